"""The cheap part of a proof, made before a run starts: the run's layout on a small clone, in float64 on CPU ranks.

One batch of rows of one length, two micro-batches where the layout has several. A layout of more ranks than this
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
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.clone import shrink, with_every_kind
from meshwright.models.config import ModelConfig
from meshwright.models.table import SMALL
from meshwright.parallel.build import check
from meshwright.proof.compare import Verdict, one_line
from meshwright.proof.layouts import layers_needed
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, made_up_batches, verify
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes, world_size
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, Recompute, StageSplit

FEW, MANY = 4, 8
"""Ranks over which a layout is proven on a machine of few cores, and at most on any."""
TOKENS = 128
"""Most tokens of a row of a clone."""
VOCABULARY = 199
"""Tokens of made-up text of a clone; a prime, so that no degree divides it."""
"""What an axis counts when not all can stay in use; 2 for all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What came of a proof before a run."""

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
    """What the proof took."""
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

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"passed": self.passed} | dataclasses.asdict(self)

    def __str__(self) -> str:
        """Returns one line for people."""
        instead = f" ({'; '.join(self.instead)})" if self.instead else ""
        if not self.passed:
            return f"not proved: {self.layout}: {self.why}{instead}"
        assert self.verdict is not None
        off = f"gradient off by at most {self.verdict['grad_error']:.0e}"
        return f"proved: {self.proven or self.layout} equals one device, {off}, {self.seconds:.1f} s{instead}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Small:
    """What is proven in a run's place."""

    layout: Layout
    model: ModelConfig
    tokens: int
    vocab: int | None
    instead: tuple[str, ...]

    @property
    def text(self) -> str:
        """The layout; its precision, which is every proof's, is left out."""
        return str(dataclasses.replace(self.layout, precision="float32"))

    def build(self) -> BuiltModel:
        """Makes the model on meta."""
        return build_meta(self.model, vocab=self.vocab, context=self.tokens)


def prove_ahead(
    built: BuiltModel, layout: Layout, *, vocab: int, tokens: int, documents: bool, limit_s: float
) -> Proof:
    """Proves a run's layout in a process beside this one, which the limit ends whatever it does.

    Args:
        built: the run's model, on meta.
        layout: of the run.
        vocab: of its text.
        tokens: a row.
        documents: whether documents of a row are kept apart.
        limit_s: hard limit in seconds.

    Returns:
        The outcome; what keeps the proof from being made is in it, not raised.

    Raises:
        KeyboardInterrupt: at a Ctrl-C or SIGTERM meanwhile.
    """
    text, began = str(layout), time.monotonic()
    small: _Small | None = None
    try:
        small = _smaller(built, layout, vocab, tokens)
        with tempfile.TemporaryDirectory(prefix="meshwright-proof-", ignore_cleanup_errors=True) as folder:
            verdict = _beside(small, documents, limit_s, folder)
    except Exception as error:  # no reason to keep a run from training
        seconds = time.monotonic() - began
        late = seconds >= limit_s
        why = f"it wasn't finished within {limit_s:g} s (train.prove_s)" if late else one_line(error)
        proven, instead = (small.text, small.instead) if small else ("", ())
        outcome = "unfinished" if late else "refused"
        return Proof(outcome=outcome, layout=text, proven=proven, instead=instead, why=why, seconds=seconds)
    return Proof(
        outcome=verdict.outcome,
        layout=text,
        proven=small.text,
        instead=small.instead,
        why=_why(verdict),
        seconds=time.monotonic() - began,
        verdict=verdict.to_json(),
    )


def _why(verdict: Verdict) -> str:
    if verdict.outcome == "wrong":
        return f"it doesn't compute what one device computes: {verdict.wrong}"
    return verdict.refused or verdict.crashed


def _beside(small: _Small, documents: bool, limit_s: float, folder: str) -> Verdict:
    """Runs the proof in a forked process, whose ranks and helpers end with it."""
    launcher = ForkLauncher(1, devices=found_devices(1, kind="cpu"))

    def watch() -> None:
        if launcher.interrupted:
            raise KeyboardInterrupt

    try:
        launcher.start(_proven, small, documents, limit_s, folder)
        found: Verdict = launcher.wait(limit_s, watch)[0]
    finally:
        launcher.cancel()
    return found


def _proven(context: RankContext, small: _Small, documents: bool, limit_s: float, folder: str) -> Verdict:
    """Proves, in a process that forks ranks of its own; what it leaves lies in a folder that its launcher removes."""
    tempfile.tempdir = folder
    layout = small.layout
    rows = layout.batch_unit * (1 if layout.batch_unit > 1 else 2)
    case = Case(
        build=small.build,
        batches=made_up_batches(1, rows, small.tokens, small.vocab or VOCABULARY, documents),
        recipe=OptimizerRecipe(),
        timeout_s=limit_s,
        allow_whole=True,
        device="cpu",
    )
    return verify(case, [layout])[0]


def _smaller(built: BuiltModel, layout: Layout, vocab: int, tokens: int) -> _Small:
    """Returns what a machine can prove in seconds.

    Raises:
        ConfigError: for a function too large for that, whose sizes are its own.
        PlanError: when no layout of few ranks is like this one.
    """
    config, instead = built.config, ["float64 on CPU ranks"]
    most = max(FEW, min(MANY, count_cores()))
    if config.kind == "function":
        elements = sum(item.numel() for item in built.module.parameters())
        if elements > SMALL:
            raise ConfigError(
                f"model '{config.name}' has {elements} parameters, and a function can't be shrunk to what is proven in "
                "seconds; meshwright verify --full takes the time"
            )
        few = few_ranks(layout, most, len(built.structure.layers))
        small = _Small(layout=few, model=config, tokens=tokens, vocab=vocab, instead=())
    else:
        few = few_ranks(layout, most, None)
        parts = few.degree(Mechanics.MATRICES) * few.degree(Mechanics.TOKENS)
        clone = with_every_kind(built, shrink(config, layers_needed([few]), parts=parts))
        instead.append("a small clone of the model")
        taken = tokens
        if tokens > TOKENS:
            unit = 2 * few.degree(Mechanics.TOKENS) * few.degree(Mechanics.MATRICES)
            taken = TOKENS // unit * unit
            instead.append(f"{taken} of {tokens} tokens a row")
        small = _Small(layout=few, model=clone, tokens=taken, vocab=VOCABULARY, instead=())
        try:
            small.build()
        except ConfigError:
            small = dataclasses.replace(small, vocab=None)  # a vocabulary that is the directory's own
    if few.degrees != layout.degrees:
        instead.append(f"{few.world} of {layout.world} ranks")
    return dataclasses.replace(small, instead=tuple(instead))


def few_ranks(layout: Layout, most: int, layers: int | None) -> Layout:
    """Returns a layout like another, in float64 on at most so many CPU ranks.

    Degrees become smaller, those of copies first; choices stay where the CPU has them and they fit.

    Args:
        layout: of the run.
        most: ranks.
        layers: of the model; None for as many as the layout takes.

    Raises:
        PlanError: when there is none of two and more ranks.
    """
    plain = dataclasses.replace(layout, precision="float64", offload="none", compile=False)
    for degrees in _fewer(layout.degrees, most):
        for choices in _choices(plain, degrees):
            try:
                few = choices.with_degrees(degrees)
                check(few, "cpu", layers_needed([few]) if layers is None else layers)
                if few.batch_unit <= 32:
                    return few
            except PlanError:
                continue
    raise PlanError(f"no layout of at most {most} ranks is like {layout}; meshwright verify proves it on more ranks")


def _fewer(degrees: Mapping[str, int], most: int) -> list[dict[str, int]]:
    """Degrees of two to ``most`` ranks, the most like ``degrees`` first: axes in use, then ranks."""
    options = [
        sorted({size for size in (1, 2, *range(3, min(degree, most) + 1)) if degree % size == 0 or size == 2})
        for degree in degrees.values()
    ]
    found = [dict(zip(degrees, sizes)) for sizes in itertools.product(*options)]
    fitting = [one for one in found if 1 < world_size(one) <= most]
    return sorted(fitting, key=lambda one: (_in_use(one), world_size(one), math.prod(one.values())), reverse=True)


def _in_use(degrees: Mapping[str, int]) -> int:
    return sum(1 if name in row_axes(Holds.COPY) else 2 for name, degree in degrees.items() if degree > 1)


def _choices(layout: Layout, degrees: Mapping[str, int]) -> Iterator[Layout]:
    """Yields the layout with fewer micro-batches, and then with less and less of what may not fit fewer ranks."""
    pipeline, mode = degrees.get(layout.axis(Mechanics.STAGES), 1), layout.recompute.mode
    counts = [min(layout.microbatches, 2 * pipeline)] + [layout.microbatches, 4 * pipeline] * (pipeline > 1)
    tried = itertools.product(
        (layout.recompute, Recompute(mode, 1 if layout.recompute else 0)),
        (layout.rows, BatchShares()),
        (layout.split, StageSplit()),
        ((layout.schedule, layout.stages), ("", 0)),
        counts,
    )
    for recompute, rows, split, (schedule, stages), count in dict.fromkeys(tried):
        yield dataclasses.replace(
            layout,
            microbatches=count,
            recompute=recompute,
            rows=rows,
            split=split,
            schedule=schedule,
            stages=stages,
        )
