"""A model and a loop of one's own under a strategy compute what plain PyTorch computes on one device, in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.strategy import HybridParallelStrategy
from tests.own_models import (
    CLIP,
    STEPS,
    VOCAB,
    Batch,
    equal,
    gpt2,
    mean_loss,
    mixtral,
    output,
    perceptron,
    plain_model,
    plainly,
    rows,
    world,
    wrapped,
)
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks
from tests.tiers import further


def own_loop(
    _rank: int, text: str, make: Callable[[], nn.Module], batches: list[Batch], **options: Any
) -> tuple[list[float], list[float]]:
    """The same with a strategy, in two micro-batches."""
    strategy = HybridParallelStrategy(text, split_vocabulary=options.pop("split_vocabulary", False))
    model = strategy.shard(make(), **options)
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-2)
    index, count = strategy.reader
    losses, norms = [], []
    for x, y in batches:
        total = torch.zeros(())
        for number, (mine, wanted) in enumerate(zip(x.chunk(count)[index].chunk(2), y.chunk(count)[index].chunk(2))):
            with strategy.accumulate() if number == 0 else contextlib.nullcontext():
                loss = mean_loss(output(model, mine), wanted) / 2
                loss.backward()
            total = total + loss.detach()
        norms.append(float(strategy.clip_grad_norm_(CLIP)))
        with torch.no_grad():
            output(model, x[:1])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(total))
    # What is dropped leaves no weights behind, whatever hooks they have.
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del strategy, model, optimizer, loss, total
    gc.collect()
    assert weights and not [weight for weight in weights if weight() is not None]
    return losses, norms


@pytest.mark.parametrize(
    ("make", "text"),
    further(
        [
            (plain_model, "replicate=2"),
            (plain_model, "shard=2,zero=1"),
            (plain_model, "shard=2,zero=3,recompute=full"),
            (plain_model, "replicate=2,tp=2"),
            (gpt2, "shard=2,tp=2"),
            (wrapped, "tp=2"),
            (wrapped, "shard=2,zero=3"),
            (mixtral, "replicate=2,shard=2,tp=2,ep=2"),
        ],
        (2, 4, 5),
    ),
)
def test_a_loop_of_ones_own_equals_one_device(make: Callable[[], nn.Module], text: str) -> None:
    equal(run_ranks(world(text), own_loop, text, make, rows(), timeout=250), plainly(make, rows()))


def test_any_module_is_split_by_an_example() -> None:
    batches = rows(5, 6)
    batches = [(x, y[:, None].expand(-1, 5).contiguous()) for x, y in batches]
    work = functools.partial(own_loop, example=batches[0][0])
    equal(run_ranks(2, work, "tp=2", perceptron, batches), plainly(perceptron, batches))


def uneven_rows(_rank: int) -> None:
    strategy, stepping = HybridParallelStrategy("tp=2,sequence=true"), HybridParallelStrategy("tp=2,sequence=true")
    model, x = strategy.shard(gpt2()), rows()[0][0][:, :7]
    stepping.shard(gpt2(), loss=mean_loss)
    for call in (lambda: model(x), lambda: torch.no_grad()(model)(x), lambda: stepping.step((x, x))):
        with pytest.raises(MeshwrightError, match=r"rows of 7 tokens .* nearest that works: rows of 6 or 8 tokens"):
            call()
    output(model, x[:, :6]).sum().backward()


def test_rows_whose_tokens_do_not_divide_are_refused() -> None:
    run_ranks(2, uneven_rows)


def split_vocabulary_loop(_rank: int, text: str, batches: list[Batch]) -> tuple[list[float], list[float]]:
    strategy = HybridParallelStrategy(text, split_vocabulary=True)
    model = strategy.shard(gpt2())
    index, count = strategy.reader
    losses, norms = [], []
    for x, y in batches:
        loss = strategy.loss(output(model, x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        losses.append(strategy.mean(loss))
        norms.append(float(strategy.grad_norm()))
        model.zero_grad()
    return losses, norms


def split_logits_uses(_rank: int) -> None:
    strategy = HybridParallelStrategy("tp=2", split_vocabulary=True)
    model = strategy.shard(gpt2())
    (x, y), *_ = rows()
    logits = output(model, x)
    flat = (logits[:, 1:] / 0.5).float().reshape(-1, logits.shape[-1])
    assert torch.isfinite(strategy.loss(flat, y[:, 1:].flatten()))
    uses: dict[str, Callable[[], object]] = {
        "log_softmax": lambda: logits.log_softmax(-1),
        "cross_entropy": lambda: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
        "argmax": lambda: logits[:, -1].argmax(-1),
        "logsumexp": lambda: logits.detach().logsumexp(-1),
        "__getitem__": lambda: logits[..., 3],
        "chunk": lambda: logits.chunk(2, dim=-1),
        "mul": lambda: logits * logits,
        "transpose": lambda: logits.transpose(1, 2),
    }
    with pytest.raises(ConfigError, match=r"labels= under tp with split_vocabulary=True: each rank has 2[67] columns"):
        model(x, labels=x)
    for name, use in uses.items():
        with pytest.raises(ConfigError, match=rf"{name}\(\) of logits under tp .* alone, which strategy\.loss"):
            use()


def test_what_a_loop_computes_of_split_logits_by_itself_is_refused() -> None:
    run_ranks(2, split_logits_uses)


def test_the_loss_of_split_logits_is_the_mean_over_all_targets() -> None:
    uncounted = torch.arange(64).view(8, 8) % 7 < torch.arange(8)[:, None] // 2
    batches = [(x, y.masked_fill(uncounted, -100)) for x, y in rows()]
    wanted: tuple[list[float], list[float]] = ([], [])
    for x, y in batches:
        model = gpt2()
        loss = mean_loss(output(model, x), y)
        loss.backward()
        wanted[0].append(loss.item())
        wanted[1].append(float(nn.utils.get_total_norm([item.grad for item in model.parameters()])))
    equal(run_ranks(4, split_vocabulary_loop, "replicate=2,tp=2", batches), wanted)


def built_by_function(_rank: int, text: str) -> tuple[float, int]:
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(lambda: PlainModel(VOCAB, 12, 2), seed=5)
    index, count = strategy.reader
    x, y = rows()[0]
    mean_loss(model(x.chunk(count)[index]), y.chunk(count)[index]).backward()
    return float(strategy.grad_norm()), strategy.bytes


def test_a_recorded_model_has_the_same_weights_under_every_layout() -> None:
    (alone, whole), *_ = run_ranks(1, built_by_function, "replicate=1")
    for norm, held in run_ranks(2, built_by_function, "shard=2"):
        assert norm == pytest.approx(alone, rel=1e-5)
        assert held == pytest.approx(whole / 2, rel=0.05)


def dropped_out(rank: int) -> list[float]:
    torch.manual_seed(rank)
    strategy = HybridParallelStrategy("tp=2")
    made = gpt2()
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    torch.manual_seed(rank)
    model, x = strategy.shard(made.train()), rows()[0][0]
    return [float(output(model, x).sum().detach()) for _ in range(2)]


def test_ranks_that_read_the_same_rows_draw_the_same_dropout() -> None:
    first, second = run_ranks(2, dropped_out)
    assert first == pytest.approx(second, rel=1e-12)
    assert first[0] != pytest.approx(first[1], rel=1e-6)


def train_and_save(_rank: int, text: str, folder: Path) -> None:
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(gpt2())
    matrices = [item for item in model.parameters() if item.dim() > 1]
    others = [item for item in model.parameters() if item.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = strategy.optimizer(torch.optim.AdamW, groups, lr=1e-2)
    for step, (x, y) in enumerate(rows()):
        if step == STEPS - 1:
            dcp.save(strategy.state_dict(optimizer), checkpoint_id=folder)
        index, count = strategy.reader
        mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(strategy.state_dict(optimizer), checkpoint_id=folder / "last")


def load_and_train(_rank: int, text: str, folder: Path) -> None:
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(gpt2())
    decayed = [{"params": [item], "weight_decay": 0.01 if item.dim() > 1 else 0.0} for item in model.parameters()]
    optimizer = strategy.optimizer(torch.optim.AdamW, decayed, lr=1e-2)
    dcp.load(strategy.state_dict(optimizer), checkpoint_id=folder)
    x, y = rows()[-1]
    index, count = strategy.reader
    mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index]).backward()
    optimizer.step()
    dcp.save(strategy.state_dict(optimizer), checkpoint_id=folder / "again")


def test_a_checkpoint_of_one_layout_goes_on_under_another_and_without_any(tmp_path: Path) -> None:
    run_ranks(4, train_and_save, "shard=2,tp=2", tmp_path)
    run_ranks(2, load_and_train, "replicate=2", tmp_path)
    states = []
    for name in ("last", "again"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        states.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)
    model = gpt2()
    model.load_state_dict(states[0]["model"])
    assert float(states[0]["optimizer"]["step"]["transformer.wpe.weight"]) == STEPS


def refused(_rank: int, text: str, make: Callable[[], Any]) -> str:
    try:
        HybridParallelStrategy(text).shard(make())
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cp=2", "use tp with sequence=true"),
        ("replicate=2,microbatches=2", "strategy.accumulate"),
        ("shard=2,precision=fp16", "precision=bf16"),
        ("replicate=4", "there are 2 ranks"),
    ],
)
def test_layouts_that_no_loop_of_ones_own_can_run(text: str, why: str) -> None:
    assert all(why in error for error in run_ranks(2, refused, text, plain_model))


def test_models_whose_weights_are_nowhere_or_differ() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return PlainModel(VOCAB, 12, 2)

    def differing() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return PlainModel(VOCAB, 12, 2)

    assert all("is on meta" in error for error in run_ranks(2, refused, "replicate=2", on_meta))
    assert all("other weights" in error for error in run_ranks(2, refused, "replicate=2", differing))
    halves = functools.partial(lambda: plain_model().bfloat16())
    assert all("precision=bf16" in error for error in run_ranks(2, refused, "replicate=2", halves))
    assert all("needs" in error or "example=" in error for error in run_ranks(2, refused, "tp=2", perceptron))


def from_one_rank(_rank: int) -> float:
    torch.manual_seed(dist.get_rank())
    strategy = HybridParallelStrategy("shard=2")
    model = strategy.shard(PlainModel(VOCAB, 12, 2).double(), from_rank=1)
    x, y = rows()[0]
    with torch.no_grad():
        return float(mean_loss(model(x), y))


def test_weights_of_one_rank_are_sent_to_all() -> None:
    torch.manual_seed(1)
    x, y = rows()[0]
    wanted = float(mean_loss(PlainModel(VOCAB, 12, 2).double()(x), y).detach())
    assert run_ranks(2, from_one_rank) == pytest.approx([wanted, wanted], rel=1e-12)


class Wrapped(nn.Module):
    """Returns an object that torch doesn't know, or nothing."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.inner, self.empty = plain_model(), empty

    def forward(self, tokens: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=None if self.empty else self.inner(tokens))


def wrapped(_rank: int) -> tuple[float, str]:
    strategy, blind = HybridParallelStrategy("replicate=2"), HybridParallelStrategy("replicate=2")
    model, index = strategy.shard(Wrapped(False)), strategy.reader[0]
    x, y = rows()[0]
    mean_loss(model(x.chunk(2)[index]).logits, y.chunk(2)[index]).backward()
    try:
        blind.shard(Wrapped(True))(x)
    except ConfigError as error:
        return float(strategy.grad_norm()), str(error)
    return 0.0, ""


def test_gradients_are_followed_through_any_output_or_refused() -> None:
    norm = plainly(plain_model, rows()[:1])[1][0]
    for found, error in run_ranks(2, wrapped):
        assert found == pytest.approx(norm, rel=1e-9)
        assert "gave a SimpleNamespace without tensors" in error


def in_bf16(_rank: int, text: str) -> tuple[float, float, set[str]]:
    strategy = HybridParallelStrategy(text)
    model, (index, count) = strategy.shard(gpt2().float()), strategy.reader
    x, y = rows()[0]
    loss = mean_loss(output(model, x.chunk(count)[index]).float(), y.chunk(count)[index])
    loss.backward()
    kinds = {str(item.dtype) for item in model.parameters()}
    return strategy.mean(loss), float(strategy.grad_norm()), kinds


def test_bf16_computes_over_float32_weights() -> None:
    (losses, norms) = plainly(gpt2, rows()[:1])
    for loss, norm, kinds in run_ranks(2, in_bf16, "shard=2,precision=bf16"):
        assert loss == pytest.approx(losses[0], rel=1e-2)
        assert norm == pytest.approx(norms[0], rel=5e-2)
        assert kinds == {"torch.float32"}


def strays(_rank: int) -> str:
    strategy = HybridParallelStrategy("replicate=2")
    strategy.shard(plain_model())
    try:
        strategy.optimizer(torch.optim.SGD, list(nn.Linear(2, 2).parameters()), lr=0.1)
    except ConfigError as error:
        return str(error)
    return ""


def test_parameters_of_another_model_are_refused() -> None:
    assert all("isn't one of the sharded model" in error for error in run_ranks(2, strays))


def clipped_by_torch(_rank: int, text: str, make: Callable[[], nn.Module]) -> tuple[list[float], list[float]]:
    strategy = HybridParallelStrategy(text)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = strategy.shard(model, optimizer)
    index, count = strategy.reader
    losses, norms = [], []
    for x, y in rows():
        loss = mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    return losses, norms


def norms_of_results(_rank: int, text: str, make: Callable[[], nn.Module]) -> dict[str, list[tuple[float, ...]]]:
    strategy = HybridParallelStrategy(text)
    model = make()
    model, optimizer = strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.5))
    index, count = strategy.reader
    x, y = rows()[0]
    mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index]).backward()
    norms, clones, refusals = [], [], 0
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        halves = torch._foreach_mul([gradient], 0.5)
        norms.append(
            (
                float(gradient.norm()),
                4 * float((gradient / 4).norm()),
                float(torch.linalg.vector_norm(2.0 * gradient)) / 2,
                2 * float(torch.norm(input=halves[0])),
                float((gradient - 3 * gradient).norm()) / 2,
                float((gradient - gradient).norm(float("inf"))),
            )
        )
        clones.append(gradient.clone())
        if not isinstance(gradient, DTensor):
            # The plain tensor stands first: what it gives is a shard too, whose sum is no sum of the gradient.
            with contextlib.suppress(ConfigError):
                (torch.ones(gradient.shape, dtype=gradient.dtype) * gradient).sum()
                refusals -= 1
            refusals += 1
    optimizer.zero_grad()
    kept = [(float(clone.norm()),) for clone in clones]
    return {"norms": norms, "kept": kept, "refusals": [(float(refusals),)]}


@pytest.mark.parametrize("text", further(["shard=2,tp=2", "replicate=2,tp=2", "shard=2,zero=3"]))
def test_norms_of_what_is_computed_from_gradients_are_their_own(text: str) -> None:
    for result in run_ranks(world(text), norms_of_results, text, gpt2, timeout=250):
        for (norm, *same, zero), (kept,) in zip(result["norms"], result["kept"], strict=True):
            assert norm > 0 and zero == 0.0
            assert [*same, kept] == pytest.approx([norm] * 5, rel=1e-12)
        assert result["refusals"][0][0] > 0 or "shard" in text


@pytest.mark.parametrize(
    ("make", "text"),
    further(
        [(gpt2, "shard=2,tp=2"), (mixtral, "replicate=2,shard=2,zero=2,ep=2"), (mixtral, "shard=2,tp=2,ep=4")], (1,)
    ),
)
def test_torch_clips_parts_of_several_meshes(make: Callable[[], nn.Module], text: str) -> None:
    """DTensors of two meshes, tensor parallel parts and experts have one norm, that of one device."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted: tuple[list[float], list[float]] = ([], [])
    for x, y in rows():
        with Float64Ops():
            loss = mean_loss(output(model, x), y)
            loss.backward()
        wanted[0].append(loss.item())
        wanted[1].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    equal(run_ranks(world(text), clipped_by_torch, text, make, timeout=250), wanted)


def stepped(_rank: int, text: str, batches: list[Batch]) -> list[float]:
    strategy = HybridParallelStrategy(text)
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    strategy.shard(model, optimizer, loss=mean_loss, microbatches=2, clip=CLIP)
    index, count = strategy.reader
    return [strategy.step((x.chunk(count)[index], y.chunk(count)[index])) for x, y in batches]


@pytest.mark.parametrize("text", ["pp=2", "replicate=2", "pp=2,tp=2"])
def test_one_object_runs_every_dim(text: str) -> None:
    wanted = plainly(plain_model, rows())[0]
    for losses in run_ranks(world(text), stepped, text, rows()):
        assert losses == pytest.approx(wanted, rel=1e-9)


def meshes(_rank: int) -> list[str]:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    nameless = init_device_mesh("cpu", (2, 2))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    sharded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    makers: list[Callable[[], Any]] = [
        lambda: HybridParallelStrategy(named),
        lambda: HybridParallelStrategy(device_mesh=sharded, zero=2),
        lambda: HybridParallelStrategy(data_parallel_dim=named["dp"], tensor_parallel_dim=named["tp"]),
        lambda: HybridParallelStrategy(device_mesh=named, data_parallel_dim="dp", tensor_parallel_dim="tp"),
        lambda: HybridParallelStrategy(data_parallel_dim=2, tensor_parallel_dim=2, pipeline_parallel_size=1),
        lambda: HybridParallelStrategy(nameless),
        lambda: HybridParallelStrategy(turned),
        lambda: HybridParallelStrategy(tensor_parallel_dim=named),
        lambda: HybridParallelStrategy(tensor_parallel_dim="tq", device_mesh=named),
        lambda: HybridParallelStrategy(),
        lambda: HybridParallelStrategy("tp=4", data_parallel_dim=2),
        lambda: HybridParallelStrategy(4),  # type: ignore[arg-type]
        lambda: HybridParallelStrategy(data_parallel_dim=3),
    ]
    found = []
    for make in makers:
        try:
            found.append(str(make().layout))
        except MeshwrightError as error:
            found.append(str(error))
    return found


def test_meshes_and_dims_are_layouts_or_refused() -> None:
    words = [
        *("replicate=2,tp=2", "shard=2,tp=2,zero=2", "replicate=2,tp=2", "replicate=2,tp=2", "replicate=2,tp=2"),
        *("dims without names", "order the mesh's dims as (pp, replicate, shard", "give one of them", "'tq' is no dim"),
        *("give one of: a layout", "give one of: a layout", "layout is a int", "there are 4 ranks"),
    ]
    for found in run_ranks(4, meshes):
        for text, word in zip(found, words, strict=True):
            assert word in text
