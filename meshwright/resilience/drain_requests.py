"""Requests that devices leave a run: files of its directory, which commands and the health policy write.

A file of ``RUN/drain`` names a node, or one of its devices, by its name; what it holds says why. Devices leave after a
step that all ranks agree on, so that nothing is computed twice, and come back when the file is gone: drain and resume
of a node, as Slurm's ``scontrol update state=drain`` and Kubernetes' ``kubectl drain`` have it, without the scheduler.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.resilience.messages import Device
from meshwright.resilience.planning import PlanPrefetcher

FOLDER = "drain"
_NAME = re.compile(r"node-(\d{1,6})(?:\.device-(\d{1,6}))?\.json")
_READ_EVERY_S = 1.0
_REASON_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class DrainRequest:
    """A node, or one of its devices, that a run should do without."""

    node: int
    """Number of the node."""
    device: int | None = None
    """Number of the device on its node; None for all of them."""
    why: str = ""
    """Reason, as a sentence."""

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"node-{self.node}.json" if self.device is None else f"node-{self.node}.device-{self.device}.json"

    def covers(self, device: Device) -> bool:
        """Returns whether it asks a device to leave."""
        return device[0] == self.node and self.device in (None, device[1])


def write_request(run_dir: Path, request: DrainRequest) -> bool:
    """Asks devices to leave a run; returns whether this wasn't asked before.

    Raises:
        ConfigError: when the run directory can't be written.
    """
    path = run_dir / FOLDER / request.file_name
    if path.exists():
        return False
    try:
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"why": request.why, "time": time.time()}), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return True


def withdraw_request(run_dir: Path, request: DrainRequest) -> bool:
    """Lets devices come back; returns whether they had been asked to leave."""
    try:
        (run_dir / FOLDER / request.file_name).unlink()
    except FileNotFoundError:
        return False
    return True


def read_requests(run_dir: Path) -> list[DrainRequest]:
    """Returns what a run is asked to do without, ordered; files with other names mean nothing."""
    requests = []
    with contextlib.suppress(OSError):
        for path in (run_dir / FOLDER).iterdir():
            named = _NAME.fullmatch(path.name)
            if named is not None:
                node, device = named.groups()
                requests.append(
                    DrainRequest(node=int(node), device=None if device is None else int(device), why=_read_reason(path))
                )
    return sorted(requests, key=lambda request: (request.node, -1 if request.device is None else request.device))


def _read_reason(path: Path) -> str:
    """Returns the reason in a file; empty where it holds something else."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_REASON_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(values.get("why", "")) if isinstance(values, dict) else ""


class DrainWatch:
    """What a run's controller knows of the requests: which devices they cover, and whether ranks should end for them.

    Args:
        run_dir: the run directory.
        planner: asked whether fewer ranks have a layout.
        minimum: ranks under which no device leaves.
        event: records an event: its kind, and its fields by keyword.
        clock: returns seconds; another one in tests.
    """

    def __init__(
        self,
        run_dir: Path,
        planner: PlanPrefetcher,
        minimum: int,
        event: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._planner, self._minimum, self._event = run_dir, planner, minimum, event
        self._clock, self._read_at = clock, -_READ_EVERY_S
        self._requests: list[DrainRequest] = []
        self._accepted: set[DrainRequest] = set()
        self._refused: set[DrainRequest] = set()
        self._answered: set[DrainRequest] = set()
        self._at_start: set[Device] = set()

    def drained(self, devices: Iterable[Device]) -> set[Device]:
        """Returns those of some devices that a request covers which was accepted, and stands."""
        self._read()
        return {device for device in devices if any(request.covers(device) for request in self._accepted)}

    def accept_at_start(self, connected: Collection[Device], left_out: Collection[Device]) -> None:
        """Accepts the requests that stand before any rank started, as far as they leave enough devices."""
        self._read()
        for request in self._requests:
            if len(self._rest(request, connected, left_out)) >= self._minimum:
                self._accepted.add(request)
            else:
                self._refuse(request, f"fewer than {self._minimum} devices would be left to start on")

    def begin_generation(self, connected: Iterable[Device]) -> None:
        """Remembers which devices have no rank by request from now on; what was refused is judged again."""
        self._at_start = self.drained(connected)
        self._refused.clear()

    def asks_for_change(
        self, connected: Collection[Device], left_out: Collection[Device], used: Collection[Device]
    ) -> bool:
        """Accepts or refuses new requests; returns whether ranks should end, so that devices leave or come back.

        Requests that leave too few devices, or a number without a layout, are refused with an event.

        Args:
            connected: all devices of the connected nodes.
            left_out: those that have no rank for another reason.
            used: those that have ranks of this generation.
        """
        self._read()
        for request in self._requests:
            if request in self._accepted or request in self._refused:
                continue
            if not any(map(request.covers, connected)):
                # It stands: the node may join later.
                self._answer(request, "no connected node has it; a node that joins later is asked then")
                continue
            rest = self._rest(request, connected, left_out)
            layout_exists = self._layout_exists(len(rest))
            if layout_exists:
                self._accepted.add(request)
            elif layout_exists is False:
                ranks = f"{self._minimum} ranks or more"
                self._refuse(request, f"{len(rest)} devices would be left, on which no {ranks} have a layout")
        now = self.drained(connected)
        # A drained node that has ended brings no device back.
        return bool((now - self._at_start).intersection(used) or (self._at_start - now).intersection(connected))

    def take_change(self, connected: Collection[Device], step: int) -> bool:
        """Records which devices leave and come back, once ranks ended; returns whether any does."""
        now = self.drained(connected)
        leave, back = sorted(now - self._at_start), sorted((self._at_start - now).intersection(connected))
        if leave or back:
            why = {request.why for request in self._accepted if request.why and any(map(request.covers, leave))}
            self._event("drained", step=step, devices=leave, back=back, why="; ".join(sorted(why)))
        return bool(leave or back)

    def _read(self) -> None:
        """Reads the requests, at most once a second, and forgets what was withdrawn."""
        if self._clock() - self._read_at >= _READ_EVERY_S:
            self._requests, self._read_at = read_requests(self._run_dir), self._clock()
            for requests in (self._accepted, self._refused, self._answered):
                requests.intersection_update(self._requests)

    def _rest(self, request: DrainRequest, connected: Collection[Device], left_out: Collection[Device]) -> set[Device]:
        """Returns the devices that a request would leave."""
        without = {*left_out, *self.drained(connected)}
        return {device for device in connected if device not in without and not request.covers(device)}

    def _refuse(self, request: DrainRequest, why: str) -> None:
        self._refused.add(request)
        self._answer(request, why)

    def _answer(self, request: DrainRequest, why: str) -> None:
        """Answers a request with an event, once."""
        if request not in self._answered:
            self._answered.add(request)
            self._event("drain_refused", node=request.node, device=request.device, why=why)

    def _layout_exists(self, devices: int) -> bool | None:
        """Returns whether some number of ranks on so many devices has a layout; None while that is planned."""
        for count in range(devices, self._minimum - 1, -1):
            self._planner.start([count])
            if self._planner.pending(count):
                return None
            with contextlib.suppress(MeshwrightError):
                self._planner.answer(count)
                return True
        return False
