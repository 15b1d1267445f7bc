"""Control groups: what the kernel's files leave a process of cores and memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from meshwright import control_groups
from meshwright.control_groups import allowed_memory_bytes, available_bytes, read_quota
from meshwright.doctor import host_memory
from meshwright.doctor.contract import Subject
from meshwright.launch import devices, machine
from meshwright.launch.devices import Devices, device_memory_bytes
from meshwright.launch.host_memory import count_oom_kills

GIB = 2**30
V1_NONE = "9223372036854771712"
"""What version 1 says where there is no limit. Source: mm/page_counter.c, PAGE_COUNTER_MAX."""


def write_system(system: Path, groups: str, files: dict[str, str]) -> None:
    """Writes a process's groups, and files of them, under a root of a file system."""
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = system / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        # Version 2: the group's own file, a tighter one above it, a container that sees itself as the root.
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        # Version 1: a quota of -1 is none; that of another controller's group isn't ours.
        ("3:cpu,cpuacct:/n\n0::/", {"cpu/n/cpu.cfs_quota_us": "5000\n", "cpu/n/cpu.cfs_period_us": "10000\n"}, 0.5),
        ("3:cpu:/n", {"cpu/n/cpu.cfs_quota_us": "-1", "cpu/n/cpu.cfs_period_us": "10000"}, math.inf),
        ("3:cpuset:/n", {"cpu/n/cpu.cfs_quota_us": "5000", "cpu/n/cpu.cfs_period_us": "10000"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_quotas_are_those_of_the_kernels_files(tmp_path, groups, files, cores):
    write_system(tmp_path, groups, files)
    assert read_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/a/b", {"a/b/memory.max": f"{3 * GIB}\n"}, 3),
        ("0::/a/b", {"a/b/memory.max": "max\n", "a/memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/", {"memory.max": f"{3 * GIB}\n", "memory.high": f"{2 * GIB}\n"}, 2),
        ("0::/", {"memory.max": "max\n", "memory.high": "max\n"}, 16),
        ("0::/", {"memory.max": f"{64 * GIB}\n"}, 16),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": f"{5 * GIB}\n"}, 5),
        (
            "4:memory:/job/step",
            {"memory/job/step/memory.limit_in_bytes": V1_NONE, "memory/job/memory.limit_in_bytes": f"{4 * GIB}"},
            4,
        ),
        ("4:memory:/", {"memory/memory.limit_in_bytes": V1_NONE}, 16),
        ("3:cpu:/job", {"memory/job/memory.limit_in_bytes": f"{5 * GIB}"}, 16),
        ("0::/", {"memory.max": "many\n"}, 16),
        ("", {}, 16),
    ],
)
def test_memory_is_the_tightest_limit(tmp_path, monkeypatch, groups, files, gib):
    monkeypatch.setattr(control_groups, "machine_memory_bytes", lambda: 16 * GIB)
    write_system(tmp_path, groups, files)
    assert allowed_memory_bytes(tmp_path) == gib * GIB


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        # Pages of files are given back; those of /dev/shm count as anonymous, and aren't.
        (
            "0::/",
            {
                "memory.max": f"{6 * GIB}",
                "memory.current": f"{4 * GIB}",
                "memory.stat": f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\nactive_file {GIB}\ninactive_file {GIB}\n",
            },
            4,
        ),
        ("0::/", {"memory.max": f"{6 * GIB}", "memory.current": f"{5 * GIB}"}, 1),
        ("0::/", {"memory.high": f"{2 * GIB}", "memory.current": f"{3 * GIB}"}, 0),
        ("0::/", {"memory.max": "max", "memory.current": f"{5 * GIB}"}, 8),
        # A group above has its own limit and its own use, of other processes too.
        (
            "0::/pod/box",
            {
                "pod/box/memory.max": f"{7 * GIB}",
                "pod/box/memory.current": f"{GIB}",
                "pod/memory.max": f"{7 * GIB}",
                "pod/memory.current": f"{6 * GIB}",
            },
            1,
        ),
        # Version 1 counts groups below in lines of their own.
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": f"{5 * GIB}",
                "memory/job/memory.usage_in_bytes": f"{4 * GIB}",
                "memory/job/memory.stat": f"inactive_file 0\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
            },
            3,
        ),
    ],
)
def test_what_is_available_stays_within_each_limit(tmp_path, groups, files, gib):
    write_system(tmp_path, groups, files)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    assert available_bytes(tmp_path) == gib * GIB


def test_ranks_share_the_limit_and_a_calibration_is_of_the_machine(monkeypatch):
    """A limit is what plans must fit; the same machine under another limit is as fast as it was measured."""
    monkeypatch.setattr(machine, "allowed_memory_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(devices, "allowed_memory_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 16 * GIB)
    two = Devices(kind="cpu", count=2, found=2, cores=2)
    assert device_memory_bytes(two, 2) == 3 * GIB // 2
    assert machine.machine_facts(two, 2)["memory_gib"] == 16
    node = machine.this_cluster(two).groups[0].node
    assert (node.host_memory_bytes, node.device.memory_bytes) == (3 * GIB, 3 * GIB // 2)


def test_the_doctor_tells_limit_and_machine(monkeypatch, tmp_path):
    for name, size in (("machine_memory", 16 * GIB), ("allowed_memory", 2 * GIB), ("available", GIB)):
        monkeypatch.setattr(host_memory, f"{name}_bytes", lambda size=size: size)
    two, three = (host_memory.examine(Subject(run_dir=tmp_path, session="a", slots=slots)) for slots in (2, 3))
    assert two.value == "1.00 GiB available of 2.00 GiB, to which a control group limits the machine's 16.0 GiB"
    assert not two.findings and two.facts["allowed_bytes"] == 2 * GIB
    (sentence,) = three.findings
    assert sentence.startswith("1.00 GiB of host memory are available, and 3 ranks take about 1.05 GiB")
    assert "raise the limit of the container" in sentence and "--devices" in sentence


def test_kills_are_counted_by_version_1_too(tmp_path, monkeypatch):
    write_system(
        tmp_path,
        "4:memory:/job\n",
        {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"},
    )
    folders = list(control_groups.group_folders("memory", tmp_path))
    monkeypatch.setattr("meshwright.launch.host_memory.group_folders", lambda _: iter(folders))
    assert count_oom_kills() == 3
