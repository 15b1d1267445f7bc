"""A question to the planner in plain fields with bounds, as the planner's page asks it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.node import standard_node
from meshwright.config import Config
from meshwright.errors import ConfigError, nearest
from meshwright.jobs.plan_model import model_of_sizes
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.closed_form import TableSizes
from meshwright.planner.presets import presets
from meshwright.planner.size_text import TRUTHS
from meshwright.spec.layout_fields import PRECISIONS

BOUNDS: Mapping[str, tuple[int, int]] = {
    "nodes": (1, 4096),
    "per_node": (0, 128),
    "layers": (1, 512),
    "width": (1, 65536),
    "heads": (1, 1024),
    "kv_heads": (0, 1024),
    "head_size": (0, 1024),
    "ffn": (0, 1 << 19),
    "vocab": (1, 1 << 21),
    "experts": (0, 1024),
    "active_experts": (0, 128),
    "expert_ffn": (0, 1 << 17),
    "shared_ffn": (0, 1 << 17),
    "dense_layers": (0, 512),
    "batch": (1, 1 << 17),
    "sequence": (1, 1 << 21),
}
"""Least and largest value of each number; they bound what a question costs together with the limit of time."""
MOST_DEVICES = 16384
"""Largest cluster."""
SIZES = tuple(list(BOUNDS)[2:-2])
"""The numbers that are sizes of the model."""
_OF_EXPERTS = ("active_experts", "expert_ffn", "shared_ffn", "dense_layers")
"""Sizes without a meaning where there are no experts."""
NETWORKS = ("infiniband-", "roce-", "ethernet-", "efa-", "slingshot-", "omnipath-")
"""Beginnings of the names of links between nodes."""
_SWITCHES = (("gated", "true"), ("tied", "false"))
"""Sizes that are true or false, with what they are by default."""
SUPPORTED = ("sizes", "cluster", "batch", "sequence", "precision", "objective", "compile")
"""Settings of `PlanConfig` from which a question can begin."""
CURVE_OCTAVES = range(-3, 3)
"""Numbers of devices of the curve, as powers of two of the question's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion(Config):
    """What to plan: a standard transformer on equal nodes."""

    device: str = "h100"
    """Name in the catalogue."""
    nodes: int = 8
    """Number of nodes."""
    per_node: int = 0
    """Devices of a node; 0 for those of the device's standard node."""
    network: str = ""
    """Link between nodes; the standard node's when empty."""
    layers: int = 32
    """Number of blocks."""
    width: int = 4096
    """D."""
    heads: int = 32
    """H."""
    kv_heads: int = 8
    """K; 0 is H."""
    head_size: int = 0
    """E; 0 is D / H."""
    ffn: int = 14336
    """F; 0 is 4 D."""
    vocab: int = 128256
    """V."""
    experts: int = 0
    """Experts of a block; 0 for a dense model."""
    active_experts: int = 0
    """Experts that a token visits."""
    expert_ffn: int = 0
    """F of an expert."""
    shared_ffn: int = 0
    """F of the shared experts together."""
    dense_layers: int = 0
    """Leading blocks without experts."""
    gated: bool = True
    """Llama's block; else GPT's."""
    tied: bool = False
    """Head and embedding are one weight."""
    batch: int = 256
    """Rows of the global batch."""
    sequence: int = 8192
    """Tokens of a row."""
    precision: str = "bf16"
    """Precision of the layouts."""
    objective: Literal["time", "cost", "energy"] = "time"
    """What the best has least of."""
    compile: bool = False
    """Plan for compiled layers alone; else for those of a run of the usual number of steps."""

    def check(self) -> None:
        """Refuses what is out of bounds, unknown, or contradicts itself."""
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} = {getattr(self, name)}: it goes from {least} to {most}")
        if self.device not in catalogue.devices() or self.device == "cpu":
            raise ConfigError(f"device = {self.device[:40]}{nearest(self.device[:40], devices())}")
        if self.network and self.network not in networks():
            raise ConfigError(f"network = {self.network[:40]}{nearest(self.network[:40], networks())}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision = {self.precision[:40]}{nearest(self.precision[:40], PRECISIONS)}")
        if self.devices > MOST_DEVICES:
            raise ConfigError(f"{self.devices} devices: this page plans for up to {MOST_DEVICES}; take fewer nodes")
        if self.experts and not (1 <= self.active_experts <= self.experts and self.expert_ffn):
            raise ConfigError(
                f"experts = {self.experts}: active_experts = {self.active_experts} must be from 1 to as many, and "
                f"expert_ffn = {self.expert_ffn} above 0"
            )
        if self.dense_layers > self.layers - bool(self.experts):
            left = " leave none for the experts; give fewer" if self.experts else ""
            raise ConfigError(f"dense_layers = {self.dense_layers} of {self.layers} layers{left}")

    @property
    def node_devices(self) -> int:
        """Devices of a node."""
        return self.per_node or standard_node(self.device).count

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.node_devices

    def config(self) -> PlanConfig:
        """Returns the same request to ``meshwright plan``."""
        return PlanConfig(
            sizes=self._sizes_text(),
            cluster=self._cluster_text(self.nodes),
            batch=self.batch,
            sequence=self.sequence,
            precision=self.precision,
            objective=self.objective,
            compile=self.compile or None,
        )

    def curve_config(self) -> PlanConfig:
        """Returns the request for the best plan of several numbers of devices around the question's."""
        octaves = [self.devices * 2.0**octave for octave in CURVE_OCTAVES]
        counts = [int(count) for count in octaves if count == int(count) and 1 <= count <= MOST_DEVICES]
        # The cluster has as many nodes as the largest number needs.
        nodes = max(self.nodes, -(-counts[-1] // self.node_devices))
        devices = ",".join(map(str, counts))
        return dataclasses.replace(self.config(), cluster=self._cluster_text(nodes), devices=devices)

    def command(self) -> str:
        """Returns the command that answers the same question."""
        config = self.config()
        words = ["--sizes", config.sizes, "--cluster", config.cluster, "--batch", str(self.batch)]
        words += ["--sequence", str(self.sequence), "--precision", self.precision, "--objective", self.objective]
        return shlex.join(["meshwright", "plan", *words, *(["--compile"] if self.compile else [])])

    def _cluster_text(self, nodes: int) -> str:
        text = f"{nodes}x{self.node_devices}x{self.device}"
        return f"{text}@{self.network}" if self.network else text

    def _sizes_text(self) -> str:
        needed = ("layers", "width", "heads", "vocab")
        # Of a dense model the fields of experts mean nothing.
        sizes = [(name, getattr(self, name)) for name in SIZES if self.experts or name not in _OF_EXPERTS]
        pairs = [f"{name}={value}" for name, value in sizes if value or name in needed]
        pairs += [f"{name}={str(getattr(self, name)).lower()}" for name in ("gated", "tied")]
        return ",".join(pairs)

    @classmethod
    def of_config(cls, config: PlanConfig) -> Self:
        """Returns the question that a request asks.

        Raises:
            ConfigError: for settings that the page doesn't have, a model that isn't given by its sizes, or a cluster
                of other than equal nodes of the catalogue.
        """
        default = PlanConfig()
        for field in dataclasses.fields(config):
            if field.name not in SUPPORTED and getattr(config, field.name) != getattr(default, field.name):
                raise ConfigError(
                    f"--serve doesn't take {field.name}: its page begins with {', '.join(SUPPORTED)}; leave it out, or "
                    "plan without --serve"
                )
        fields: dict[str, object] = {}
        if config.sizes:
            fields |= _fields_of_sizes(config.sizes)
        if config.cluster:
            fields |= _fields_of_cluster(config.cluster)
        fields |= {name: getattr(config, name) for name in ("batch", "sequence", "precision", "objective")}
        fields["compile"] = bool(config.compile)
        question = cls.from_dict(fields)
        question.check_all()
        return question


def devices() -> tuple[str, ...]:
    """Returns the accelerators of the catalogue."""
    return tuple(name for name in catalogue.devices() if name != "cpu")


def networks() -> tuple[str, ...]:
    """Returns the catalogue's links between nodes."""
    return tuple(name for name in catalogue.links() if name.startswith(NETWORKS))


def _fields_of_sizes(text: str) -> dict[str, object]:
    """Returns the fields of a model's sizes; those that the text leaves out are those of ``--sizes``."""
    # Parsed by the job, so that a text that can't be is refused in its words.
    model_of_sizes(text)
    pairs = dict(pair.strip().split("=", 1) for pair in text.split(",") if pair.strip())
    if unknown := [name for name in pairs if name not in (*SIZES, "gated", "tied", "name")]:
        known = ", ".join((*SIZES, "gated", "tied"))
        raise ConfigError(f"sizes: the page of --serve has no {unknown[0]}; it has {known}")
    fields: dict[str, object] = {name: int(pairs.get(name, 0)) for name in SIZES}
    return fields | {name: TRUTHS[pairs.get(name, default).lower()] for name, default in _SWITCHES}


def _fields_of_cluster(text: str) -> dict[str, object]:
    """Returns the fields of a cluster's text."""
    cluster = Cluster.parse(text)
    group = cluster.groups[0]
    outside = group.node.outside
    network = outside.name if outside is not None and outside.name in networks() else ""
    fields: dict[str, object] = {"device": group.node.device.name, "nodes": group.count, "per_node": group.node.count}
    if network and network != getattr(standard_node(group.node.device.name).outside, "name", ""):
        fields["network"] = network
    question = PlanQuestion.from_dict(fields)
    question.check_all()
    if len(cluster.groups) > 1 or Cluster.parse(question.config().cluster).groups != cluster.groups:
        raise ConfigError(
            f"cluster = {text}: the page of --serve has equal nodes of the catalogue alone, as 8x8xh100@ethernet-25g; "
            "plan for others without --serve"
        )
    return fields


def page_presets() -> dict[str, dict[str, int | bool]]:
    """Returns the public models that the question's fields describe in full, by name, each with all of its sizes.

    Learned positions and what dropout costs aren't asked on the page; they are under 1 % of these models' parameters.
    """
    asked = {*SIZES, *(name for name, _ in _SWITCHES)}
    left_out = {"name", "positions", "dropout", *asked}
    defaults = {item.name: item.default for item in dataclasses.fields(TableSizes) if item.name not in left_out}
    return {
        name: {size: getattr(preset.sizes, size) for size in (*SIZES, *(switch for switch, _ in _SWITCHES))}
        for name, preset in presets().items()
        if all(getattr(preset.sizes, name) == value for name, value in defaults.items())
    }
