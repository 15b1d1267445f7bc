"""The proof of a whole job: it passes across a change of layout, and each bug around the step is caught by it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.cli.main import main
from meshwright.cli.verify import read_job
from meshwright.data import loader
from meshwright.errors import PlanError
from meshwright.jobs.verify_job import case_of, job_and_layouts
from meshwright.proof import job as job_proof
from meshwright.proof.plain_job import PlainBatch, PlainJob, PlainOptimizer, PlainSchedule, train_job
from meshwright.spec.layout import Layout
from meshwright.train import feed, session
from meshwright.train.config import TrainConfig
from meshwright.train.feed import TokenFeed
from meshwright.train.health import Health
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.rate import RateSchedule
from meshwright.train.run_config import RunConfig
from tests.runs import write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
NUMBERS = ("loss", "norm", "rate", "tokens", "total", "accuracy", "validation")
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
        [recovery]
        largest_norm = 3.0
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
        assert set(job["errors"]) == {*NUMBERS, "weights", "moments"}
        assert max(job["errors"].values()) < 1e-10
    assert "a small clone" in report["proven"]


def test_rates_that_follow_the_noise_equal_a_plain_loops(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured after the second step, which is skipped, and the fourth; under sums over three axes."""
    noise, text = recipe.with_name("noise.toml"), recipe.read_text(encoding="utf-8")
    for line, more in (("steps = 300", "noise_scale = 7"), ("clip = 0.5", 'lr_batch = 2\nlr_rule = "adascale_sqrt"')):
        text = text.replace(line, f"{line}\n{more}")
    noise.write_text(text, encoding="utf-8")
    status, report = proven(noise, capsys, "replicate=2,tp=2,microbatches=2", "pp=2,microbatches=2,shard=2,zero=1")
    assert status == 0, report
    assert max(max(job["errors"].values()) for job in report["jobs"]) < 1e-9


def _rows_of_another_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "derive_key", lambda *parts: loader.mix.__hash__() % 2**63)


def _rate_a_step_late(patch: pytest.MonkeyPatch) -> None:
    plain = RateSchedule.rate
    patch.setattr(RateSchedule, "rate", lambda self, step: plain(self, max(0, step - 1)))


def _targets_of_another_row(patch: pytest.MonkeyPatch) -> None:
    plain = TokenFeed._split

    def shifted(self: TokenFeed, batch, count):  # type: ignore[no-untyped-def]
        batch.targets[:] = batch.targets[::-1]
        return plain(self, batch, count)

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


def _limits_skip_no_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "limits", property(lambda self: None))


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
            (_limits_skip_no_step, "weights"),
        ],
        (2, 3, 4, 6),
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
    capsys.readouterr()
    assert main(["verify", str(recipe), "--layout", "tp=2,precision=bf16"]) == 2
    assert "a job is proven in float64; drop precision=bf16" in capsys.readouterr().err


def test_a_job_of_another_precision_says_that_float64_stands_for_it(recipe: Path) -> None:
    words = [str(recipe), "--layout", "tp=2,precision=bf16"]
    config, layouts = job_and_layouts(read_job(words), [], False)
    _, what = case_of(config, layouts, False, 6, 60.0)
    assert "float64 stands for bf16" in what


def test_weights_that_are_not_trained_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss would show what a checkpoint holds of them after the last step."""
    kinds = {"weights/a": 2, "weights/frozen": 3, "exp_avg/a": 2, "exp_avg_sq/a": 2}
    tensors = {name: torch.ones(size, dtype=torch.float64) for name, size in kinds.items()}
    names = {"loss": "losses", "grad_norm": "norms", "lr": "rates", "tokens": "tokens", "tokens_total": "totals"}
    names |= {"accuracy": "accuracies"}
    wanted = {of: [1.0, 1.0] for of in names.values()} | {"validation": {2: {"loss": 1.0}}, "state": tensors}
    rows = [{"step": step} | dict.fromkeys(names, 1.0) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "evaluated", "step": 2, "loss": 1.0}))

    def compared(**changed: torch.Tensor) -> job_proof.JobVerdict:
        state = tensors | {f"weights/{name}": value for name, value in changed.items()}
        monkeypatch.setattr(job_proof.CheckpointStore, "find", lambda self, step: "newest")
        monkeypatch.setattr(job_proof.CheckpointStore, "read_full", lambda self, found: state.items())
        config = dataclasses.replace(RunConfig(), train=TrainConfig(steps=3))
        case = job_proof.JobCase(config=config, build=cast(Any, None), data=tmp_path)
        return job_proof._compare_run(case, Layout(), Layout(), tmp_path, wanted)

    assert compared().passed
    verdict = compared(frozen=torch.full((3,), 1.001, dtype=torch.float64))
    assert not verdict.passed and verdict.worst == "weights/frozen"
    with pytest.raises(PlanError, match="knows nothing of"):
        compared(more=torch.ones(1))


def test_the_plain_loop_keeps_weights_that_are_not_trained() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)).double()
    module[0].weight.requires_grad_(False)
    tokens = torch.arange(4).view(1, 4)
    batch = PlainBatch(tokens=tokens, targets=tokens + 1, positions=None)
    rows = cast(Any, SimpleNamespace(batch=lambda step: batch))
    schedule = PlainSchedule(peak=0.1, warmup=0, steps=3, shape="constant", floor=0.0, decay_share=0.0)
    optimizer = PlainOptimizer(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay_all=False, clip=1.0)
    plain = PlainJob(rows=rows, schedule=schedule, optimizer=optimizer, steps=2, evaluate=(), evaluation_rows=0)
    before = module[0].weight.clone()
    state = train_job(module, lambda part, rows, step: part(rows.tokens), plain)["state"]
    assert torch.equal(state["weights/0.weight"], before) and "exp_avg/0.weight" not in state
