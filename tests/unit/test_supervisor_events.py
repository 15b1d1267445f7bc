"""A supervisor's events are shown once each: by the display of rank 0, or by the supervisor what that didn't reach."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.events import Event
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import RunHeader
from meshwright.monitor.monitor import Monitor
from meshwright.resilience.supervisor import Supervisor
from meshwright.spec.layout import Layout
from meshwright.train.supervisor_requests import SupervisorRequests

CONFIG = MonitorConfig(display="plain", tensorboard=False, report=False)


class _Supervisor(Supervisor):
    """A supervisor whose ranks the test plays."""

    def _make_node(self) -> Any:
        return SimpleNamespace(ranks_run=False, shown_until=0.0, storage=SimpleNamespace(close=lambda: None))


def _supervisor(run_dir: Path) -> Any:
    config = SimpleNamespace(recovery=SimpleNamespace(copies=1), monitor=CONFIG)
    job = SimpleNamespace(plan=SimpleNamespace(layout=Layout.parse("replicate=2")), config=config, run_dir=run_dir)
    return _Supervisor(job, SimpleNamespace(count=2, kind="cpu"), None)  # type: ignore[arg-type]


def test_each_event_is_shown_once_whoever_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor, requests, stream = _supervisor(tmp_path), SupervisorRequests(), io.StringIO()
    supervisor.event("before", step=0)
    supervisor._local.ranks_run = True
    monitor = Monitor.build(CONFIG, tmp_path, RunHeader(steps=4), stream=stream)
    monitor.on_shown = requests.publish_shown
    supervisor.event("checkpoint_saved", step=2)
    monitor.event(Event(kind="evaluated", rank=0, data={"step": 3}))
    supervisor.event("checkpoint_saved", step=3)
    monitor.close()
    # The ranks still end when the checkpoint of the last step is written.
    supervisor.event("checkpoint_saved", step=4)
    supervisor._local.shown_until, supervisor._local.ranks_run = requests.shown_until, False
    supervisor._close()
    requests.close()
    saved = [line for line in stream.getvalue().splitlines() if "at step" in line]
    assert saved == ["checkpoint saved at step 2", "evaluated at step 3", "checkpoint saved at step 3"]
    assert capsys.readouterr().err.splitlines() == ["before at step 0", "checkpoint saved at step 4"]


def test_a_node_without_rank_0_shows_nothing_of_running_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = _supervisor(tmp_path)
    supervisor._local.ranks_run, supervisor._local.shown_until = True, float("inf")
    supervisor.event("slow_rank", slow=3)
    supervisor._local.ranks_run = False
    supervisor.event("leader_lost", node=1)
    supervisor._close()
    assert capsys.readouterr().err.splitlines() == ["leader lost: node 1"]
