"""Which engine a row's framework columns name."""

from __future__ import annotations

from benchmarks.published import framework_profiles
from benchmarks.published.models import Row, Unpriced
from meshwright.planner.cost.framework_profile import FrameworkProfile


def engine_of(row: Row) -> FrameworkProfile:
    """Returns the engine of a row.

    Raises:
        Unpriced: for a framework without one.
    """
    name, notes = row.get("framework", ""), row.get("notes", "").lower()
    if name == "nanotron":
        if "AllForwardAllBackward" in row.get("pp_engine", ""):
            return framework_profiles.NANOTRON_AFAB
        return framework_profiles.NANOTRON if row.get("after_pp_fix") != "False" else framework_profiles.NANOTRON_BEFORE
    if "Sailor" in name:
        return framework_profiles.SAILOR
    if "DeepSpeed" in name:
        return framework_profiles.DEEPSPEED_BIGSCIENCE if "BigScience" in name else framework_profiles.DEEPSPEED
    if "FSDP" in name:
        hopper = "h100" in row.get("gpu_type", "").lower()  # its attention was written for the generation before
        return framework_profiles.COMPOSER_HOPPER if hopper else framework_profiles.COMPOSER
    if "torchtitan" in name:
        return _titan(row, notes)
    if "NeMo" in name:
        overlap = "tp_comm_overlap=true" in notes
        return framework_profiles.NEMO_OVERLAP if overlap else framework_profiles.NEMO
    if "Bridge" in name:
        return framework_profiles.BRIDGE_GRAPHS if row.get("date", "") >= "26.06" else framework_profiles.BRIDGE
    if "TE" in name:
        return framework_profiles.MEGATRON_PLAIN
    if "Megatron" in name and _is_of_transformer_engine(row):
        return framework_profiles.MEGATRON_CORE
    if "Megatron" in name:
        return framework_profiles.MEGATRON_2020 if row.get("date", "") < "2022" else framework_profiles.MEGATRON_2022
    if "meshwright" in name:
        return framework_profiles.MESHWRIGHT
    raise Unpriced(f"no engine for the framework {name}")


def _is_of_transformer_engine(row: Row) -> bool:
    """Whether a run of Megatron-LM used Transformer Engine's kernels: all in 8 or 4 bits, and later ones in 16."""
    return any(word in row.get("precision", "").lower() for word in ("fp8", "fp4")) or row.get("date", "") >= "2023-07"


def _titan(row: Row, notes: str) -> FrameworkProfile:
    compiled = "compile" in notes or row.get("date", "") >= "2025"
    if not compiled:
        return framework_profiles.TITAN_EAGER
    asynchronous, rowwise = "async tp" in notes, "rowwise" in row.get("precision", "")
    if rowwise:
        return framework_profiles.TITAN_ASYNC_ROWWISE if asynchronous else framework_profiles.TITAN_ROWWISE
    if asynchronous:
        return framework_profiles.TITAN_ASYNC
    return framework_profiles.TITAN_2025 if row.get("date", "") >= "2025" else framework_profiles.TITAN
