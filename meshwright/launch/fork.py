"""The default launcher: forks the ranks of one node from a process that has already imported and checked everything."""

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
from types import FrameType
from typing import Any

from meshwright.errors import LaunchError
from meshwright.forking import fork_obstacle, release_threads
from meshwright.launch.child import Birth, run_rank
from meshwright.launch.config import LaunchConfig
from meshwright.launch.contract import Entry, HostCommand, NodeRanks, RankContext
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.failure import RankFailure, RankLabel, failure_error, first_failure
from meshwright.launch.process import RankProcess
from meshwright.launch.rendezvous import open_store_socket
from meshwright.launch.signals import STOP_SIGNAL, interrupts_to

_POLL_S = 0.1
_SETTLE_S = 0.3
"""How long the launcher listens for an earlier cause once it saw a failure: the news race each other."""
_EXIT_S = 3.0
"""How long a rank may take to go once it has sent its result."""


class ForkLauncher:
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
        interrupts: int = 0,
        place: NodeRanks | None = None,
    ) -> None:
        """Checks that the ranks can be had.

        Args:
            ranks: how many; one per device when None.
            devices: what they run on; what this machine has when None.
            label: names a rank's place in the mesh for messages.
            config: limits.
            run_id: name of the run; made up when None.
            generation: how many times this run's ranks have been started before.
            disposable: kill all ranks at once when one fails, since others will take their place.
            interrupts: how often the user has asked already that the run end.
            place: where these ranks stand, when there are others on other nodes.

        Raises:
            ClusterError: when more GPU ranks are asked for than there are GPUs.
        """
        self.devices = devices if devices is not None else found_devices(ranks)
        self._count = ranks if ranks is not None else self.devices.count
        self.label = label
        """Names a rank's place for messages; may be set until `wait`."""
        self._config = config or LaunchConfig()
        self._run_id, self._generation = run_id or uuid.uuid4().hex[:12], generation
        self._disposable, self._place = disposable, place
        self._ranks: list[RankProcess] = []
        self.failures: tuple[RankFailure, ...] = ()
        """What was seen when the ranks failed, the cause first; empty while all is well."""
        self._interrupts = self._asked_before = interrupts
        self._terminated = False
        self._stop_sent = 0
        self._stop_at: float | None = None

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
        return self._interrupts > 0

    @property
    def interrupts(self) -> int:
        """How often the user asked."""
        return self._interrupts

    @property
    def terminated(self) -> bool:
        """True when it was SIGTERM that asked, as schedulers do before they take a node away."""
        return self._terminated

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the one command that starts everything on this node."""
        return [HostCommand("localhost", (sys.executable, "-m", "meshwright", *argv))]

    def run(self, entry: Entry, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Starts the ranks and waits for them; see `start` and `wait`."""
        try:
            # From before the first rank is there: a Ctrl-C in between would end this process alone.
            with interrupts_to(self._count_interrupt):
                self.start(entry, *args)
                return self.wait(timeout_s)
        finally:
            self.cancel()

    def start(self, entry: Entry, *args: Any) -> None:
        """Forks every rank with ``entry(context, *args)``.

        Raises:
            LaunchError: when this process can't fork safely, or ranks are running already.
        """
        if any(rank.status is None for rank in self._ranks):
            raise LaunchError("the ranks of this launcher are running; wait for them or cancel them first")
        obstacle = fork_obstacle()
        if obstacle is not None:
            raise LaunchError(f"ranks can't be forked: {obstacle}; start them from a process that has not done so")
        self._ranks, self.failures, self._interrupts = [], (), self._asked_before
        self._stop_sent, self._stop_at = 0, None
        release_threads()
        gc.collect()
        if not gc.get_freeze_count():
            gc.freeze()
        try:
            with self._store_socket() as listener:
                for rank in range(self._count):
                    context = self._context(rank, listener)
                    self._fork(context, entry, args, listener)
        except BaseException:
            self.cancel()
            raise
        finally:
            # Before others take the place of these ranks only what is new is gone through, in a hundredth of the time.
            if not self._disposable:
                gc.unfreeze()

    def _store_socket(self) -> AbstractContextManager[socket.socket | None]:
        if self._place is None:
            return open_store_socket(self._count)
        return self._place.listener if self._place.listener is not None else nullcontext()

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
        place = self._place
        if place is None:
            assert listener is not None
            host, port = listener.getsockname()[:2]
        else:
            host, port = place.host, place.port
            context = replace(
                context,
                rank=place.first + local_rank,
                world=place.world,
                nodes=place.nodes,
                node=place.node,
                interface=place.interface,
            )
        serves = context.rank == 0 and listener is not None
        return replace(context, host=host, port=port, listen_fd=listener.fileno() if listener and serves else None)

    def _fork(self, context: RankContext, entry: Entry, args: tuple[Any, ...], listener: socket.socket | None) -> None:
        receive, send = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, STOP_SIGNAL})
        try:
            birth = Birth(
                pipe=send,
                close=(receive,) if listener is None or context.rank == 0 else (receive, listener.fileno()),
                mask=frozenset(blocked),
                parent=os.getpid(),
                threads=self.devices.threads(self._count),
                keep_memory=self._config.keep_memory,
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of any thread, also of OpenBLAS's, which survive a fork; fork_obstacle has looked.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                run_rank(context, entry, args, birth)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(send)
        os.set_blocking(receive, False)
        self._ranks.append(RankProcess(context.rank, pid, receive))

    def wait(
        self, timeout_s: float | None = None, watch: Callable[[], None] | None = None, wake: int = -1
    ) -> list[Any]:
        """Waits for all ranks; the first that fails takes the others down.

        Args:
            timeout_s: limit in seconds; None waits as long as the ranks work.
            watch: called some times a second meanwhile; what it raises ends the ranks.
            wake: descriptor that calls for ``watch`` at once when there is something to read.

        Returns:
            What each rank returned, by rank.

        Raises:
            MeshwrightError: the first failure, with the rank's prefix; all ranks are gone then.
            KeyboardInterrupt: at the second Ctrl-C.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with interrupts_to(self._count_interrupt):
                while not self._done():
                    self._poll(_POLL_S, wake)
                    self._obey(limit, timeout_s)
                    if self._failures():
                        raise self._end_failed()
                    if watch is not None:
                        watch()
            return [rank.outcome[1] for rank in self._ranks if rank.outcome is not None]
        finally:
            self.cancel()

    def _done(self) -> bool:
        now = time.monotonic()
        for rank in self._ranks:
            if rank.outcome is not None and rank.status is None and now - rank.reported_at > _EXIT_S:
                rank.signal(signal.SIGKILL)
        return all(rank.status is not None for rank in self._ranks) and not self._failures()

    def _failures(self) -> list[RankFailure]:
        return [failure for rank in self._ranks if (failure := rank.failure()) is not None]

    def _poll(self, seconds: float, wake: int = -1) -> None:
        """Takes in what the ranks sent, and reaps those that ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                if rank.open:
                    selector.register(rank.pipe, selectors.EVENT_READ, rank)
            if wake >= 0:
                selector.register(wake, selectors.EVENT_READ)
            for key, _ in selector.select(seconds) if selector.get_map() else self._doze(seconds):
                if key.data is not None:
                    key.data.read()
        for rank in self._ranks:
            rank.reap()

    def _doze(self, seconds: float) -> list[Any]:
        time.sleep(min(seconds, 0.01))
        return []

    def _obey(self, limit: float | None, timeout_s: float | None) -> None:
        """Passes on a Ctrl-C, and ends ranks whose time is up."""
        now = time.monotonic()
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self._interrupts > self._stop_sent:
            self._stop_sent = self._interrupts
            self._stop_at = now + self._config.stop_s
            for rank in self._ranks:
                if rank.status is None:
                    rank.signal(STOP_SIGNAL)
        if self._stop_at is not None and now > self._stop_at:
            raise LaunchError(
                f"the ranks did not end within launch.stop_s = {self._config.stop_s:g} s of the first Ctrl-C and were "
                "killed; the last checkpoint stands; raise launch.stop_s if checkpoints take that long"
            )
        if limit is not None and now > limit:
            busy = [rank.rank for rank in self._ranks if rank.outcome is None]
            raise LaunchError(f"ranks {busy} of {self._count} did not end within {timeout_s:g} s and were killed")

    def _end_failed(self) -> Exception:
        """Listens a moment for an earlier cause, then ends all ranks and returns the error to raise."""
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until and not self._done() and not self._is_clear():
            self._poll(0.02)
        failures = self._failures()
        first = first_failure(failures)
        self.failures = (first, *(failure for failure in failures if failure is not first))
        error = failure_error(failures, self._count, self.label)
        self.cancel(0.0 if self._disposable else self._config.grace_s)
        return error

    def _is_clear(self) -> bool:
        """Whether a rank died without a word: it has no failure of another one to tell of, as an exception may."""
        return self._disposable and any(not failure.trace for failure in self._failures())

    def cancel(self, grace_s: float = 0.0) -> None:
        """Ends all ranks and reaps them.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; without, they are killed at once.
        """
        if grace_s > 0:
            self._signal_all(signal.SIGTERM)
            until = time.monotonic() + grace_s
            while time.monotonic() < until and self._reap_all() > 0:
                time.sleep(0.01)
        self._signal_all(signal.SIGKILL)
        until = time.monotonic() + 10.0
        while self._reap_all() > 0 and time.monotonic() < until:
            time.sleep(0.005)
        for rank in self._ranks:
            rank.close()

    def _reap_all(self) -> int:
        """Returns how many ranks still run."""
        return sum(not rank.reap() for rank in self._ranks)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                rank.signal(number)

    def _count_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._terminated |= number == signal.SIGTERM
