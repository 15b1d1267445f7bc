"""Computes what needs a backward pass in a short-lived forked process, so that this process never runs torch's engine.

Once the autograd engine has run in a process that sees a GPU, every child forked later dies at its first backward: the
engine's threads, one a device, aren't inherited. The launcher, its supervisor and what plans ahead for them fork ranks,
so each fact of a model that needs gradients is computed by a helper: forked from here, it computes, sends plain data
back through a pipe, and ends. A rank, or a process that can't fork ranks anyway, computes in place.
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
"""How long one computation may take; the largest clones take a minute."""
P = ParamSpec("P")
R = TypeVar("R")
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1}
"""Signals that a helper must not answer as its parent does."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a helper sends back."""

    value: Any
    """What the computation returned; None when it raised."""
    error: BaseException | None
    trace: str
    """Traceback of the error as text."""
    warned: list[tuple[str, type[Warning], str, int]]
    """Message, category, file and line of each warning."""


class _HelperTraceback(Exception):
    """Shows where in the helper an error arose, as the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def computed_by_helper(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that runs the autograd engine: each call computes in a forked helper process.

    The function's arguments are inherited, so they may be anything; what it returns must be picklable, and a tensor in
    it comes without its autograd graph. Its error is raised here with type and message; its warnings are given here.
    """

    @functools.wraps(compute)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_in_helper(functools.partial(compute, *args, **kwargs))

    return wrapper


def run_in_helper(compute: Callable[[], R], limit_s: float = LIMIT_S) -> R:
    """Computes in a helper process what needs the autograd engine, and returns it.

    Args:
        compute: runs in a process forked from this one.
        limit_s: after which the helper is killed.

    Raises:
        PlanError: when the helper died, took too long, or what it computed can't be sent.
    """
    if _computes_in_place():
        return compute()
    # Between fork and the helper's own handlers a signal would run the parent's handlers twice.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    started: list[int] = []  # pid and pipe: a Ctrl-C that another thread took may come before `_fork` has returned
    status = 0
    try:
        _fork(compute, mask, started)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        data = _received(started[1], time.monotonic() + limit_s)
    except BaseException:  # a Ctrl-C too: nobody waits for the helper any more
        for pid in started[:1]:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if started:
            os.close(started[1])
            status = os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1])
    if data is None:
        raise PlanError(_death(status))
    return _unpacked(data)


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
    receive, send = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    release_threads()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, also of OpenBLAS's, which survive a fork; fork_obstacle has looked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _work(compute, send, parent, mask)
        started += [pid, receive]
    finally:
        os.close(send)


def _work(compute: Callable[[], Any], pipe: int, parent: int, mask: set[Any]) -> NoReturn:
    """Computes, sends the answer and ends; in the helper."""
    status = 1
    try:
        _State.is_helper = True
        die_with_parent(parent)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to answer
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.freeze()  # else a collection touches, and so copies, every page that is shared with the parent
        data = _packed(_answer(compute))
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


def _answer(compute: Callable[[], Any]) -> _Answer:
    value, error, trace = None, None, ""
    with warnings.catch_warnings(record=True) as seen:
        try:
            value = compute()
        except BaseException as raised:
            error, trace = raised, traceback.format_exc()
    warned = [(str(item.message), item.category, item.filename, item.lineno) for item in seen]
    return _Answer(value, error, trace, warned)


def _packed(answer: _Answer) -> bytes:
    """Pickles an answer; an error that can't be pickled becomes one of its nearest kind that can."""
    try:
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        if answer.error is not None:
            _loaded(data)  # an exception that wants other arguments than its message shows only now
        return data
    except Exception as why:
        kept: list[BaseException] = [PlanError(f"what was computed of the model can't be sent: {why}")]
        if answer.error is not None:
            text = str(answer.error)
            kept = [RuntimeError(f"{type(answer.error).__name__}: {text}")]
            kept[:0] = [kind(text) for kind in type(answer.error).__mro__ if kind in (ValueError, TypeError, OSError)]
        return pickle.dumps(_Answer(None, kept[0], answer.trace, []))


def _received(pipe: int, until: float) -> bytes | None:
    """Returns the bytes of the answer, or None when the helper ended without one."""
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise PlanError(
                "trying the model out took longer than its limit and was ended; name another layout, or a smaller model"
            )
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            return None
        data += chunk
    return bytes(data[8:])


def _loaded(data: bytes) -> _Answer:
    with warnings.catch_warnings():
        # What a layer returns is described by a tree, and torch warns of its own way to unpickle one.
        warnings.filterwarnings("ignore", message=".*treespec.*", category=FutureWarning)
        answer: _Answer = pickle.loads(data)
    return answer


def _unpacked(data: bytes) -> Any:
    """Gives the helper's warnings, then returns its value or raises its error."""
    answer = _loaded(data)
    for message, category, filename, line in answer.warned:
        warnings.warn_explicit(message, category, filename, line, registry=_warned)
    if answer.error is not None:
        raise answer.error from _HelperTraceback(answer.trace)
    return answer.value


_warned: dict[Any, Any] = {}
"""Warnings given once already: each helper starts from this process's memory and would give them again."""


def _death(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        cure = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        return f"the process that tried the model out was ended by {name}{cure}"
    return f"the process that tried the model out ended with status {status} and no answer"
