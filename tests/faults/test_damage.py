"""A run that is broken inside notices, names where, and goes on from a state that agreed along the same curve."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.train.faults import Fault
from meshwright.train.spoiler import Spoiler, _flip
from tests.runs import call, curve, events, words, write_corpus
from tests.tiers import cases, further

pytestmark = pytest.mark.slow
OFTEN = ("--recovery.snapshot-every", "2", "--recovery.back-s", "1e-6")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage")
    write_corpus(root / "corpus.txt")
    return root


def trained(root: Path, name: str, *more: str, layout: str = "replicate=2", devices: int = 2) -> Path:
    status, text = call(words(root, name, *more, layout=layout, devices=devices), root / f"{name}.log")
    assert status == 0, text
    return root / name


def undisturbed(root: Path, layout: str = "replicate=2", devices: int = 2) -> dict[int, tuple[float, float]]:
    run = root / ("whole-" + layout.replace("=", "").replace(",", "-"))
    return curve(run if run.exists() else trained(root, run.name, layout=layout, devices=devices))


def test_the_form_in_the_docstring_and_a_step_that_is_done_again(root: Path) -> None:
    run = trained(root, "nan", "--recovery.faults", "nan:rank=1,step=5")
    (again,) = events(run, "step_repeated")
    assert again["step"] == 5 and again["why"] == "the loss or the gradient isn't finite"
    assert curve(run) == undisturbed(root) and not events(run, "step_skipped") and not events(run, "rank_lost")


@pytest.mark.parametrize("of", further(["weights", "moments"]))
def test_a_small_flip_in_one_of_two_replicas_is_seen_named_and_undone(of: str, root: Path) -> None:
    """Far below what loss or norm would show; done again from the state before, the right value says which it was."""
    starts = {"weights": "in weights/", "moments": "in exp_avg"}
    fault = f"flip:rank=1,step=9,phase=forward,of={of},bit=20,seed=4"
    run = trained(root, f"flip-{of}", "--recovery.faults", fault, *OFTEN)
    (damaged,), (repaired,) = events(run, "damaged"), events(run, "damage_repaired")
    assert (damaged["step"], damaged["back_to"]) == (9, 8) and starts[of] in damaged["why"]
    assert repaired["damaged"] == [1]
    assert curve(run) == undisturbed(root)
    assert [row["step"] for row in events(run, "checkpoint_saved")] == [3, 6, 9, 12, 15, 18, 21, 24]


def test_of_three_copies_most_decide(root: Path) -> None:
    layout = "replicate=3,rows=3x2-2"
    fault = "flip:rank=2,step=9,phase=forward,bit=22,seed=1"
    run = trained(root, "three", "--recovery.faults", fault, *OFTEN, layout=layout, devices=3)
    (damaged,) = events(run, "damaged")
    assert damaged["suspects"] == [2] and "rank 2 differs from ranks 0, 1 in weights/" in damaged["why"]
    assert curve(run) == undisturbed(root, layout, 3)


def hits(name: str) -> Callable[[], None]:
    """Returns what aims flips at a weight by its name."""

    def plant() -> None:
        def flip(self: Spoiler, fault: Fault) -> bool:
            _flip([next(one.local for one in self._program.weights if name in one.name)], fault, random.Random(0))
            return True

        Spoiler.flip_bit = flip  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize(
    ("layout", "devices", "name"),
    cases(
        [
            ("tp=2", 2, "ln_1.weight"),
            ("pp=2,microbatches=2", 2, "wte.weight"),
            ("shard=2,replicate=2,zero=3", 4, "wte.weight"),
        ]
    ),
)
def test_what_else_is_held_twice(layout: str, devices: int, name: str, root: Path) -> None:
    """Norms under tp, a tied embedding on both of its stages, a shard's replica: flipped on the last rank."""
    fault = f"flip:rank={devices - 1},step=9,phase=optimizer,bit=21"
    run = root / layout[:2]
    argv = words(root, run.name, "--recovery.faults", fault, *OFTEN, layout=layout, devices=devices)
    status, text = call(argv, root / f"{run.name}.log", before=hits(name))
    assert status == 0, text
    (damaged,), (repaired,) = events(run, "damaged"), events(run, "damage_repaired")
    assert name in damaged["why"] and repaired["damaged"] == [devices - 1]
    assert curve(run) == undisturbed(root, layout, devices)


def test_a_flip_that_only_the_loss_shows_is_undone_without_a_damaged_checkpoint(root: Path) -> None:
    """One device holds everything once: the checkpoint that has the flip in it is taken back."""
    run = trained(root, "single", "--recovery.faults", "flip:rank=0,step=19", *OFTEN, layout="replicate=1", devices=1)
    (damaged,) = events(run, "damaged")
    assert damaged["withdrawn"] == ["step-00000018"] and damaged["why"].startswith("the loss ")
    assert events(run, "damage_repaired") and curve(run) == undisturbed(root, "replicate=1", 1)
    assert len(list((run / "checkpoints").glob("step-*"))) == 3


def ruins(step: int, *more: object) -> float:
    """Stands for a learning rate that is sane until the past says something, and ruins the model then, finitely."""
    return 10.0 if step == 18 else 1e-3


def plant_ruin() -> None:
    from meshwright.train import rate

    rate.learning_rate = ruins


def test_numbers_that_come_again_are_the_training_itself(root: Path) -> None:
    """A learning rate that ruins the model looks like damage: twice from older states, then it is left to the user."""
    argv = words(root, "ruined", *OFTEN, layout="replicate=1", devices=1)
    status, text = call(argv, root / "ruined.log", before=plant_ruin)
    assert status == 0, text
    damaged, (left,) = events(root / "ruined", "damaged"), events(root / "ruined", "limits_left")
    assert {row["step"] for row in damaged} == {19} and len(damaged) >= 2, damaged
    assert left["step"] == 20 and left["replayed"]
    assert not events(root / "ruined", "damage_repaired")
