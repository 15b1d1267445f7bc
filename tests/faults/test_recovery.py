"""A run ends only when the user ends it: dead, stopped and hanging ranks are replaced, and the curve stays the same."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import main
from tests.faults.stories import raises
from tests.runs import Running, call, curve, events, happened, last_step, rows, wait_until, words, write_corpus
from tests.tiers import further

pytestmark = pytest.mark.slow
STEPS = 24
SOON_S = 45.0
"""From a failure to the next step, on a machine that does other things beside, and less than any limit of a hang."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recovery")
    write_corpus(root / "corpus.txt")
    return root


def faulty(root: Path, run: str, faults: str, layout: str, devices: int, *more: str) -> Path:
    """Runs to the end with faults, and returns the run directory."""
    argv = words(root, run, "--recovery.faults", faults, *more, layout=layout, devices=devices)
    status, text = call(argv, root / f"{run}.log")
    assert status == 0, text
    assert sorted(curve(root / run)) == list(range(1, STEPS + 1))
    return root / run


def undisturbed(root: Path, layout: str, devices: int, *more: str) -> dict[int, tuple[float, float]]:
    run = root / ("whole-" + "-".join((layout, *more)).replace("=", "").replace(",", "-"))
    if not run.exists():
        status, text = call(words(root, run.name, *more, layout=layout, devices=devices), root / "whole.log")
        assert status == 0, text
    return curve(run)


def close(found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]], bound: float) -> None:
    assert sorted(found) == sorted(expected)
    for step, pair in expected.items():
        assert found[step] == pytest.approx(pair, rel=bound), step


def recoveries(run: Path, count: int) -> list[dict]:
    """Returns the events of this many recoveries, each told in its order."""
    story = [row for row in rows(run, "events.jsonl") if row["kind"] in ("rank_lost", "fenced", "planned", "recovered")]
    assert [row["kind"] for row in story] == ["rank_lost", "fenced", "planned", "recovered"] * count, story
    assert all(row["seconds"] < SOON_S for row in story if row["kind"] == "recovered")
    return story


def test_killed_in_every_phase_of_a_step(root: Path) -> None:
    """To the bit, under the same layout; where each step is copied, the last one may be done again."""
    phases = ("data", "forward", "backward", "collective", "optimizer", "snapshot")
    faults = [f"kill:rank={at % 2},step={4 + 3 * at},phase={phase}" for at, phase in enumerate(phases)]
    run = faulty(
        root, "phases", ";".join(faults), "shard=2,zero=3", 2,
        *("--recovery.snapshot-every", "1", "--recovery.back-s", "1e-6"),
    )  # fmt: skip
    story = recoveries(run, len(phases))
    assert [row["lost"] for row in story if row["kind"] == "rank_lost"] == [0, 1] * 3
    restored = [row["step"] for row in events(run, "restored")]
    assert all(row["tier"] == "memory" for row in events(run, "restored"))
    lost = [3 + 3 * at - step for at, step in enumerate(restored)]
    assert set(lost) <= {0, 1}, f"a copy counts once its checksums are made, moments after the step: {lost}"
    first, *_, last = (row["memory"] for row in rows(run))
    state_bytes = last["optimizer"]
    assert "snapshots" not in first and 0 <= last["snapshots"] - 2 * state_bytes < 2**19, "two of a rank's own part"
    assert last["peak"] > last["snapshots"] + state_bytes
    assert curve(run) == undisturbed(root, "shard=2,zero=3", 2)


def test_killed_while_starting_and_while_copying_for_the_disk(root: Path) -> None:
    faults = "kill:rank=1,step=0,generation=0;kill:rank=0,step=6,phase=checkpoint;kill:rank=1,step=0,generation=2"
    options = ("--recovery.snapshot-every", "2", "--recovery.back-s", "1e-6")
    run = faulty(root, "saving", faults, "replicate=2", 2, *options)
    lost = events(run, "rank_lost")
    assert [row["generation"] for row in lost] == [0, 1, 2] and lost[0]["phase"] == lost[2]["phase"] == "start"
    assert curve(run) == undisturbed(root, "replicate=2", 2)
    assert [row["step"] for row in events(run, "checkpoint_saved")][-1] == STEPS


def test_the_writer_of_checkpoints_is_killed_in_every_phase(root: Path) -> None:
    """Training goes on; what was being written never gets its name, and the next one stands."""
    phases = ("open", "write", "written", "manifest", "rename", "renamed")
    faults = ";".join(f"kill:rank=-1,step={3 * at + 3},phase=checkpoint.{phase}" for at, phase in enumerate(phases))
    run = faulty(root, "writer", faults, "replicate=2", 2, "--checkpoint.keep", "9")
    assert [row["step"] for row in events(run, "checkpoint_failed")] == [3, 6, 9, 12, 15, 18]
    assert all("killed" in row["reason"] for row in events(run, "checkpoint_failed"))
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert folders == ["step-00000018", "step-00000021", "step-00000024"], "the 18th had been renamed"
    assert not events(run, "rank_lost") and curve(run) == undisturbed(root, "replicate=2", 2)


@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    further(
        [
            ("replicate=3,rows=3x2-2", 3, ()),
            ("shard=2,tp=2,zero=3", 4, ()),
            ("pp=2,tp=2,schedule=1f1b,microbatches=2", 4, ()),
        ]
    ),
)
def test_a_lost_device_means_another_layout_and_the_same_curve(
    layout: str, ranks: int, more: tuple[str, ...], root: Path
) -> None:
    kind = f"{layout},precision=float64"
    name = layout.replace("=", "").replace(",", "-")
    options = ("--recovery.on-death", "shrink", "--recovery.snapshot-every", "1", *more)
    run = faulty(root, name, f"kill:rank={ranks - 1},step=6,phase=backward", kind, ranks, *options)
    recoveries(run, 1)
    (planned,) = events(run, "planned")
    assert planned["ranks"] == ranks - 1 and planned["left_out"] == [ranks - 1]
    assert [row["step"] for row in events(run, "restored")] in ([4], [5])
    close(curve(run), undisturbed(root, "replicate=1,precision=float64", 1), 1e-9)


def test_a_device_that_comes_back_is_used_again(root: Path) -> None:
    options = ("--recovery.on-death", "shrink", "--recovery.back-s", "2", "--recovery.snapshot-every", "1")
    faults = "kill:rank=2,step=4,phase=forward;slow:rank=0,step=5,seconds=0.3"
    run = faulty(root, "back", faults, "replicate=3,rows=3x2-2,precision=float64", 3, *options)
    (grown,) = events(run, "growing")
    assert grown["devices"] == [2]
    assert [row["ranks"] for row in events(run, "planned")] == [2, 3]
    first, second = (row["step"] for row in events(run, "restored"))
    assert first in (2, 3) and second == grown["step"], "growing loses none"
    close(curve(run), undisturbed(root, "replicate=1,precision=float64", 1), 1e-9)


def test_a_device_that_fails_twice_is_left_out(root: Path) -> None:
    faults = "kill:rank=1,step=4;kill:rank=1,step=6"
    run = faulty(root, "twice", faults, "replicate=2", 2, "--recovery.snapshot-every", "1")
    assert [row["device"] for row in events(run, "left_out")] == [1]
    assert [row["layout"] for row in events(run, "planned")] == ["replicate=2", "replicate=1"]


@pytest.mark.parametrize(
    ("layout", "fault", "told"),
    further(
        [
            (
                "shard=2,zero=3",
                "hang:rank=1,step=7,phase=forward.1",
                (
                    "rank 1: shard 1 made no progress in forward of step 7, layer 1, for",
                    "rank 0 [shard 0] waits in backward of step 7, layer 1, for all_gather over shard of layer 1, ",
                ),
            ),
            (
                "tp=2",
                "gil:rank=0,step=7,phase=backward.0",
                (
                    "rank 0: tp 0 made no progress in backward of step 7, layer 0, for",
                    "rank 1 [tp 1] waits in backward of step 7, layer 0, for all_reduce over tp, ",
                ),
            ),
            (
                "pp=2,schedule=1f1b,microbatches=2",
                "hang:rank=0,step=7,phase=forward.0",
                (
                    "rank 0: pp 0 made no progress in forward of step 7, layer 0, for",
                    "rank 1 [pp 1] waits in data of step 7 for receive over pp of the input of micro-batch 0 for "
                    "stage 1 ",
                ),
            ),
        ]
    ),
)
def test_a_hang_names_the_layer_under_every_kind_of_layout(
    layout: str, fault: str, told: tuple[str, ...], root: Path
) -> None:
    run = faulty(root, layout.partition("=")[0] + "-hang", fault, layout, 2)
    (lost,) = events(run, "rank_lost")
    assert all(part in lost["why"] for part in told), lost["why"]


@pytest.mark.parametrize("kind", further(["hang", "gil", "stop"], ("gil", "stop")))
def test_a_rank_that_hangs_is_named_and_replaced(kind: str, root: Path) -> None:
    """With the layer that it runs, and what the other waits for: also where the interpreter can't say so any more."""
    fault = f"{kind}:rank=1,step=7,phase=backward.1"
    run = faulty(root, kind, fault, "replicate=2", 2, "--recovery.hang-s", "4", "--recovery.snapshot-every", "1")
    (lost,) = events(run, "rank_lost")
    assert lost["lost"] == 1 and lost["phase"] == "backward" and lost["step"] == 7
    assert "rank 1: replicate 1 made no progress in backward of step 7, layer 1, for" in lost["why"]
    assert "rank 0 [replicate 0] waits in backward of step 7 for all_reduce over replicate of" in lost["why"]
    assert re.search(r"of layers? [0-9-]+(?: and the rest)?, [0-9.]+ \w+ \(1st of the step\) since", lost["why"])
    assert curve(run) == undisturbed(root, "replicate=2", 2)


def test_a_sick_step_is_skipped_and_its_rows_are_left_out_after_a_rewind(root: Path) -> None:
    for policy in ("skip", "rewind"):
        run = faulty(root, f"sick-{policy}", "nan:rank=1,step=8,phase=reduce", "replicate=2", 2, *(
            "--recovery.on-sick", policy, "--checkpoint.every", "3", "--recovery.no-learned-limits",
        ))  # fmt: skip
        (skipped,) = events(run, "step_skipped")
        assert skipped["step"] == 8 and skipped["why"] == "the gradient isn't finite"
        whole, found = undisturbed(root, "replicate=2", 2), curve(run)
        assert all(found[step] == whole[step] for step in range(1, 7))
        if policy == "skip":
            assert found[7] == whole[7] and found[9] != whole[9]
            continue
        (rewound,) = events(run, "rewound")
        assert (rewound["step"], rewound["passed_over"]) == (6, 2), "the 7th step takes the rows of the 9th"
        assert found[7] != whole[7] and [row["step"] for row in events(run, "resumed")] == [6]


def test_a_loss_that_jumps_is_sick_and_can_end_the_run(root: Path) -> None:
    limits = ("--recovery.no-learned-limits", "--recovery.spike", "1.5", "--recovery.on-sick")
    more = ("--recovery.faults", "flip:rank=0,step=19", *limits)
    status, text = call(words(root, "jump", *more, "stop", layout="replicate=1"), root / "jump.log")
    assert status == 1 and "over 1.5 times the median of the last 18" in text and "recovery.on_sick = stop" in text
    assert len(events(root / "jump", "rank_lost")) == 1
    run = faulty(root, "jumped", "flip:rank=0,step=19", "replicate=1", 1, *more[2:], "rewind")
    assert [row["step"] for row in events(run, "resumed")] == [18]
    assert [row["passed_over"] for row in events(run, "rewound")] == [1]


def test_a_signal_to_end_leaves_a_checkpoint_and_a_status_that_launchers_know(root: Path) -> None:
    run = root / "preempted"
    argv = words(root, run.name, "--checkpoint.every", "0", layout="replicate=2", devices=2)
    running = Running([*argv, "--train.steps", "4000"], root / "preempted.log")
    wait_until(lambda: last_step(run) >= 3)
    running.kill(signal.SIGTERM)
    assert running.wait() == 143, running.text()
    running.no_orphans()
    assert [row["step"] for row in events(run, "checkpoint_saved")] == [last_step(run)]


def test_a_signal_to_end_doesnt_wait_for_a_disk_that_hangs(root: Path) -> None:
    """The checkpoint under way is given up, and the newest state in memory is written in its stead."""
    run = root / "stuck"
    options = ("--recovery.snapshot-every", "1", "--launch.stop-s", "4", "--checkpoint.every", "8")
    argv = words(root, run.name, *options, layout="shard=2,zero=2", devices=2)
    running = Running([*argv, "--recovery.faults", "hang:rank=-1,step=8,phase=checkpoint.written"], root / "stuck.log")
    wait_until(lambda: happened(run, "hang") and last_step(run) >= 10)
    running.kill(signal.SIGTERM)
    assert running.wait() == 143, running.text()
    running.no_orphans()
    (failed,) = events(run, "checkpoint_failed")
    assert failed["step"] == 8 and "given up" in failed["reason"]
    (saved,) = events(run, "checkpoint_saved")
    assert failed["step"] < saved["step"] <= last_step(run)
    assert call(argv, root / "stuck.log")[0] == 0
    assert [row["step"] for row in events(run, "resumed")] == [saved["step"]]
    assert curve(run) == undisturbed(root, "shard=2,zero=2", 2)


def test_what_always_fails_ends_the_run_with_its_state_on_disk(root: Path) -> None:
    run = root / "always"
    options = ("--recovery.snapshot-every", "1", "--checkpoint.every", "0")
    argv = words(root, run.name, *options, layout="shard=2,zero=2", devices=2)
    running = Running(argv, root / "always.log", before=raises(9, 0, ZeroDivisionError("planted fault")))
    assert running.wait() == 1
    running.no_orphans()
    assert "planted fault" in running.text()
    assert len(events(run, "rank_lost")) == 2, "once more, in case it was chance"
    assert [row["step"] for row in events(run, "checkpoint_saved")] == [8]
    status, text = call(argv, root / "always.log")
    assert status == 0, text
    assert [row["step"] for row in events(run, "resumed")] == [8]
    assert curve(run) == undisturbed(root, "shard=2,zero=2", 2)


def test_the_end_of_the_supervisor_ends_its_ranks_and_costs_a_snapshots_steps_at_most(root: Path) -> None:
    """Killed where a checkpoint is far away: what the ranks left in memory is written, and the same command goes on."""
    run = root / "orphans"
    options = ("--checkpoint.every", "0", "--recovery.snapshot-every", "2", "--recovery.idle-s", "0")
    held = ("--recovery.faults", "hang:rank=0,step=20,phase=forward")
    argv = words(root, run.name, *options, *held, layout="replicate=2", devices=2)
    running = Running(argv, root / "orphans.log")
    wait_until(lambda: happened(run, "hang"))
    running.kill(signal.SIGKILL)
    running.wait()
    status, text = call(argv, root / "orphans-again.log")
    assert status == 0, text
    running.no_orphans()
    (lost,) = events(run, "supervisor_lost")
    assert lost["step"] in (16, 18), "of step 18, once every rank's copy had its checksums"
    assert [row["step"] for row in events(run, "resumed")] == [lost["step"]] and not events(run, "restored")
    assert curve(run) == undisturbed(root, "replicate=2", 2)
    assert not (run / "owner").exists()


def test_chaos_breaks_a_run_under_way_and_tells_its_story(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = root / "asked"
    options = ("--train.steps", "4000", "--recovery.snapshot-every", "1")
    held = ("--recovery.idle-s", "0", "--recovery.faults", "slow:rank=1,step=10,seconds=3,generation=0")
    running = Running(words(root, run.name, *options, *held, layout="replicate=2", devices=2), root / "asked.log")
    wait_until(lambda: last_step(run) >= 9)
    status = main(["chaos", str(run), "--kill", "rank=1", "--at", "step=12,phase=backward", "--json"])
    story = [event["kind"] for event in json.loads(capsys.readouterr().out)]
    assert status == 0 and story == ["rank_lost", "fenced", "planned", "restored", "recovered"]
    assert main(["chaos", str(run), "--kill", "rank=7"]) == 2
    assert "the run has ranks 0 to 1" in capsys.readouterr().err
    running.kill(signal.SIGINT)
    assert running.wait() == 1, running.text()
    running.no_orphans()
    assert events(run, "interrupted")


def test_memory_that_runs_out_is_told_part_by_part_with_a_layout_that_needs_less(root: Path) -> None:
    run = root / "short"
    before = raises(5, 1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    argv = words(root, run.name, "--recovery.snapshot-every", "1", layout="replicate=2", devices=2)
    status, text = call(argv, root / "short.log", before=before)
    assert status == 1
    assert "[rank 1: replicate 1] out of memory in" in text and "Tried to allocate 2.00 GiB" in text
    for part in ("parameters", "gradients", "optimizer", "together, peak"):
        assert any(line.strip().startswith(part) and line.count("B") >= 2 for line in text.splitlines()), part
    assert "nearest that needs less: --layout" in text or "no layout of these devices needs clearly less" in text
    assert [row["step"] for row in events(run, "checkpoint_saved")][-1] == 4, "the state in memory is on disk"
