"""Devices that leave a run on request: what the controller makes of requests, and which the health policy makes."""

from __future__ import annotations

import ctypes
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.doctor import nvml
from meshwright.doctor.nvml import GpuState, visible_gpus
from meshwright.jobs.health import RISING_SAMPLES, DrainPolicy, HealthSampler, find_worsened
from meshwright.resilience.drain_requests import DrainRequest, read_requests, withdraw_request, write_request
from meshwright.resilience.messages import Order
from meshwright.train.outcome import TrainOutcome
from tests.faults.test_doctor import FAKE_NVML, build
from tests.runs import Running, curve, events, rows, wait_until, words, write_corpus
from tests.unit.test_monitor_report import make_run
from tests.unit.test_resilience_generation import OVER, Script, controller_of, end

LIMIT_S = 60.0


class Watched(Script):
    """A node whose generations last until the controller asks their ranks to end; each begins with some deed."""

    deeds: list[list[Callable[[], object]]]

    def poll(self, ranks: Any) -> list[Any]:
        return []

    def run(self, order: Order, *more: Any) -> None:
        watch, ends_by = more[0], time.monotonic() + LIMIT_S
        control = SimpleNamespace(reconfiguration_requested=False)
        control.request_reconfiguration = lambda: setattr(control, "reconfiguration_requested", True)
        for deed in self.deeds.pop(0) if self.deeds else ():
            deed()
        while self.ends[0].outcome != OVER and not control.reconfiguration_requested:
            assert time.monotonic() < ends_by, "nobody asked the ranks to end"
            watch(SimpleNamespace(control=control, times=None))
            time.sleep(0.01)
        super().run(order)


def test_devices_leave_on_request_and_come_back(tmp_path: Path) -> None:
    """Three devices; two ranks have no layout. Requests that can't be met are answered and change nothing."""
    one, node, stranger = DrainRequest(node=0, device=1, why="errors"), DrainRequest(node=0), DrainRequest(node=7)
    told: list[tuple[str, dict]] = []

    script = Watched(tmp_path, [end(outcome=TrainOutcome(step=7, continues=True))] * 2 + [end(outcome=OVER)], True)
    script.deeds = [
        [lambda: write_request(tmp_path, one), lambda: (tmp_path / "drain" / "node-0.json.swp").write_text("")],
        [lambda: write_request(tmp_path, node), lambda: write_request(tmp_path, stranger)],
    ]
    controller = controller_of(script, told)
    event = controller._drains._event

    def answer(kind: str, **data: Any) -> None:
        event(kind, **data)
        if kind == "drain_refused" and data["node"] == 0:
            assert withdraw_request(tmp_path, one)

    controller._drains._event = answer
    assert controller.run({0}, 0.0) == OVER
    refused = [fields for kind, fields in told if kind == "drain_refused"]
    assert [(fields["node"], fields["device"]) for fields in refused] == [(0, None), (7, None)]
    assert "no connected node has it" in refused[1]["why"] and "0 devices would be left" in refused[0]["why"]
    drained = [fields for kind, fields in told if kind == "drained"]
    assert [(fields["devices"], fields["back"], fields["why"]) for fields in drained] == [
        ([(0, 1)], [], "errors"), ([], [(0, 1)], "")
    ]  # fmt: skip
    everything = ((0, 0), (0, 1), (0, 2))
    assert [order.devices for order in script.orders] == [everything, ((0, 0),), everything]
    assert [kind for kind, _ in told if kind in ("rank_lost", "growing")] == []


def test_what_lies_in_the_folder_is_data(tmp_path: Path) -> None:
    assert read_requests(tmp_path) == []
    assert write_request(tmp_path, DrainRequest(node=1, why="hot"))
    assert not write_request(tmp_path, DrainRequest(node=1, why="again"))
    folder = tmp_path / "drain"
    for name, text in (("node-0.device-3.json", "[" * 10_000), ("node-0.device-4.json", '{"why": {"a": 1}}'),
                       ("node--1.json", "{}"), ("node-1.device-.json", "{}"), ("node-9999999.json", "{}")):  # fmt: skip
        (folder / name).write_text(text)
    assert read_requests(tmp_path) == [
        DrainRequest(node=0, device=3), DrainRequest(node=0, device=4, why="{'a': 1}"), DrainRequest(node=1, why="hot")
    ]  # fmt: skip


ERRORS = r"""
static int wrong = 0, left = 0;
static unsigned long long xid = 0;
void fail(int how, unsigned long long number) { wrong = how; xid = number; left = number ? 1 : 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
  strncpy(text, "GPU-0aa", size); text[4] = '0' + (int)(long)gpu; return 0; }
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *c, unsigned *u, unsigned *p, unsigned *f) {
  *c = *u = *p = 0; *f = wrong == 1 && gpu == (void *)1; return 0; }
struct event { void *device; unsigned long long type, data; unsigned gi, ci; };
int nvmlEventSetCreate(void **set) { *set = (void *)99; return 0; }
int nvmlDeviceRegisterEvents(void *gpu, unsigned long long types, void *set) {
  return types == 8 && set == (void *)99 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, struct event *e, unsigned ms) {
  if (!left) return 10;
  left--; e->device = (void *)2; e->type = 8; e->data = xid; return 0; }
"""


def test_errors_of_a_simulated_driver_ask_devices_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(FAKE_NVML + ERRORS, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-2,0")
    fake, sampler = ctypes.CDLL(str(library)), HealthSampler(tmp_path)
    fake.fail.argtypes = (ctypes.c_int, ctypes.c_ulonglong)
    policy = DrainPolicy(4, has_gpus=True)
    samples = [sampler.sample()]
    # The third GPU is lost from the start, but it isn't one of the run's; seven old errors of the fourth don't count.
    assert samples[0]["visible"] == [3, 1, 0] and list(policy.judge(None, samples[0])) == []
    found = []
    for how, xid in ((1, 0), (1, 79), (0, 31), (0, 0)):
        fake.fail(how, xid)
        samples.append(sampler.sample())
        found.append([(request.device, request.why) for request in policy.judge(samples[-2], samples[-1])])
    assert found == [
        [(2, "GPU 0: a faulty row of memory couldn't be replaced")],
        [(1, "GPU 1: XID 79: the GPU fell off the bus")], [], [],
    ]  # fmt: skip
    assert [fields["why"] for _, fields in find_worsened(samples[2], samples[3])] == ["XID 31"]
    cpu = DrainPolicy(4, has_gpus=False)
    assert [request for pair in itertools.pairwise(samples) for request in cpu.judge(*pair)] == []


def test_a_network_whose_errors_keep_rising_asks_its_node_to_leave() -> None:
    policy = DrainPolicy(2, has_gpus=False)
    counts = [5, 6, 7, 7, 8, 9, 12, 13]
    samples = [{"gpus": [], "xids": [], "visible": None, "nics": {"eth0": count}} for count in counts]
    asked = [list(policy.judge(*pair)) for pair in zip([None, *samples], samples)]
    assert RISING_SAMPLES == 3
    assert [index for index, requests in enumerate(asked) if requests] == [6]
    assert (asked[6][0].node, asked[6][0].device) == (2, None)


def gpu(index: int, name: str = "H100", uuid: str = "") -> GpuState:
    return GpuState(index=index, error="", name=name, uuid=uuid)


@pytest.mark.parametrize(
    ("environment", "names", "indices"),
    [
        ({}, "aaa", [0, 1, 2]),
        ({}, "aba", None),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "aba", [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "aaa", [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "aab", None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}, "aab", [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-,0"}, "aaa", []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "aaa", [1]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-c"}, "aaa", None),
        ({"CUDA_VISIBLE_DEVICES": ""}, "aaa", []),
    ],
)
def test_numbers_of_torch_as_numbers_of_the_driver(
    environment: dict[str, str], names: str, indices: list[int] | None
) -> None:
    gpus = [gpu(index, name, f"GPU-{'abc'[index]}") for index, name in enumerate(names)]
    assert visible_gpus(gpus, environment) == indices


def test_a_policy_without_samples_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "run", "--recovery.on-device-error", "drain")) == 2
    assert "needs monitor.health_s" in capsys.readouterr().err


def test_a_run_that_nobody_would_start_again_is_not_drained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 3)
    assert main(["drain", str(tmp_path), "--device", "1"]) == 2 and "not a run directory" in capsys.readouterr().err
    assert main(["drain", str(run), "--device", "1"]) == 0 and "from its next start on" in capsys.readouterr().out
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f"{text}\n[recovery]\nenabled = false\n")
    assert main(["drain", str(run), "--device", "2"]) == 2 and "recovery.enabled" in capsys.readouterr().err


def test_what_a_custom_loop_recorded_is_not_drained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 3)
    (run / "config.toml").write_text("[meter]\nranks = 4\n")
    assert main(["drain", str(run), "--node", "0"]) == 2
    assert "is what a custom loop recorded" in capsys.readouterr().err and not (run / "drain").exists()


def test_an_ended_run_is_not_asked_to_do_without_what_it_never_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without an event has told nobody of its nodes, so it holds any request until its start."""
    run = make_run(tmp_path / "run", 3)
    (run / "config.toml").write_text(f"devices = 4\n{(run / 'config.toml').read_text()}")
    assert main(["drain", str(run), "--node", "7"]) == 2
    assert "node 7 was never part of" in capsys.readouterr().err
    assert main(["drain", str(run), "--device", "4"]) == 2
    assert "the highest device it can have is 3" in capsys.readouterr().err
    assert main(["drain", str(run), "--device", "3"]) == 0 and main(["drain", str(run), "--node", "0"]) == 0
    found = [{"kind": "leading", "node": 0}, {"kind": "node_ready", "node": 2, "ranks": 1}, {"kind": "node_ready"}]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in found)
    assert main(["drain", str(run), "--node", "1"]) == 2 and "its nodes were 0, 2" in capsys.readouterr().err
    assert main(["drain", str(run), "--node", "2", "--device", "1"]) == 2
    assert main(["drain", str(run), "--node", "2"]) == 0
    assert [(one.node, one.device) for one in read_requests(run)] == [(0, None), (0, 3), (2, None)]
    (run / "events.jsonl").unlink()
    assert main(["drain", str(run), "--node", "7"]) == 0


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts runs that last until they are cancelled."""
    write_corpus(tmp_path / "corpus.txt")
    runs: list[Running] = []

    def start(name: str, **more: Any) -> Running:
        argv = words(tmp_path, name, "--train.steps", "5000", "--train.batch", "6", "--checkpoint.every", "0", **more)
        runs.append(Running(argv, tmp_path / f"{name}.log"))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.mark.slow
def test_a_device_is_drained_by_a_command_and_the_curve_stays(
    tmp_path: Path, live: Callable[..., Running], capsys: pytest.CaptureFixture[str]
) -> None:
    """No step is lost or computed twice; the losses are those of a run that nobody disturbed."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    running = live("run", layout="replicate=3", devices=3)
    wait_until(lambda: len(rows(run)) > 4)
    assert main(["drain", str(run), "--device", "1", "--why", "a hot one"]) == 0
    assert "goes on without device 1 of node 0 after step" in capsys.readouterr().out
    assert main(["drain", str(run), "--device", "1"]) == 2 and "drained already" in capsys.readouterr().err
    assert main(["drain", str(run)]) == 0 and "node 0 device 1: a hot one" in capsys.readouterr().out
    assert main(["drain", str(run), "--node", "0"]) == 1 and "0 devices would be left" in capsys.readouterr().err
    assert main(["drain", str(run), "--device", "1", "--undo", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["step"] + 3
    wait_until(lambda: len(rows(run)) > last)
    assert main(["cancel", str(run)]) == 0 and running.wait() == 143, running.text()
    assert [event["ranks"] for event in events(run, "planned")] == [2, 3] and not events(run, "rank_lost") + events(
        run, "growing"
    )
    undisturbed = live("alone")
    wait_until(lambda: len(rows(alone)) > last)
    assert main(["cancel", str(alone)]) == 0 and undisturbed.wait() == 143
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))
    one, other = curve(run), curve(alone)
    assert max(abs(one[step][0] / other[step][0] - 1) for step in range(1, last + 1)) < 2e-4
