"""Proves that layouts compute what one device computes: same losses, norms, gradients and weights, on every rank.

The reference is plain PyTorch (`proof.reference`). Under a layout every rank compares its own parts with the
reference's, so a copy that is wrong on one rank alone is found too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import MeshwrightError, PlanError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import BuiltModel, use_float64
from meshwright.models.deferred import retie
from meshwright.models.forward import model_forward
from meshwright.plan import Layout, Plan, Prediction
from meshwright.proof.compare import Verdict, Worst, largest, merged, part_error, relative, scales
from meshwright.proof.reference import Recipe, train_plainly
from meshwright.runtime.build import check
from meshwright.runtime.wide import Wide
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import IGNORED
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper

BOUNDS = {"float64": 1e-9, "float32": 2e-3, "bf16": 0.1}
"""Largest relative error that passes, by precision; only float64 leaves no room for a wrong gradient to hide."""
GROUP_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is proven: a model, and the global batches that it trains on."""

    build: Callable[[], BuiltModel]
    """Makes the model on meta; called once in each process."""
    batches: Sequence[MicroBatch]
    """Global batches, one a step, on the CPU."""
    recipe: Recipe
    """Optimizer."""
    timeout_s: float = 600.0
    """Limit for one layout."""


def verify(case: Case, layouts: Sequence[Layout], done: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """Runs the reference once and each layout after it, on forked ranks of this machine.

    Args:
        case: model and data.
        layouts: all of one precision.
        done: told of each verdict as it is reached.

    Returns:
        One verdict a layout; a layout that can't run is refused, with the reason.
    """
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        path = Path(folder) / "reference.pt"
        wide = layouts[0].precision == "float64"
        _launcher(1, None).run(_reference, case, path, wide, timeout_s=case.timeout_s)
        for layout in layouts:
            verdicts.append(_prove(case, layout, path))
            if done:
                done(verdicts[-1])
    return verdicts


def _launcher(ranks: int, layout: Layout | None) -> ForkLauncher:
    return ForkLauncher(ranks, devices=found_devices(ranks), label=layout.place if layout else None)


def _prove(case: Case, layout: Layout, path: Path) -> Verdict:
    try:
        layout.check_batch(len(case.batches[0].tokens))
        device = found_devices(layout.world).kind
        check(layout, device, len(case.build().anatomy.layers))
    except MeshwrightError as error:
        return _refusal(layout, str(error))
    try:
        ranks = _launcher(layout.world, layout).run(_candidate, case, layout, path, timeout_s=case.timeout_s)
    except PlanError as error:
        return _refusal(layout, str(error))
    return merged(str(layout), ranks, BOUNDS[layout.precision])


def _refusal(layout: Layout, why: str) -> Verdict:
    return Verdict(
        layout=str(layout),
        passed=False,
        loss_error=math.inf,
        grad_error=math.inf,
        grad_norm_error=math.inf,
        weight_error=math.inf,
        worst=Worst(name="", error=math.inf),
        refused=why,
    )


def _reference(context: RankContext, case: Case, path: Path, wide: bool) -> None:
    """Trains plainly on this one rank and writes what it gave."""
    dtype, device = torch.float64 if wide else torch.float32, torch.device(context.device)
    built = case.build()
    if wide:
        use_float64(built.module)
    module = built.module.to_empty(device=device)
    retie(module, built.recipe.ties)
    built.fill_buffers(module, device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Buffers keep their type, as under a layout: tables of angles are float32 in either.
            parameter.data = built.tensor(name).to(device=device, dtype=dtype)

    def forward(part: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        with Wide() if wide else contextlib.nullcontext():
            return model_forward(part, built.anatomy, batch.tokens, batch.positions, batch.positions is not None)

    batches = [_moved(batch, device) for batch in case.batches]
    trace = train_plainly(module, forward, batches, case.recipe)
    found = {"losses": trace.losses, "norms": trace.norms, "gradients": trace.gradients, "weights": trace.weights}
    torch.save(found, path)


def _moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
    places = None if batch.positions is None else batch.positions.to(device)
    return MicroBatch(batch.tokens.to(device), batch.targets.to(device), places)


def _candidate(context: RankContext, case: Case, layout: Layout, path: Path) -> dict[str, Any]:
    """Trains under the layout on this rank and compares its parts with the reference."""
    torch.set_num_threads(1)
    init_group(context, timeout_s=case.timeout_s, group_s=GROUP_S)
    wanted = torch.load(path, map_location="cpu", weights_only=True)
    device = torch.device(context.device)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be proven")
    program = build_program(case.build(), plan, device, random=False)
    recipe = case.recipe
    config = OptimizerConfig(
        lr=recipe.lr,
        beta1=recipe.betas[0],
        beta2=recipe.betas[1],
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
    )
    reader = layout.reader(context.rank)
    optimizer = LocalAdamW(program.weights, config, on_host=layout.offload == "optimizer")
    stepper = Stepper(
        program,
        optimizer,
        LossScaler(layout.precision == "fp16"),
        clip=recipe.clip,
        seed=0,
        reader=reader[0],
    )
    errors: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "gradients": {}, "weights": {}}
    scale = scales(wanted["gradients"])

    def look(factor: torch.Tensor) -> None:
        for weight in program.weights:
            assert weight.gradient is not None
            part = wanted["gradients"][weight.name][tuple(slice(*span) for span in weight.box)]
            found = weight.gradient.cpu().to(torch.float64) * factor.cpu()
            errors["gradients"][weight.name] = part_error(found, part, scale[weight.name])

    stepper.probe = look
    for step, batch in enumerate(case.batches):
        share, targets = _share(batch, reader, layout.microbatches, device), int((batch.targets != IGNORED).sum())
        outcome = stepper.run(step, share, targets, recipe.lr, False).read()
        stepper.probe = None
        errors["loss"] = max(errors["loss"], relative(outcome["loss"], wanted["losses"][step]))
        errors["norm"] = max(errors["norm"], relative(outcome["grad_norm"], wanted["norms"][step]))
    floor = recipe.lr * len(case.batches)
    for weight in program.weights:
        whole = wanted["weights"][weight.name]
        part = whole[tuple(slice(*span) for span in weight.box)]
        errors["weights"][weight.name] = part_error(weight.local.cpu(), part, max(largest([whole]), floor))
    return errors


def _share(batch: MicroBatch, reader: tuple[int, int], micro: int, device: torch.device) -> list[MicroBatch]:
    """Cuts this reader's rows out of a global batch, and those into micro-batches."""
    index, count = reader
    rows = len(batch.tokens) // count
    mine = slice(index * rows, (index + 1) * rows)
    places = [None] * micro if batch.positions is None else list(batch.positions[mine].chunk(micro))
    parts = zip(batch.tokens[mine].chunk(micro), batch.targets[mine].chunk(micro), places)
    return [_moved(MicroBatch(tokens, targets, place), device) for tokens, targets, place in parts]


def all_layouts(ranks: int, base: Layout | None = None) -> list[Layout]:
    """Returns every way to use ``ranks`` ranks over the data axes, with and without accumulation and recompute.

    Args:
        ranks: number of ranks.
        base: choices that all of them share (precision, compile).
    """
    base = base or Layout()
    found: list[Layout] = []
    for shard in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for zero in (1, 2, 3) if shard > 1 else (0,):
            for micro, recompute in ((1, "none"), (2, "none"), (1, "full"), (2, "selective")):
                degrees = {"replicate": ranks // shard, "shard": shard}
                layout = dataclasses.replace(base, degrees=degrees, zero=zero, microbatches=micro, recompute=recompute)
                found.append(layout)
    return found


def made_up_batches(steps: int, rows: int, sequence: int, vocab: int, documents: bool) -> list[MicroBatch]:
    """Makes global batches whose target counts differ by row, so that a count per rank can't pass for a global one.

    Args:
        steps: number of batches.
        rows: rows of each.
        sequence: tokens a row.
        vocab: token ids are below this.
        documents: whether documents begin inside rows.
    """
    made = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 + step)
        stream = torch.randint(0, vocab, (rows, sequence + 1), generator=draw)
        tokens, targets = stream[:, :-1].contiguous(), stream[:, 1:].clone()
        share = torch.linspace(0.0, 0.5, rows).unsqueeze(1)
        targets[torch.rand(rows, sequence, generator=draw) < share] = -100
        positions = None
        if documents:
            begins = torch.rand(rows, sequence, generator=draw) < 2.0 / sequence
            begins[:, 0] = True
            places = torch.arange(sequence).expand(rows, sequence)
            positions = places - torch.where(begins, places, 0).cummax(dim=1).values
        made.append(MicroBatch(tokens, targets, positions))
    return made
