"""The life of a forked rank: detach from the launcher's state, run the entry, send the outcome, and exit."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from meshwright.errors import LaunchError
from meshwright.forking import die_with_parent
from meshwright.launch.contract import Entry, RankContext
from meshwright.launch.failure import RankFailure, describe_exception
from meshwright.launch.host_memory import RANK_SCORE, keep_host_memory, prefer_for_killing


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkSettings:
    """The launcher's settings for a forked rank, beside its `RankContext`."""

    pipe: int
    """Descriptor that the outcome is written to."""
    close: tuple[int, ...]
    """Inherited descriptors of the launcher or of another rank, to be closed."""
    mask: frozenset[int]
    """Signals that stay blocked. The launcher blocks more during the fork: its handlers must not run in a rank."""
    parent: int
    """Process id of the launcher."""
    threads: int
    """Threads that torch uses for an operation."""
    keep_memory: bool
    """Keep freed tensor memory in the process (CPU ranks only)."""
    disposable: bool = False
    """A supervisor kills the rank when it is time: a SIGTERM is sent to all of a node's processes, by a scheduler."""


def run_rank(context: RankContext, entry: Entry, args: tuple[Any, ...], settings: ForkSettings) -> NoReturn:
    """Runs the entry in the forked process and exits.

    Args:
        context: this rank's context.
        entry: the function to run.
        args: its arguments after the context.
        settings: the launcher's settings.
    """
    status = 1
    try:
        _detach_from_launcher(context, settings)
        # Before the entry allocates anything large.
        if settings.keep_memory and context.device == "cpu":
            keep_host_memory()
        _set_threads(settings.threads)
        outcome, status = _outcome(context, entry, args)
        _flush()
        _write_all(settings.pipe, outcome)
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        # No exit handlers or destructors: they belong to the launcher, or would hang on peers that are gone.
        os._exit(status)


def _detach_from_launcher(context: RankContext, settings: ForkSettings) -> None:
    """Gives the rank its own process group and ties its life to the launcher's."""
    os.setpgid(0, 0)
    # After setpgid no terminal signal reaches the rank: the kernel ends it with its launcher.
    die_with_parent(settings.parent)
    context.stop.hold(signal.SIGHUP, signal.SIG_IGN)  # the launcher handles it for its ranks
    prefer_for_killing(RANK_SCORE)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    if settings.disposable:
        # Slurm and systemd signal the supervisor's whole tree: the supervisor answers, its ranks write the checkpoint.
        context.stop.hold(signal.SIGTERM, signal.SIG_IGN)
    # The inherited wakeup descriptor belongs to the launcher's event loop.
    signal.set_wakeup_fd(-1)
    context.stop.install()
    # Unblocked last: until the handlers above stood, a signal would have run the launcher's.
    signal.pthread_sigmask(signal.SIG_SETMASK, settings.mask)
    for number in settings.close:
        os.close(number)
    # A rank is in a background process group, where reading the terminal would stop it (SIGTTIN).
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    faulthandler.enable(file=2)


def _set_threads(threads: int) -> None:
    # For libraries that are imported later; torch, if imported already, is told directly.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _outcome(context: RankContext, entry: Entry, args: tuple[Any, ...]) -> tuple[bytes, int]:
    """Runs the entry; returns its pickled (succeeded, result or `RankFailure`), and the exit status."""
    failure: RankFailure
    try:
        result = entry(context, *args)
        try:
            # Pickled here, so that an unpicklable result is this rank's error.
            return pickle.dumps((True, result), protocol=pickle.HIGHEST_PROTOCOL), 0
        except Exception as error:
            raise LaunchError(f"what the rank returned ({type(result).__name__}) can't be pickled: {error}") from error
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        # sys.exit(0) in an entry counts as success without a result.
        if status == 0:
            return pickle.dumps((True, None)), 0
        failure = RankFailure(context.rank, f"exited with status {status}", status=status, time=time.monotonic())
    except BaseException as error:
        failure = describe_exception(context.rank, error, time.monotonic())
    return pickle.dumps((False, failure)), failure.status


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _write_all(pipe: int, data: bytes) -> None:
    # The length first: end of file alone can't tell a complete outcome from a killed rank's.
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(pipe, view) :]
