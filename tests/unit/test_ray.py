"""Ray without Ray: what is refused and shown before anything is asked, and how nodes are kept in a fake cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import ClusterError, LaunchError
from meshwright.jobs.run_control import run_status
from meshwright.launch import ray_job
from meshwright.launch.config import RayConfig
from meshwright.launch.ray_cluster import NodeLost, missing_nodes
from meshwright.launch.ray_job import EndRequest, RayJob
from meshwright.launch.ray_node import SharedFile

RUN = ["train", "--on", "ray", "--ray.nodes", "2", "--run", "here"]
SHARED = SharedFile(path="/run/launch/job.json", text="{}", workdir="/work")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")


def test_a_dry_run_says_what_would_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--ray.gpus-per-node", "8", "--ray.resources", "accelerator_type:H100=0.001", "--ray.timeout", "600")
    assert main([*RUN, "--dry-run", *words, "--ray.environment", "NCCL_DEBUG=a b"]) == 0
    cluster, group, waits, command = capsys.readouterr().out.splitlines()
    assert cluster == "cluster: auto"
    assert group.startswith("placement group: 2 x (8 CPU + 8 GPU + 0.001 accelerator_type:H100), STRICT_SPREAD")
    assert "600 s" in waits
    assert command.startswith("on each: NCCL_DEBUG='a b' python -m meshwright train ")
    assert "--run-dir here --devices 16 " in command
    assert command.endswith("--on local --nodes 2 --node I --meet ADDRESS")
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--ray.nodes 0", "ray.nodes = 0"),
        ("--ray.address somewhere", "give auto, HOST:6379"),
        ("--ray.address local", "give auto, HOST:6379"),
        ("--ray.timeout -1", "ray.timeout = -1"),
        ("--ray.resources H100", "no name and amount"),
        ("--ray.resources H100=0", "no name and amount"),
        ("--ray.resources GPU=2", "set by ray.cpus_per_node"),
        ("--ray.environment NCCL_DEBUG", "write NAME=VALUE"),
        ("--devices 3", "equally many ranks"),
        ("--ray.gpus-per-node 1 --devices 4", "have 2 GPUs"),
        ("--ray.gpus-per-node 1 --layout shard=4", "multiply to 4"),
        ("--recovery.copies 2", "recovery.copies = 2"),
        ("--trials 2", "drop trials"),
        ("--nodes 2 --node 0 --meet here", "numbers the nodes by itself"),
        ("--hostfile hosts", "--on ssh and --hostfile"),
        ("--json", "meshwright status RUN --json"),
    ],
)
def test_settings_are_refused_before_ray_is_asked(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("here").exists()


def test_a_missing_ray_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(RUN) == 1
    assert "pip install 'meshwright[ray]'" in capsys.readouterr().err
    assert not Path("here", "launch", "job.json").exists()


def test_what_a_cluster_lacks_is_said() -> None:
    cluster = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "node:10.0.0.1": 1.0}]
    assert missing_nodes(cluster, {"CPU": 8.0, "GPU": 2.0}, 2) == ""
    lacking = missing_nodes(cluster, {"CPU": 8.0, "GPU": 2.0}, 3)
    assert "has 2 such nodes, among 2 x 8 CPU + 2 GPU, 1 x 4 CPU + 0 GPU" in lacking
    assert "among none" in missing_nodes([], {"CPU": 1.0}, 1)


class FakeNode:
    """An actor of a `FakeCluster`: ready at once, and what a test makes of it then."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.argv: Sequence[str] = ()
        self.ended: int | None = None
        self.lost = self.killed = self.asked_to_end = False

    def address(self) -> str | None:
        self._check()
        return self._address

    def run(self, argv: Sequence[str], environment: Mapping[str, str], workdir: str) -> None:
        self.argv = argv

    def status(self) -> int | None:
        self._check()
        return self.ended

    def _check(self) -> None:
        if self.lost:
            raise NodeLost("its raylet is gone")

    def terminate(self) -> None:
        self.asked_to_end = True

    def kill(self) -> None:
        self.killed = True


class FakeRun:
    """A cluster, and a run's records: each report while it runs is a turn of the script that a test gives."""

    def __init__(self, script: dict[int, Callable[[FakeRun], None]], nodes: int = 2, free: int = 9) -> None:
        self.script, self.turn, self.nodes, self.free = dict(script), 0, nodes, free
        self.actors: list[tuple[int, FakeNode]] = []
        self.request, self.over, self.finished = EndRequest.NONE, False, False
        self.states: list[tuple[str, tuple[str, ...], str]] = []

    def node_resources(self) -> list[dict[str, float]]:
        return [{"CPU": 1.0}] * self.nodes

    def reserve(self, bundle: Mapping[str, float], nodes: int) -> None:
        assert (dict(bundle), nodes) == ({"CPU": 1.0}, 2)

    def is_reserved(self) -> bool:
        return self.free >= 2

    def start_node(self, node: int, shared: SharedFile, output: str) -> FakeNode:
        self.actors.append((node, FakeNode(f"10.0.0.{len(self.actors)}")))
        return self.actors[-1][1]

    def is_finished(self) -> bool:
        return self.finished

    def is_over(self) -> bool:
        return self.over

    def end_request(self) -> EndRequest:
        return self.request

    def report(self, state: str, nodes: Sequence[str], reason: str) -> None:
        self.states.append((state, tuple(nodes), reason))
        if state == "RUNNING":
            self.script.get(self.turn, lambda run: None)(self)
            self.turn += 1
            assert self.turn < 50, "the job doesn't end"

    def job(self, **settings: float) -> RayJob:
        config = RayConfig(nodes=2, **settings)  # type: ignore[arg-type]
        return RayJob(self, ["train"], config, {}, SHARED, str, self, start_s=1.0, stop_s=5.0, say=lambda text: None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_POLL_S", 0.001), ("_FREE_S", 0.01), ("_MOST_PAUSE_S", 0.0), ("_OTHERS_END_S", 0.0)):
        monkeypatch.setattr(ray_job, name, seconds)


def lose(index: int) -> Callable[[FakeRun], None]:
    """Returns a turn in which an actor is lost, counted in the order in which they were asked for."""
    return lambda run: setattr(run.actors[index][1], "lost", True)


def end(index: int, status: int) -> Callable[[FakeRun], None]:
    """Returns a turn in which a supervisor ends by itself."""
    return lambda run: setattr(run.actors[index][1], "ended", status)


def end_all(status: int) -> Callable[[FakeRun], None]:
    """Returns a turn in which the run ends on all nodes; with 0 it is finished."""

    def turn(run: FakeRun) -> None:
        run.over, run.finished = True, status == 0
        for _, actor in run.actors:
            actor.ended = status

    return turn


def ask(request: EndRequest) -> Callable[[FakeRun], None]:
    """Returns a turn in which another command asks the run to end."""
    return lambda run: setattr(run, "request", request)


def test_a_lost_node_is_asked_for_again_and_meets_the_first() -> None:
    run = FakeRun({1: lose(1), 6: end_all(0)})
    assert run.job().run() == 0
    assert [node for node, _ in run.actors] == [0, 1, 1]
    lost, back = run.actors[1][1], run.actors[2][1]
    assert lost.killed and not back.killed
    assert list(back.argv) == ["train", "--nodes", "2", "--node", "1", "--meet", "10.0.0.0"]
    assert ("RUNNING", ("10.0.0.0",), "node 1 lost, asked for again") in run.states


def test_the_first_node_listens_at_its_own_address_when_it_is_back_elsewhere() -> None:
    run = FakeRun({1: lose(0), 6: end_all(0)})
    assert run.job().run() == 0
    assert run.actors[2][1].argv[-1] == "10.0.0.2"


def test_a_node_that_is_lost_at_once_again_is_asked_for_until_it_stays() -> None:
    run = FakeRun({**dict.fromkeys(range(1, 30), lose(-1)), 45: end_all(0)})
    assert run.job().run() == 0
    assert [node for node, _ in run.actors].count(1) > 6


def test_a_supervisor_that_ends_by_itself_is_started_again_some_times_while_others_go_on() -> None:
    run = FakeRun({**dict.fromkeys(range(1, 40), end(-1, 2)), 45: end_all(0)})
    assert run.job().run() == 0
    assert [node for node, _ in run.actors].count(1) == 1 + ray_job._RETRIES


def test_nothing_is_asked_for_once_the_run_is_over() -> None:
    def over(run: FakeRun) -> None:
        run.over = run.actors[1][1].lost = True

    run = FakeRun({1: over, 4: end(0, 1)})
    assert run.job().run() == 1
    assert len(run.actors) == 2


def test_a_request_ends_all_supervisors_in_order_or_at_once() -> None:
    run = FakeRun({1: ask(EndRequest.CHECKPOINT), 4: end_all(1)})
    assert run.job().run() == 1
    assert all(actor.asked_to_end and not actor.killed for _, actor in run.actors)
    assert "ends with a checkpoint" in run.states[-1][2]
    run = FakeRun({1: ask(EndRequest.NOW)})
    assert run.job().run() == 1 and run.turn == 2


def test_a_signal_ends_the_run_in_order() -> None:
    run = FakeRun({1: lambda run: os.kill(os.getpid(), signal.SIGTERM), 4: end_all(143)})
    assert run.job().run() == 143
    assert all(actor.asked_to_end for _, actor in run.actors)


def test_nodes_are_waited_for_as_long_as_the_settings_say() -> None:
    with pytest.raises(ClusterError, match=r"1 such nodes.*ray.timeout = 600"):
        FakeRun({}, nodes=1).job().check_cluster()
    FakeRun({}, nodes=1).job(timeout=0.05).check_cluster()
    run = FakeRun({}, nodes=2, free=1)
    with pytest.raises(ClusterError, match="other jobs use them"):
        run.job(timeout=0.05).run()
    assert run.states[-1][2] == "waits for 2 nodes with 1 CPU each" and not run.actors


def test_all_nodes_may_be_lost_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_job, "_ALONE_S", 0.0)
    monkeypatch.setattr(ray_job, "_MOST_PAUSE_S", 9.0)
    run = FakeRun({1: lambda run: [lose(index)(run) for index in (0, 1)] and None})
    with pytest.raises(LaunchError, match="all nodes are lost"):
        run.job().run()


def test_a_driver_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "launch"
    folder.mkdir(parents=True)
    record = {"launcher": "ray", "job": "01000000", "nodes": 2, "submitted": ""}
    (folder / "job.json").write_text(json.dumps(record))
    (folder / "ray.json").write_text(json.dumps({"state": "RUNNING", "nodes": ["a"], "reason": ""}))
    status = run_status(tmp_path / "run")
    assert status.job is not None and (status.job.state, status.state) == ("gone", "ended")
