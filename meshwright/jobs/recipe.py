"""The job ``run``: all stages of a recipe in one command; a stage whose result is there already is left out."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.config import check_config
from meshwright.data.prepare import prepared_path
from meshwright.errors import ConfigError
from meshwright.jobs.epochs import with_counted_steps
from meshwright.jobs.export import export
from meshwright.jobs.model_reading import read_model
from meshwright.jobs.nodes import NodeOptions
from meshwright.jobs.prepare import CACHE, prepare, text_config
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.run_directory import PLAN, claim_directory
from meshwright.jobs.train import train
from meshwright.monitor.rundir import RunFiles, read_run
from meshwright.records import parse_json
from meshwright.train.rate import nothing_left
from meshwright.train.run_config import RunConfig
from meshwright.units import format_count

EXPORT, EXPORTED = "export", "export.json"
"""In a run's directory: the exported model, and the step and type that it has."""
_PROOF, _REPORT = "proof.json", "report.html"
ExportType = Literal["float32", "bfloat16", "float16", "as-trained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeStage:
    """A stage of a recipe."""

    name: str
    """``prepare``, ``plan``, ``verify``, ``train``, ``evaluate`` or ``export``."""
    was_done: bool
    """Whether an earlier command had done it, so that this one left it out."""
    summary: str
    """Its result, in a line."""
    path: str
    """File or directory with the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeResult:
    """What became of a recipe."""

    run: str
    """The run's directory."""
    stages: tuple[RecipeStage, ...] = ()
    """Those that have a result, in their order."""
    finished: bool = False
    """Whether all stages are done; else the same command goes on."""
    terminated: bool = False
    """Whether SIGTERM ended training."""
    leads: bool = True
    """Whether this process concluded the run; on other nodes there are no stages."""
    validation_loss: float | None = None
    """In nats a token, over all held-out text; None where nothing is held out, or training isn't finished."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name != "leads"}


def run_recipe(
    config: RunConfig,
    *,
    export_type: ExportType | None = "as-trained",
    nodes: NodeOptions | None = None,
    say: Say = to_stderr,
) -> RecipeResult:
    """Prepares text, plans, verifies, trains, evaluates and exports, each unless its result is there.

    Args:
        config: the run, whose ``run`` names the directory that a repeated command finds its results in.
        export_type: type of the exported weights; None leaves the export out.
        nodes: this node's place, when the same is done on others.
        say: takes a line of progress.

    Raises:
        ConfigError: without ``run``, and as `meshwright.train` and `meshwright.export` raise.
    """
    check_config(config, RunConfig, "config")
    if not config.run:
        raise ConfigError("run: a recipe's stages are found again by their directory; give one with --run DIR")
    config.check_all()
    run_dir, began = Path(claim_directory(config).run), time.time()
    if config.model.kind == "type":
        read_model(config, None, None)  # a wrong name or size is known before text is prepared
    text = text_config(config.model, config.data)
    folder = prepared_path(text, CACHE)
    was_prepared = folder.is_dir()
    token_set = prepare(text, say=say)
    config = with_counted_steps(config, token_set)
    sizes = [format_count(len(split.tokens)) for split in (token_set.train, token_set.validation)]
    summary = f"{sizes[0]} + {sizes[1]} held out tokens, vocabulary {token_set.vocab_size}"
    prepared = RecipeStage(name="prepare", was_done=was_prepared, summary=summary, path=str(folder))
    earlier = read_run(run_dir)
    was_trained, terminated = is_finished(earlier, config), False
    if was_trained:
        final = earlier.final()
        reason = nothing_left(int(final.get("step", 0)), config.train.steps, final.get("scaled_steps"))
        say(f"train: {run_dir}: {reason}")
    else:
        result = train(config, nodes=nodes, say=say)
        if result is None or not result.leads:  # a rank of torchrun other than the first, or a node that doesn't lead
            return RecipeResult(run=str(run_dir), leads=False, finished=result is None or result.finished)
        terminated = result.terminated
    run_data = read_run(run_dir)
    stages = [prepared, *_trained_stages(run_data, earlier.layout, began, was_trained)]
    finished = is_finished(run_data, config)
    if finished and export_type is not None:
        stages.append(_export(run_dir, export_type, say))
    loss = run_data.final().get("validation_loss") if finished else None
    return RecipeResult(
        run=str(run_dir), stages=tuple(stages), finished=finished, terminated=terminated, validation_loss=loss
    )


def is_finished(run_data: RunFiles, config: RunConfig) -> bool:
    """Returns whether a run has been trained to the config's last step, and concluded."""
    return run_data.has_done(config.train.steps)


def _trained_stages(run_data: RunFiles, earlier_layout: str, began: float, was_trained: bool) -> list[RecipeStage]:
    """Returns plan, proof, training and evaluation, as far as they have results.

    Args:
        run_data: of the run.
        earlier_layout: that the run had before the command; empty without one.
        began: time.time() of the command's start.
        was_trained: whether the command trained nothing.
    """
    stages = []
    plan_path, proof_path = run_data.path / PLAN, run_data.path / _PROOF
    if run_data.layout:
        summary = f"{run_data.layout}: {run_data.plan.get('reason', '')}"
        was_planned = run_data.layout == earlier_layout
        stages.append(RecipeStage(name="plan", was_done=was_planned, summary=summary, path=str(plan_path)))
    if proof_path.is_file():
        was_proven = proof_path.stat().st_mtime < began
        outcome = str(_read_json(proof_path).get("outcome", ""))
        stages.append(RecipeStage(name="verify", was_done=was_proven, summary=outcome, path=str(proof_path)))
    if run_data.steps:
        last = run_data.steps[-1]
        summary = f"step {last['step']}, loss {last['loss']:.4f}"
        stages.append(
            RecipeStage(name="train", was_done=was_trained, summary=summary, path=str(run_data.path / _REPORT))
        )
    final = run_data.final()
    if final.get("validation_loss") is not None:
        parts = [f"validation loss {final['validation_loss']:.4f}"]
        if final.get("bits_per_byte") is not None:
            parts.append(f"{final['bits_per_byte']:.3f} bits per byte")
        report = str(run_data.path / _REPORT)
        stages.append(RecipeStage(name="evaluate", was_done=was_trained, summary=", ".join(parts), path=report))
    return stages


def _export(run_dir: Path, export_type: ExportType, say: Say) -> RecipeStage:
    """Exports the newest checkpoint into the run's directory, unless that is there; an older export is replaced."""
    target, record_path = run_dir / EXPORT, run_dir / EXPORTED
    record = _read_json(record_path)
    final_step = int(read_run(run_dir).final().get("step", 0))
    described = f"step {final_step}, {export_type}"
    if target.is_dir() and (record.get("step"), record.get("type")) == (final_step, export_type):
        return RecipeStage(name="export", was_done=True, summary=described, path=str(target))
    # Only what this job wrote is replaced; another directory of that name is refused by the export.
    if record:
        record_path.unlink()
        shutil.rmtree(target, ignore_errors=True)
    # The config is what this command was given, its model's code included.
    result = export(run_dir, target, dtype=export_type, trust=True, say=say)
    record_path.write_text(json.dumps({"step": result.step, "type": export_type}), encoding="utf-8")
    say(f"exported step {result.step} to {target}")
    return RecipeStage(name="export", was_done=False, summary=f"step {result.step}, {export_type}", path=str(target))


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty where there is none."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
