"""Outcomes that are read while the next step computes change no bit of a run: numbers, events and checkpoints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import DataError
from meshwright.train import session, step
from meshwright.train.feed import TokenFeed
from meshwright.train.health import Health, Limits
from meshwright.train.page_requests import PageRequests
from meshwright.train.step import Stepper
from meshwright.train.step_launcher import StepLauncher
from meshwright.train.trainer import Trainer
from meshwright.train.trainer_deps import TrainerDeps
from tests.plain_model import PlainModel
from tests.runs import call, rows, words, write_corpus
from tests.tiers import cases

STEPS = 24
AT_END = {1, 2, 6, 8, 12, 16, 18, 24}
"""Steps whose outcome is read at their end: the first two, those of a checkpoint or a snapshot, the last."""
BAD = (1, 4, 7, 8, 9, 12, 13, 14, 16, 19, 23, 24)
"""Steps without a finite gradient: the first, one alone, before, at and after a checkpoint, in a row, the last."""
MEASURED = ("tokens_per_s", "step_s", "parts", "memory", "mfu", "mfu_of_measured", "processor_s", "comm", "time", "pid")
OFTEN = (
    *("--checkpoint.every", "8", "--checkpoint.keep", "9", "--recovery.snapshot-every", "6"),
    *("--recovery.compare-every", "100", "--train.steps", str(STEPS)),
)
SKIP = ("--recovery.no-learned-limits",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("late")
    write_corpus(root / "corpus.txt")
    return root


class Counting(PlainModel):
    """Counts its calls in a buffer."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__(vocab, width, layers)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        return super().forward(tokens)


def build_counting(vocab: int, width: int, layers: int) -> nn.Module:
    return Counting(vocab, width, layers)


def plant_lateness(log: Path) -> None:
    """Reads late on CPUs too, and notes which steps were, and which were abandoned."""

    def make_deps(**fields: Any) -> TrainerDeps:
        return TrainerDeps(**fields | {"reads_late": True})

    session.TrainerDeps = make_deps  # type: ignore[assignment, misc]
    settle_late, abandon = Trainer._settle_late, Trainer._step_before_abandoned

    def note(word: str, number: int) -> None:
        with log.open("a") as file:
            file.write(f"{word} {number}\n")

    def settled(self: Trainer) -> None:
        unread = self._unread
        settle_late(self)
        if unread is not None:
            note("late", unread.step + 1)

    def abandoned(self: Trainer) -> Any:
        note("abandoned", self.step + 1)
        return abandon(self)

    Trainer._settle_late = settled  # type: ignore[method-assign]
    Trainer._step_before_abandoned = abandoned  # type: ignore[method-assign]


def plant_nan(bad: Collection[int], times: int = 10**6) -> None:
    """Makes a gradient of every rank NaN in steps with some rows, the first ``times`` that they are computed."""
    launch, run, fill_missing = StepLauncher.launch, Stepper.run, step.fill_missing
    skipped, present, left = [0], [0], dict.fromkeys(bad, times)

    def launched(self: StepLauncher, number: int, passed_over: int, *args: Any) -> Any:
        skipped[0] = passed_over
        return launch(self, number, passed_over, *args)

    def run_step(self: Stepper, number: int, *args: Any) -> Any:
        present[0] = number + skipped[0] + 1
        return run(self, number, *args)

    def spoil(program: Any, **more: Any) -> None:
        fill_missing(program, **more)
        if left.get(present[0], 0) > 0:
            left[present[0]] -= 1
            next(weight.gradient for weight in program.weights if weight.local.numel()).fill_(float("nan"))

    StepLauncher.launch = launched  # type: ignore[method-assign]
    Stepper.run = run_step  # type: ignore[method-assign]
    step.fill_missing = spoil


def plant_request(at: int, ask: Callable[[TrainerDeps], None]) -> None:
    """Asks every rank for something at the beginning of a step, once."""
    launch, asked = StepLauncher.launch, []

    def launched(self: StepLauncher, number: int, *args: Any) -> Any:
        if number + 1 == at and not asked:
            asked.append(at)
            ask(self._deps)
        return launch(self, number, *args)

    StepLauncher.launch = launched  # type: ignore[method-assign]


def story(run: Path) -> dict[str, Any]:
    """Returns what a run computed, said and saved, without what was measured."""
    saved = {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted((run / "checkpoints").rglob("*"))
        if path.is_file() and path.suffix != ".json"
    }
    assert saved
    told = [
        (event["kind"], event.get("step"), event.get("why"), repr(event.get("loss")), event.get("what"))
        for event in rows(run, "events.jsonl")
        if (event["rank"] >= 0 and event["kind"] != "rank_started") or event["kind"] == "rank_lost"
    ]
    lines = [json.dumps({key: row[key] for key in sorted(row) if key not in MEASURED}) for row in rows(run)]
    sent = [
        sorted([entry[key] for key in ("axis", "op", "calls", "bytes")] for entry in row["comm"]) for row in rows(run)
    ]
    return {"lines": lines, "sent": sent, "events": sorted(told, key=str), "saved": saved}


def both(
    root: Path, name: str, *more: str, before: Callable[[], None] = lambda: None, status: int = 0, **where: Any
) -> tuple[Path, Path, dict[str, list[int]]]:
    """Runs read at each step's end and late, asserts that they are the same, and returns both and what was late."""
    log, runs = root / f"{name}.late", (root / f"{name}-end", root / f"{name}-late")
    for run in runs:

        def plant(late: bool = run is runs[1]) -> None:
            before()
            if late:
                plant_lateness(log)

        ended, text = call(words(root, run.name, *OFTEN, *more, **where), root / f"{run.name}.log", plant)
        assert ended == status, text
    noted: dict[str, list[int]] = {"late": [], "abandoned": []}
    for word, number in Counter(tuple(line.split()) for line in log.read_text().splitlines()):
        noted[word].append(int(number))
    stories = [story(run) for run in runs]
    for part, expected in stories[0].items():
        assert stories[1][part] == expected, part
    return *runs, noted


@pytest.mark.parametrize(
    ("layout", "devices"),
    cases(
        [
            ("shard=2,zero=3", 2),
            ("pp=2,tp=2,microbatches=2", 4),
            ("replicate=1", 1),
            ("shard=2,zero=1", 2),
            ("shard=2,zero=2,microbatches=2", 2),
            ("tp=2,sequence=true", 2),
            ("cp=2", 2),
            ("replicate=2,compress=topk:4:3", 2),
        ]
    ),
)
def test_steps_without_a_finite_gradient(layout: str, devices: int, root: Path) -> None:
    where = {"layout": layout + ",precision=float64", "devices": devices}
    name = layout.replace("=", "").replace(",", "-")
    end, _, noted = both(root, name, *SKIP, before=partial(plant_nan, BAD), **where)
    skipped = [event["step"] for event in rows(end, "events.jsonl") if event["kind"] == "step_skipped"]
    assert skipped == list(BAD)
    # A bad one is found out by the next, which it stops.
    assert noted["late"] == [number for number in range(1, STEPS + 1) if number not in AT_END | set(BAD)]
    assert noted["abandoned"] == [number + 1 for number in BAD if number not in AT_END]


@pytest.mark.long
def test_a_step_that_is_nan_once_is_computed_again(root: Path) -> None:
    """By learned limits it is suspect, and its second result counts: on the weights that the first one left alone."""
    end, _, noted = both(
        root, "once", before=partial(plant_nan, (4, 10, 21), times=1), layout="shard=2,zero=2", devices=2
    )
    assert [row["step"] for row in rows(end, "events.jsonl") if row["kind"] == "step_repeated"] == [4, 10, 21]
    assert noted["abandoned"] == [5, 11, 22]


@pytest.mark.parametrize(("layout", "devices", "bad"), [("replicate=2", 2, ()), ("replicate=1", 1, (10,))])
def test_an_error_in_the_next_step_loses_no_line(layout: str, devices: int, bad: tuple[int, ...], root: Path) -> None:
    """Text that can't be read any more, say, ends the run after the line of the last step that was computed.

    That line is there too where its step updated nothing.
    """

    def plant() -> None:
        plant_nan(bad)
        read = TokenFeed.micro_batches

        def fail(self: TokenFeed, number: int) -> Any:
            if number == 10:
                raise DataError("the text is gone")
            return read(self, number)

        TokenFeed.micro_batches = fail  # type: ignore[method-assign]

    rate = ("--optimizer.lr", "1e-3", "--optimizer.lr-batch", "2")
    end, _, noted = both(
        root, f"gone{devices}", "--recovery.no-enabled", "--recovery.snapshot-every", "None", *SKIP, *rate,
        before=plant, status=2, layout=layout, devices=devices,
    )  # fmt: skip
    assert [row["step"] for row in rows(end)] == list(range(1, 11))
    assert [row["step"] for row in rows(end) if row["skipped"]] == list(bad)
    assert noted["late"][-1] == (9 if bad else 10) and not noted["abandoned"]
    assert rows(end)[2]["lr"] == pytest.approx(2e-3), "the peak after 2 steps, of 8 rows where 2 had half of it"


def test_rates_that_follow_the_noise_wait_for_its_measurement(root: Path) -> None:
    """Steps that are measured are read at their end, and the last one, which is known by the gain of those before."""
    more = ("--optimizer.lr-batch", "2", "--optimizer.lr-rule", "adascale", "--train.noise-scale", "5")
    end, _, noted = both(root, "noise", *SKIP, *more, layout="replicate=1")
    lines = rows(end)
    measured = [row["step"] for row in lines if "adascale/gain" in row["scalars"]]
    assert measured == [5, 10, 15, 20][: len(measured)] and len(measured) > 1 and len(lines) < STEPS
    assert len(noted["late"]) > 4 and not set(noted["late"]) & {*measured, len(lines)} and not noted["abandoned"]


@pytest.mark.parametrize(
    ("policy", "status", "kind"), cases([("rewind", 0, "rewound"), ("stop", 1, "step_skipped")], ())
)
def test_what_a_bad_step_means(policy: str, status: int, kind: str, root: Path) -> None:
    options = (*SKIP, "--recovery.on-sick", policy, "--recovery.attempts", "1", "--recovery.back-s", "1e-6")
    end, _, noted = both(root, policy, *options, before=partial(plant_nan, (11,)), status=status, layout="replicate=1")
    assert [row["kind"] for row in rows(end, "events.jsonl") if row["kind"] == kind] == [kind]
    assert noted["abandoned"] == [12]


def test_a_request_acts_after_the_step_that_spread_it(root: Path) -> None:
    """Evaluations, checkpoints and the end come after the same steps as where each step is read at its end."""

    def ask(deps: TrainerDeps, action: str = "") -> None:
        if not action:
            deps.stop_asked.request()
        elif deps.rank == 0:
            deps.page_requests = PageRequests()
            deps.page_requests.make(action)

    def before() -> None:
        plant_request(4, partial(ask, action="evaluate"))
        plant_request(10, partial(ask, action="checkpoint"))
        plant_request(15, ask)

    run, _, noted = both(root, "asked", before=before, status=1, layout="shard=2,zero=3", devices=2)
    acted = [(row["kind"], row.get("step")) for row in rows(run, "events.jsonl")]
    saved = [("checkpoint_saved", number) for number in (8, 10, 15)]
    assert sorted(pair for pair in acted if pair[1])[: 2 + len(saved)] == [
        *saved,
        ("evaluated", 4),
        ("interrupted", 15),
    ]
    assert noted["abandoned"] == [5, 11, 16]


def plant_limits_by_the_last_norm() -> None:
    """Lets a step update the weights or not by a digit of the norm of the step before: any older one says another."""
    judge, last_norm = Health.judge, [0.0]

    def judged(self: Health, loss: float, norm: float) -> str | None:
        reason = judge(self, loss, norm)
        last_norm[0] = norm
        return reason

    Health.judge = judged  # type: ignore[method-assign]
    Health.limits = property(  # type: ignore[assignment, method-assign]
        lambda self: Limits(math.inf, 0.0 if int(last_norm[0] * 1e4) % 2 else math.inf)
    )


@pytest.mark.parametrize(
    ("name", "more", "before"),
    cases(
        [
            ("last", (), plant_limits_by_the_last_norm),
            ("spike", ("--recovery.spike", "1.001", "--train.steps", "48", "--optimizer.lr", "1e-7"), lambda: None),
            ("norm", ("--recovery.largest-norm", "2.0", "--optimizer.lr", "1e-7"), lambda: None),
        ]
    ),
)
def test_limits_follow_from_the_step_before(
    name: str, more: tuple[str, ...], before: Callable[[], None], root: Path
) -> None:
    """Many steps are over them; at a rate that teaches nothing, losses and norms vary as the rows do."""
    end, _, noted = both(root, name, *SKIP, *more, before=before, layout="replicate=1")
    skipped = [row for row in rows(end, "events.jsonl") if row["kind"] == "step_skipped"]
    assert len(skipped) > 4 and len(noted["abandoned"]) > 2 and len(noted["late"]) > 2, noted


@pytest.mark.parametrize(
    ("name", "more", "where"),
    cases(
        [
            ("islands", ("--outer.every", "5"), {"layout": "islands=2", "devices": 2}),
            ("scale", (), {"layout": "precision=fp16"}),
            ("hook", ("--train.rebalance", "9"), {"layout": "replicate=2", "devices": 2}),
            ("fault", ("--recovery.faults", "nan:rank=0,step=5"), {"layout": "replicate=1"}),
            ("buffers", ("--model", "tests.faults.test_late_reading:build_counting"), {"layout": "replicate=1"}),
        ],
        ("buffers",),
    ),
)
def test_nothing_is_read_late_where_each_step_is_acted_on(
    name: str, more: tuple[str, ...], where: dict[str, Any], root: Path
) -> None:
    """An outer optimizer, a loss scale, hooks and injected faults; buffers that the next forward changes."""
    log = root / f"{name}.late"
    argv = words(root, name, *OFTEN, *more, **where)
    status, text = call(argv, root / f"{name}.log", partial(plant_lateness, log))
    assert status == 0 and len(rows(root / name)) == STEPS, text
    assert not log.exists()
