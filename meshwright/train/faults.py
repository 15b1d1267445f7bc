"""Fault injection: a rank fails by itself at a point that was named beforehand, so that recovery can be tested.

    kill:rank=3,step=20
    hang:rank=1,step=12,phase=backward;nan:rank=0,step=30
    flip:rank=1,step=5,of=moments,bit=29,seed=7

A fault happens once in a run: the rank creates a mark file in the run directory before it acts. A fault that needs a
gradient waits, when the rank has none at the named point, until the gradients of the step are complete.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, nearest
from meshwright.monitor.progress import PHASES

FOLDER = "chaos"
"""Folder of a run directory with faults requested while it runs, and marks of those that happened."""
KINDS = {
    "kill": "the rank is killed, as by kill -9",
    "stop": "the rank is stopped, as by kill -STOP",
    "hang": "the rank sleeps for ever",
    "gil": "the rank sleeps for ever and holds the interpreter's lock",
    "exit": "the rank ends with an exit status",
    "raise": "the rank raises an exception",
    "nan": "a gradient of the rank becomes NaN",
    "slow": "the rank sleeps for `seconds` in each step from then on",
    "flip": "a bit of the rank's memory flips: of its weights, unless `of` names something else",
}
"""Kinds of faults."""
FLIPPED = ("weights", "gradients", "moments", "activations")
"""Targets of `flip`."""
WHOLE = "reduce"
"""Phase at whose start every gradient of the step is complete."""
WRITER = -1
"""The rank that a fault names to hit the process that writes checkpoints on node 0; one less a node."""
COURIER = -101
"""The rank that a fault names to hit the process that sends node 0's snapshots to another node; one less a node."""
SAVE_POINTS = ("open", "write", "saved", "written", "manifest", "rename", "renamed", "collect", "copy")
"""Points of a save, which the writer of a checkpoint stamps: ``checkpoint.rename``."""
_POINTS = (*PHASES, "collective", "send", *(f"checkpoint.{point}" for point in SAVE_POINTS))
_FOR_EVER_S = 10**7
_TICK_NS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault to inject."""

    kind: str
    """One of `KINDS`."""
    rank: int
    """To which rank; -1 - N is the process that writes checkpoints on node N, -101 - N the one that sends snapshots."""
    step: int = 0
    """In which step, counted from 1; 0 while the rank starts."""
    phase: str = ""
    """At the beginning of which phase of the step (`monitor.progress.PHASES`), ``backward.3`` for that of layer 3,
    ``collective`` for its first wait for others, ``checkpoint.write``, ``.manifest``, ``.rename`` and so on for those
    of a save, ``send`` within the sending of a snapshot to another node; empty for its beginning."""
    generation: int = -1
    """In which generation of ranks; -1 in any."""
    seconds: float = 1.0
    """How long, for ``slow``."""
    of: str = "weights"
    """One of `FLIPPED`, for ``flip``."""
    bit: int = -1
    """Which bit of an element, for ``flip``, counted as in float32: 31 is the sign, 30 the highest of the exponent; -1
    for sign and exponent at once, so that the element is -2^60 times what it was."""
    seed: int = -1
    """Draws the element, for ``flip``; -1 for the first one."""

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        fields = [f"rank={self.rank}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                fields.append(f"{field.name}={value}")
        return f"{self.kind}:{','.join(fields)}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Returns the fault of ``kind:rank=N,step=N[,phase=P][,generation=N][,seconds=S][,of=W][,bit=N][,seed=N]``.

        Raises:
            ConfigError: for anything else.
        """
        kind, _, field_texts = text.strip().partition(":")
        if kind not in KINDS:
            raise ConfigError(f"fault '{text}': '{kind}' is unknown{nearest(kind, KINDS)}")
        types: dict[str, Callable[[str], int | float | str]] = {
            "rank": int, "step": int, "phase": str, "generation": int, "seconds": float, "of": str, "bit": int,
            "seed": int,
        }  # fmt: skip
        values: dict[str, int | float | str] = {}
        for field_text in field_texts.split(","):
            name, _, value = field_text.partition("=")
            if name not in types:
                hint = f"; did you mean 'rank={name}'?" if name.isdigit() else nearest(name, types)
                raise ConfigError(f"fault '{text}': '{name}' is unknown{hint}")
            try:
                values[name] = types[name](value)
            except ValueError:
                raise ConfigError(f"fault '{text}': {name}={value} is no number") from None
        if "rank" not in values:
            raise ConfigError(f"fault '{text}' names no rank; write {kind}:rank=0,step=20")
        if (target := values.get("of", "weights")) not in FLIPPED:
            raise ConfigError(f"fault '{text}': of={target} is unknown{nearest(str(target), FLIPPED)}")
        phase = str(values.get("phase", ""))
        phase_of_layer, _, layer = phase.partition(".")
        if phase and phase not in _POINTS and not (phase_of_layer in PHASES and layer.isdigit()):
            # It would be waited for until the run's end.
            raise ConfigError(
                f"fault '{text}': phase={phase} is unknown{nearest(phase, _POINTS)}; of a layer, backward.3"
            )
        if not -1 <= int(values.get("bit", 0)) < 32:
            raise ConfigError(f"fault '{text}': bit={values['bit']} isn't from 0 to 31, or -1")
        return cls(kind=kind, **values)  # type: ignore[arg-type]


def parse_faults(text: str) -> list[Fault]:
    """Returns the faults of a text, separated by ``;``."""
    return [Fault.parse(fault_text) for fault_text in text.split(";") if fault_text.strip()]


def check_faults(text: str, ranks: int, nodes: int) -> None:
    """Refuses faults of ranks that a run doesn't have.

    Args:
        text: of faults, as `parse_faults` takes it.
        ranks: of the whole run.
        nodes: of the run.

    Raises:
        ConfigError: with the ranks that there are.
    """
    for fault in parse_faults(text):
        # Snapshots are sent between nodes alone.
        couriers = range(COURIER, COURIER - nodes, -1) if nodes > 1 else ()
        if fault.rank not in range(ranks) and fault.rank not in (*range(WRITER, WRITER - nodes, -1), *couriers):
            raise ConfigError(
                f"recovery.faults: {fault} would never happen: ranks go from 0 to {ranks - 1}, beside the processes "
                f"that write checkpoints, {WRITER} on node 0, and that send snapshots to other nodes, {COURIER}"
            )


class Faults:
    """Injects the faults of one rank.

    Args:
        run_dir: of the run.
        rank: this rank; negative for helper processes (`WRITER`, `COURIER`).
        generation: of these ranks.
        configured: the config's faults; others may be requested through the run directory.
        spoil: makes one of the rank's gradients NaN; returns whether there was one.
        flip: flips a bit as the fault says; returns whether there was one.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        generation: int,
        configured: Sequence[Fault] = (),
        spoil: Callable[[], bool] = lambda: True,
        flip: Callable[[Fault], bool] = lambda fault: True,
    ) -> None:
        self._folder = run_dir / FOLDER
        self._rank, self._generation = rank, generation
        self._faults = list(configured)
        self._spoil, self._flip = spoil, flip
        self._folder_changed_ns = -1
        self._step = 0
        self._slow = 0.0
        self._pending: list[tuple[Fault, Path]] = []
        self._waiting_for_gradients: list[Fault] = []
        self._refused: set[Path] = set()
        self.refuse: Callable[[Path, str], None] = lambda path, reason: None
        """Called once with each request file that can't be parsed, and the reason."""
        # Step 0 is the rank's start: its faults strike in this constructor.
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Starts a step (from 1; 0 for the rank's start), and injects faults at its beginning."""
        self._step = step
        # Requests come while the run is running: none need be read before its first step.
        requested = self._read_requests() if step else []
        self._faults += requested
        if self._faults:
            self._pending = [
                (fault, mark)
                for fault in self._faults
                if fault.rank == self._rank
                and fault.step == step
                and fault.generation in (-1, self._generation)
                and not (mark := mark_path(self._folder, fault)).exists()
            ]
            self.reach("")
        if self._slow:
            time.sleep(self._slow)

    @property
    def pending(self) -> bool:
        """Whether a fault is to be injected in this step."""
        return bool(self._pending or self._waiting_for_gradients)

    def reach(self, point: str) -> None:
        """Injects the faults at a point within the step, which the rank has reached."""
        if not self.pending:
            return
        if point == WHOLE:
            waiting, self._waiting_for_gradients = self._waiting_for_gradients, []
            for fault in waiting:
                self._execute(fault)
        for fault, mark in list(self._pending):
            if fault.phase == point:
                self._pending.remove((fault, mark))
                self._folder.mkdir(exist_ok=True)
                # Before the fault: after it this process may not exist any more.
                mark.touch()
                self._execute(fault)

    def _read_requests(self) -> list[Fault]:
        """Returns the faults that were requested since the last call."""
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:
            return []
        # A request within the same tick of the file system's clock leaves the folder's time unchanged: read again.
        if changed == self._folder_changed_ns and time.time_ns() - changed > _TICK_NS:
            return []
        self._folder_changed_ns = changed
        requested = []
        for path in sorted(set(self._folder.glob("*.ask")) - self._refused):
            # Any file may be put here: an invalid one must not stop the run.
            try:
                requested.append(Fault.parse(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, ConfigError) as error:
                self._refused.add(path)
                self.refuse(path, str(error)[:200])
        return [fault for fault in requested if fault not in self._faults]

    def _execute(self, fault: Fault) -> None:
        if fault.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        elif fault.kind == "hang":
            time.sleep(_FOR_EVER_S)
        elif fault.kind == "gil":
            # PyDLL keeps the GIL, so that no thread of the rank can answer.
            ctypes.PyDLL(None).sleep(_FOR_EVER_S)
        elif fault.kind == "exit":
            os._exit(17)
        elif fault.kind == "raise":
            raise RuntimeError(f"a fault on purpose: {fault}")
        elif fault.kind == "slow":
            self._slow = fault.seconds
        elif not (self._spoil() if fault.kind == "nan" else self._flip(fault)):
            self._waiting_for_gradients.append(fault)


def mark_path(folder: Path, fault: Fault) -> Path:
    """Returns the file that a rank creates once a fault happens.

    Args:
        folder: `FOLDER` of the run directory.
        fault: which one.
    """
    return folder / str(fault).replace(":", "-").replace(",", "-")


def ask(run_dir: Path, fault: Fault) -> Path:
    """Requests a fault of a running job; returns the path of the mark that appears once it happens.

    Raises:
        ConfigError: when there is no such run.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is no run directory")
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    mark = mark_path(folder, fault)
    temporary = folder / f".{mark.name}.new"
    temporary.write_text(str(fault), encoding="utf-8")
    # Renamed into place, so that the run never reads half a request.
    temporary.replace(folder / f"{mark.name}.ask")
    return mark
