"""The TensorBoard sink: one event file, written by tensorboard's own record writer, without torch."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.events import CommTotals, Event, StepRecord
from meshwright.monitor.retry import RetryingFile


class TensorBoardSink:
    """Writes scalars of every k-th step and of evaluations, and samples as text."""

    def __init__(self, folder: Path, every: int = 1, resumed_step: int | None = None) -> None:
        """Opens a new event file.

        Args:
            folder: the run's ``tensorboard`` folder, created when it is missing.
            every: steps between two points.
            resumed_step: the step after which a resumed run continues; later points of older files are hidden.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        self._tensor_pb2, self._shape_pb2, self._types_pb2 = tensor_pb2, tensor_shape_pb2, types_pb2
        self._every = every
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        self._file = RetryingFile(folder / name, shared=False)
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        first_step = 0 if resumed_step is None else resumed_step + 1
        self._write_event(event_pb2.Event(wall_time=time.time(), step=first_step, file_version="brain.Event:2"))
        if resumed_step is not None:
            session_start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            # A session start hides the points of older files from this step on.
            self._write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=session_start))

    def step(self, record: StepRecord) -> None:
        """Writes the scalars of the first and of every k-th step."""
        if record.step == 1 or record.step % self._every == 0:
            self._write_scalars(record.step, step_scalars(record))
        elif record.outer:
            # Joins are seldom, and need not fall on a k-th step.
            self._write_scalars(record.step, join_scalars(record))

    def event(self, event: Event) -> None:
        """Writes the numbers of an evaluation, and the text of a sample."""
        step = int(event.data.get("step") or 0)
        if event.kind == "evaluated":
            numbers = {name: value for name, value in event.data.items() if name != "step" and _is_number(value)}
            self._write_scalars(step, {f"evaluation/{name}": value for name, value in numbers.items()})
        elif event.kind == "sampled":
            self._write_text(step, "sample", str(event.data.get("text", "")))
        elif event.kind == "run_started":
            self._write_text(step, "run", json.dumps(dict(event.data), indent=2, default=str))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def _write_scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes finite values as one event."""
        summary_type = self._summary_pb2.Summary
        summary_values = [
            summary_type.Value(tag=tag, simple_value=value) for tag, value in values.items() if math.isfinite(value)
        ]
        self._write_event(
            self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary_type(value=summary_values))
        )

    def _write_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text as a tensor summary, in the form that TensorBoard's text plugin reads."""
        # TensorBoard renders text as Markdown: indented by four it is shown as it is.
        indented = "\n".join("    " + line for line in text.splitlines())
        summary_pb2, types_pb2 = self._summary_pb2, self._types_pb2
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text", content=b"")
        shape = self._shape_pb2.TensorShapeProto(dim=[self._shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = self._tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[indented.encode()], tensor_shape=shape
        )
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
        value = summary_pb2.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._write_event(
            self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=[value]))
        )

    def _write_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        # Records pass through a buffer, so that a full disk is handled by `RetryingFile`.
        self._file.write(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Returns one step's scalars by TensorBoard tag; in seconds, bytes and bytes per second."""
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
    if record.experts:
        values["experts/fullest_over_mean"] = max(record.experts) * len(record.experts)
        values["experts/idle"] = float(sum(share == 0 for share in record.experts))
    if record.mfu is not None:
        values["speed/mfu"] = record.mfu
    values |= {f"memory/{name}_bytes": float(size) for name, size in record.memory.items()}
    values |= {f"step/{name}_s": seconds for name, seconds in record.parts.items()}
    for total in record.comm:
        values |= _comm_scalars(total)
    return values | join_scalars(record)


def join_scalars(record: StepRecord) -> dict[str, float]:
    """Returns the scalars of a join of islands by TensorBoard tag; none where no islands joined in the step."""
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
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
