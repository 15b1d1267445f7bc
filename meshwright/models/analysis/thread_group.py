"""Ranks as threads of one process, whose collectives meet at a barrier: the stand-in of a process group in trials."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.parallel.axis_group import DifferentiableCollectives

PATIENCE_S = 20.0
"""Time for which a thread waits for the others."""
LONG_PATIENCE_S = 60.0
"""The same with long rows."""
_Result = TypeVar("_Result")


class _FinishedThread:
    """Marks the slot of a thread that has finished and won't exchange any more."""


class _FinishedExchange:
    """A work handle of a collective that has already completed."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True


class ThreadGroup(DifferentiableCollectives):
    """One thread's end of a group of threads, with the collectives of `parallel.axis_group.AxisGroup`."""

    def __init__(self, size: int, index: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        super().__init__()
        self.size, self.index = size, index
        self._barrier, self._slots = barrier, slots

    @classmethod
    def group(cls, size: int, patience_s: float = PATIENCE_S) -> list[ThreadGroup]:
        """Returns the ends of a new group, whose threads wait so many seconds for each other."""
        barrier, slots = threading.Barrier(size, timeout=patience_s), [None] * size
        return [cls(size, index, barrier, slots) for index in range(size)]

    def abort(self) -> None:
        """Frees all waiting threads with an error."""
        self._barrier.abort()

    def leave(self) -> None:
        """Declares that this thread won't exchange any more, and aborts a group that waits for it."""
        self._slots[self.index] = _FinishedThread()
        if self._barrier.n_waiting:
            self._barrier.abort()

    def share(self, value: Any) -> list[Any]:
        """Returns every thread's value, in order of index."""
        # a thread that has finished would never come to the barrier: fail now instead of after the timeout
        if any(isinstance(item, _FinishedThread) for item in self._slots):
            self._barrier.abort()
        self._slots[self.index] = value
        self._barrier.wait()
        # Second barrier: nobody may overwrite a slot for the next exchange before all have read this one.
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> _FinishedExchange:
        """Sums a tensor of any shape over the threads, in place."""
        contributions = self.share(tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(torch.stack(contributions).sum(0))
        return _FinishedExchange()

    def all_reduce_max(self, tensor: torch.Tensor) -> _FinishedExchange:
        """Replaces a tensor of any shape by the elementwise maximum over the threads."""
        tensor.copy_(torch.stack(self.share(tensor.clone())).amax(0))
        return _FinishedExchange()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _FinishedExchange:
        """Concatenates every thread's flattened ``part``, (n,), into ``output``, (n · size,), in order of index."""
        output.copy_(torch.cat([item.reshape(-1) for item in self.share(part.detach().clone())]))
        return _FinishedExchange()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> _FinishedExchange:
        """Sums ``tensor: (size * n,)`` over the threads and writes this thread's chunk into ``output: (n,)``."""
        contributions = self.share(tensor.detach().clone())
        output.copy_(torch.stack(contributions).sum(0).view(self.size, -1)[self.index].view_as(output))
        return _FinishedExchange()

    def all_to_all(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> _FinishedExchange:
        """Writes into ``outputs[i]`` the tensor that thread i has for this one; ``parts[j]`` goes to thread j.

        Both have ``size`` tensors of any shapes; what thread i sends to j has the shape of j's ``outputs[i]``.
        """
        for output, sent in zip(outputs, self.share([part.detach().clone() for part in parts])):
            output.copy_(sent[self.index])
        return _FinishedExchange()

    def exchange(self, outputs: Mapping[int, torch.Tensor], chunks: Mapping[int, torch.Tensor]) -> _FinishedExchange:
        """Sends ``chunks[p]`` to thread p and writes into ``outputs[p]`` its chunk for this one; of any shapes.

        All threads call it, with empty mappings where they have nothing to send or receive.
        """
        sent = self.share({peer: chunk.detach().clone() for peer, chunk in chunks.items()})
        for peer, output in outputs.items():
            output.copy_(sent[peer][self.index])
        return _FinishedExchange()


def run_in_threads(size: int, work: Callable[[ThreadGroup], _Result], patience_s: float = PATIENCE_S) -> list[_Result]:
    """Runs ``work`` on each thread of a group and returns the results in order of index.

    Args:
        size: number of threads.
        work: function of a thread's end of the group.
        patience_s: how long a thread waits for the others.

    Raises:
        RuntimeError: with the first error of a thread, or when threads wait for each other for ever.
    """
    # A forked process makes torch's thread pool anew, and threads that meet there before it stands fail: "Invalid
    # thread pool!". Source: caffe2/utils/threadpool/pthreadpool-cpp.cc.
    torch.set_num_threads(torch.get_num_threads())
    axis_groups = ThreadGroup.group(size, patience_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(axis_group: ThreadGroup) -> None:
        try:
            results[axis_group.index] = work(axis_group)
            axis_group.leave()
        # another thread failed first; its error is the one to report
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
            axis_group.abort()

    threads = [threading.Thread(target=run, args=(axis_group,), daemon=True) for axis_group in axis_groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s * 2)
    # a broken barrier without an error: a thread left while another waited
    if not errors and any(item is None for item in results):
        raise RuntimeError("the ranks waited for each other")
    if errors:
        raise RuntimeError(describe_error(errors[0])[:180]) from errors[0]
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError("the ranks waited for each other")
    return results


def describe_error(error: BaseException) -> str:
    """Returns an error's message in one line that is never empty."""
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else f"its code raised {type(error).__name__}"


def raising_module(error: BaseException) -> str:
    """Returns the class of the innermost module whose forward raised an error on a rank; "" for none."""
    frames = (frame for frame, _ in traceback.walk_tb((error.__cause__ or error).__traceback__))
    owners = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "forward"]
    names = [type(owner).__name__ for owner in owners if isinstance(owner, nn.Module)]
    return names[-1] if names else ""
