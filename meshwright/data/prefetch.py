"""Prefetching of batches: one thread reads them and passes them as tensors through a bounded queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from meshwright.data.loader import Batch
from meshwright.errors import DataError

_POLL_S = 0.1


class Batches(Protocol):
    """A source of the batch of any step: a `Loader`, or a stand-in for one."""

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBatch:
    """A `Batch` as tensors on a device; fields and shapes are the same."""

    step: int
    """Number of the global batch, from 0."""
    tokens: torch.Tensor
    """(rows, S) int64."""
    targets: torch.Tensor
    """(rows, S) int64, already shifted; -100 where ignored."""
    positions: torch.Tensor
    """(rows, S) int64."""
    row_ids: torch.Tensor
    """(rows,) int64, on the CPU."""
    targets_count: int
    """Targets of this reader that are not ignored."""


def tensors(batch: Batch, device: str | torch.device = "cpu") -> TensorBatch:
    """Converts a batch to tensors; copies to an accelerator go through pinned memory, without waiting.

    The copy is queued on the calling thread's current stream of that device: the default one, unless the caller chose.

    Args:
        batch: arrays.
        device: of tokens, targets and positions; row ids stay on the CPU.
    """
    target = torch.device(device)
    device_tensors = {}
    for name in ("tokens", "targets", "positions"):
        # from_numpy shares memory with the batch, whose arrays nobody changes.
        tensor = torch.from_numpy(getattr(batch, name))
        device_tensors[name] = tensor if target.type == "cpu" else tensor.pin_memory().to(target, non_blocking=True)
    return TensorBatch(
        step=batch.step, row_ids=torch.from_numpy(batch.row_ids), targets_count=batch.targets_count, **device_tensors
    )


class Prefetcher:
    """Iterates over the batches of consecutive steps, some of which a thread prepares in advance.

    Use it in a ``with`` block, or call `close`, which ends the thread.
    """

    def __init__(
        self,
        loader: Batches,
        start_step: int = 0,
        depth: int = 2,
        to_device: Callable[[Batch], Any] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Starts the thread.

        Args:
            loader: source of the batches.
            start_step: first step.
            depth: most batches prepared in advance.
            to_device: converts a batch in the thread; `tensors` on the CPU by default.
            timeout_s: longest wait for a batch, seconds.
        """
        if depth < 1:
            raise DataError(f"a prefetch depth of {depth} must be 1 or more")
        self._loader, self._convert, self._timeout_s = loader, to_device or tensors, timeout_s
        self._ready: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self.step = start_step
        """The next step, which is the whole state."""
        self._thread = threading.Thread(target=self._read, args=(start_step,), name="prefetch", daemon=True)
        self._thread.start()

    def _read(self, step: int) -> None:
        """Reads batches from a step on until `close`; an error is queued and ends the thread."""
        while not self._stop.is_set():
            try:
                entry = (step, self._convert(self._loader.batch(step)), None)
            # The consumer raises it: an exception in a thread would else be lost.
            except BaseException as error:
                self._put((step, None, error))
                return
            self._put(entry)
            step += 1

    def _put(self, entry: tuple[int, Any, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                # A bounded wait, so that `close` ends a thread whose queue nobody reads.
                return self._ready.put(entry, timeout=_POLL_S)
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next step's batch.

        Raises:
            DataError: when no batch came in time, or after `close`; errors of the loader are raised here unchanged.
        """
        if self._stop.is_set():
            raise DataError("the prefetcher is closed")
        try:
            _, item, error = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DataError(
                f"no batch for step {self.step} within {self._timeout_s:g} s; is the disk with the token files alive?"
            ) from None
        if error is not None:
            self.close()
            raise error
        self.step += 1
        return item

    def close(self) -> None:
        """Ends the thread and drops the batches in the queue."""
        self._stop.set()
        # An emptied queue lets a blocked put return.
        while not self._ready.empty():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
