"""A node that leaves a run of islands at SIGTERM: its island ends in order, and the others go on.

Sent to one node of a layout without islands, SIGTERM ends the run on all nodes: none can train without the others. An
island can be done without. Its node asks to be drained (`drain_requests`), so that it leaves after a step that all
ranks agree on, which is the end of the open round: nothing of the round is lost. Where that takes longer than
``launch.stop_s`` the node leaves at once, and its open round is lost as that of a lost node. Where the run refuses,
since too few devices would be left, SIGTERM ends it on all nodes after all.
"""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.errors import TERMINATED
from meshwright.launch.signals import InterruptCounter
from meshwright.monitor.rundir import read_run
from meshwright.resilience.drain_requests import DrainRequest, read_requests, withdraw_request, write_request
from meshwright.resilience.generation_ranks import LeftRun
from meshwright.resilience.messages import Order

REASON = "SIGTERM"
"""Reason of the requests: a node that starts again withdraws its own."""
_READ_EVERY_S = 1.0


class Departure:
    """Asks for this node's leave once SIGTERM has arrived, and sees to it that the node leaves in time.

    Args:
        run_dir: the run directory, which all nodes share.
        node: this node's number.
        interrupts: of this node.
        stop_s: seconds after SIGTERM in which the node leaves.
    """

    def __init__(self, run_dir: Path, node: int, interrupts: InterruptCounter, stop_s: float) -> None:
        self._run_dir, self._interrupts, self._stop_s = run_dir, interrupts, stop_s
        self._request = DrainRequest(node=node, why=REASON)
        self._asked_at: float | None = None
        """time.time() of the request; None without one."""
        self._read_at = 0.0
        self._refused_at: float | None = None
        """time.monotonic() at which the run refused; None before."""

    @property
    def saves_alone(self) -> bool:
        """Whether this node is to end the run, by itself where the node that led has left meanwhile."""
        return self._refused_at is not None and time.monotonic() - self._refused_at < self._stop_s

    def poll(self) -> None:
        """Asks for leave, or hears that the run refuses; called some times a second while ranks run.

        Raises:
            LeftRun: when the node's time is over.
        """
        since_s = self._interrupts.leaving_since
        if since_s is None:
            return
        now_s = time.monotonic()
        if self._asked_at is None:
            self._asked_at = time.time()
            write_request(self._run_dir, self._request)
            return
        self.end_in_time()
        if now_s - self._read_at > _READ_EVERY_S:
            self._read_at = now_s
            if self._is_refused(self._asked_at):
                self.end_run_instead()

    def end_in_time(self) -> None:
        """Ends the node's part in the run when its time is over, also while it has no ranks and waits for others.

        Raises:
            LeftRun: then.
        """
        since_s = self._interrupts.leaving_since
        if since_s is not None and time.monotonic() - since_s > self._stop_s:
            raise self._left(f"gave its open round up after launch.stop_s = {self._stop_s:g} s")

    def end_run_instead(self) -> None:
        """Ends the run on all nodes at a SIGTERM that asked this one to leave, whom the others can't do without."""
        if self._interrupts.leaving_since is not None:
            self.withdraw()
            self._interrupts.end_run_instead()
            self._refused_at = time.monotonic()

    def end_without_ranks(self, order: Order) -> None:
        """Ends the node's part in the run once it has no rank, and the others have read what it holds of their state.

        Args:
            order: of the generation that runs.

        Raises:
            LeftRun: when the node may end.
        """
        since_s = self._interrupts.leaving_since
        if since_s is None or self._request.node in order.nodes:
            return
        now_s = time.monotonic()
        serves = order.state is not None and self._request.node in order.state.holders.values()
        if serves and now_s - since_s < self._stop_s:
            if now_s - self._read_at < _READ_EVERY_S:
                return
            self._read_at, asked_at = now_s, self._asked_at or 0.0
            restored = read_run(self._run_dir).of_kind("restored")
            if not any(float(event["time"]) >= asked_at for event in restored):
                return
        raise self._left("nothing of its round is lost")

    def _left(self, how: str) -> LeftRun:
        """Returns the error with which the node's command ends."""
        error = LeftRun(f"node {self._request.node} left the run at SIGTERM and {how}; the others go on")
        error.exit_status = TERMINATED
        return error

    def withdraw(self) -> None:
        """Lets the node come back, by a command that is started again."""
        if any((request.node, request.device, request.why) == (self._request.node, None, REASON)
               for request in read_requests(self._run_dir)):  # fmt: skip
            withdraw_request(self._run_dir, self._request)

    def _is_refused(self, asked_at: float) -> bool:
        """Returns whether the node that leads refused the request."""
        refusals = read_run(self._run_dir).of_kind("drain_refused")
        return any(
            event["node"] == self._request.node and event["device"] is None and float(event["time"]) >= asked_at - 1.0
            for event in refusals
        )
