"""A node of a Slurm job: runs its supervisor, starts it again when it was killed, and brings back nodes that are lost.

Each node has such a keeper. The one of the lowest live number looks after the others: whose presence file isn't renewed
any more is started again by srun while Slurm has it in the job, else by a job of one node that takes its number.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from meshwright.errors import LaunchError
from meshwright.launch.signals import handle_interrupts
from meshwright.launch.slurm import (
    SlurmLauncher,
    SlurmPlace,
    call_slurm,
    cancel_replacements,
    job_nodes,
    replacement_name,
    restart_environment,
)
from meshwright.launch.supervisor_process import SupervisorProcess

SRUN = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--cpu-bind=none", "--input=none")
"""srun, which by these goes on when a node fails, and leaves cores and ranks to the supervisors."""
_MISSING_S = 10.0
"""A supervisor that forks ranks may not renew its presence for seconds."""
_OVER_S = 60.0
"""A last checkpoint, evaluation and sample come after the last sign of life."""
_MOST_PAUSE_S = 15.0
_LATE_S = 300.0
"""A supervisor that was started again has lived before; a file system under load may need minutes for its imports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeSigns:
    """How a keeper sees other nodes' supervisors: by files that all nodes share."""

    presence: Callable[[Iterable[int]], Mapping[int, int]]
    """Returns a stamp by node that changes while the node's supervisor lives."""
    is_owned: Callable[[], bool]
    """Whether a supervisor has locked the run directory and not let go of it; one that was killed never does."""
    start_s: float
    """Within which a supervisor has started."""


@dataclass(frozen=True, slots=True)
class _Restart:
    """A node that was started again."""

    step: subprocess.Popen[bytes]
    """Its srun."""
    started_at: float
    """When, by the monotonic clock."""


class NodeKeeper:
    """Runs one node's supervisor to the end of the run.

    Args:
        place: this node.
        argv: words of the command without those that number nodes.
        launcher: submits a job in the stead of a lost node.
        signs: reads which supervisors live.
        say: takes a line for people.
    """

    def __init__(
        self,
        place: SlurmPlace,
        argv: Sequence[str],
        launcher: SlurmLauncher,
        signs: LifeSigns,
        say: Callable[[str], None],
    ) -> None:
        assert place.node is not None
        self._revival = NodeRevival(place, argv, launcher, signs, say) if place.nodes > 1 else None
        watch = self._revival.poll if self._revival is not None else lambda: None
        self._place, self._argv = place, tuple(argv)
        self._supervisor = SupervisorProcess(place.node, self._command, say, watch=watch)

    def run(self) -> int:
        """Runs until the supervisor ends by itself; returns its exit status."""
        with handle_interrupts(self._forward):
            status = self._supervisor.run()
        if self._revival is not None:
            self._revival.finish()
        return status

    def _command(self) -> list[str]:
        place = self._place
        words = ("--nodes", str(place.nodes), "--node", str(place.node), "--meet", place.meet())
        return [sys.executable, "-m", "meshwright", *self._argv, *(words if place.nodes > 1 else ())]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._supervisor.stopping = True
        # Slurm sends SIGINT to all processes of a step; SIGTERM may be for this one alone, and twice counts once.
        if number == signal.SIGTERM:
            self._supervisor.terminate()


class NodeRevival:
    """Starts lost nodes again: the job's script does, else the lowest node that lives."""

    def __init__(
        self,
        place: SlurmPlace,
        argv: Sequence[str],
        launcher: SlurmLauncher,
        signs: LifeSigns,
        say: Callable[[str], None],
    ) -> None:
        self._place, self._argv, self._launcher, self._signs = place, tuple(argv), launcher, signs
        self._say = say
        # Before its first sign of life a node may take as long as a start does.
        self._seen_at = dict.fromkeys(range(place.nodes), time.monotonic() + signs.start_s - _MISSING_S)
        self._stamps: dict[int, int] = {}
        self._moved: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._try_at: dict[int, float] = {}
        self._restarts: dict[int, _Restart] = {}
        self._keeps = place.node in (None, 0)

    @property
    def has_ended(self) -> bool:
        """Whether supervisors have lived, and all of them have ended in order."""
        return bool(self._moved) and not self._signs.is_owned()

    @property
    def is_silent(self) -> bool:
        """Whether supervisors have lived, and for a while none does."""
        return bool(self._moved) and time.monotonic() - max(self._seen_at[node] for node in self._moved) > _OVER_S

    def poll(self, revives: bool = True) -> None:
        """Looks who lives, and starts who doesn't unless the run is to end."""
        now = time.monotonic()
        for node, stamp in self._signs.presence(range(self._place.nodes)).items():
            if self._stamps.get(node, stamp) != stamp:
                self._seen_at[node] = now
                self._moved.add(node)
                self._attempts.pop(node, None)
            self._stamps[node] = stamp
        live = [node for node, seen_at in self._seen_at.items() if now - seen_at < _MISSING_S]
        self._keeps = self._place.node in (None, min(live, default=-1))
        for node, restart in list(self._restarts.items()):
            if restart.step.poll() is not None:
                del self._restarts[node]
            elif node not in live and (self._seen_at[node] > restart.started_at or self._is_late(restart)):
                # The node was lost again: srun would wait for its task for ever, and nobody start another.
                restart.step.kill()
                restart.step.wait()
                del self._restarts[node]
        # Where nobody lives the run is over, or has not begun.
        for node in range(self._place.nodes) if revives and self._keeps and live else ():
            if node not in live and node not in self._restarts and now >= self._try_at.get(node, 0.0):
                self._attempts[node] = self._attempts.get(node, 0) + 1
                self._try_at[node] = now + min(2.0 ** self._attempts[node], _MOST_PAUSE_S)
                self._start_again(node)

    def _is_late(self, restart: _Restart) -> bool:
        return time.monotonic() - restart.started_at > max(self._signs.start_s, _LATE_S)

    def _start_again(self, node: int) -> None:
        place = self._place
        current = job_nodes(place.job)
        # A scheduler's signal to this step would reach the srun started here, which would kill the other node's step.
        if current is None or (place.node is not None and place.is_watched and current[0] in current[1]):
            return
        environment = restart_environment(place, node)
        words = ["-m", "meshwright", *self._argv, "--on", "slurm"]
        if place.names[node] in current[1]:
            own = ("--overlap", f"--jobid={place.job}", "--nodes=1", "--ntasks=1", f"--nodelist={place.names[node]}")
            cores = self._launcher.config.cpus_per_node
            command = [*SRUN, *own, *((f"--cpus-per-task={cores}",) if cores else ()), sys.executable, *words]
            step = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self._restarts[node] = _Restart(step, time.monotonic())
            if self._attempts[node] == 1:
                self._say(f"node {node} ({place.names[node]}) is lost; it is started again as soon as it answers")
            return
        name = replacement_name(place.job, node)
        if not place.replaces or call_slurm("squeue", "--noheader", "--me", f"--name={name}", "--format=%i") != "":
            return
        self._launcher.name = name
        try:
            self._launcher.submit_replacement(words[2:], node, environment, ",".join(current[1]))
        except LaunchError as error:
            self._say(f"node {node} ({place.names[node]}) has left the job, and there is no other: {error}")
        else:
            self._say(f"node {node} ({place.names[node]}) has left the job; another was asked for ({name})")

    def finish(self) -> None:
        """Ends what was started beside the job, and the job where its script is gone with its first node."""
        if not self._keeps:
            return
        cancel_replacements(self._place.job, self._place.nodes)
        current = job_nodes(self._place.job)
        if current is not None and current[0] not in current[1]:
            # Nobody is left to end the job; it would stay until its time limit.
            call_slurm("scancel", self._place.job)
