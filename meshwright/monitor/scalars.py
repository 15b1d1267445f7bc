"""A run's records and events as scalars and texts by tag, the same for TensorBoard and every tracker."""

from __future__ import annotations

import json

from meshwright.events import CommTotals, Event, StepRecord


def due_scalars(record: StepRecord, every: int) -> dict[str, float]:
    """Returns the scalars of the first and of every k-th step, and those of a join of islands; else none."""
    if record.step == 1 or record.step % every == 0:
        return step_scalars(record)
    # Joins are seldom, and need not fall on a k-th step.
    return join_scalars(record)


def event_scalars(event: Event) -> dict[str, float]:
    """Returns the numbers of an evaluation by tag; none of another event."""
    if event.kind != "evaluated":
        return {}
    return {f"evaluation/{name}": value for name, value in event.data.items() if name != "step" and _is_number(value)}


def event_text(event: Event) -> tuple[str, str] | None:
    """Returns tag and text of a sample or of the run's start; None of another event."""
    if event.kind == "sampled":
        return "sample", str(event.data.get("text", ""))
    if event.kind == "run_started":
        return "run", json.dumps(dict(event.data), indent=2, default=str)
    return None


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Returns one step's scalars by tag; in seconds, bytes and bytes per second."""
    values: dict[str, float] = {
        "train/loss": record.loss,
        "train/accuracy": record.accuracy,
        "train/learning_rate": record.lr,
        "train/grad_norm": record.grad_norm,
        "train/epoch": record.epoch,
        "train/skipped": float(record.skipped),
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
    }
    values |= {f"train/{name}": value for name, value in record.terms.items()}
    values |= {f"own/{name}": value for name, value in record.scalars.items()}
    if record.experts:
        values["experts/fullest_over_mean"] = max(record.experts) * len(record.experts)
        values["experts/idle"] = float(sum(share == 0 for share in record.experts))
    if record.mfu is not None:
        values["speed/mfu"] = record.mfu
    if record.mfu_of_measured is not None:
        values["speed/mfu_of_measured"] = record.mfu_of_measured
    values |= {f"memory/{name}_bytes": float(size) for name, size in record.memory.items()}
    values |= {f"step/{name}_s": seconds for name, seconds in record.parts.items()}
    for total in record.comm:
        values |= _comm_scalars(total)
    return values | join_scalars(record)


def join_scalars(record: StepRecord) -> dict[str, float]:
    """Returns the scalars of a join of islands by tag; none where no islands joined in the step."""
    values = {f"islands/{name}": float(value) for name, value in record.outer.items() if _is_number(value)}
    losses = record.outer.get("island_losses", ())
    return values | {f"islands/loss_{island}": float(loss) for island, loss in enumerate(losses)}


def _comm_scalars(total: CommTotals) -> dict[str, float]:
    """Returns bytes, seconds and bandwidth of one axis and operation by tag."""
    tag = f"{total.axis}/{total.op}"
    values = {
        f"comm_bytes/{tag}": float(total.bytes),
        f"comm_s/{tag}": total.seconds,
        f"comm_exposed_s/{tag}": total.exposed_s,
    }
    if total.rounding_error:
        values[f"comm_rounding_error/{tag}"] = total.rounding_error
        values[f"comm_raw_bytes/{tag}"] = float(total.raw_bytes)
    if total.seconds > 0:
        values[f"comm_bytes_per_s/{tag}"] = total.bytes / total.seconds
    if total.latency_p50_s > 0:
        values[f"comm_latency_p50_s/{tag}"] = total.latency_p50_s
        values[f"comm_latency_p99_s/{tag}"] = total.latency_p99_s
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
