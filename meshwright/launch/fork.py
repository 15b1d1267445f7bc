"""The default launcher: forks the ranks of one node from a process that has already imported and checked everything.

Forking a warm process starts a rank in milliseconds. It is safe only while neither CUDA nor torch's autograd engine has
run in the parent (`forking.fork_obstacle`).
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from meshwright.errors import TERMINATED, LaunchError
from meshwright.forking import fork_obstacle, release_threads
from meshwright.launch.addresses import open_store_socket
from meshwright.launch.child import ForkSettings, run_rank
from meshwright.launch.config import LaunchConfig
from meshwright.launch.contract import Entry, HostCommand, Launcher, NodeRanks, RankContext
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.failure import RankFailure, RankLabel, failure_error, first_failure
from meshwright.launch.process import RankProcess
from meshwright.launch.signals import STOP_SIGNAL, InterruptCounter, handle_interrupts

_POLL_S = 0.1
_SETTLE_S = 0.3
"""Time to collect further failures after the first one: the cause may be reported after its echoes."""
_EXIT_S = 3.0
"""Time for a rank to exit after it sent its result; then it is killed."""
_STOP_EVERY_S = 1.0
"""Between two requests to a rank that it end."""


class ForkLauncher(Launcher):
    """Runs ranks as forks of this process, one per device; a `Launcher`.

    Each rank has its own process group, dies with the launcher whatever kills it, and sends its result through a pipe.
    """

    def __init__(
        self,
        ranks: int | None = None,
        *,
        devices: Devices | None = None,
        label: RankLabel | None = None,
        config: LaunchConfig | None = None,
        run_id: str | None = None,
        generation: int = 0,
        disposable: bool = False,
        interrupts: InterruptCounter | None = None,
        node_ranks: NodeRanks | None = None,
    ) -> None:
        """Checks that the devices suffice for the ranks.

        Args:
            ranks: their number; one per device when None.
            devices: their devices; those of this machine when None.
            label: names a rank's coordinates in the mesh for messages.
            config: limits.
            run_id: name of the run; random when None.
            generation: of these ranks.
            disposable: kill all ranks at once when one fails, because a supervisor starts others.
            interrupts: a supervisor's, which counts before `wait` too; a counter of each launch's own when None.
            node_ranks: this node's ranks within the world, when other nodes have ranks too.

        Raises:
            ClusterError: when more GPU ranks are asked for than there are GPUs.
        """
        self.devices = devices if devices is not None else found_devices(ranks)
        self._count = ranks if ranks is not None else self.devices.count
        self.label = label
        """Names a rank's coordinates for messages; may be set until `wait`."""
        self._config = config or LaunchConfig()
        self._run_id, self._generation = run_id or uuid.uuid4().hex[:12], generation
        self._disposable, self._node_ranks = disposable, node_ranks
        self._ranks: list[RankProcess] = []
        self.failures: tuple[RankFailure, ...] = ()
        """The ranks' failures, the cause first; empty without any."""
        self._shared_interrupts = interrupts
        self._interrupts = interrupts or InterruptCounter()
        self._stop_sent = 0
        self._stop_at: float | None = None
        self._send_stop_at = 0.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._count

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that have not been reaped, by rank."""
        return tuple(rank.pid for rank in self._ranks if rank.status is None)

    @property
    def interrupted(self) -> bool:
        """True when the user asked the run to end."""
        return self._interrupts.count > 0

    @property
    def terminated(self) -> bool:
        """True when SIGTERM asked the run to end, as schedulers do before they reclaim a node."""
        return self._interrupts.terminated

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the one command that starts everything on this node."""
        return [HostCommand("localhost", (sys.executable, "-m", "meshwright", *argv))]

    def run(self, entry: Entry, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Starts the ranks and waits for them; see `start` and `wait`."""
        try:
            self._forget_last_launch()
            # Installed before the first fork: a Ctrl-C in between would end this process and orphan its ranks.
            with handle_interrupts(self._interrupts.record):
                self._fork_ranks(entry, args)
                return self.wait(timeout_s)
        finally:
            self.cancel()

    def start(self, entry: Entry, *args: Any) -> None:
        """Forks every rank with ``entry(context, *args)``.

        Raises:
            LaunchError: when this process can't fork, or not safely, or ranks are running already.
        """
        self._forget_last_launch()
        self._fork_ranks(entry, args)

    def _forget_last_launch(self) -> None:
        if any(rank.status is None for rank in self._ranks):
            raise LaunchError("the ranks of this launcher are running; wait for them or cancel them first")
        self._ranks, self.failures, self._stop_sent, self._stop_at = [], (), 0, None
        if self._shared_interrupts is None:
            self._interrupts = InterruptCounter()

    def _fork_ranks(self, entry: Entry, args: tuple[Any, ...]) -> None:
        obstacle = fork_obstacle()
        if obstacle is not None:
            raise LaunchError(f"ranks can't be forked: {obstacle}; start them from a process that has not done so")
        # Frozen objects are ignored by collections in the ranks, which would otherwise touch, and so copy, every page.
        release_threads()
        gc.collect()
        gc.freeze()
        try:
            # Bound before any rank exists, and inherited by rank 0 alone: no other process can take the port.
            with self._store_socket() as listener:
                for rank in range(self._count):
                    context = self._context(rank, listener)
                    self._fork_rank(context, entry, args, listener)
        except BaseException:
            self.cancel()
            raise
        finally:
            # A supervisor keeps its objects frozen: the collection before its next start then costs a hundredth.
            if not self._disposable:
                gc.unfreeze()

    def _store_socket(self) -> AbstractContextManager[socket.socket | None]:
        if self._node_ranks is None:
            return open_store_socket(self._count)
        return self._node_ranks.listener if self._node_ranks.listener is not None else nullcontext()

    def _context(self, local_rank: int, listener: socket.socket | None) -> RankContext:
        context = RankContext(
            rank=local_rank,
            world=self._count,
            local_rank=local_rank,
            local_world=self._count,
            device=self.devices.name(local_rank),
            generation=self._generation,
            run_id=self._run_id,
        )
        node_ranks = self._node_ranks
        if node_ranks is None:
            assert listener is not None
            host, port = listener.getsockname()[:2]
        else:
            host, port = node_ranks.host, node_ranks.port
            context = replace(
                context,
                rank=node_ranks.first + local_rank,
                world=node_ranks.world,
                nodes=node_ranks.nodes,
                node=node_ranks.node,
                interface=node_ranks.interface,
            )
        serves = context.rank == 0 and listener is not None
        return replace(context, host=host, port=port, listen_fd=listener.fileno() if listener and serves else None)

    def _fork_rank(
        self, context: RankContext, entry: Entry, args: tuple[Any, ...], listener: socket.socket | None
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between fork and the child's own handlers would run the launcher's handler in the child; in this
        # process, before the rank is recorded, it would leave the rank to nobody.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP_SIGNAL})
        descriptors: tuple[int, ...] = ()
        try:
            descriptors = read_fd, write_fd = os.pipe()
            settings = ForkSettings(
                pipe=write_fd,
                close=(read_fd,) if listener is None or context.rank == 0 else (read_fd, listener.fileno()),
                mask=frozenset(blocked),
                parent=os.getpid(),
                threads=self.devices.threads(self._count),
                keep_memory=self._config.keep_memory,
                disposable=self._disposable,
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of any thread, even OpenBLAS's, which survive a fork; fork_obstacle has checked.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                run_rank(context, entry, args, settings)
            os.set_blocking(read_fd, False)
            self._ranks.append(RankProcess(context.rank, pid, read_fd))
            descriptors = (write_fd,)
        except OSError as error:
            raise LaunchError(
                f"rank {context.rank} can't be started: {error.strerror}; see ulimit -u and -n, and free memory"
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def wait(
        self, timeout_s: float | None = None, watch: Callable[[], None] | None = None, wake: int = -1
    ) -> list[Any]:
        """Waits for all ranks; the first that fails takes the others down.

        Args:
            timeout_s: limit in seconds; None waits as long as the ranks work.
            watch: called some times a second; an exception of it ends the ranks.
            wake: descriptor whose readability calls ``watch`` at once.

        Returns:
            Each rank's result, by rank.

        Raises:
            MeshwrightError: the first failure, with the rank's prefix; all ranks are gone then.
            KeyboardInterrupt: at the second Ctrl-C.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with handle_interrupts(self._interrupts.record):
                while not self._all_finished():
                    self._poll(_POLL_S, wake)
                    self._enforce_limits(deadline, timeout_s)
                    if self._failures():
                        raise self._end_failed()
                    if watch is not None:
                        watch()
            return [rank.outcome[1] for rank in self._ranks if rank.outcome is not None]
        finally:
            self.cancel()

    def _all_finished(self) -> bool:
        now_s = time.monotonic()
        for rank in self._ranks:
            # A rank that hangs in its exit, after its result arrived, is killed: the result counts.
            if rank.outcome is not None and rank.status is None and now_s - rank.reported_at > _EXIT_S:
                rank.signal(signal.SIGKILL)
        return all(rank.status is not None for rank in self._ranks) and not self._failures()

    def _failures(self) -> list[RankFailure]:
        return [failure for rank in self._ranks if (failure := rank.failure()) is not None]

    def _poll(self, seconds: float, wake: int = -1) -> None:
        """Reads the ranks' outcomes, and reaps the ranks that ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                if rank.open:
                    selector.register(rank.pipe, selectors.EVENT_READ, rank)
            if wake >= 0:
                selector.register(wake, selectors.EVENT_READ)
            for key, _ in selector.select(seconds) if selector.get_map() else self._sleep(seconds):
                if key.data is not None:
                    # Read while ranks run: a result larger than the pipe would block its rank.
                    key.data.read()
        for rank in self._ranks:
            rank.reap()

    def _sleep(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        time.sleep(min(seconds, 0.01))
        return []

    def _enforce_limits(self, deadline: float | None, timeout_s: float | None) -> None:
        """Forwards Ctrl-C to the ranks, and raises `LaunchError` when they exceed a time limit."""
        now_s = time.monotonic()
        interrupt_count = self._interrupts.count
        if interrupt_count > 1:
            raise KeyboardInterrupt
        if interrupt_count > self._stop_sent:
            self._stop_sent = interrupt_count
            # The grace period restarts with each further request.
            self._stop_at = now_s + self._config.stop_s
            self._send_stop_at = now_s
        if self._stop_at is not None and now_s >= self._send_stop_at:
            # Again and again: one that comes while a library holds the rank's handlers is lost (`StopFlag.restore`).
            self._send_stop_at = now_s + _STOP_EVERY_S
            for rank in self._ranks:
                if rank.status is None:
                    rank.signal_alone(STOP_SIGNAL)
        if self._stop_at is not None and now_s > self._stop_at:
            overdue = LaunchError(
                f"the ranks did not end within launch.stop_s = {self._config.stop_s:g} s of the signal to end and were "
                "killed; the last checkpoint stands; raise launch.stop_s if checkpoints take that long"
            )
            if self._interrupts.terminated:
                overdue.exit_status = TERMINATED
            raise overdue
        if deadline is not None and now_s > deadline:
            busy = [rank.rank for rank in self._ranks if rank.outcome is None]
            raise LaunchError(f"ranks {busy} of {self._count} did not end within {timeout_s:g} s and were killed")

    def _end_failed(self) -> Exception:
        """Collects further failures for a moment, ends all ranks, and returns the error of the root cause."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline and not self._all_finished() and not self._is_clear():
            self._poll(0.02)
        failures = self._failures()
        cause = first_failure(failures)
        self.failures = (cause, *(failure for failure in failures if failure is not cause))
        error = failure_error(failures, self._count, self.label)
        # Disposable ranks are replaced at once; others get SIGTERM before SIGKILL.
        self.cancel(0.0 if self._disposable else self._config.grace_s)
        return error

    def _is_clear(self) -> bool:
        """Whether a rank died without an exception, and so is the cause: exceptions may be echoes."""
        return self._disposable and any(not failure.trace for failure in self._failures())

    def cancel(self, grace_s: float = 0.0) -> None:
        """Ends all ranks and reaps them.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; without, they are killed at once.
        """
        if grace_s > 0:
            self._signal_all(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and self._reap_all() > 0:
                time.sleep(0.01)
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        # SIGKILL may be delayed by uninterruptible I/O: bounded, not for ever.
        while self._reap_all() > 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        for rank in self._ranks:
            rank.close()

    def _reap_all(self) -> int:
        """Reaps ended ranks; returns the number of those that still run."""
        return sum(not rank.reap() for rank in self._ranks)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                rank.signal(number)
