"""The cheap part of a proof, made before a run starts: the run's layout on a small clone, in float64 on CPU ranks.

One batch of rows of one length, two micro-batches where the layout has several; under islands `JOINS` short rounds,
whose outer step is the run's own. A layout of more ranks than this
machine can run side by side is proven over few of them, every axis that it uses still in use where they suffice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ConfigError, PlanError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import count_cores, found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.analysis.clone import SMALL
from meshwright.models.analysis.small_config import shrink_config, with_every_kind
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.build import check
from meshwright.parallel.sync.all_reduce import EXCHANGE as ALL_REDUCE
from meshwright.proof.compare import Verdict, one_line
from meshwright.proof.layouts import min_layers
from meshwright.proof.plain_islands import OuterRecipe
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes, world_size
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, StageSplit
from meshwright.train.config import OuterConfig

FEW, MANY = 4, 8
"""Ranks over which a layout is proven on a machine of few cores, and at most on any."""
TOKENS = 128
"""Most tokens of a row of a clone."""
VOCABULARY = 199
"""Tokens of made-up text of a clone; a prime, so that no degree divides it."""
ROUND_STEPS, JOINS = 2, 2
"""Most steps of a round, and rounds: momentum shows in the second join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The result of the proof before a run."""

    outcome: str
    """``passed``; ``wrong`` or ``crashed``; ``refused``, ``unfinished`` or ``left out`` where nothing was compared."""
    layout: str
    """The run's layout."""
    proven: str = ""
    """The layout that was proven in its place, in float64."""
    instead: tuple[str, ...] = ()
    """What was proven instead of the run's own, in words."""
    why: str = ""
    """Why it didn't pass; empty when it did."""
    seconds: float = 0.0
    """Duration of the proof."""
    verdict: Mapping[str, Any] | None = None
    """Errors and scope, as `Verdict.to_json`; None where nothing was compared."""

    @property
    def passed(self) -> bool:
        """Whether the layout equals one device."""
        return self.outcome == "passed"

    @property
    def failed(self) -> bool:
        """Whether the layout was run and doesn't equal one device."""
        return self.outcome in ("wrong", "crashed")

    def to_json(self) -> dict[str, object]:
        """Returns plain values."""
        return {"passed": self.passed} | dataclasses.asdict(self)

    def __str__(self) -> str:
        """Returns one line for people."""
        instead = f" ({'; '.join(self.instead)})" if self.instead else ""
        if not self.passed:
            return f"not proved: {self.layout}: {self.why}{instead}"
        assert self.verdict is not None
        off = f"gradient off by at most {self.verdict['grad_error']:.0e}"
        if distance := self.verdict.get("rounding_distance"):
            off += f" but for what is rounded on the wire ({distance:.0e} of it, as in plain numpy)"
        scope = self.verdict.get("scope") or {}
        if scope.get("calls", 1) > 1:
            off += (
                f", where that is called {scope['calls']} times a step, since its own loss ({scope['terms']}) depends "
                "on which rows share a call"
            )
        return f"proved: {self.proven or self.layout} equals one device, {off}, {self.seconds:.1f} s{instead}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _StandIn:
    """The smaller layout and model that are proven in a run's place."""

    layout: Layout
    model: ModelConfig
    tokens: int
    vocab: int | None
    instead: tuple[str, ...]
    outer: OuterRecipe = OuterRecipe()  # noqa: RUF009 - frozen

    @property
    def steps(self) -> int:
        """Steps that are compared."""
        return self.outer.warmup + JOINS * self.outer.every if self.layout.islands > 1 else 1

    @property
    def text(self) -> str:
        """The layout's text form without its precision, which is float64 in every proof."""
        return str(dataclasses.replace(self.layout, precision="float32"))

    def build(self) -> BuiltModel:
        """Makes the model on meta."""
        return build_meta(self.model, vocab=self.vocab, context=self.tokens)


def prove_ahead(
    built: BuiltModel,
    layout: Layout,
    *,
    vocab: int,
    tokens: int,
    documents: bool,
    limit_s: float,
    outer: OuterConfig | None = None,
) -> Proof:
    """Proves a run's layout in a process beside this one, which the limit ends whatever it does.

    Args:
        built: the run's model, on meta.
        layout: of the run.
        vocab: of its text.
        tokens: a row.
        documents: whether documents of a row are kept apart.
        limit_s: hard limit in seconds.
        outer: how islands join; None for the defaults.

    Returns:
        The outcome; what keeps the proof from being made is in it, not raised.

    Raises:
        KeyboardInterrupt: at a Ctrl-C or SIGTERM meanwhile.
    """
    layout_text, started = str(layout), time.monotonic()
    stand_in: _StandIn | None = None
    try:
        stand_in = _small_stand_in(built, layout, vocab, tokens)
        if layout.islands > 1:
            stand_in = _with_short_rounds(stand_in, outer or OuterConfig())
        with tempfile.TemporaryDirectory(prefix="meshwright-proof-", ignore_cleanup_errors=True) as folder:
            verdict = _prove_in_child(stand_in, documents, limit_s, folder)
    except Exception as error:  # no reason to keep a run from training
        seconds = time.monotonic() - started
        timed_out = seconds >= limit_s
        reason = f"it wasn't finished within {limit_s:g} s (train.prove_s)" if timed_out else one_line(error)
        proven_layout, differences = (stand_in.text, stand_in.instead) if stand_in else ("", ())
        outcome = "unfinished" if timed_out else "refused"
        return Proof(
            outcome=outcome, layout=layout_text, proven=proven_layout, instead=differences, why=reason, seconds=seconds
        )
    return Proof(
        outcome=verdict.outcome,
        layout=layout_text,
        proven=stand_in.text,
        instead=stand_in.instead,
        why=_failure_reason(verdict),
        seconds=time.monotonic() - started,
        verdict=verdict.to_json(),
    )


def _failure_reason(verdict: Verdict) -> str:
    if verdict.outcome == "wrong":
        return f"it doesn't compute what one device computes: {verdict.wrong}"
    return verdict.refused or verdict.crashed


def _prove_in_child(stand_in: _StandIn, documents: bool, limit_s: float, folder: str) -> Verdict:
    """Runs the proof in a forked process, whose ranks and helpers end with it."""
    launcher = ForkLauncher(1, devices=found_devices(1, kind="cpu"))

    def watch() -> None:
        if launcher.interrupted:
            raise KeyboardInterrupt

    try:
        launcher.start(_prove_in_process, stand_in, documents, limit_s, folder)
        verdict: Verdict = launcher.wait(limit_s, watch)[0]
    finally:
        launcher.cancel()
    return verdict


def _prove_in_process(
    context: RankContext, stand_in: _StandIn, documents: bool, limit_s: float, folder: str
) -> Verdict:
    """Proves, in a process that forks ranks of its own; what it leaves lies in a folder that its launcher removes."""
    tempfile.tempdir = folder
    layout = stand_in.layout
    # As few rows as the readers divide, but never a single one: rows that differ in targets show a wrong mean.
    rows = layout.batch_unit * (1 if layout.batch_unit > 1 else 2)
    case = Case(
        build=stand_in.build,
        batches=random_batches(stand_in.steps, rows, stand_in.tokens, stand_in.vocab or VOCABULARY, documents),
        made_up=True,
        recipe=OptimizerRecipe(),
        outer=stand_in.outer,
        timeout_s=limit_s,
        allow_whole=True,
        device="cpu",
    )
    return verify(case, [layout])[0]


def _small_stand_in(built: BuiltModel, layout: Layout, vocab: int, tokens: int) -> _StandIn:
    """Returns what a machine can prove in seconds.

    Raises:
        ConfigError: for a function too large for that, whose sizes are its own.
        PlanError: when no layout of few ranks is like this one.
    """
    config, differences = built.config, ["float64 on CPU ranks"]
    rank_limit = max(FEW, min(MANY, count_cores()))
    if config.kind == "function":
        elements = sum(parameter.numel() for parameter in built.module.parameters())
        if elements > SMALL:
            raise ConfigError(
                f"model '{config.name}' has {elements} parameters, and a function can't be shrunk to what is proven in "
                "seconds; meshwright verify --full takes the time"
            )
        few_rank_layout = few_ranks(layout, rank_limit, len(built.structure.layers))
        stand_in = _StandIn(layout=few_rank_layout, model=config, tokens=tokens, vocab=vocab, instead=())
    else:
        few_rank_layout = few_ranks(layout, rank_limit, None)
        split_degree = few_rank_layout.degree(Mechanics.MATRICES) * few_rank_layout.degree(Mechanics.TOKENS)
        clone = with_every_kind(built, shrink_config(config, min_layers([few_rank_layout]), parts=split_degree))
        differences.append("a small clone of the model")
        row_tokens = tokens
        if tokens > TOKENS:
            # cp cuts a row into two chunks a rank (gather), and sequence each of these over tp.
            unit = 2 * few_rank_layout.degree(Mechanics.TOKENS) * few_rank_layout.degree(Mechanics.MATRICES)
            row_tokens = TOKENS // unit * unit
            differences.append(f"{row_tokens} of {tokens} tokens a row")
        stand_in = _StandIn(layout=few_rank_layout, model=clone, tokens=row_tokens, vocab=VOCABULARY, instead=())
        try:
            stand_in.build()
        except ConfigError:
            stand_in = dataclasses.replace(stand_in, vocab=None)  # a vocabulary that is the directory's own
    if few_rank_layout.degrees != layout.degrees:
        differences.append(f"{few_rank_layout.world} of {layout.world} ranks")
    return dataclasses.replace(stand_in, instead=tuple(differences))


def _with_short_rounds(stand_in: _StandIn, outer: OuterConfig) -> _StandIn:
    """Returns a stand-in whose islands take the run's outer step, after rounds of few steps."""
    if stand_in.layout.islands == 1:
        return dataclasses.replace(stand_in, instead=(*stand_in.instead, "no islands, and so no join"))
    steps, differences = min(outer.round_steps, ROUND_STEPS), []
    if steps < outer.round_steps:
        differences.append(f"rounds of {steps} of {outer.round_steps} steps")
    if outer.topology != ALL_REDUCE.name:
        differences.append(f"joins by {ALL_REDUCE.name}, not {outer.topology}")
    if outer.number_format != "none":
        differences.append(f"no rounding to {outer.number_format} between islands")
    fragments, delay = min(outer.fragment_count, steps), min(outer.delay_steps, steps - 1)
    if fragments < outer.fragment_count:
        differences.append(f"{fragments} of {outer.fragment_count} fragments")
    if delay < outer.delay_steps:
        differences.append(f"a delay of {delay} of {outer.delay_steps} steps")
    warmup = min(outer.warmup, 1)
    if warmup < outer.warmup:
        differences.append(f"{warmup} of {outer.warmup} steps before islands part")
    recipe = OuterRecipe(
        warmup=warmup,
        every=steps,
        lr=outer.rate,
        momentum=outer.decay,
        nesterov=outer.nesterov,
        fragments=fragments,
        delay=delay,
        mix=outer.own_share if delay else 0.0,
    )
    return dataclasses.replace(stand_in, outer=recipe, instead=(*stand_in.instead, *differences))


def few_ranks(layout: Layout, rank_limit: int, layers: int | None) -> Layout:
    """Returns a layout like another, in float64 on at most so many CPU ranks.

    Degrees become smaller, those of copies first; choices stay where the CPU has them and they fit.

    Args:
        layout: of the run.
        rank_limit: ranks.
        layers: of the model; None for as many as the layout takes.

    Raises:
        PlanError: when there is none of two and more ranks.
    """
    # None of these changes what is computed in exact arithmetic, and the CPU or float64 lacks them.
    base = dataclasses.replace(layout, precision="float64", offload="none", compile=False)
    for degrees in _smaller_degrees(layout.degrees, rank_limit):
        for choices in _choices_that_may_fit(base, degrees):
            try:
                candidate = choices.with_degrees(degrees)
                check(candidate, "cpu", min_layers([candidate]) if layers is None else layers)
                if candidate.batch_unit <= 32:
                    return candidate
            except PlanError:
                continue
    raise PlanError(
        f"no layout of at most {rank_limit} ranks is like {layout}; meshwright verify proves it on more ranks"
    )


def _smaller_degrees(degrees: Mapping[str, int], rank_limit: int) -> list[dict[str, int]]:
    """Degrees of two to ``rank_limit`` ranks, the most like ``degrees`` first: axes in use, then ranks."""
    options = [
        sorted({size for size in (1, 2, *range(3, min(degree, rank_limit) + 1)) if degree % size == 0 or size == 2})
        for degree in degrees.values()
    ]
    combinations = [dict(zip(degrees, sizes)) for sizes in itertools.product(*options)]
    usable = [candidate for candidate in combinations if 1 < world_size(candidate) <= rank_limit]
    # The product breaks ties of axes that lie inside of others (ep), which add no ranks.
    return sorted(
        usable,
        key=lambda candidate: (_axes_in_use(candidate), world_size(candidate), math.prod(candidate.values())),
        reverse=True,
    )


def _axes_in_use(degrees: Mapping[str, int]) -> int:
    # Copies weigh half: they change no module, so a proof without them says nearly as much.
    return sum(1 if name in row_axes(Holds.COPY) else 2 for name, degree in degrees.items() if degree > 1)


def _choices_that_may_fit(layout: Layout, degrees: Mapping[str, int]) -> Iterator[Layout]:
    """Yields the layout with fewer micro-batches, and then with less and less of what may not fit fewer ranks."""
    pipeline, recompute = degrees.get(layout.axis(Mechanics.STAGES), 1), layout.recompute
    counts = [min(layout.microbatches, 2 * pipeline)] + [layout.microbatches, 4 * pipeline] * (pipeline > 1)
    combinations = itertools.product(
        (recompute, dataclasses.replace(recompute, count=1 if recompute else 0)),
        (layout.rows, BatchShares()),
        (layout.split, StageSplit()),
        ((layout.schedule, layout.stages), ("", 0)),
        counts,
    )
    for recompute, rows, split, (schedule, stages), count in dict.fromkeys(combinations):
        yield dataclasses.replace(
            layout,
            microbatches=count,
            recompute=recompute,
            rows=rows,
            split=split,
            schedule=schedule,
            stages=stages,
        )
