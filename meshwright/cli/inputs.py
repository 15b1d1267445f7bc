"""What several verbs do first: prepared text with progress, a run's config, a model with its shape."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import say
from meshwright.config import read_toml
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.launch.devices import Devices
from meshwright.planner.memory import ModelParts, StateSizes
from meshwright.spec.axis import Mechanics
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
    from meshwright.data.config import DataConfig
    from meshwright.data.tokens import TokenSet
    from meshwright.models.build import BuiltModel
    from meshwright.models.config import ModelConfig
    from meshwright.planner.measured_price import Measure
    from meshwright.spec.layout import Layout
    from meshwright.spec.model_shape import ModelWork
    from meshwright.spec.sharding_table import ShardingTable
    from meshwright.train.model_analysis import ModelAnalysis

CACHE = Path("prepared")
"""Where prepared text is kept unless ``data.cache`` says otherwise."""
CONFIG = "config.toml"
PLAN = "plan.json"


def prepared(config: DataConfig, out: Path | None = None, quiet: bool = False) -> TokenSet:
    """Prepares text, or opens what was prepared before, and says how it goes."""
    from meshwright.data.prepare import prepare, prepared_path

    began, progress = time.monotonic(), None if quiet else _teller()
    folder = out or prepared_path(config, CACHE, progress)
    token_set = prepare(config, folder, progress=progress)
    if not quiet:
        trained, held = (format_count(len(split.tokens)) for split in (token_set.train, token_set.validation))
        size, spent = token_set.vocab_size, format_seconds(time.monotonic() - began)
        say(f"text: {folder}: {trained} + {held} held out tokens, vocabulary {size} ({spent})")
    return token_set


def text_config(model: ModelConfig, data: DataConfig) -> DataConfig:
    """Returns how the text is prepared for a model: a directory's weights know the ids of their own tokenizer alone.

    Raises:
        ConfigError: for another tokenizer than that of the weights without the user's word, or none that is known.
    """
    from meshwright.data.tokenizer import has_tokenizer, same_tokenizer

    folder = Path(model.name).expanduser().absolute()
    own = model.kind == "directory" and has_tokenizer(folder)
    trained = model.kind == "directory" and not model.fresh
    if data.foreign_tokenizer and (not own or not trained or data.tokenizer == "auto"):
        raise ConfigError(
            "data.foreign_tokenizer has no effect: it allows another data.tokenizer than that of a model directory "
            "whose weights are loaded; leave it out"
        )
    if data.tokenizer != "auto":
        if own and trained and not data.foreign_tokenizer and not same_tokenizer(data.tokenizer, str(folder)):
            raise ConfigError(
                f"data.tokenizer = {data.tokenizer!r} is another tokenizer than that of {model.name}, to whose weights "
                "its ids mean other text; leave it out, or set data.foreign_tokenizer = true to train on them anyway"
            )
        return data
    if not own and trained:
        raise ConfigError(
            f"model.name = '{model.name}' has weights and no tokenizer beside them, without which ids mean nothing to "
            "it; add its tokenizer.json, or give data.tokenizer the one it was trained with"
        )
    resolved = data.resolved(str(folder) if own else "")
    resolved.check()
    return resolved


def _teller(every_s: float = 2.0) -> Callable[[Any], None]:
    stage, at = "", time.monotonic()

    def tell(progress: Any) -> None:
        nonlocal stage, at
        now = time.monotonic()
        if progress.stage != stage or now - at >= every_s:
            stage, at = progress.stage, now
            done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
            say(f"text: {progress.stage} {done} of {total}")

    return tell


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """A model on meta with what planning needs of it."""

    built: BuiltModel
    sizes: StateSizes
    fingerprint: str
    """Hash of names, shapes and types of its parameters."""


def read_model(config: RunConfig, vocab: int | None, context: int | None) -> ReadModel:
    """Builds the config's model on the meta device."""
    from meshwright.models.build import build_meta

    built = build_meta(config.model, vocab=vocab, context=context)
    named = [(name, item) for name, item in built.module.named_parameters() if item.requires_grad]
    layers = [
        sum(item.numel() for name, item in named if name.startswith(layer + ".")) for layer in built.structure.layers
    ]
    rows = [(name, list(item.shape), str(item.dtype)) for name, item in built.module.named_parameters()]
    return ReadModel(
        built=built,
        sizes=StateSizes(total=sum(item.numel() for _, item in named), layers=tuple(layers)),
        fingerprint=hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
    )


def model_parts(built: BuiltModel, facts: ModelAnalysis) -> ModelParts:
    """Returns what prices every axis: the model's weights by name, and what a layout knows of them."""
    from meshwright.models.experts import routes_wide

    named = built.module.named_parameters(remove_duplicate=False)
    structure = built.structure
    return ModelParts.of(
        named,
        structure.layers,
        structure.ties,
        facts.table,
        facts.layer_graph,
        facts.experts,
        facts.attention,
        wide_routing=routes_wide(built.module),
    )


def measure_of(built: BuiltModel, sequence: int, precision: str) -> Measure:
    """Returns what runs a model's modules on fake tensors for a layout, once for each size and split.

    Args:
        built: the model on meta.
        sequence: tokens a row.
        precision: of compute.
    """
    import torch

    from meshwright.models.table import sharding_table
    from meshwright.models.work import measure_model

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}.get(precision, torch.float32)

    @functools.cache
    def table(degree: int) -> ShardingTable:
        return sharding_table(built, degree)

    @functools.cache
    def measured(rows: int, degree: int, split: bool) -> ModelWork | None:
        try:
            split_by = table(degree) if degree > 1 else None
            return measure_model(built, rows, sequence, dtype, split_by, degree, split)
        except MeshwrightError:
            return None

    def of(layout: Layout, rows: int) -> ModelWork | None:
        if layout.offload != "none":  # its update isn't the device's, which is what was measured
            return None
        work = measured(rows, layout.degree(Mechanics.MATRICES), layout.sequence)
        return work.compiled() if work is not None and layout.compile else work

    return of


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """What the ranks of a run stand on."""

    devices: Devices
    """Of this node; the others are taken to be alike."""
    ranks: int
    """On all nodes."""
    nodes: int = 1
    """That the ranks stand on."""
    network: str = ""
    """Between them, as a cluster's text has it behind @; the usual one when empty."""

    def fewer(self, ranks: int) -> Machines:
        """Returns what is left for fewer ranks: full nodes, as far as can be."""
        each = -(-self.ranks // self.nodes)
        return dataclasses.replace(self, ranks=ranks, nodes=-(-ranks // each))


def cluster_here(machines: Machines) -> Cluster:
    """Returns the machines of a run as a cluster, with what was measured on them where it was.

    Raises:
        ClusterError: for a GPU or a network that the catalogue doesn't know.
    """
    from meshwright.launch.machine import this_cluster

    each = -(-machines.ranks // machines.nodes)
    devices = dataclasses.replace(machines.devices, count=each)
    found = this_cluster(devices, machines.nodes, machines.network)
    return found if found.devices == machines.ranks else found.restricted(machines.ranks)


def ledger_here(machines: Machines) -> tuple[Path, str]:
    """Returns the file of this machine's runs, and what the machine is called in it.

    What a run took over its price says nothing of prices by another calibration, so the name goes by that too.
    """
    from meshwright.cluster.calibration import machine_key
    from meshwright.launch.machine import calibration_folder, machine_facts
    from meshwright.planner.run_history import NAME

    name = machine_key(machine_facts(machines.devices, machines.ranks, machines.nodes))
    calibrated = calibration_folder() / f"{name}.json"
    if calibrated.is_file():
        name += "-" + hashlib.sha256(calibrated.read_bytes()).hexdigest()[:8]
    return calibration_folder() / NAME, name


def refuse_code(run_dir: Path, config: RunConfig, trust: bool) -> None:
    """Refuses to run the code that a run directory's config names, unless the user said that it is trusted.

    Raises:
        ConfigError: names the function.
    """
    if config.model.kind == "function" and not trust:
        raise ConfigError(
            f"{run_dir / CONFIG} names the function '{config.model.name}' as its model, which would be imported "
            "and called, and could do anything; add --trust if you trust who wrote that directory"
        )


def run_config(run_dir: Path) -> RunConfig:
    """Reads the config of a run directory.

    Raises:
        ConfigError: when the directory holds no run.
    """
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}; give the directory of a run")
    return RunConfig.from_dict(read_toml(run_dir / CONFIG))
