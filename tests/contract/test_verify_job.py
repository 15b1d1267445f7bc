"""The proof of a whole job: it passes across a change of layout, and each bug around the step is caught by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.data import loader
from meshwright.train import feed, session, trainer
from meshwright.train.feed import TokenFeed
from meshwright.train.optimizer import LocalAdamW
from tests.runs import write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job")
    text = write_corpus(root / "corpus.txt", sentences=120)
    path = root / "recipe.toml"
    path.write_text(
        f"""
        layout = "replicate=2,microbatches=2"
        [model]
        name = "gpt2"
        layers = 6
        dropout = 0.1
        [data]
        paths = ["{text}"]
        tokenizer = "chars"
        sequence = 16
        workers = 1
        cache = "{root / "prepared"}"
        [train]
        batch = 8
        steps = 300
        [optimizer]
        clip = 0.5
        """,
        encoding="utf-8",
    )
    return path


def proven(recipe: Path, capsys: pytest.CaptureFixture[str], *layouts: str) -> tuple[int, dict]:
    """Returns the exit status and the report of a proof."""
    words = ["verify", str(recipe), "--json", *(("--layout", *layouts) if layouts else ())]
    status = main(words)
    return status, json.loads(capsys.readouterr().out)


def test_a_job_equals_a_plain_loop_across_a_change_of_layout(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout and uneven documents included; each layout is resumed once and resumed from once."""
    status, report = proven(recipe, capsys, "shard=2,zero=3", "tp=2")
    assert status == 0, report
    assert [(job["layout"].split(",")[0], job["resumed"].split(",")[0]) for job in report["jobs"]] == [
        ("shard=2", "tp=2"),
        ("tp=2", "shard=2"),
    ]
    for job in report["jobs"]:
        assert set(job["errors"]) == {"loss", "norm", "rate", "tokens", "validation", "weights", "moments"}
        assert max(job["errors"].values()) < 1e-10
    assert "a small clone" in report["proven"]


def _rows_of_another_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "derive_key", lambda *parts: loader.mix.__hash__() % 2**63)


def _rate_a_step_late(patch: pytest.MonkeyPatch) -> None:
    plain = trainer.learning_rate
    patch.setattr(trainer, "learning_rate", lambda step, *rest: plain(max(0, step - 1), *rest))


def _targets_of_another_row(patch: pytest.MonkeyPatch) -> None:
    plain = TokenFeed._split

    def shifted(self: TokenFeed, batch):  # type: ignore[no-untyped-def]
        batch.targets[:] = batch.targets[::-1]
        return plain(self, batch)

    patch.setattr(TokenFeed, "_split", shifted)


def _evaluation_of_the_first_rows_again(patch: pytest.MonkeyPatch) -> None:
    plain = feed.evaluation_batches

    def again(*args, row_range, **named):  # type: ignore[no-untyped-def]
        return plain(*args, row_range=(0, row_range[1] - row_range[0]), **named)

    patch.setattr(feed, "evaluation_batches", again)


def _moments_forget_their_steps(patch: pytest.MonkeyPatch) -> None:
    plain = LocalAdamW.restored
    patch.setattr(LocalAdamW, "restored", lambda self, steps: plain(self, 0))


def _dropout_of_another_seed(patch: pytest.MonkeyPatch) -> None:
    plain = session.Stepper

    def seeded(*args, seed, **named):  # type: ignore[no-untyped-def]
        return plain(*args, seed=seed + 1, **named)

    patch.setattr(session, "Stepper", seeded)


@pytest.mark.parametrize(
    ("plant", "where"),
    cases(
        [
            (_rows_of_another_seed, "loss"),
            (_rate_a_step_late, "rate"),
            (_targets_of_another_row, "loss"),
            (_evaluation_of_the_first_rows_again, "validation"),
            (_moments_forget_their_steps, "weights"),
            (_dropout_of_another_seed, "loss"),
        ],
        (2, 3, 4),
    ),
)
def test_bugs_around_the_step_are_caught(
    plant: Plant,
    where: str,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the recipe's own layout, resumed on one device."""
    plant(monkeypatch)
    status, report = proven(recipe, capsys)
    assert status == 1, report
    assert max(float(job["errors"][where]) for job in report["jobs"]) > 1e-6


def test_what_cannot_be_proven_is_refused_with_a_sentence(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = proven(recipe, capsys, "pp=2,microbatches=3")
    assert status == 2 and not report["passed"]
    assert report["jobs"][0]["refused"]
    assert main(["verify", str(recipe), "--steps", "3"]) == 2
    assert main(["verify", str(recipe.parent / "corpus.txt")]) == 2
