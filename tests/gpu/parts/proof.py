"""What a GPU computes against what the CPU computes: dropout's bits, optimizer, norm, loss, masks, whole steps.

Without a GPU all of it is compared on the CPU with itself, so that the part can be tried anywhere.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from meshwright.models.analysis.logit_map import LogitMap
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import dropout_rng
from meshwright.parallel.block_attention import Segments, attend, attend_backward
from meshwright.parallel.document_attention import document_attention, document_bounds, pack_mask, reference_attention
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.keyed_random import RowBox, dropout_mask, random_fractions, row_keys, uniform
from meshwright.parallel.random_ops import apply_dropout
from meshwright.parallel.weights import named_weights
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import IGNORED, cross_entropy_sums
from meshwright.train.model_analysis import analyse_model
from meshwright.train.noise_scale import small_batch
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper, squared_norm
from tests.gpu.parts.cases import Cases, Result

CPU = torch.device("cpu")


def main() -> int:
    """Compares values, then whole steps.

    ``--dropout``: also dropout's bits, which take 20 s; ``--no-values``: steps alone.
    """
    with_dropout, with_values = "--dropout" in sys.argv, "--no-values" not in sys.argv
    sys.argv = [word for word in sys.argv if word not in ("--dropout", "--no-values")]
    cases = Cases.from_arguments(limit_s=95.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(4)
    cases.tell("device", device=str(device), name=torch.cuda.get_device_name() if device.type == "cuda" else "")
    if with_dropout:
        for dtype in (torch.float32, torch.bfloat16):
            cases.run(f"dropout {dtype}", lambda dtype=dtype: dropout(device, dtype))
        cases.run("dropout of 2^31 elements", lambda: large_dropout(device))
    if with_values:
        values_of(cases, device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    for text in ("precision=float64", "replicate=1"):
        cases.run(f"steps {text}", lambda text=text: steps(device, text))
    return cases.finish()


def values_of(cases: Cases, device: torch.device) -> None:
    """Compares what steps are made of."""
    for kind in ("fused", "foreach", "single"):
        cases.run(f"optimizer {kind}", lambda kind=kind: optimizer(device, kind))
    cases.run("gradient norm", lambda: norm(device))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        cases.run(f"loss {dtype}", lambda dtype=dtype: loss(device, dtype))
        cases.run(f"chunked loss {dtype}", lambda dtype=dtype: chunked_loss(device, dtype))
    cases.run("masks", lambda: masks(device))
    for dtype in (torch.bfloat16, torch.float16):
        cases.run(f"documents {dtype}", lambda dtype=dtype: documents(device, dtype))
        cases.run(f"blocks {dtype}", lambda dtype=dtype: blocks(device, dtype))


def dropout(device: torch.device, dtype: torch.dtype) -> Result:
    """Compares the bits of masks, uniforms and fractions, and of what dropout makes of a tensor."""
    boxes = {
        "some": RowBox(np.arange(7, 600, 3), np.arange(64)),
        "heads": RowBox(np.arange(4 * 256), np.arange(256)),
        "one": RowBox(np.arange(1), np.arange(1)),
        "odd": RowBox(np.array([5, 3, 99991, 2**31 - 1, 2**31, 2**32 - 1]), np.array([0, 2, 4097, 2**32 - 1, 7])),
        "beyond 2^32": RowBox(np.arange(2**32 - 3, 2**32 + 3), np.arange(2**32, 2**32 + 33)),
        "long": RowBox(np.arange(4096), np.arange(1024)),
    }
    differs = {}
    for name, box in boxes.items():
        for row in (2**31 - 2, 2**40):
            keys = row_keys(f"3,1,layer:{name},0", np.arange(row, row + 3))
            for p in (0.1, 1.0):
                wanted, found = (dropout_mask(keys, box, p, where) for where in (CPU, device))
                differs[f"mask {name} {row} {p}"] = count(wanted, found)
                x = torch.linspace(-3, 3, wanted.numel()).view(wanted.shape).to(dtype)
                dropped = apply_dropout(x, wanted, p), apply_dropout(x.to(device), found, p)
                differs[f"dropped {name} {row} {p}"] = count(*dropped)
            for draw in (uniform, random_fractions):
                differs[f"{draw.__name__} {name} {row}"] = count(*(draw(keys, box, where) for where in (CPU, device)))
    wrong = {name: number for name, number in differs.items() if number}
    return {"ok": not wrong, "compared": len(differs), "wrong": wrong}


def count(wanted: torch.Tensor, found: torch.Tensor) -> int:
    """Returns the number of elements that differ."""
    return int((wanted != found.cpu()).sum()) if wanted.shape == found.shape else -1


def large_dropout(device: torch.device) -> Result:
    """Makes a mask of more than 2^31 elements and compares its first and last lines with the CPU's."""
    lines = 2**21 + 5 if device.type == "cuda" else 2**12
    box, keys = RowBox(np.arange(lines), np.arange(1027)), row_keys("0,0,big,0", np.arange(1))
    found = dropout_mask(keys, box, 0.1, device)
    wrong = {}
    for part in (slice(0, 64), slice(lines // 2, lines // 2 + 64), slice(lines - 64, lines)):
        wanted = dropout_mask(keys, RowBox(box.lines[part], box.columns), 0.1, CPU)
        wrong[str(part)] = count(wanted, found[:, part])
    kept = float(found.sum()) / found.numel()
    return {"ok": not any(wrong.values()) and abs(kept - 0.9) < 1e-3, "wrong": wrong, "kept": kept, "of": found.numel()}


def optimizer(device: torch.device, kind: Any) -> Result:
    """Takes steps with changing factors, one of them infinite, on both devices and by plain torch in float64."""
    told: Result = {"ok": True}
    for dtype, bound in ((torch.float32, 3e-6), (torch.float64, 1e-12)):
        found = {where.type: _updated(where, kind, dtype) for where in (CPU, device)}
        wanted = _updated_plainly()
        for where, values in found.items():
            worst = max(relative(a, b) for a, b in zip(wanted, values))
            told[f"{where} {dtype}"] = worst
            told["ok"] &= worst < bound
    return told


FACTORS = (1.0, 0.25, math.inf, 3.0, 0.5)
SHAPES = ((257, 129), (513,), (3, 5, 7), (1,))


def _values(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw).double() for shape in SHAPES]


def _updated(device: torch.device, kind: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    module = nn.Module()
    for number, value in enumerate(_values(0)):
        module.register_parameter(f"p{number}", nn.Parameter(value.to(device, dtype)))
    own = LocalAdamW(named_weights(module, {}, 1), OptimizerConfig(implementation=kind))
    for step, factor in enumerate(FACTORS, 1):
        for parameter, value in zip(module.parameters(), _values(step)):
            parameter.grad = value.to(device, dtype)
        own.step(1e-2, torch.tensor(factor, dtype=torch.float64, device=device))
    return [parameter.detach().cpu().double() for parameter in module.parameters()]


def _updated_plainly() -> list[torch.Tensor]:
    config, parameters = OptimizerConfig(), [nn.Parameter(value) for value in _values(0)]
    groups = [
        {"params": [item for item in parameters if (item.dim() >= 2) is decays], "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
    for step, factor in enumerate(FACTORS, 1):
        for parameter, value in zip(parameters, _values(step)):
            parameter.grad = value * factor
        if math.isfinite(factor):
            plain.step()
    return [parameter.detach() for parameter in parameters]


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the largest difference relative to the largest entry."""
    wanted, found = wanted.detach().double(), found.detach().double().cpu()
    return float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1e-30))


def norm(device: torch.device) -> Result:
    """Sums squares of gradients whose sizes differ by far, in float32, bf16 and float64."""
    told: Result = {"ok": True}
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        draw = torch.Generator().manual_seed(1)
        values = [
            torch.randn(size, generator=draw).mul_(scale).to(dtype) for size, scale in ((5_000_001, 1e-3), (77, 9))
        ]
        wanted = float(sum(value.double().square().sum() for value in values))
        box = SimpleNamespace(copies=1, local_box=None)
        shards: Any = [(SimpleNamespace(boxes=[box]), value.to(device)) for value in values]
        told[str(dtype)] = abs(float(squared_norm(shards, device)) / wanted - 1)
        told["ok"] &= told[str(dtype)] < bound
    return told


def _head(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((300, 64), (5003, 64)))
    targets = torch.randint(0, 5003, (300,), generator=draw)
    targets[::7] = IGNORED
    return hidden.to(dtype), weight.to(dtype) / 4, targets


def _bound(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}[dtype]


def _wanted_loss(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss and the gradients of hidden state and weight, by plain torch in float64."""
    hidden, weight, targets = _head(dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    total = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORED)
    (total * 0.125).backward()
    assert hidden.grad is not None and weight.grad is not None
    return total.detach(), hidden.grad, weight.grad


def loss(device: torch.device, dtype: torch.dtype) -> Result:
    """Compares the loss of logits and its gradients with plain torch in float64."""
    hidden, weight, targets = (x.to(device) for x in _head(dtype))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    scale = torch.tensor(0.125, dtype=torch.float64, device=device)
    own, sums = cross_entropy_sums((hidden @ weight.T).unsqueeze(0), targets.unsqueeze(0), scale)
    own.backward()
    return _compared(dtype, sums, hidden, weight)


def chunked_loss(device: torch.device, dtype: torch.dtype) -> Result:
    """Compares the loss of a head whose logits exist in chunks."""
    hidden, weight, targets = (x.to(device) for x in _head(dtype))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    own, sums = head_cross_entropy_sums(HeadInput(hidden, weight, None), targets, 0.125, 77, LogitMap())
    own.backward()
    return _compared(dtype, sums, hidden, weight)


def _compared(dtype: torch.dtype, sums: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> Result:
    total, of_hidden, of_weight = _wanted_loss(dtype)
    assert hidden.grad is not None and weight.grad is not None
    told = {
        "loss": relative(total, sums[0]), "hidden": relative(of_hidden, hidden.grad),
        "weight": relative(of_weight, weight.grad),
    }  # fmt: skip
    return told | {"ok": max(told.values()) < _bound(dtype), "targets": float(sums[1])}


def _positions(rows: int, tokens: int) -> torch.Tensor:
    positions = random_batches(1, rows, tokens, 100, documents=True)[0].positions
    assert positions is not None
    return positions


def masks(device: torch.device) -> Result:
    """Compares the bounds of documents, and the small batch of the noise scale."""
    positions = _positions(5, 333)
    wanted, found = document_bounds(positions), document_bounds(positions.to(device))
    moved = wanted.to(device)
    targets = torch.arange(16 * 8).view(16, 8)
    batch = MicroBatch(targets, targets, None)
    on_device = MicroBatch(targets.to(device), targets.to(device), None)
    small, other = (small_batch([part], 3, 19)[0].targets for part in (batch, on_device))
    same = torch.equal(wanted.starts, found.starts.cpu()) and torch.equal(wanted.starts, moved.starts.cpu())
    return {
        "ok": same and wanted.longest == found.longest and torch.equal(small, other.cpu()),
        "of": len(wanted.starts),
    }


def documents(device: torch.device, dtype: torch.dtype) -> Result:
    """Compares attention by documents and its gradients with the reference in float64 of the same numbers."""
    told: Result = {"ok": True}
    rows, tokens = 2, 200
    for heads, keys, size, value_size, window in (
        (4, 2, 64, 64, 0),
        (4, 4, 80, 80, 33),
        (6, 2, 20, 20, 7),
        (8, 1, 128, 96, 0),
    ):
        draw = torch.Generator().manual_seed(size)
        shapes = ((heads, size), (keys, size), (keys, value_size), (heads, value_size))
        query, key, value, upstream = (
            torch.randn((rows, count, tokens, width), generator=draw).to(dtype) for count, width in shapes
        )
        mask = pack_mask(document_bounds(_positions(rows, tokens)), window)
        wide = [x.double().requires_grad_() for x in (query, key, value)]
        flat = [x.transpose(1, 2).flatten(0, 1) for x in wide]
        wanted = reference_attention(*flat, mask[:, 0, 0], window, 1 / math.sqrt(size)).unflatten(0, (rows, tokens))
        wanted.backward(upstream.transpose(1, 2).double())
        given = [x.to(device).requires_grad_() for x in (query, key, value)]
        on_device = mask[:, :1, :1].to(device).expand(mask.shape)
        found = document_attention(*given, on_device)
        found.backward(upstream.transpose(1, 2).to(device))
        errors = [relative(wanted, found)] + [relative(a.grad, b.grad) for a, b in zip(wide, given)]  # type: ignore[arg-type]
        told[f"{heads},{keys},{size},{value_size},{window}"] = errors
        told["ok"] &= max(errors) < 2e-2
    return told


def blocks(device: torch.device, dtype: torch.dtype) -> Result:
    """Merges attention over two blocks of keys as a ring does, and compares it and its gradients in float64."""
    told: Result = {"ok": True}
    for heads, keys, size, value_size in ((4, 2, 64, 64), (4, 4, 40, 40), (8, 2, 128, 128), (4, 2, 20, 12)):
        draw = torch.Generator().manual_seed(size)
        shapes = ((96, heads, size), (160, keys, size), (160, keys, value_size), (96, heads, value_size))
        query, key, value, upstream = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
        scale, lengths, earlier = 1 / math.sqrt(size), (60, 36), (40, 24)
        # Keys before the queries', all seen; then the queries' own, causally.
        pieces = (
            (slice(0, 64), Segments(lengths, earlier, (-1, -1))),
            (slice(64, 160), Segments(lengths, lengths, (-1, 0))),
        )
        x = [item.to(device) for item in (query, key, value)]
        parts = [attend(x[0], x[1][run], x[2][run], segments, scale) for run, segments in pieces]
        log_sums = torch.logaddexp(parts[0][1].float(), parts[1][1].float())
        output = sum(part.float() * (sums.float() - log_sums).exp().unsqueeze(-1) for part, sums in parts)
        assert isinstance(output, torch.Tensor)
        grads = [
            attend_backward(
                upstream.to(device), x[0], x[1][run], x[2][run], output.to(dtype), log_sums, segments, scale
            )
            for run, segments in pieces
        ]
        wide = [item.double().requires_grad_() for item in (query, key, value)]
        wanted = _dense_blocks(*wide, lengths, earlier, scale)
        wanted.backward(upstream.double())
        found = [grads[0][0].float() + grads[1][0].float()]
        found += [torch.cat([grads[0][index].float(), grads[1][index].float()]) for index in (1, 2)]
        errors = [relative(wanted, output)] + [relative(a.grad, b) for a, b in zip(wide, found)]  # type: ignore[arg-type]
        told[f"{heads},{keys},{size},{value_size}"] = errors
        told["ok"] &= max(errors) < 2e-2
    return told


def _dense_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any, earlier_lengths: Any, scale: float
) -> torch.Tensor:
    """Computes attention over both blocks of keys, a segment at a time: earlier keys all, own ones causally."""
    outputs, groups = [], query.shape[1] // key.shape[1]
    starts = [0, 0, 64]  # of queries, of earlier keys, of own keys
    for queries, earlier in zip(lengths, earlier_lengths):
        runs = [slice(start, start + size) for start, size in zip(starts, (queries, earlier, queries))]
        starts = [run.stop for run in runs]
        local_key, local_value = (
            torch.cat([x[runs[1]], x[runs[2]]]).transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value)
        )
        scores = query[runs[0]].transpose(0, 1) @ local_key.mT * scale
        seen = torch.cat([torch.ones(queries, earlier), torch.ones(queries, queries).tril()], dim=1).bool()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append((weights @ local_value).transpose(0, 1))
    return torch.cat(outputs)


def steps(device: torch.device, text: str) -> Result:
    """Trains a model with dropout for some steps, several times on both devices, and tells what differs first."""
    found = [trained(where, text) for where in (CPU, CPU, device, device, CPU)]
    curves = [one["curve"] for one in found]
    reference = curves[2]
    worst = [max(abs(a - b) / abs(a) for a, b in zip(reference, curve)) for curve in curves]
    bound = 1e-9 if "float64" in text else 2e-4
    differs = {}
    # In 32 bits a GPU's kernel drops as it draws, without masks to compare; the curve follows from them.
    names = ("weights", "batches", *(["masks"] if "float64" in text else []), "curve")
    for name in names:
        for number, one in enumerate(found):
            pairs = list(zip(found[2][name], one[name]))
            wrong = [index for index, (a, b) in enumerate(pairs) if abs(a - b) > bound * max(abs(a), abs(b))]
            if wrong or len(found[2][name]) != len(one[name]):
                differs[f"{name} {number}"] = [len(pairs), len(wrong), *wrong[:8]]
    told: Result = {"ok": max(worst) < bound and not differs, "worst": worst, "differs": differs, "curve": reference}
    if not told["ok"]:
        told["curves"] = curves
    return told


def trained(device: torch.device, text: str) -> dict[str, list[float]]:
    """Returns the curve: of each step the norm of a small batch before it, its loss and its gradient's norm.

    Beside it what it followed from: sums of the first weights and of each batch, and of each mask its key and size.
    """
    model = build_meta(ModelConfig(name="gpt2", layers=2, width=64, heads=4, dropout=0.3), 199, 48)
    layout = Layout.parse(text)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=1, reason="")
    program = build_program(model, plan, device, facts=analyse_model(model, layout))
    told: dict[str, list[float]] = {"weights": [], "batches": [], "masks": [], "curve": []}
    told["weights"] = [float(weight.local.double().square().sum()) for weight in program.weights]

    def recorded(keys: Any, box: RowBox, p: float, where: torch.device) -> torch.Tensor:
        mask = dropout_mask(keys, box, p, where)
        told["masks"].extend((float(keys[0, 0]), float(mask.sum())))
        return mask

    stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False), 1.0, 0)
    with mock.patch.object(dropout_rng, "dropout_mask", recorded):
        for step, batch in enumerate(random_batches(4, 16, 48, 199, documents=False)):
            told["batches"] += [float(batch.tokens.sum()), float(batch.targets.sum())]
            chunks = zip(
                batch.tokens.to(device).chunk(layout.microbatches), batch.targets.to(device).chunk(layout.microbatches)
            )
            parts = [MicroBatch(*chunk, None) for chunk in chunks]
            told["curve"].append(stepper.part_norm(step, small_batch(parts, 0, 16), 16 * 48)[0])
            values = stepper.run(step, parts, 16 * 48, 1e-3, 0.0).read()
            told["curve"] += [values["loss"], values["grad_norm"]]
    return told


if __name__ == "__main__":
    sys.exit(main())
