"""Reads rows of published runs: what was run, on what, how, and what was measured."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.published.frameworks import engine_of
from benchmarks.published.models import Row, Unpriced, counted, number, shape_of, whole
from benchmarks.published.sites import machine_of, scales_of
from benchmarks.published.unequal import unequal_kinds
from meshwright.errors import ClusterError, MeshwrightError
from meshwright.planner.cost.framework_profile import GIB, FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import RECOMPUTES, PricedJob, schedule_names
from meshwright.planner.device_kinds import DeviceKinds

MOST_STAGES = 1024
"""Most stages of a pipeline that is priced."""
NODE_GB_S = 250.0
"""GB/s of an all-gather among the devices of a node below which a run's time isn't compared. Runs of the sweep measured
252 to 266, or 246 and less, and nothing between. In the latter a layer that the host holds up takes 11, 16 and 26 ms
with tp of 2, 4 and 8, with a pipeline or without; in the former 4.4 to 5.5 ms, whatever tp or pp."""
FAST_DOMAIN = 8
"""Most ranks of tp whose time is compared: beyond, the published sweep ran on a network known to be sick."""
ALIKE = (
    *("model", "layers", "hidden", "heads", "ffn_hidden", "vocab", "tie_embeddings", "gpus", "gpu_type"),
    *("gbs", "seq_len", "framework", "date", "precision"),
)
"""Columns that rows share which differ in layout alone: models of one name may have other sizes (BLOOM's trials), and a
framework's next version may run the same layout at 0.56 of the time (Megatron-Bridge 26.02 and 26.02.01)."""


UNREADABLE = (MeshwrightError, ArithmeticError, ValueError, LookupError, TypeError)
"""What reading or pricing a row may raise that says no more than that the row can't be used."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that can be predicted."""

    file: str
    row: Row = field(repr=False)
    job: PricedJob = field(repr=False)
    columns: Mapping[str, Any]
    split: tuple[float, ...] | None
    machine: Machine = field(repr=False)
    """Of the first kind where there are several."""
    kinds: DeviceKinds | None = field(default=None, repr=False)
    """Devices of several kinds; None where they are equal."""
    engine: FrameworkProfile = field(repr=False)
    time_s: float | None
    """Measured step time, where it is to be compared."""
    memory_bytes: float | None
    """Measured memory, where it is to be compared."""
    memory_kind: str
    """``reserved``, ``first`` (reserved on the first stage), ``allocated`` or ``device``."""
    fits: bool | None
    """Whether it ran, where that is known to be a matter of memory."""
    group: tuple[str, ...]
    """Rows that differ only in layout share it."""
    left_out: tuple[str, ...]
    """Why a measure of the row isn't compared."""


def read_file(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV; cells beyond the header are dropped, missing ones empty.

    Raises:
        OSError: when it can't be read.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        lines = csv.DictReader(line.replace("\0", "") for line in text)
        return [{key.strip(): (value or "").strip() for key, value in row.items() if key} for row in lines]


def read_case(row: Row, file: str, nominal: bool = False) -> Case:
    """Returns what a row says.

    Args:
        row: one line of a file.
        file: its name.
        nominal: links have the catalogue's rates, whatever the row measured of them.

    Raises:
        Unpriced: it can't be predicted; the message is the reason.
    """
    if "accelerator" in row or "quantity" in row:
        raise Unpriced("not a training run")
    if row.get("status") == "failed-other":
        raise Unpriced("failed for a reason other than memory")
    try:
        shape = shape_of(row)
        columns = _columns(row)
        rows = whole(row, "gbs")
        adapters = "lora" in row.get("notes", "").lower()
        job = PricedJob(shape=shape, sequence=whole(row, "seq_len"), rows=rows, adapters=adapters, **_precision(row))
        kinds = kinds_of_row(row)
        machine = kinds.machines[0] if kinds else machine_of(row)
        engine = engine_of(row)
    except UNREADABLE as fault:
        raise Unpriced(str(fault).split(";")[0][:90] or type(fault).__name__) from None
    columns |= {} if nominal or kinds else scales_of(row, machine)
    split = _split(row)
    time_s, why = _time(row, kinds is not None)
    memory, kind, why_memory = _memory(row)
    fits = {"ok": True, "oom": False}.get(row.get("status", ""))
    if time_s is None and memory is None and fits is None:
        raise Unpriced("; ".join(item for item in (why, why_memory) if item) or "nothing measured")
    return Case(
        file=file,
        row=row,
        job=job,
        columns=columns,
        split=split,
        machine=machine,
        kinds=kinds,
        engine=engine,
        time_s=time_s,
        memory_bytes=memory,
        memory_kind=kind,
        fits=fits,
        group=tuple(row.get(key, "") for key in ALIKE),
        left_out=tuple(item for item in (why, why_memory) if item),
    )


def _columns(row: Row) -> dict[str, Any]:
    tp, pp, cp, ep = (counted(row, key, 1) for key in ("tp", "pp", "cp", "ep"))
    gpus, mbs, gbs = counted(row, "gpus"), number(row, "mbs", 1), counted(row, "gbs")
    dp = counted(row, "dp", max(1, gpus // (tp * pp * cp)))
    if mbs <= 0 or pp > MOST_STAGES:
        raise Unpriced(f"{'mbs' if mbs <= 0 else 'pp'} is out of range")
    if tp * pp * cp * dp > gpus * 1.01 or tp * pp * cp * dp < gpus * 0.9:
        raise Unpriced("tp x pp x cp x dp is not the number of devices")
    microbatches = gbs / (dp * mbs)
    zero = _zero(row)
    stages = counted(row, "vpp", 1) if pp > 1 else 1
    if pp * stages > MOST_STAGES:
        raise Unpriced("vpp is out of range")
    schedule = row.get("schedule", "").lower()
    code = "interleaved" if stages > 1 else ("gpipe" if "afab" in schedule or "gpipe" in schedule else "1f1b")
    sequence = row.get("sp") or ("1" if tp > 1 and _sequence_by_default(row) else "0")
    return {
        "pp": pp,
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "replicate": 1 if zero else dp,
        "shard": dp if zero else 1,
        "zero": zero,
        "microbatches": max(1.0, microbatches),
        "recompute": RECOMPUTES.index(_recompute(row)),
        "recompute_share": 1.0,
        "sequence": float(sequence in ("1", "True", "true")),
        "stages": stages,
        "schedule": schedule_names().index(code),
    }


def _sequence_by_default(row: Row) -> bool:
    framework = row.get("framework", "")
    return any(word in framework for word in ("Bridge", "NeMo", "torchtitan", "nanotron"))


def _zero(row: Row) -> int:
    text = row.get("zero", "").lower()
    if "fsdp" in text or "hsdp" in text:
        return 3
    if not any(sign.isdigit() for sign in text):
        return int("distributed" in text)
    return min(3, whole(row, "zero"))


def _recompute(row: Row) -> str:
    text = row.get("recompute", "").lower()
    if text.startswith("full"):
        return "full"
    if text.startswith("selective"):
        return "selective" if "titan" in row.get("framework", "") else "block"
    if not text and row.get("framework") == "Megatron-LM" and row.get("date", "").startswith("2020"):
        return "full"
    return "none"


def _precision(row: Row) -> dict[str, Any]:
    text = row.get("precision", "").lower()
    products = "fp4" if "fp4" in text else ("fp8" if "fp8" in text else "")
    if text in ("fp32", "float32") or ("Sailor" in row.get("framework", "") and not text):
        return {"precision": "float32", "products": "tf32"}
    return {"precision": "fp16" if text == "fp16" else "bf16", "products": products}


def _split(row: Row) -> tuple[float, ...] | None:
    if not row.get("layers_per_stage"):
        return None
    try:
        sizes = [float(item) for item in json.loads(row["layers_per_stage"])]
    except (ValueError, TypeError):
        raise Unpriced("layers_per_stage isn't a list of numbers") from None
    if len(sizes) != whole(row, "pp", 1) * whole(row, "vpp", 1):
        raise Unpriced("layers_per_stage doesn't name every stage")
    layers = whole(row, "layers")
    if round(sum(sizes)) == layers + 2:
        sizes[0] -= 1
        sizes[-1] -= 1
    elif round(sum(sizes)) != layers:
        raise Unpriced("layers_per_stage has the layers of another model")
    return tuple(sizes)


def kinds_of_row(row: Row) -> DeviceKinds | None:
    """Returns the kinds of a row's devices; None where they are all of one.

    One device's name may have the signs that stand between kinds, so unknown kinds are taken for one name.
    """
    try:
        return unequal_kinds(row.get("gpu_type", ""), counted(row, "gpus"), counted(row, "gpus_per_node", 8))
    except ClusterError:
        return None


def _time(row: Row, kinds: bool) -> tuple[float | None, str]:
    if not row.get("step_time_s"):
        return None, ""
    if row.get("status") not in ("", "ok", None):
        return None, "time: status isn't ok"
    if row.get("heterogeneous") == "1" and not kinds:
        return None, "time: unequal devices, and which isn't said"
    if row.get("network_healthy") == "0":
        return None, "time: the network was sick"
    if row.get("allgather_intra_gbs") and number(row, "allgather_intra_gbs") < NODE_GB_S:
        return None, "time: links or hosts of the nodes were sick"
    if "after_pp_fix" in row:
        if whole(row, "tp", 1) > FAST_DOMAIN:
            return None, "time: tp over more than a node"
        if whole(row, "pp", 1) > 1 and row["after_pp_fix"] != "True":
            return None, "time: before the pipeline engine was mended"
    seconds = number(row, "step_time_s")
    return (seconds, "") if seconds > 0 else (None, "time: it is 0")


def _memory(row: Row) -> tuple[float | None, str, str]:
    kind = row.get("mem_kind", "")
    if not row.get("mem_gb"):
        return None, "", ""
    size = number(row, "mem_gb") * GIB
    if not size:
        return None, "", "memory: it is 0"
    if "nvidia-smi" in row.get("mem_unit", ""):
        return size, "device", ""
    if "allocated" in kind:
        return size, "allocated", ""
    if "rank 0" in kind or "first" in kind:
        pp, accumulation = whole(row, "pp", 1), number(row, "grad_acc", 1)
        if accumulation < pp:
            return None, "first", "memory: fewer micro-batches than stages"
        return size, "first", ""
    return size, "reserved", ""


def replaced(case: Case, engine: FrameworkProfile) -> Case:
    """Returns the case under another engine."""
    return dataclasses.replace(case, engine=engine)
