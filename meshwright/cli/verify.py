"""``meshwright verify``: proves for the user's own model that layouts compute what one device computes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from meshwright.cli import verify_job
from meshwright.cli.arguments import answer, read_config, say, take_flag
from meshwright.config import Config
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.launch.devices import found_devices
from meshwright.launch.preload import prepare_environment
from meshwright.models.config import ModelConfig
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

if TYPE_CHECKING:
    from meshwright.models.build import BuiltModel
    from meshwright.proof.compare import Verdict
    from meshwright.proof.verify import Case
    from meshwright.train.feed import MicroBatch

PASSED, FAILED, REFUSED = 0, 1, 2
"""Exit statuses: every layout equals one device; one doesn't; one couldn't run (and none failed)."""
VOCABULARY = 199
"""Tokens of made-up text; a prime, so that no degree divides it."""
LENGTHS = (240, 120, 48, 24)
"""Tokens of long rows, of which the first is taken on which the model runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig(Config):
    """What to prove. Without layouts: every layout of ``devices`` ranks."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="gpt2"))
    """The model; a small clone of it (fewer, narrower layers) unless ``full``."""
    layout: tuple[str, ...] = ()
    """Layouts by text form; several may follow one ``--layout``."""
    devices: int | None = None
    """Number of ranks when no layout is named; None for all GPUs, else all cores."""
    steps: int = 3
    """Optimizer steps that are compared."""
    dtype: Literal["float64", "float32", "bf16", "fp16"] = "float64"
    """Precision of layouts that name none. In float64 nothing but 1e-9 is allowed; in any other what rounding does to
    one plain device, measured (`proof.rounding`)."""
    full: bool = False
    """The model as it is, instead of a small clone."""
    rows: int = 0
    """Rows of the global batch; 0 for the fewest, at least 8, that all layouts divide."""
    sequence: int = 0
    """Tokens of the long rows; 0 for 240, which divides over every degree up to 6, over 8 and over 16, or for the most
    of 120, 48 and 24 on which the model runs."""
    short_sequence: int = 24
    """Tokens of the short rows, with which the long ones take turns; both are trained on from two steps on."""
    allow_whole: bool = False
    """Let a layout pass that left whole what it was asked to split."""
    training: bool = True
    """Training mode. ``false`` proves a model in evaluation mode: one that draws random numbers in training, say."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to take tokens from; made-up tokens when no path is given."""
    timeout_s: float = 600.0
    """Limit for one layout."""

    def check(self) -> None:
        """Refuses counts under one."""
        lengths = self.sequence >= 0 and self.sequence != 1 and self.short_sequence >= 2
        if self.steps < 1 or not lengths or self.rows < 0 or self.timeout_s <= 0:
            raise ConfigError(
                f"verify: steps = {self.steps} must be at least 1, sequence = {self.sequence} 0 or at least 2, "
                f"short_sequence = {self.short_sequence} at least 2, rows = {self.rows} at least 0 and timeout_s = "
                f"{self.timeout_s} above 0"
            )


def run(argv: Sequence[str]) -> int:
    """Proves and prints a table or JSON; see `PASSED`, `FAILED`, `REFUSED` for the exit status."""
    words = list(argv)
    if words and not words[0].startswith("-"):
        return verify_job.run(words)
    if "--loop" in words:
        from meshwright.cli.verify_loop import run_loop

        return run_loop(words)
    as_json = take_flag(words, "--json")
    config = read_config(VerifyConfig, words, "verify")
    prepare_environment()
    config = dataclasses.replace(config, sequence=config.sequence or _longest(config))
    from meshwright.proof.verify import verify

    layouts = _layouts(config)
    named = bool(config.layout)
    if len({layout.precision for layout in layouts}) > 1:
        raise ConfigError("verify compares layouts of one precision; call it once for each")
    case = _case(config, layouts)
    if not as_json:
        say(f"{_what(config)}: {len(layouts)} layouts against one device, {config.steps} steps, {layouts[0].precision}")
        if layouts[0].precision != "float64":
            say("  error<=bound: against float64; the bound is from what rounding does to one plain device")
    width = max(len(str(layout)) for layout in layouts)
    verdicts = verify(case, layouts, None if as_json else lambda verdict: show(verdict, width))
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    # A layout that nobody asked for may be refused; one that was named may not.
    passed = all(verdict.passed or (verdict.refused and not named) for verdict in verdicts) and refused < len(verdicts)
    if as_json:
        answer(json.dumps({"passed": passed, "layouts": [verdict.to_json() for verdict in verdicts]}, indent=2))
    else:
        say(("PASS" if passed else "FAIL") + (f" ({refused} of {len(verdicts)} layouts refused)" if refused else ""))
    if any(verdict.outcome in ("wrong", "crashed") for verdict in verdicts):
        return FAILED
    return PASSED if passed else REFUSED


def show(verdict: Verdict, width: int) -> None:
    """Prints one layout's lines, its name padded to ``width``: the verdict, and what it covers."""
    if verdict.refused or verdict.crashed:
        word = "refused" if verdict.refused else "CRASH"
        say(f"  {word:<8} {verdict.layout}: {verdict.refused or verdict.crashed}")
        return
    word = "pass" if verdict.passed else "FAIL"
    say(f"  {word:<8} {verdict.layout:<{width}}  {_numbers(verdict)}  worst {verdict.worst.name}")
    if verdict.wrong:
        say(f"           {verdict.wrong}")
    if verdict.scope:
        say(f"           {verdict.scope.summary}")


def _numbers(verdict: Verdict) -> str:
    """Each kind's error; outside of float64 with the bound that it was held against, ``error<=bound`` or ``>``."""
    from meshwright.proof.compare import KINDS

    errors = (verdict.loss_error, verdict.grad_error, verdict.grad_norm_error, verdict.weight_error)
    told = []
    for kind, error in zip(KINDS, errors):
        bound = verdict.bounds.get(kind)
        sign = "<=" if bound is not None and error <= bound else ">"
        told.append(f"{kind} {error:.1e}" + ("" if bound is None else f"{sign}{bound:.1e}"))
    return "  ".join(told)


def _layouts(config: VerifyConfig) -> list[Layout]:
    from meshwright.models.experts import find_experts
    from meshwright.proof.layouts import all_layouts

    base = Layout(precision=config.dtype)
    if not config.layout:
        experts = find_experts(_built(_model(config, 2), config.sequence).module)
        return all_layouts(found_devices(config.devices).count, base, min((e.experts for e in experts), default=0))
    layouts = [Layout.parse(text) for text in config.layout]
    if config.devices is not None:
        for layout in layouts:
            layout.check_ranks(config.devices)
    return [
        layout if "precision" in text else dataclasses.replace(layout, precision=config.dtype)
        for text, layout in zip(config.layout, layouts)
    ]


def _case(config: VerifyConfig, layouts: Sequence[Layout]) -> Case:
    from meshwright.models.build import build_meta
    from meshwright.proof.layouts import layers_needed
    from meshwright.proof.reference import OptimizerRecipe
    from meshwright.proof.verify import Case

    parts = max(layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS) for layout in layouts)
    model = _model(config, layers_needed(layouts), parts)
    batches, vocab = _batches(config, layouts, model)

    def build() -> BuiltModel:
        return build_meta(model, vocab=vocab, context=config.sequence)

    return Case(
        build=build,
        batches=batches,
        recipe=OptimizerRecipe(),
        timeout_s=config.timeout_s,
        training=config.training,
        allow_whole=config.allow_whole,
        grown=_grows(config),
    )


def _model(config: VerifyConfig, layers: int, parts: int = 2) -> ModelConfig:
    """The model, or a clone that keeps its ratio of heads and every kind of layer beside its neighbours."""
    from meshwright.models.clone import shrink, with_every_kind
    from meshwright.proof.verify import NARROW

    model = config.model
    if config.full or model.kind == "function":
        return model
    small = shrink(model, layers, parts=parts)
    if _grows(config):
        small = shrink(model, layers, width=2 * NARROW * (small.heads or 8), parts=parts)
    return with_every_kind(_built(model, config.sequence), small)


def _grows(config: VerifyConfig) -> bool:
    """Whether the model's sharding table is read off a narrower clone when it is trained; the proof's is then too."""
    from meshwright.models.table import SMALL

    if config.full or config.model.kind == "function":
        return False
    built = _built(config.model, config.sequence)
    return sum(item.numel() for item in built.module.parameters()) > SMALL


def _built(model: ModelConfig, context: int) -> BuiltModel:
    """The model on meta, with the proof's vocabulary unless it has a smaller one of its own."""
    from meshwright.models.build import build_meta

    try:
        return build_meta(model, vocab=None if model.kind == "directory" else VOCABULARY, context=context)
    except ConfigError:
        return build_meta(model, vocab=None, context=context)


def _longest(config: VerifyConfig) -> int:
    """The longest of `LENGTHS` on which the model runs; functions alone are run to find out."""
    from meshwright.models.table import SMALL, clone_of

    for length in LENGTHS[:-1]:
        try:
            built = _built(config.model, length)
        except ConfigError:
            continue  # rows longer than its positions
        elements = sum(item.numel() for item in built.module.parameters())
        if config.model.kind != "function" or elements > SMALL or not clone_of(built).refuses(length):
            return length
    return LENGTHS[-1]


def _what(config: VerifyConfig) -> str:
    whole = config.full or config.model.kind == "function"
    return config.model.name + ("" if whole else ", a small clone of it")


def _batches(config: VerifyConfig, layouts: Sequence[Layout], model: ModelConfig) -> tuple[Sequence[MicroBatch], int]:
    """Returns global batches and their vocabulary: from the user's text, or made up."""
    import torch

    from meshwright.cli.inputs import prepared, text_config
    from meshwright.data.loader import Loader
    from meshwright.proof.verify import made_up_batches
    from meshwright.train.feed import MicroBatch

    share = math.lcm(*(layout.batch_unit for layout in layouts))
    rows = config.rows or share * max(1, -(-8 // share))
    if not config.data.paths:
        built = _built(model, config.sequence)
        vocab = min(built.vocab or VOCABULARY, VOCABULARY)
        return made_up_batches(config.steps, rows, _lengths(config), vocab, _masks(built)), vocab
    token_set = prepared(text_config(config.model, config.data))
    masked = config.data.mask_documents
    loaders = [
        Loader(token_set.train, rows=rows, sequence=length, seed=0, mask_documents=masked)
        for length in _lengths(config)
    ]
    made = []
    for step in range(config.steps):
        batch = loaders[step % len(loaders)].batch(step)
        parts = (torch.from_numpy(item) for item in (batch.tokens, batch.targets, batch.positions))
        made.append(MicroBatch(*parts))
    return made, token_set.vocab_size


def _lengths(config: VerifyConfig) -> tuple[int, ...]:
    """Tokens a row, the run's own first: where one step alone is proven, it is proven on them."""
    return (config.sequence, min(config.sequence, config.short_sequence))


def _masks(built: BuiltModel) -> bool:
    """Whether the model keeps documents of a row apart."""
    from meshwright.models.probe import check_documents

    try:
        check_documents(built)
    except ConfigError:
        return False
    return True
