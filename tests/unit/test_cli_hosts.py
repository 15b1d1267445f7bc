"""Training from a hostfile: what would run where, and what is refused before anything starts."""

from __future__ import annotations

import os
import shlex
import signal
import stat
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.launch import hostfile as launch_hostfile
from tests.runs import Running, wait_until


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts"
    path.write_text("first slots=2\nsecond slots=2  # the same machine again\n")
    return str(path)


def test_dry_run_shows_a_supervisor_on_each_host(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--layout", "shard=4", "--run", "here", "--hostfile", hosts, "--dry-run"]) == 0
    for node, line in enumerate(capsys.readouterr().out.splitlines()):
        remote = shlex.split(shlex.split(line)[-1])
        told = " ".join(remote[remote.index("meshwright") :])
        assert told == (
            "meshwright train --layout shard=4 --run-dir here --devices 4 --nodes 2 --meet first:29400 "
            f"--node {node} --slots 2"
        )
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nodes 2", "--nodes needs --node"),
        ("--node 1", "--node without --nodes"),
        ("--nodes 2 --node 2 --meet here", "nodes are numbered from 0"),
        ("--nodes 2 --node x --meet here", "are whole numbers"),
        ("--nodes 2 --node 1 --meet 127.0.0.1", "--nodes needs --run"),
    ],
)
def test_words_of_nodes_that_make_no_sense_are_refused(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_dry_run_names_the_run_for_torchrun(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layout", "shard=4", "--run", "here", "--hostfile", hosts, "--recovery.enabled", "false", "--dry-run"]
    assert main(["train", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        remote = shlex.split(shlex.split(line)[-1])
        assert f"--node-rank={rank}" in remote
        assert remote[-2:] == ["--run-dir", "here"] and "--run" not in remote and "--hostfile" not in remote
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--layout bogus=2", "bogus"),
        ("--layout shard=5", "nearest that works: --layout shard=2"),
        ("--data nothing.txt", "nothing.txt"),
        ("--model gtp2", "did you mean 'gpt2'?"),
        ("--model gpt2 --model.heads 7", "divisible by num_heads"),
        ("--model examples.my_loop:nope", "has no function 'nope'"),
    ],
)
def test_a_dry_run_here_refuses_what_this_node_knows(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split(), "--devices", "2", "--dry-run"]) == 2
    assert told in capsys.readouterr().err


def test_a_dry_run_over_hosts_refuses_a_model_that_is_none(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "gtp2", "--hostfile", hosts, "--dry-run"]) == 2
    assert "did you mean 'gpt2'?" in capsys.readouterr().err


def test_degrees_must_multiply_to_the_slots(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--layout", "shard=3", "--hostfile", hosts]) == 2
    assert "there are 4 ranks; nearest that works: --layout shard=4" in capsys.readouterr().err


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the stead of ssh, whose first argument is the host."""
    fake = tmp_path / "ssh"
    fake.touch()
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(launch_hostfile.HostfileLauncher.__init__, "__kwdefaults__", {
        **launch_hostfile.HostfileLauncher.__init__.__kwdefaults__, "ssh": (os.fspath(fake),),
    })  # fmt: skip
    return fake


def test_a_host_that_fails_is_named(hosts: str, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.write_text('#!/bin/sh\n[ "$1" = second ] && exit 7\nexec sleep 30\n')
    words = ["train", "--layout", "shard=4", "--hostfile", hosts]
    assert main([*words, "--recovery.enabled", "false"]) == 1
    assert "[second] ended with status 7" in capsys.readouterr().err
    fake.write_text('#!/bin/sh\n[ "$1" = second ] && exit 7\nexec sleep 0.2\n')
    assert main(words) == 0, "the supervisors of the others go on"
    fake.write_text("#!/bin/sh\nexit 7\n")
    assert main(words) == 1
    assert "[first] ended with status 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGHUP, 143)],
)
def test_every_host_is_asked_to_end(number: int, status: int, hosts: str, fake: Path, tmp_path: Path) -> None:
    """Ctrl-C is typed on each, whichever signal came, and no session is left behind."""
    fake.write_text('#!/bin/sh\necho $$ > "pid-$1"\nhead -c 1 > "typed-$1"\nexit 1\n')
    hangup = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731  the tests may be run under nohup
    running = Running(["train", "--layout", "shard=4", "--hostfile", hosts], tmp_path / "log", before=hangup)
    wait_until(lambda: all((tmp_path / f"typed-{host}").exists() for host in ("first", "second")))
    running.kill(number)
    assert running.wait() == status, running.text()
    for host in ("first", "second"):
        assert (tmp_path / f"typed-{host}").read_bytes() == b"\x03"
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{host}").read_text()), 0)
