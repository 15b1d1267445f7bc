"""The TensorBoard sink: one event file, written by tensorboard's own record writer, without torch."""

from __future__ import annotations

import io
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.events import Event, StepRecord
from meshwright.monitor.retry import RetryingFile
from meshwright.monitor.scalars import due_scalars, event_scalars, event_text


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
        scalars = due_scalars(record, self._every)
        if scalars:
            self._write_scalars(record.step, scalars)

    def event(self, event: Event) -> None:
        """Writes the numbers of an evaluation, and the text of a sample."""
        step = int(event.data.get("step") or 0)
        if event.kind == "evaluated":
            self._write_scalars(step, event_scalars(event))
        elif text := event_text(event):
            self._write_text(step, *text)

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
