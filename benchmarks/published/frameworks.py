"""Which engine a row's framework columns name."""

from __future__ import annotations

from benchmarks.published.models import Row, Unpriced
from meshwright.planner.cost import engines
from meshwright.planner.cost.engine import FrameworkProfile


def engine_of(row: Row) -> FrameworkProfile:
    """Returns the engine of a row.

    Raises:
        Unpriced: for a framework without one.
    """
    name, notes = row.get("framework", ""), row.get("notes", "").lower()
    if name == "nanotron":
        if "AllForwardAllBackward" in row.get("pp_engine", ""):
            return engines.NANOTRON_AFAB
        return engines.NANOTRON if row.get("after_pp_fix") != "False" else engines.NANOTRON_BEFORE
    if "Sailor" in name:
        return engines.SAILOR
    if "DeepSpeed" in name:
        return engines.DEEPSPEED_BIGSCIENCE if "BigScience" in name else engines.DEEPSPEED
    if "FSDP" in name:
        hopper = "h100" in row.get("gpu_type", "").lower()  # its attention was written for the generation before
        return engines.COMPOSER_HOPPER if hopper else engines.COMPOSER
    if "torchtitan" in name:
        return _titan(row, notes)
    if "NeMo" in name:
        overlap = "tp_comm_overlap=true" in notes
        return engines.NEMO_OVERLAP if overlap else engines.NEMO
    if "Bridge" in name:
        return engines.BRIDGE_GRAPHS if row.get("date", "") >= "26.06" else engines.BRIDGE
    if "TE" in name:
        return engines.MEGATRON_PLAIN
    if "Megatron" in name:
        return engines.MEGATRON_2020 if row.get("date", "") < "2022" else engines.MEGATRON_2022
    if "meshwright" in name:
        return engines.MESHWRIGHT
    raise Unpriced(f"no engine for the framework {name}")


def _titan(row: Row, notes: str) -> FrameworkProfile:
    compiled = "compile" in notes or row.get("date", "") >= "2025"
    if not compiled:
        return engines.TITAN_EAGER
    asynchronous, rowwise = "async tp" in notes, "rowwise" in row.get("precision", "")
    if rowwise:
        return engines.TITAN_ASYNC_ROWWISE if asynchronous else engines.TITAN_ROWWISE
    if asynchronous:
        return engines.TITAN_ASYNC
    return engines.TITAN_2025 if row.get("date", "") >= "2025" else engines.TITAN
