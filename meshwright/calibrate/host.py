"""What the runtime takes beside operators and collectives: Python, autograd, hooks of FSDP, actions of a pipeline.

A model whose operators are next to nothing runs under a few layouts. What its steps compute over the measured times of
its operators is the host's, and goes by how many operators, units or actions there are. It is read in processor time,
which neither other programs nor waiting for other ranks add to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.cluster.calibration import Calibration
from meshwright.errors import MeshwrightError
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.config import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork, Operator

TINY = ModelConfig(name="llama", layers=2, width=32, heads=2, ffn=64, vocab=64, context=8)
FEW, MANY = 2, 10
"""Layers of the model: what grows from one to the other is a layer's."""
STEPS, MICROBATCHES = 12, 8
LIMIT_S = 60.0

Parts = dict[str, float]
"""Seconds of a step by part, and ``rest`` for all after backward."""


def host_times(
    calibration: Calibration, devices: Devices, work_of: Callable[[ModelConfig, int], ModelWork]
) -> tuple[tuple[str, float], ...]:
    """Returns (what, seconds), as the calibration's ``host`` keeps them.

    They are of an operator's forward and backward, a micro-batch, a step, a layer of a step, an operator that selective
    recompute looks at, a unit of ZeRO-3 in a forward and backward, and an action of a pipeline.

    Args:
        calibration: times of operators and collectives; of several nodes, each of which runs its own ranks here.
        devices: of this node.
        work_of: (model, rows) to its operators.
    """
    ranks = calibration.ranks // calibration.nodes
    rows = MICROBATCHES * ranks
    work = work_of(TINY, MICROBATCHES)
    ahead, back = _operators(work, calibration)
    few, many = _run(devices, FEW, f"replicate={ranks}", rows), _run(devices, MANY, f"replicate={ranks}", rows)
    layer = {name: max(0.0, (many[name] - few[name]) / (MANY - FEW)) for name in many}
    passes = layer["forward"] + layer["backward"]
    found = {
        "operator_forward": max(0.0, layer["forward"] - ahead.seconds) / ahead.count,
        "operator_backward": max(0.0, layer["backward"] - back.seconds) / back.count,
        "microbatch": max(0.0, few["forward"] + few["backward"] - FEW * passes),
        "step_layer": layer["rest"],
        "step": max(0.0, few["rest"] - FEW * layer["rest"]),
    }
    both = many["forward"] + many["backward"]
    kept = _run(devices, MANY, f"replicate={ranks},recompute=selective", rows)
    seen = (kept["forward"] + kept["backward"] - both) / MANY - layer["forward"]
    found["selective_operator"] = max(0.0, seen) / (2 * ahead.count)
    # The one rank of a node shares its core with a second for these: what they read is processor time.
    most = 2 if calibration.nodes > 1 and ranks == 1 else ranks
    if most > 1:
        sharded = _run(devices, MANY, f"shard={most},zero=3", MICROBATCHES * most)
        found["shard_unit"] = max(0.0, sharded["forward"] + sharded["backward"] - both) / (MANY + 1)
    if most % 2 == 0:
        text = f"pp=2,replicate={most // 2},microbatches={MICROBATCHES},schedule=1f1b"
        piped = _run(devices, FEW, text, MICROBATCHES * most)
        turn = piped["pipeline"] / MICROBATCHES
        found["action"] = max(0.0, turn - FEW / 2 * passes - found["microbatch"] / 2) / 2
    return tuple((name, round(seconds * calibration.crowd, 9)) for name, seconds in found.items())


@dataclasses.dataclass(frozen=True)
class _Operators:
    """Of a layer's pass: how many, and seconds by the tables."""

    count: int
    seconds: float


def _operators(work: ModelWork, calibration: Calibration) -> tuple[_Operators, _Operators]:
    from meshwright.planner.cost.operators import operator_s

    def summed(items: list[Operator], back: bool) -> _Operators:
        seconds = sum(operator_s(item, calibration, "float32", True, back) for item in items)
        return _Operators(len(items), seconds / calibration.crowd)

    return summed(work.layers[0].forward, False), summed(work.layers[0].backward, True)


def _run(devices: Devices, layers: int, text: str, rows: int) -> Parts:
    """Runs the model under a layout; returns each part of its fastest step, the mean over the ranks."""
    from meshwright.calibrate.practice import practise_parts
    from meshwright.models.build import build_meta
    from meshwright.train.model_analysis import analyse_model, check_shapes

    config, layout = dataclasses.replace(TINY, layers=layers), Layout.parse(text)
    facts = analyse_model(build_meta(config), layout)
    check_shapes(facts, layout, rows, int(config.context or 0))
    ranks = layout.world
    ran = ForkLauncher(ranks, devices=devices.only(range(ranks)) if devices.kind == "cuda" else devices).run(
        practise_parts, config, layout, facts, rows, STEPS, LIMIT_S, timeout_s=LIMIT_S
    )
    if not ran:
        raise MeshwrightError("no rank answered")
    best = min(zip(*ran), key=lambda step: sum(sum(parts.values()) for parts in step))
    names = ("forward", "backward", "pipeline", "rest")
    return {name: sum(parts.get(name, 0.0) for parts in best) / len(best) for name in names}
