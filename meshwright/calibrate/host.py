"""Measures the runtime's host time beside operators and collectives: Python, autograd, FSDP hooks, pipeline actions.

A model of tiny operators runs under a few layouts. The processor time of its steps beyond the measured times of its
operators is the host's, and is divided by the number of operators, FSDP units or pipeline actions. Processor time
includes neither other programs nor waiting for other ranks. A GPU is done with such operators before the next comes, so
that there all of a step's time is the host's.

Of a GPU's host it also times what state that is offloaded to it costs there: an update and a norm, on all cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from meshwright.calibrate.compute import ADAMW
from meshwright.calibrate.practice import practise_parts
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.host import HOST_WEIGHTS, NORM, UPDATE
from meshwright.errors import MeshwrightError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.planner.cost.operators import operator_s
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork, Operator
from meshwright.torch_compat.tensors import fused_adamw_
from meshwright.train.model_analysis import analyse_model, check_shapes
from meshwright.train.step import norms_by_row

TINY = ModelConfig(name="llama", layers=2, width=32, heads=2, ffn=64, vocab=64, context=8)
FEW, MANY = 2, 10
"""Layers of the two models: the difference between their times is that of layers."""
STEPS, MICROBATCHES = 12, 8
LIMIT_S = 60.0
OFFLOADED = (8, 1 << 22)
"""Tensors of offloaded state, and elements of each: half a gigabyte of it, which no cache holds, in matrices of a usual
size."""
REPEATS = 5
"""How often an update and a norm of them are timed; the fastest counts."""

PartSeconds = dict[str, float]
"""Seconds of a step by part, with ``rest`` for everything after backward."""


def host_times(
    calibration: Calibration, devices: Devices, work_of: Callable[[ModelConfig, int], ModelWork]
) -> tuple[tuple[str, float], ...]:
    """Measures (item, seconds) for the calibration's ``host`` table.

    Items are an operator's forward and backward, a micro-batch, a step, a layer of a step, an operator that selective
    recompute inspects, a ZeRO-3 unit in forward and backward, and a pipeline action; on a GPU's host also an update and
    a norm of `HOST_WEIGHTS` weights on all cores.

    Args:
        calibration: times of operators and collectives; with several nodes, each measures its own ranks.
        devices: of this node.
        work_of: (model, rows) to its operators.
    """
    on_gpu = devices.kind == "cuda"
    ranks = 1 if on_gpu else calibration.ranks // calibration.nodes
    rows = MICROBATCHES * ranks
    work = work_of(TINY, MICROBATCHES)
    # Operators of one layer by the calibration, to subtract from what a layer costs.
    forward_operators, backward_operators = _count_operators(work, None if on_gpu else calibration)
    # Two depths of the same model under data parallelism, and the deeper one with selective recompute on.
    plain = f"replicate={ranks}"
    few_layers, many_layers, selective = _fastest_step_parts(
        devices, [(FEW, plain), (MANY, plain), (MANY, f"{plain},recompute=selective")], rows
    )
    # Slope over the number of layers: the cost of one layer, free of a step's constant cost.
    layer_s = {name: max(0.0, (many_layers[name] - few_layers[name]) / (MANY - FEW)) for name in many_layers}
    layer_pass_s = layer_s["forward"] + layer_s["backward"]
    host_seconds = {
        "operator_forward": max(0.0, layer_s["forward"] - forward_operators.seconds) / forward_operators.count,
        "operator_backward": max(0.0, layer_s["backward"] - backward_operators.seconds) / backward_operators.count,
        "microbatch": max(0.0, few_layers["forward"] + few_layers["backward"] - FEW * layer_pass_s),
        "step_layer": layer_s["rest"],
        "step": max(0.0, few_layers["rest"] - FEW * layer_s["rest"]),
    }
    many_pass_s = many_layers["forward"] + many_layers["backward"]
    # Selective recompute repeats a forward; beyond it the time is that of inspecting operators.
    recompute_s = (selective["forward"] + selective["backward"] - many_pass_s) / MANY - layer_s["forward"]
    host_seconds["selective_operator"] = max(0.0, recompute_s) / (2 * forward_operators.count)
    if on_gpu:
        one_rank = ForkLauncher(1, devices=devices.only([0]))
        (offload_s,) = one_rank.run(time_offloaded_state, OFFLOADED, timeout_s=LIMIT_S)
        host_seconds |= offload_s
        return tuple((name, round(seconds, 9)) for name, seconds in host_seconds.items())
    # A node's only rank shares its core with a second one here, which processor time doesn't notice.
    test_ranks = 2 if calibration.nodes > 1 and ranks == 1 else ranks
    if test_ranks > 1:
        # ZeRO-3 beyond plain data parallelism, over all FSDP units: layers and the root.
        (sharded,) = _fastest_step_parts(devices, [(MANY, f"shard={test_ranks},zero=3")], MICROBATCHES * test_ranks)
        host_seconds["shard_unit"] = max(0.0, sharded["forward"] + sharded["backward"] - many_pass_s) / (MANY + 1)
    if test_ranks % 2 == 0:
        layout_text = f"pp=2,replicate={test_ranks // 2},microbatches={MICROBATCHES},schedule=1f1b"
        # A pipeline of two stages: a micro-batch costs each stage half of the layers and two actions.
        (pipelined,) = _fastest_step_parts(devices, [(FEW, layout_text)], MICROBATCHES * test_ranks)
        # A micro-batch on a stage is one forward and one backward action.
        action_pair_s = pipelined["pipeline"] / MICROBATCHES
        host_seconds["action"] = max(0.0, action_pair_s - FEW / 2 * layer_pass_s - host_seconds["microbatch"] / 2) / 2
    return tuple((name, round(seconds * calibration.crowd, 9)) for name, seconds in host_seconds.items())


def time_offloaded_state(context: RankContext, sizes: tuple[int, int]) -> dict[str, float]:
    """Returns seconds of an AdamW update (`UPDATE`) and of a norm (`NORM`) of `HOST_WEIGHTS` weights in host memory.

    Args:
        context: of a rank that has all cores of the node.
        sizes: number of tensors, and elements of each.
    """
    count, elements = sizes
    # As `train.optimizer.LocalAdamW` keeps them: weights and gradients in memory that a device copies from and to.
    pin = context.device != "cpu"
    weights, gradients = ([torch.full((elements,), 1e-3, pin_memory=pin) for _ in range(count)] for _ in range(2))
    moments = [[torch.zeros(elements) for _ in range(count)] for _ in range(2)]
    steps = [torch.ones(()) for _ in range(count)]
    works: dict[str, Callable[[], object]] = {
        UPDATE: lambda: fused_adamw_(weights, gradients, *moments, [], steps, **ADAMW),
        NORM: lambda: [norms_by_row(item) for item in gradients],
    }
    seconds = {}
    for name, work in works.items():
        work()  # The kernel gives the pages out.
        spans = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            work()
            spans.append(time.perf_counter() - began)
        seconds[name] = min(spans) / (count * elements) * HOST_WEIGHTS
    return seconds


@dataclasses.dataclass(frozen=True)
class _Operators:
    """Number of operators in a layer's pass, and their seconds by the calibration."""

    count: int
    seconds: float


def _count_operators(work: ModelWork, calibration: Calibration | None) -> tuple[_Operators, _Operators]:
    """Counts a layer's operators and sums their measured seconds, for forward and backward; 0 without a calibration."""

    def summed(items: list[Operator], backward: bool) -> _Operators:
        if calibration is None:
            return _Operators(len(items), 0.0)
        seconds = sum(operator_s(item, calibration, "float32", True, backward) for item in items)
        return _Operators(len(items), seconds / calibration.crowd)

    return summed(work.layers[0].forward, False), summed(work.layers[0].backward, True)


def _fastest_step_parts(devices: Devices, runs: Sequence[tuple[int, str]], rows: int) -> list[PartSeconds]:
    """Runs the model in some depths under a layout each, of equally many ranks, which are started once.

    Returns:
        Of each run its fastest step's seconds by part, averaged over ranks.
    """
    practice_runs, ranks = [], 0
    for layers, text in runs:
        config, layout = dataclasses.replace(TINY, layers=layers), Layout.parse(text)
        facts = analyse_model(build_meta(config), layout)
        check_shapes(facts, layout, rows, int(config.context or 0))
        practice_runs.append((config, layout, facts))
        ranks = layout.world
    rank_runs = ForkLauncher(ranks, devices=devices.only(range(ranks)) if devices.kind == "cuda" else devices).run(
        practise_parts, practice_runs, rows, STEPS, LIMIT_S, timeout_s=LIMIT_S
    )
    if not rank_runs:
        raise MeshwrightError("no rank answered")
    names = ("forward", "backward", "pipeline", "rest")
    fastest_parts = []
    for rank_steps in zip(*rank_runs):
        fastest_step = min(zip(*rank_steps), key=lambda step: sum(sum(part_seconds.values()) for part_seconds in step))
        fastest_parts.append(
            {
                name: sum(part_seconds.get(name, 0.0) for part_seconds in fastest_step) / len(fastest_step)
                for name in names
            }
        )
    return fastest_parts
