"""``meshwright verify RUN|RECIPE``: proves a whole job, through its data, schedule, evaluation and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.arguments import answer, read_config, say, take_flag, take_value
from meshwright.cli.inputs import CONFIG, PLAN, prepared, refuse_code, run_config, text_config
from meshwright.errors import ConfigError
from meshwright.launch.preload import prepare_environment
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.run_config import RunConfig

if TYPE_CHECKING:
    from meshwright.models.build import BuiltModel
    from meshwright.models.config import ModelConfig
    from meshwright.proof.job import JobCase, JobVerdict

PASSED, FAILED, REFUSED = 0, 1, 2
"""Exit statuses: every job equals the plain loop; one doesn't; one couldn't run (and none failed)."""
ROWS, TOKENS = 8, 1024
"""Fewest rows of the proof's batch, and most tokens of its rows, unless ``--full``: what a CPU can do in float64."""
USAGE = """usage: meshwright verify RUN|RECIPE.toml [--layout LAYOUT ...] [--full] [--steps N] [--json] [FLAGS]

Proves a run's directory or a recipe: its text, rows, length, optimizer, schedule and loss train under each layout, are
evaluated, saved, and resumed under the next layout as a plain loop on one device trains, in float64 to 1e-9.

  --layout     layouts, each resumed under the one after it and the last under the first; one alone is resumed on one
               device and taken up from one; the run's own when none is named
  --full       the model as it is, all rows and tokens, instead of a small clone
  --steps      optimizer steps, half under each of two layouts; 6 by default
  --timeout-s  limit for each run, in seconds; 600 by default
  FLAGS        with a recipe: those of meshwright train, over it
"""


def run(argv: Sequence[str]) -> int:
    """Proves and prints a line a pair of layouts, or JSON; see `PASSED`, `FAILED`, `REFUSED` for the exit status."""
    words = list(argv)
    if "--help" in words or "-h" in words:
        answer(USAGE)
        return PASSED
    as_json, full = take_flag(words, "--json"), take_flag(words, "--full")
    trust = take_flag(words, "--trust")
    steps, limit = take_value(words, "--steps") or "6", take_value(words, "--timeout-s") or "600"
    if not steps.isdigit() or int(steps) < 2 or int(steps) % 2:
        raise ConfigError(f"--steps {steps}: half of them run under each layout; give an even number from 2 on")
    try:
        limit_s = float(limit)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < math.inf:
        raise ConfigError(f"--timeout-s {limit}: give seconds above 0")
    named = _take_layouts(words)
    config, layouts = _job_and_layouts(words, named, trust)
    prepare_environment()
    from meshwright.proof.job import verify_job

    case, what = _case(config, layouts, full, int(steps), limit_s)
    pairs = _pairs([dataclasses.replace(layout, precision="float64") for layout in layouts])
    if not as_json:
        say(what)
    verdicts = verify_job(case, pairs, None if as_json else show)
    passed = all(verdict.passed for verdict in verdicts)
    if as_json:
        report = {"passed": passed, "proven": what, "jobs": [verdict.to_json() for verdict in verdicts]}
        answer(json.dumps(report, indent=2))
    else:
        say("PASS" if passed else "FAIL")
    if any(not verdict.passed and not verdict.refused for verdict in verdicts):
        return FAILED
    return PASSED if passed else REFUSED


def show(verdict: JobVerdict) -> None:
    """Prints what came of one pair of layouts."""
    what = f"{verdict.layout} -> {verdict.resumed}"
    if verdict.refused:
        say(f"  refused  {what}: {verdict.refused}")
        return
    numbers = "  ".join(f"{name} {error:.1e}" for name, error in verdict.errors.items())
    say(f"  {'pass' if verdict.passed else 'FAIL':<8} {what}\n           {numbers}  worst {verdict.worst}")


def _take_layouts(words: list[str]) -> list[str]:
    """Removes ``--layout A B ...`` and returns the layouts."""
    if "--layout" not in words:
        return []
    first = words.index("--layout")
    end = next((at for at in range(first + 1, len(words)) if words[at].startswith("--")), len(words))
    named = words[first + 1 : end]
    if not named:
        raise ConfigError("--layout needs a value")
    del words[first:end]
    return named


def _job_and_layouts(words: list[str], named: Sequence[str], trust: bool) -> tuple[RunConfig, list[Layout]]:
    """Returns the config of the run or recipe and the layouts to prove it under."""
    path = Path(words[0])
    own = ""
    if path.is_dir():
        if len(words) > 1:
            raise ConfigError(f"{words[1]}: a run is proven as it is; flags go with a recipe")
        config = run_config(path)
        refuse_code(path, config, trust)
        if (path / PLAN).is_file():
            own = str(Plan.from_json(json.loads((path / PLAN).read_text(encoding="utf-8"))).layout)
    elif path.suffix == ".toml":
        config = read_config(RunConfig, words, "verify")
        own = "" if config.layout == "auto" else config.layout
    else:
        raise ConfigError(f"{path} is neither a run's directory (with {CONFIG}) nor a recipe (.toml)")
    texts = list(named) or ([own] if own else [])
    if not texts:
        raise ConfigError("the recipe leaves the layout to the planner (auto): name layouts with --layout")
    layouts = [Layout.parse(text) for text in texts]
    for layout, text in zip(layouts, named):
        if "precision" in text and layout.precision != "float64":
            raise ConfigError(
                f"--layout {text}: a job is proven in float64; drop precision={layout.precision}, and prove its steps "
                f"within rounding by meshwright verify --model {config.model.name} --layout {text}"
            )
    return config, layouts


def _pairs(layouts: Sequence[Layout]) -> list[tuple[Layout, Layout]]:
    """Each layout is trained under once and resumed under once."""
    if len(layouts) == 1:
        alone = Layout(precision="float64")
        return [(layouts[0], alone), (alone, layouts[0])] if layouts[0] != alone else [(alone, alone)]
    return list(zip(layouts, [*layouts[1:], layouts[0]]))


def _case(config: RunConfig, layouts: Sequence[Layout], full: bool, steps: int, limit_s: float) -> tuple[JobCase, str]:
    """Returns the job to prove and a sentence that says what of the run it leaves out."""
    from meshwright.models.build import build_meta
    from meshwright.proof.job import JobCase, scaled_config

    token_set = prepared(text_config(config.model, config.data), quiet=True)
    scaled, less = scaled_config(config, steps), []
    model = config.model
    if not full and model.kind != "function":
        model, less = _clone(config.model, layouts), ["a small clone of the model"]
    share = math.lcm(*(layout.batch_unit for layout in layouts))
    rows, tokens = config.train.batch, config.data.sequence
    if not full:
        rows, tokens = min(rows, share * max(1, -(-ROWS // share))), min(tokens, TOKENS)
        less += [f"{rows} of {config.train.batch} rows"] if rows < config.train.batch else []
        less += [f"{tokens} of {config.data.sequence} tokens a row"] if tokens < config.data.sequence else []
    scaled = dataclasses.replace(
        scaled,
        model=model,
        train=dataclasses.replace(scaled.train, batch=rows),
        evaluation=dataclasses.replace(scaled.evaluation, rows=rows),
        data=dataclasses.replace(scaled.data, sequence=tokens),
    )

    def build() -> BuiltModel:
        return build_meta(model, vocab=token_set.vocab_size, context=tokens)

    build()
    case = JobCase(config=scaled, build=build, data=token_set.path, timeout_s=limit_s)
    what = f"{config.model.name} on {token_set.path}: {steps} steps of {rows} x {tokens} tokens, float64"
    narrow = sorted({layout.precision for layout in layouts} & {"bf16", "fp16"})
    stands = f"; float64 stands for {' and '.join(narrow)}, in which verify --model proves steps" if narrow else ""
    return case, what + (f"; instead of the run's own: {', '.join(less)} (--full proves all)" if less else "") + stands


def _clone(model: ModelConfig, layouts: Sequence[Layout]) -> ModelConfig:
    from meshwright.models.clone import shrink
    from meshwright.proof.layouts import layers_needed

    return shrink(model, layers_needed(layouts))
