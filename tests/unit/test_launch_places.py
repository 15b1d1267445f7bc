"""Places and devices: what torchrun's environment, a hostfile and the node's devices are read as."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import ClusterError, ConfigError, LaunchError
from meshwright.launch import devices
from meshwright.launch.choice import choose_launcher
from meshwright.launch.config import LaunchConfig
from meshwright.launch.devices import Devices, count_cores, count_gpus, found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.hostfile import HostfileLauncher, HostfileLine, read_hostfile
from meshwright.launch.machine import machine_facts
from meshwright.launch.torchrun import TorchrunLauncher, torchrun_context

PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def test_torchrun_place():
    context = torchrun_context(PLACE | {"TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": "2"}, gpus=4)
    assert context is not None
    assert (context.rank, context.world, context.local_rank, context.local_world) == (5, 8, 1, 4)
    assert (context.device, context.host, context.port, context.run_id) == ("cuda:1", "head", 29500, "job")
    assert context.nodes == 2 and context.listen_fd is None and not context.agent_store


def test_no_torchrun_no_place():
    assert torchrun_context({}, gpus=0) is None
    assert torchrun_context({"MASTER_ADDR": "head"}, gpus=0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR not"),
        ({"RANK": "8"}, "contradict"),
        ({"RANK": "x"}, "whole number"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, "SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_a_torchrun_place_that_cannot_work(change, message):
    values = {name: value for name, value in (PLACE | change).items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        torchrun_context(values, gpus=0)


def test_fewer_gpus_than_torchrun_ranks():
    with pytest.raises(LaunchError, match="4 ranks on this node, but it has 2 usable GPUs"):
        torchrun_context(PLACE, gpus=2)


def test_choice(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    launcher = choose_launcher(3, kind="cpu")
    assert isinstance(launcher, ForkLauncher) and launcher.ranks == 3
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    launcher = choose_launcher(kind="cpu")
    assert isinstance(launcher, TorchrunLauncher) and launcher.ranks == 8
    assert launcher.commands(["train"])[0].argv[-3:] == ("-m", "meshwright", "train")
    with pytest.raises(ClusterError, match="torchrun started 8 ranks"):
        choose_launcher(2, kind="cpu")


def test_cpu_ranks_may_outnumber_cores(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    found = found_devices(3 * count_cores())
    assert found.kind == "cpu" and found.count == 3 * count_cores()
    assert found.threads(found.count) == 1 and found.name(2) == "cpu"
    assert found_devices().count == count_cores()


def test_a_quota_counts_as_parts_of_cores(monkeypatch):
    """Threads stay within it, and a machine with another quota is another one to a calibration."""
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    found = {}
    for quota in (0.4, 1.5, 4.0, 9.0):
        monkeypatch.setattr(devices, "read_quota", lambda quota=quota: quota)
        found[quota] = found_devices()
    assert [(each.cores, each.count, each.threads(1)) for each in found.values()] == [
        (1, 1, 1),
        (2, 2, 1),
        (4, 4, 4),
        (8, 8, 8),
    ]
    assert [machine_facts(each, 1)["cores"] for each in found.values()] == [0.4, 1.5, 4, 8]


def test_gpu_ranks_may_not_outnumber_gpus(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    assert found_devices() == Devices(kind="cuda", count=2, found=2, cores=count_cores())
    assert found_devices(1).name(0) == "cuda:0"
    assert found_devices(6, kind="cpu").kind == "cpu"
    with pytest.raises(ClusterError, match="devices = 4, but this node has 2 usable GPUs; ask for at most 2"):
        found_devices(4)
    with pytest.raises(ClusterError, match="at least 1"):
        found_devices(0)
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    with pytest.raises(ClusterError, match="no GPU"):
        found_devices(1, kind="cuda")


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("0,2", 2), ("1,9,2", 1), ("-1", 0), ("GPU-ab,GPU-cd", 2)]
)
def test_visible_gpus_as_cuda_reads_them(monkeypatch, tmp_path, visible, count):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA (UUID: GPU-$i)"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(devices, "_torch_is_cpu_build", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_limits_are_above_zero():
    with pytest.raises(ConfigError, match=r"launch.grace_s = 0"):
        LaunchConfig(grace_s=0).check()


def test_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two nodes\nme@alpha slots=8  # head\n\nbeta slots = 4\n10.0.0.3\n")
    hosts = read_hostfile(path)
    assert hosts == [HostfileLine("me@alpha", 8), HostfileLine("beta", 4), HostfileLine("10.0.0.3", 1)]
    launcher = HostfileLauncher(hosts, python="python3", folder=Path("/my runs"), run_id="r1")
    assert launcher.ranks == 13
    command = launcher.commands(["train", "a b.toml"])[1]
    assert command.host == "beta"
    assert command.argv[:3] == ("python3", "-m", "torch.distributed.run")
    assert {"--nnodes=3", "--node-rank=1", "--nproc-per-node=4", "--master-addr=alpha"} <= set(command.argv)
    assert command.environment == (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
    line = launcher.shell_lines(["train", "a b.toml"])[1]
    assert line.startswith("ssh -tt") and " beta " in line and "/my runs" in line and "a b.toml" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("alpha slots=0", "is not a host"),
        ("alpha slots=two", "is not a host"),
        ("-oProxyCommand=x slots=1", "is not a host"),
        ("alpha\nalpha slots=2", "named twice"),
    ],
)
def test_a_hostfile_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        read_hostfile(path)
    with pytest.raises(ClusterError, match="can't be read"):
        read_hostfile(tmp_path / "none")


FAKE_SSH = """#!{python}
import pathlib, signal, subprocess, sys, time
host, command = sys.argv[1:3]
folder = pathlib.Path(__file__).parent
(folder / (host + ".command")).write_text(command)
if host == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if host in ("deaf", "slow"):
    (folder / (host + ".pid")).write_text(str(__import__("os").getpid()))
    if sys.stdin.buffer.read(1) == b"\\x03":
        sys.exit(0)
    time.sleep(60)
sys.exit({{"bad": 7, "lost": 255}}.get(host, 0))
"""


@pytest.fixture
def ssh(tmp_path) -> Path:
    tool = tmp_path / "ssh"
    tool.write_text(FAKE_SSH.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool


def _hosts(ssh: Path, *names: str) -> HostfileLauncher:
    launcher = HostfileLauncher([HostfileLine(name, 2) for name in names], ssh=[str(ssh)])
    launcher.start(["train"])
    return launcher


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 100
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_hosts_that_end_well(ssh):
    _hosts(ssh, "alpha", "beta").wait(100)
    assert "--node-rank=1" in (ssh.parent / "beta.command").read_text()


@pytest.mark.parametrize(
    ("host", "message"), [("bad", r"\[bad\] ended with status 7"), ("lost", r"\[lost\] ssh lost or could not")]
)
def test_a_host_that_fails_takes_the_others_down(ssh, host, message):
    launcher = _hosts(ssh, "slow", host)
    with pytest.raises(LaunchError, match=message):
        launcher.wait(100)
    pid = ssh.parent / "slow.pid"
    assert not pid.exists() or not pid.read_text() or not Path("/proc", pid.read_text()).exists()


def test_hosts_are_cancelled_even_when_deaf(ssh):
    launcher = _hosts(ssh, "slow", "deaf")
    pids = [ssh.parent / "slow.pid", ssh.parent / "deaf.pid"]
    for pid in pids:
        _wait_for(pid)
    launcher.cancel(0.2)
    assert not any(Path("/proc", pid.read_text()).exists() for pid in pids)


def test_an_interrupt_is_typed_on_every_host(ssh):
    launcher = _hosts(ssh, "slow")
    _wait_for(ssh.parent / "slow.pid")
    launcher.interrupt()
    launcher.wait(100)


def test_no_ssh(tmp_path):
    launcher = HostfileLauncher([HostfileLine("alpha", 1)], ssh=[str(tmp_path / "none")])
    with pytest.raises(LaunchError, match="can't be run"):
        launcher.start(["train"])
