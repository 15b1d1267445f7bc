"""Runs backward passes in short-lived forked processes, so that this process never starts torch's autograd engine.

Once the autograd engine has run in a process that sees a GPU, every child forked later fails at its first backward: the
engine's threads, one per device, aren't inherited. The launcher, its supervisor and the plan prefetcher fork processes,
so each fact of a model that needs gradients is computed by a **helper**: a forked process that computes, sends plain
data through a pipe, and exits. A rank, or a process that can't fork ranks anyway, computes in place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

from meshwright.errors import PlanError
from meshwright.forking import die_with_parent, fork_obstacle, release_threads

LIMIT_S = 1200.0
"""Limit of one computation; the largest model clones need a minute."""
P = ParamSpec("P")
R = TypeVar("R")
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1}
"""Signals that a helper must not answer as its parent does."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A helper's answer."""

    value: Any
    """The computation's result; None when it raised."""
    error: BaseException | None
    trace: str
    """Traceback of the error as text."""
    warned: list[tuple[str, type[Warning], str, int]]
    """Message, category, file and line of each warning."""


class _HelperTraceback(Exception):
    """Carries the helper's traceback, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def computed_by_helper(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that runs the autograd engine: each call computes in a forked helper process.

    Arguments are inherited and may be any objects. The result must be picklable; tensors in it lose their autograd
    graph. Errors are raised here with type and message, and warnings issued here.
    """

    @functools.wraps(compute)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_in_helper(functools.partial(compute, *args, **kwargs))

    return wrapper


def run_in_helper(compute: Callable[[], R], limit_s: float = LIMIT_S) -> R:
    """Runs a computation that needs the autograd engine in a helper process, and returns its result.

    Args:
        compute: the computation.
        limit_s: after which the helper is killed.

    Raises:
        PlanError: when the helper died, exceeded its limit, or its result can't be pickled.
    """
    if _computes_in_place():
        return compute()
    # Until the helper installs its own handlers, a signal to both processes would run the parent's handlers in both.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    started: list[int] = []  # pid and pipe, set within `_fork`: a Ctrl-C may interrupt it before it returns
    status = 0
    try:
        _fork(compute, mask, started)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        data = _read_answer(started[1], time.monotonic() + limit_s)
    except BaseException:  # also KeyboardInterrupt: the helper's answer is no longer awaited
        for pid in started[:1]:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if started:
            os.close(started[1])
            # Always reaped, also after an error: no zombie is left behind.
            status = os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1])
    # End of file without an answer: the helper died, by a signal or in torch.
    if data is None:
        raise PlanError(_death_message(status))
    return _return_or_raise(data)


def _computes_in_place() -> bool:
    """Whether this process may run the engine itself: it is a helper or a rank, or it couldn't fork ranks anyway."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    is_rank = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return _State.is_helper or is_rank or fork_obstacle() is not None


class _State:
    is_helper = False


def _fork(compute: Callable[[], Any], mask: set[Any], started: list[int]) -> None:
    """Starts the helper, which runs under a signal mask; ``started`` gets its pid and the read end of its pipe."""
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    release_threads()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, even OpenBLAS's, which survive a fork; fork_obstacle has checked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_helper(compute, write_fd, parent, mask)
        started += [pid, read_fd]
    finally:
        os.close(write_fd)


def _run_helper(compute: Callable[[], Any], pipe: int, parent: int, mask: set[Any]) -> NoReturn:
    """Computes, sends the answer and exits; runs in the helper."""
    status = 1
    try:
        _State.is_helper = True
        die_with_parent(parent)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to answer
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.freeze()  # otherwise a collection touches, and so copies, every page shared with the parent
        _compute_in_one_thread()
        data = _pickle_answer(_compute_answer(compute))
        view = memoryview(len(data).to_bytes(8, "little") + data)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        while view:
            view = view[os.write(pipe, view) :]
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


def _compute_in_one_thread() -> None:
    """Has torch compute in this thread: a small clone's operators are too short to be shared out.

    Each of them, of microseconds, would wait milliseconds for the second thread where other programs keep cores busy.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _compute_answer(compute: Callable[[], Any]) -> _Answer:
    value, error, trace = None, None, ""
    # Warnings are recorded and sent: printed here, they would bypass the caller's filters.
    with warnings.catch_warnings(record=True) as recorded:
        try:
            value = compute()
        except BaseException as raised:
            error, trace = raised, traceback.format_exc()
    warning_rows = [(str(item.message), item.category, item.filename, item.lineno) for item in recorded]
    return _Answer(value, error, trace, warning_rows)


def _pickle_answer(answer: _Answer) -> bytes:
    """Pickles an answer; an error that can't be pickled is replaced by its nearest built-in base class."""
    try:
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        if answer.error is not None:
            _unpickle_answer(
                data
            )  # an exception whose constructor needs other arguments than its message fails only now
        return data
    except Exception as reason:
        substitutes: list[BaseException] = [PlanError(f"what was computed of the model can't be sent: {reason}")]
        if answer.error is not None:
            text = str(answer.error)
            substitutes = [RuntimeError(f"{type(answer.error).__name__}: {text}")]
            # Callers catch built-in classes, so the nearest one goes first.
            substitutes[:0] = [
                kind(text) for kind in type(answer.error).__mro__ if kind in (ValueError, TypeError, OSError)
            ]
        return pickle.dumps(_Answer(None, substitutes[0], answer.trace, []))


def _read_answer(pipe: int, deadline: float) -> bytes | None:
    """Returns the bytes of the answer, or None when the helper ended without one."""
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select.select([pipe], [], [], remaining_s)[0]:
            raise PlanError(
                "trying the model out took longer than its limit and was ended; name another layout, or a smaller model"
            )
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            return None
        data += chunk
    return bytes(data[8:])


def _unpickle_answer(data: bytes) -> _Answer:
    with warnings.catch_warnings():
        # Layers' outputs are described by torch's TreeSpec, whose unpickling issues a FutureWarning.
        warnings.filterwarnings("ignore", message=".*treespec.*", category=FutureWarning)
        answer: _Answer = pickle.loads(data)
    return answer


def _return_or_raise(data: bytes) -> Any:
    """Issues the helper's warnings, then returns its value or raises its error."""
    answer = _unpickle_answer(data)
    for message, category, filename, line in answer.warned:
        warnings.warn_explicit(message, category, filename, line, registry=_issued_warnings)
    if answer.error is not None:
        raise answer.error from _HelperTraceback(answer.trace)
    return answer.value


_issued_warnings: dict[Any, Any] = {}
"""Warnings issued already: each helper is forked from this process's memory and would repeat them."""


def _death_message(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        cure = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        return f"the process that tried the model out was ended by {name}{cure}"
    return f"the process that tried the model out ended with status {status} and no answer"
