"""Slurm without Slurm: the script, the place in a job, and what is refused before anything is submitted."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import LaunchError
from meshwright.launch.slurm import expand_hostlist, slurm_place

RUN = ["train", "--on", "slurm", "--slurm.nodes", "2", "--run", "here"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_the_script_asks_for_what_the_settings_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slurm.gpus-per-node", "8", "--slurm.time", "2-12:00:00", "--slurm.partition", "big", "--slurm.lines"]
    assert main([*RUN, "--dry-run", *words, "constraint=h100", "--slurm.setup", "module load cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in ("--nodes=2", "--gpus-per-node=8", "--time=2-12:00:00", "--partition=big", "--constraint=h100"):
        assert f"#SBATCH {line}" in lines
    assert {"#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@120"} <= set(lines)
    assert lines.index("module load cuda") == len(lines) - 3, "before the command, after all options"
    assert lines[-1].endswith("--run-dir here --devices 16 --on slurm")
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--slurm.time 1d", "is no time of Slurm's"),
        ("--slurm.nodes 0", "slurm.nodes = 0"),
        ("--slurm.memory lots", "a number and a unit"),
        ("--slurm.partition a;b", "letters, digits"),
        ("--slurm.lines nodes=7", "nodes=7 is set by other settings"),
        ("--slurm.lines=-x", "no long option"),
        ("--slurm.warn-s 1", "at least 10 seconds"),
        ("--devices 3", "equally many ranks"),
        ("--slurm.gpus-per-node 1 --devices 4", "have 2 GPUs"),
        ("--slurm.gpus-per-node 1 --layout shard=4", "multiply to 4"),
        ("--recovery.copies 2", "recovery.copies = 2"),
        ("--trials 2", "drop trials"),
        ("--nodes 2 --node 0 --meet here", "numbers the nodes by itself"),
        ("--hostfile hosts", "--on ssh and --hostfile"),
        ("--json", "meshwright status RUN --json"),
    ],
)
def test_settings_are_refused_before_submission(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("here").exists()


def test_what_slurm_refuses_is_said_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: big >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert main(RUN) == 1
    assert "Slurm refuses the job: invalid partition specified: big" in capsys.readouterr().err


def test_hostlists_are_written_out_as_scontrol_does() -> None:
    assert expand_hostlist("gpu[08-11,3],login") == ("gpu08", "gpu09", "gpu10", "gpu11", "gpu3", "login")
    assert expand_hostlist("r[0-1]n[2-3]x") == ("r0n2x", "r0n3x", "r1n2x", "r1n3x")
    assert expand_hostlist("") == ()
    with pytest.raises(LaunchError, match="not a list of Slurm's nodes"):
        expand_hostlist("n[a-b]")


def test_a_process_finds_its_place_in_a_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[0-2]"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "1"}
    assert slurm_place({}) is None
    assert slurm_place({**job, "RANK": "0"}) is None, "torchrun's"
    script = slurm_place({**job, "SLURM_TASK_PID": "12"})
    assert script is not None and script.node is None and script.nodes == 3 and script.is_batch
    shell = slurm_place({**job, "SLURM_STEP_ID": "4294967290", "SLURM_TASK_PID": "12"})
    assert shell is not None and shell.node is None and not shell.is_batch, "an interactive step of salloc"
    node = slurm_place({**job, **step, "SLURM_STEP_NODELIST": "n[0-2]"})
    assert node is not None and (node.node, node.peer) == (1, "n0")
    with pytest.raises(LaunchError, match="--ntasks-per-node=1"):
        slurm_place({**job, **step, "SLURM_STEP_NUM_TASKS": "24"})
    with pytest.raises(LaunchError, match="isn't complete"):
        slurm_place({**job, "SLURM_STEP_ID": "0"})


def test_a_run_without_a_scheduler_has_status_logs_and_cancel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[train]\nsteps = 9\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 2.5, "tokens_per_s": 10.0}) + "\n")
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["step"], status["steps"], status["job"]) == ("ended", 3, 9, None)
    assert main(["logs", str(run)]) == 0
    assert "step 3: loss 2.5" in capsys.readouterr().out
    assert main(["cancel", str(run)]) == 0
    assert "nobody trains" in capsys.readouterr().out


def test_a_damaged_record_never_becomes_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch").mkdir()
    record = {"launcher": "slurm", "job": "--me", "nodes": 1, "submitted": ""}
    for text in ("{", "[]", json.dumps(record | {"job": "1 2"}), json.dumps(record | {"more": 1})):
        (tmp_path / "launch" / "job.json").write_text(text)
        assert main(["cancel", str(tmp_path)]) == 2
        assert "remove it" in capsys.readouterr().err


def test_without_a_number_all_gpus_of_the_partition_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    nodes = "cpu|(null)\nbig*|gpu:h100:8(S:0-1),shard:16\nmixed|gpu:4\nmixed|gpu:a100:8\n"
    case = 'case "$*" in *=cpu*) name=cpu;; *=mixed*) name=mixed;; *) name=.;; esac'
    sinfo = f"#!/bin/sh\n{case}\ngrep $name <<E\n{nodes}E\n"
    for name, text in (("sinfo", sinfo), ("sbatch", "#!/bin/sh\necho 17\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    assert main(RUN) == 0
    shown = capsys.readouterr()
    assert "job 17 trains in here" in shown.out and "the default partition has 8 GPUs a node" in shown.err
    script = Path("here/launch/job.sh").read_text()
    assert "#SBATCH --gpus-per-node=8" in script and "--devices 16 --slurm.gpus-per-node 8 --on slurm" in script
    cores = [*RUN[:-1], "there", "--slurm.partition", "cpu"]
    assert main(cores) == 0
    assert "a rank a core" in capsys.readouterr().err
    assert "--gpus-per-node" not in Path("there/launch/job.sh").read_text()
    assert main([*RUN[:-1], "other", "--slurm.partition", "mixed"]) == 2
    assert "nodes of partition mixed have 4, 8 GPUs" in capsys.readouterr().err
    assert main([*RUN[:-1], "named", "--slurm.partition", "mixed", "--slurm.gpus-per-node", "4"]) == 0
    assert "#SBATCH --gpus-per-node=4" in Path("named/launch/job.sh").read_text()


def test_a_partition_without_the_gpus_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    # As Slurm 22.05 says it.
    program.write_text("#!/bin/sh\necho 'sbatch: error: Invalid generic resource (gres) specification' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert main([*RUN, "--slurm.gpus-per-node", "8"]) == 1
    assert "give slurm.cpus_per_node instead of slurm.gpus_per_node" in capsys.readouterr().err
