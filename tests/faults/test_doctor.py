"""`meshwright doctor` against planted faults: real mounts, networks, libraries and system calls."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.doctor import links, meeting, nvml
from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.doctor.examine import run_check
from tests.house.source import ROOT
from tests.runs import Running

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE, MS_RDONLY = 0x20000, 4096, 16384, 1 << 18, 1
"""Source: linux/sched.h, linux/mount.h."""
PORT = 29455
FAKE_NVML = r"""
#include <string.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  *gpu = (void *)(long)(index + 1); return index == 2 ? 15 : 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "555.42", size); return 0; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) { strncpy(text, "Simulated H100", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, struct memory *m) {
  m->total = 80ull << 30; m->used = (gpu == (void *)2 ? 30ull : 0) << 30; m->free = m->total - m->used; return 0; }
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int since, unsigned long long *n) {
  *n = type == 1 && gpu == (void *)4 ? 7 : 0; return 0; }
const char *nvmlErrorString(int code) { return "GPU is lost"; }
"""
AHEAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 120;
  return status; }
"""


def build(source: str, path: Path) -> Path:
    """Compiles a shared library."""
    try:
        words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), "-ldl"]
        subprocess.run(words, input=source, text=True, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no C compiler here: {error}")
    return path


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode())
    assert status == 0, os.strerror(ctypes.get_errno())


def own_mounts() -> None:
    """Gives the calling process mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0


def needs_root() -> None:
    if os.geteuid():
        pytest.skip("needs root, to mount and to make networks")


def examined(
    words: Sequence[str], folder: Path, before: Callable[[], None] | None = None
) -> tuple[int, dict[str, Any]]:
    """Runs the command in a process of its own; returns its exit status and report."""
    running = Running(["doctor", *words, "--json"], folder / "report", before=before)
    status = running.wait()
    running.no_orphans()
    text = running.text()
    assert "{" in text, text
    return status, json.loads(text[text.index("{") :])


def sentences(report: dict[str, Any], check: str) -> list[str]:
    return [finding["sentence"] for finding in report["findings"] if finding["check"] == check]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_a_sound_machine_has_no_findings_and_keeps_no_trace(run_dir: Path, tmp_path: Path) -> None:
    status, report = examined(["--run", str(run_dir), "--devices", "2"], tmp_path)
    assert report["findings"] == [] and report["healthy"] is True and status == 0
    (node,) = report["nodes"].values()
    (link,) = next(row for row in node["results"] if row["check"] == "local links")["facts"]["links"]
    assert link["fault"] == "" and min(link["forward_bytes_per_s"], link["backward_bytes_per_s"]) > 1e6
    assert abs(link["clock_offset_s"]) < 0.1
    assert list(run_dir.iterdir()) == [], "a folder that isn't empty is refused as a new run's"


def test_a_read_only_run_directory(run_dir: Path, tmp_path: Path) -> None:
    needs_root()

    def mount_it() -> None:
        own_mounts()
        mount("tmpfs", run_dir, "tmpfs", MS_RDONLY)

    status, report = examined(["--run", str(run_dir / "new"), "--devices", "1"], tmp_path, mount_it)
    assert status == 3
    assert any("can't be written: Read-only file system" in text for text in sentences(report, "disk"))


def test_a_full_disk(run_dir: Path, tmp_path: Path) -> None:
    needs_root()

    def mount_it() -> None:
        own_mounts()
        mount("tmpfs", run_dir, "tmpfs", 0, "size=256k")

    # A named model states what it needs: two checkpoints and the next one, 12 bytes for each weight.
    sizes = ["--model", "gpt2", "--model.layers", "2", "--model.width", "32", "--model.heads", "2"]
    sizes += ["--model.vocab", "1000", "--model.context", "64", "--data.sequence", "64", "--checkpoint.keep", "2"]
    status, report = examined(["--run", str(run_dir), "--devices", "1", *sizes], tmp_path, mount_it)
    assert status == 3
    (text, *_) = sentences(report, "disk")
    assert "256.0 KiB free" in text and "lower checkpoint.keep" in text
    weights = 1000 * 32 + 64 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    disk = next(row for row in report["nodes"]["0"]["results"] if row["check"] == "disk")
    assert disk["facts"]["required_bytes"] == 3 * 12 * weights


def test_no_shared_memory(run_dir: Path, tmp_path: Path) -> None:
    needs_root()
    devices = tmp_path / "dev"
    devices.mkdir()

    def mount_it() -> None:
        own_mounts()
        for name in ("null", "zero", "random", "urandom"):
            (devices / name).touch()
            mount(f"/dev/{name}", devices / name, "", MS_BIND)
        mount(str(devices), Path("/dev"), "", MS_BIND | MS_REC)

    status, report = examined(["--run", str(run_dir), "--devices", "1"], tmp_path, mount_it)
    assert status == 3
    assert [text.partition(",")[0] for text in sentences(report, "shared memory")] == ["/dev/shm is missing"]


def forbid_links() -> None:
    """Makes the kernel refuse link and linkat with EPERM, as FAT and some network file systems do."""
    machine = os.uname().machine
    arch, calls = {"x86_64": (0xC000003E, (86, 265)), "aarch64": (0xC00000B7, (37,))}[machine]
    # Load the architecture, allow others; load the number, refuse the calls. Source: seccomp(2), bpf(4).
    program = [(0x20, 0, 0, 4), (0x15, 0, len(calls) + 1, arch), (0x20, 0, 0, 0)]
    program += [(0x15, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in program))
    filters = ctypes.create_string_buffer(struct.pack("<H6xQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="system calls' numbers of these alone")
def test_a_file_system_without_hard_links(run_dir: Path, tmp_path: Path) -> None:
    status, report = examined(["--run", str(run_dir), "--devices", "1"], tmp_path, forbid_links)
    assert status == 3
    (text,) = sentences(report, "file system")
    assert "a hard link doesn't work (Operation not permitted)" in text
    assert list(run_dir.iterdir()) == []


def test_a_dead_gpu_beside_a_damaged_and_a_busy_one(run_dir: Path, tmp_path: Path) -> None:
    library = build(FAKE_NVML, tmp_path / "libnvidia-ml.so.1")

    def simulate() -> None:
        nvml.LIBRARY = str(library)

    status, report = examined(["--run", str(run_dir), "--devices", "1"], tmp_path, simulate)
    assert status == 3
    busy, dead, damaged = sentences(report, "devices")
    assert dead.startswith("GPU 2 doesn't answer: GPU is lost (NVML error 15)")
    assert "GPU 1 (Simulated H100) has 30.0 GiB of 80.0 GiB in use" in busy
    assert "GPU 3 (Simulated H100) has 7 uncorrected memory errors" in damaged


def test_a_busy_port(run_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        meet = f"127.0.0.1:{listener.getsockname()[1]}"
        words = ["--run", str(run_dir), "--nodes", "2", "--node", "0", "--slots", "1", "--meet", meet]
        status, report = examined(words, tmp_path)
    assert status == 3
    (text,) = sentences(report, "meeting")
    assert f"can't listen at {meet}: Address already in use" in text and "ss -ltnp" in text


def hurry() -> None:
    """Shortens the limits that a test would otherwise wait for in full."""
    meeting._MARGIN_S, links.FORM_S = 1.5, 5.0


def test_a_listener_that_never_answers(run_dir: Path, tmp_path: Path) -> None:
    """A stranger has the port of node 0: it takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        meet = f"127.0.0.1:{listener.getsockname()[1]}"
        words = ["--run", str(run_dir), "--nodes", "2", "--node", "1", "--slots", "1", "--meet", meet, "--meet-s", "2"]
        status, report = examined(words, tmp_path, hurry)
    assert status == 3
    (text,) = sentences(report, "meeting")
    assert text.startswith("node 1 could not meet node 0:")


def test_a_check_that_hangs_or_crashes_ends_alone(tmp_path: Path) -> None:
    subject = Subject(run_dir=tmp_path, session="s")

    def crash(_: Subject) -> Observation:
        os.kill(os.getpid(), signal.SIGKILL)
        return Observation(value="")

    def hang(_: Subject) -> Observation:
        subprocess.run(["sleep", "600"], check=False)
        return Observation(value="")

    def fail(_: Subject) -> Observation:
        raise OSError("the tool is gone")

    texts = []
    for examine in (crash, hang, fail):
        check = Check(name="odd", purpose="", limit_s=1.0, examine=examine)
        texts += run_check(check, subject).observation.findings
    assert "signal 9" in texts[0] and "did not end within 1 s" in texts[1] and "the tool is gone" in texts[2]


class Machines:
    """Machines as network namespaces, each with a wire to a router."""

    def __init__(self, count: int) -> None:
        self.names = [f"doc{os.getpid()}{end}" for end in (*map(str, range(count)), "r")]

    def build(self) -> Machines:
        router = self.names[-1]
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        for at, name in enumerate(self.names[:-1]):
            self.ip("-n", router, "link", "add", f"to{at}", "type", "veth", "peer", "name", "out", "netns", name)
            for where, link, address in ((router, f"to{at}", 1), (name, "out", 2)):
                self.ip("-n", where, "address", "add", f"10.76.{at}.{address}/24", "dev", link)
                self.ip("-n", where, "link", "set", link, "up")
            self.ip("-n", name, "route", "add", "default", "via", f"10.76.{at}.1")
        self.ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return self

    def slow(self, node: int, rate: str) -> None:
        """Holds the rate of a machine's wire down, both ways."""
        for where, link in ((self.names[node], "out"), (self.names[-1], f"to{node}")):
            held = ["tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
            self.ip("netns", "exec", where, *held)

    def drop(self, *match: str) -> None:
        """Drops what matches on its way through the router, without an answer."""
        self.ip("-n", self.names[-1], "rule", "add", "ipproto", "tcp", *match, "blackhole")

    def enter(self, node: int) -> None:
        with open(f"/run/netns/{self.names[node]}", "rb") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0

    def examine(self, folder: Path, run_dir: Path, meet_s: float, odd: dict[str, str] | None = None) -> list[Any]:
        """Runs the command on every machine; the last one starts a program of its own with other variables."""
        nodes: list[Running | subprocess.Popen[bytes]] = []
        count = len(self.names) - 1
        for node in range(count):
            words = ["doctor", "--json", "--run", str(run_dir), "--nodes", str(count), "--node", str(node)]
            words += ["--slots", "1", "--meet", f"10.76.0.2:{PORT}", "--meet-s", str(meet_s)]
            path = folder / f"report{node}"
            if odd and node == count - 1:
                command = ["ip", "netns", "exec", self.names[node], sys.executable, "-m", "meshwright", *words]
                with path.open("wb") as file:
                    nodes.append(subprocess.Popen(command, stdout=file, env=os.environ | odd, cwd=folder))
            else:
                nodes.append(Running(words, path, before=lambda node=node: self.enter(node)))
        try:
            statuses = [node.wait(240.0) for node in nodes]
        finally:
            for process in nodes:
                if isinstance(process, subprocess.Popen):
                    process.kill()
                    process.wait()
        texts = [(folder / f"report{node}").read_text() for node in range(count)]
        return [(status, json.loads(text[text.index("{") :])) for status, text in zip(statuses, texts)]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @staticmethod
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    needs_root()
    found = Machines(getattr(request, "param", 2))
    try:
        try:
            found.build()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found
    finally:
        found.close()


@pytest.mark.long
@pytest.mark.parametrize("machines", [3], indirect=True)
def test_a_slow_link_a_skewed_clock_and_another_torch(machines: Machines, run_dir: Path, tmp_path: Path) -> None:
    """One run over three machines, each fault on the machine that has it and on no other."""
    for node, rate in enumerate(("200mbit", "200mbit", "20mbit")):
        machines.slow(node, rate)
    other = tmp_path / "other" / "torch-2.12.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.9\n")
    odd = {"LD_PRELOAD": str(build(AHEAD, tmp_path / "ahead.so")), "PYTHONPATH": f"{other.parent}:{ROOT}"}
    outcomes = machines.examine(tmp_path, run_dir, 60.0, odd)
    assert [status for status, _ in outcomes] == [3, 3, 3]
    report = outcomes[0][1]
    (link_sentence,) = sentences(report, "links")
    assert link_sentence.startswith("all 2 links of node 2 are slow:")
    fast, *slow = sorted(report["links"], key=lambda row: -row["forward_bytes_per_s"])
    assert (fast["first"], fast["second"]) == (0, 1) and fast["forward_bytes_per_s"] < 1.1 * 25e6
    assert all(1e6 < row[way] < 1.1 * 2.5e6 for row in slow for way in ("forward_bytes_per_s", "backward_bytes_per_s"))
    (clock,) = sentences(report, "clocks")
    assert clock.startswith("the clock of node 2 is 1") and "s ahead of that of node" in clock
    here = importlib.metadata.version("torch")
    (version,) = sentences(report, "same versions")
    assert f"torch differs between nodes: 2.12.9 on node 2, {here} on nodes 0, 1" in version
    assert len(report["findings"]) == 3, report["findings"]
    assert outcomes[1][1]["findings"] == outcomes[2][1]["findings"] == report["findings"], "all nodes say the same"
    assert list(run_dir.iterdir()) == []


def test_a_firewalled_port(machines: Machines, run_dir: Path, tmp_path: Path) -> None:
    machines.drop("dport", str(PORT))
    (_, first), (status, second) = machines.examine(tmp_path, run_dir, 6.0)
    assert status == 3
    (text,) = sentences(second, "meeting")
    assert f"10.76.0.2:{PORT} doesn't answer at all, as behind a firewall" in text
    (text,) = sentences(first, "meeting")
    assert text.startswith("node 1 of 2 didn't come within 6 s")


@pytest.mark.long
def test_ports_that_only_ranks_use_are_firewalled(machines: Machines, run_dir: Path, tmp_path: Path) -> None:
    """The nodes meet, and a pair of ranks, which listens on a free port, can't: a run would hang at its first group."""
    machines.drop("sport", "32768-60999", "dport", "32768-60999")
    enter = machines.enter

    def enter_in_a_hurry(node: int) -> None:
        enter(node)
        links.FORM_S = 5.0

    machines.enter = enter_in_a_hurry  # type: ignore[method-assign]
    (status, report), _ = machines.examine(tmp_path, run_dir, 30.0)
    assert status == 3
    (text,) = sentences(report, "links")
    assert text.startswith("nodes 0 and 1 can't exchange data over gloo")


@pytest.mark.long
def test_nodes_with_directories_of_their_own(machines: Machines, run_dir: Path, tmp_path: Path) -> None:
    """Two machines, sound but for the run directory, which each has on a disk of its own."""
    enter = machines.enter

    def enter_apart(node: int) -> None:
        enter(node)
        own_mounts()
        mount("tmpfs", run_dir, "tmpfs", 0, "size=2g")

    machines.enter = enter_apart  # type: ignore[method-assign]
    (status, report), _ = machines.examine(tmp_path, run_dir, 60.0)
    assert status == 3
    (finding,) = report["findings"]
    assert finding["check"] == "shared folder" and finding["sentence"].startswith("node 1 can't see what node 0 wrote")
