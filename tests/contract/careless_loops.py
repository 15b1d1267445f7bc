"""Custom loops as users of DistributedDataParallel, FSDP2 and single devices write them, one habit each.

Each takes a strategy and returns losses, means over this rank's rows. On one device that is `OneDevice`, plain torch.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from meshwright.strategy.one_device import OneDevice
from tests.own_models import VOCAB, Batch, mean_loss, rows
from tests.plain_model import PlainModel

COPIES, SHARDS, SPLIT = "replicate=2", "shard=2", "tp=2"
EVERY = (COPIES, SHARDS, SPLIT)
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
Losses = list[torch.Tensor]


@dataclass(frozen=True)
class Careless:
    """A habit."""

    name: str
    loop: Callable[[Any], Losses]
    refused: dict[str, str] = field(default_factory=dict)
    """Words of the refusal, by the first axis of a layout; equal to one device under the others."""


LOOPS: list[Careless] = []


def careless(refused: str = "", under: tuple[str, ...] = EVERY) -> Callable[[Any], Any]:
    """Lists a loop; ``refused`` are words of the error that it ends in ``under`` some layouts."""

    def listed(loop: Any) -> Any:
        LOOPS.append(Careless(loop.__name__, loop, dict.fromkeys(under, refused) if refused else {}))
        return loop

    return listed


def between(kind: Any, lr: float, own: bool = False, refused: str = "", under: tuple[str, ...] = EVERY, **options: Any):  # type: ignore[no-untyped-def]
    """Lists the usual loop, in which a function of module and optimizer is called between backward and step."""

    def listed(act: Callable[[Any, Any], Any]) -> Any:
        def loop(strategy: Any) -> Losses:
            module, optimizer = sharded(strategy, kind, lr, own, **options)
            return steps(strategy, module, optimizer, lambda: act(module, optimizer))

        loop.__name__ = act.__name__
        return careless(refused, under)(loop)

    return listed


def whole(value: Any) -> Any:
    """A DTensor's values, as users of FSDP2 know to ask for them."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def model() -> nn.Module:
    torch.manual_seed(0)
    return PlainModel(VOCAB, 12, 2).double()


def sharded(strategy: Any, kind: Any = AdamW, lr: float = 1e-2, own: bool = False, **options: Any) -> tuple[Any, Any]:
    """The model, sharded, and an optimizer of torch, or with ``own`` the strategy's."""
    module = strategy.shard(model())
    return module, strategy.optimizer(kind, lr=lr, **options) if own else kind(module.parameters(), lr=lr, **options)


def by_rank(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the vectors."""
    items = list(module.parameters())
    return [item for item in items if item.dim() > 1], [item for item in items if item.dim() < 2]


def shares(strategy: Any) -> list[Batch]:
    """This rank's rows of each batch."""
    index, count = strategy.reader
    return [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]


def updates(batches: list[Batch], loss_of: Callable[[Any, Any], Any], update: Callable[[], Any]) -> Losses:
    """A backward and an update for each batch; nothing clears a gradient."""
    losses = []
    for x, y in batches:
        loss = loss_of(x, y)
        loss.backward()
        update()
        losses.append(loss.detach())
    return losses


def steps(strategy: Any, module: Any, optimizer: Any, act: Callable[[], Any] = lambda: None) -> Losses:
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return mean_loss(module(x), y)

    return updates(shares(strategy), loss_of, lambda: (act(), optimizer.step()))


def trained(strategy: Any, module: Any) -> Losses:
    return steps(strategy, module, AdamW(module.parameters(), lr=1e-2))


def step_and_clear(optimizer: Any) -> Callable[[], Any]:
    return lambda: (optimizer.step(), optimizer.zero_grad())


@careless("made before shard(model)")
def optimizer_before_shard(strategy: Any) -> Losses:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2)
    return steps(strategy, strategy.shard(module), optimizer)


class ListedWeights(nn.Module):
    """Reads its weights from a list, or in a function that has them, where sharding doesn't find them."""

    def __init__(self, in_closure: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        weights = [self.up.weight, self.down.weight]
        self.products = (lambda: weights) if in_closure else weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.products() if callable(self.products) else self.products
        return x + functional.linear(torch.relu(functional.linear(x, up, self.up.bias)), down, self.down.bias)


def listed_weights(strategy: Any, in_closure: bool) -> Losses:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCAB, 16), ListedWeights(in_closure), nn.Linear(16, VOCAB, bias=False))
    return trained(strategy, strategy.shard(module))


@careless("'1.down.weight' is read as it was before shard()")
def weights_in_a_list(strategy: Any) -> Losses:
    return listed_weights(strategy, in_closure=False)


@careless("'1.down.weight' is read as it was before shard()")
def weights_in_a_closure(strategy: Any) -> Losses:
    return listed_weights(strategy, in_closure=True)


for _item in LOOPS[-2:]:  # the trial of a split finds them before a backward does
    _item.refused[SPLIT] = "from a list, a closure or another place than its module"


@careless("is read as it was before shard()")
def penalty_of_weights_from_before(strategy: Any) -> Losses:
    module = model()
    weights = list(module.parameters())
    module = strategy.shard(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_loss(module(x), y) + 0.01 * sum(weight.square().sum() for weight in weights)

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


@careless()
def optimizer_handed_in(strategy: Any) -> Losses:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    module, optimizer = strategy.shard(module, optimizer)
    return steps(strategy, module, optimizer, lambda: optimizer.step() or scheduler.step() or optimizer.zero_grad())


@careless()
def trained_optimizer_handed_in(strategy: Any) -> Losses:
    module = model()
    decayed, others = by_rank(module)
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)
    x, y = rows()[0]
    mean_loss(module(x), y).backward()
    optimizer.step()
    return steps(strategy, *strategy.shard(module, optimizer))


@between(AdamW, 1e-2)
def torch_optimizer_after_shard(_module: Any, _optimizer: Any) -> None:
    pass


@between(SGD, 0.5, momentum=0.9)
def torch_clipping(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5, own=True)
def torch_clipping_of_a_strategy_optimizer(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5, own=True)
def torch_clipping_of_groups(_module: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        clip_grad_norm_(group["params"], 0.1)


@between(SGD, 0.5)
def clipping_by_other_norms(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5, norm_type=1.0)
    clip_grad_norm_(module.parameters(), 0.01, norm_type=float("inf"), foreach=False)


@between(SGD, 0.5)
def clipping_of_values(module: Any, _optimizer: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)


@between(SGD, 0.5)
def clipping_by_hand(module: Any, _optimizer: Any) -> None:
    grads = [item.grad for item in module.parameters()]
    total = sum(float(grad.norm()) ** 2 for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, 0.1 / total))


@between(SGD, 0.5)
def clipping_twice(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5)
    for item in module.parameters():
        item.grad.mul_(3.0)
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5)
def rows_of_gradients_written(module: Any, _optimizer: Any) -> None:
    block = module.blocks[0]
    module.embedding.weight.grad[:20] = 0.0
    block.out.weight.grad[[1, 7]] = torch.arange(12.0).double() / 100
    block.down.weight.grad[:, 3:9] = 0.01
    block.up.bias.grad[-3:] = 0.02


@between(SGD, 0.5)
def masked_gradients(module: Any, _optimizer: Any) -> None:
    block, new_words = module.blocks[0], torch.arange(VOCAB)[:, None] >= 20
    module.embedding.weight.grad.mul_(new_words)
    block.out.weight.grad.mul_(torch.arange(12.0).double())
    block.down.weight.grad.masked_fill_(torch.ones(12, 25).triu() > 0, 0.01)
    block.up.weight.grad = torch.where(
        torch.arange(25)[:, None] < 9, torch.zeros((), dtype=torch.float64), block.up.weight.grad
    )


@between(SGD, 0.5, refused="would be one of the part", under=(SHARDS, SPLIT))
def rows_of_a_gradient_cleared(module: Any, _optimizer: Any) -> None:
    module.embedding.weight.grad[:20].zero_()


@between(SGD, 0.5, refused="part", under=(SPLIT,))
def sum_of_a_gradient_as_a_number(module: Any, _optimizer: Any) -> None:
    for item in module.parameters():
        item.grad.div_(1.0 + float((item.grad * item.grad).sum()) + item.grad.abs().max().item())


@between(SGD, 0.5, refused="part", under=(SPLIT,))
def largest_gradient_by_hand(module: Any, _optimizer: Any) -> None:
    for item in module.parameters():
        item.grad.div_(float(whole(item.grad.abs().max())))


def accumulated(strategy: Any, around: Callable[[int], Any], clip: float = 0.0) -> Losses:
    module, optimizer = sharded(strategy)
    losses = []
    for x, y in shares(strategy):
        total = torch.zeros((), dtype=torch.float64)
        for number, (part, wanted) in enumerate(zip(x.chunk(2), y.chunk(2))):
            with around(number):
                loss = mean_loss(module(part), wanted) / 2
                loss.backward()
                total += loss.detach()
                if clip:
                    clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@careless()
def accumulation_without_a_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda _: contextlib.nullcontext())


@careless()
def accumulation_in_its_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda number: strategy.accumulate() if number == 0 else contextlib.nullcontext())


@careless("leave it out of accumulate()")
def all_of_a_step_in_the_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda _: strategy.accumulate())


@careless("inside strategy.accumulate()")
def clipping_within_accumulation(strategy: Any) -> Losses:
    return accumulated(strategy, lambda number: strategy.accumulate() if number == 0 else contextlib.nullcontext(), 0.1)


def masked_shares(strategy: Any) -> list[Batch]:
    """This rank's rows, of which micro-batches and readers have unequal numbers of targets, and some none."""
    index, count = strategy.reader
    uncounted = torch.arange(8)[None, :] >= torch.tensor([0, 3, 0, 0, 7, 8, 5, 2])[:, None]
    return [(x.chunk(count)[index], y.masked_fill(uncounted, -100).chunk(count)[index]) for x, y in rows()]


def by_targets(strategy: Any, total_of: Callable[[Any, list[Any]], Any], within: bool) -> Losses:
    """Four micro-batches a step; on one device, if it is to be equal, one call on all rows."""
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for x, y in masked_shares(strategy):
        if isinstance(strategy, OneDevice):
            losses.append(mean_loss(module(x), y))
            losses[-1].backward()
        else:
            parts = list(zip(x.chunk(4), y.chunk(4)))
            total = total_of(strategy, [part for _, part in parts])
            terms = []
            for number, (part, wanted) in enumerate(parts):
                with strategy.accumulate() if within and number < 3 else contextlib.nullcontext():
                    terms.append(strategy.loss(module(part), wanted, total))
                    terms[-1].backward()
            losses.append(torch.stack(terms).sum())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@careless()
def targets_counted_over_a_step(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: strategy.count_targets(targets), within=True)


@careless()
def targets_counted_over_a_step_without_a_context(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: float(strategy.count_targets(torch.cat(targets))), False)


@careless("each was divided by its own")
def unequal_targets_of_each_micro_batch(strategy: Any) -> Losses:
    return by_targets(strategy, lambda *_: None, within=True)


@careless("each was divided by its own")
def unequal_targets_of_each_backward(strategy: Any) -> Losses:
    return by_targets(strategy, lambda *_: None, within=False)


@careless("total= says")
def targets_counted_in_one_micro_batch(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: strategy.count_targets(targets[0]), within=True)


@careless("total= says", (COPIES, SHARDS))
def targets_counted_by_each_reader(strategy: Any) -> Losses:
    return by_targets(strategy, lambda _, targets: (torch.cat(targets) != -100).sum(), within=True)


@careless("one number")
def targets_counted_by_row(strategy: Any) -> Losses:
    return by_targets(strategy, lambda _, targets: (torch.cat(targets) != -100).sum(dim=1), within=True)


@careless()
def two_losses_of_a_micro_batch(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for x, y in masked_shares(strategy):
        first = y.clone()
        first[:, 1:] = -100
        logits = module(x)
        loss = strategy.loss(logits.clone(), y) + 0.5 * strategy.loss(logits, first)
        loss.backward()
        step_and_clear(optimizer)()
        losses.append(loss)
    return losses


@careless()
def other_targets_after_gradients_were_cleared(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for clear in (optimizer.zero_grad, lambda: module.zero_grad(set_to_none=False)):
        optimizer.zero_grad()
        first, *others = masked_shares(strategy)
        for x, y in others:
            with strategy.accumulate():
                strategy.loss(module(first[0]), first[1]).backward()
            clear()
            y[:, 1:3] = -100
            losses += updates([(x, y)], lambda x, y: strategy.loss(module(x), y), optimizer.step)
            clear()
    return losses


@careless()
def every_other_batch_steps(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    turns = iter(range(100))

    def update() -> None:
        if next(turns) % 2:
            step_and_clear(optimizer)()

    return updates(shares(strategy) * 2, lambda x, y: mean_loss(module(x), y) / 2, update)


@careless()
def zeros_instead_of_none(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer, lambda: optimizer.step() or optimizer.zero_grad(set_to_none=False))
    other = AdamW(module.parameters(), lr=1e-2)
    return losses + steps(strategy, module, other, lambda: other.step() or module.zero_grad(set_to_none=False))


@careless()
def zero_grad_between_forward_and_backward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(module(x), y)
        module.zero_grad()
        return loss

    return updates(shares(strategy), loss_of, optimizer.step)


@careless()
def zero_grad_forgotten(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), optimizer.step)


@careless()
def two_forwards_a_backward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_loss(module(x), y) + mean_loss(module(x.flip(1)), y.flip(1))

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


@careless()
def two_backwards_a_forward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = []
    for x, y in shares(strategy):
        logits = module(x)
        first, second = mean_loss(logits[:, :4], y[:, :4]), mean_loss(logits[:, 4:], y[:, 4:])
        first.backward(retain_graph=True)
        second.backward()
        step_and_clear(optimizer)()
        losses += [first.detach(), second.detach()]
    return losses


@careless()
def grad_scaler(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for number, (x, y) in enumerate(shares(strategy) * 2):
        loss = mean_loss(module(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number == 1:  # not a number in one element, which one rank alone may hold
            next(module.parameters()).grad.mul_(float("nan"))
        scaler.unscale_(optimizer)
        clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale(), dtype=torch.float64)]
    return losses


@careless()
def grad_scaler_over_a_strategy_optimizer(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1, own=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def compiled(strategy: Any, module: Any, optimizer: Any) -> Losses:
    with warnings.catch_warnings():  # Dynamo warns of what it traces: autograd functions, .grad of what is no leaf
        warnings.simplefilter("ignore")
        return steps(strategy, torch.compile(module, backend="eager"), optimizer)


@careless()
def compiled_model(strategy: Any) -> Losses:
    return compiled(strategy, *sharded(strategy))


@careless()
def compiled_model_in_float32(strategy: Any) -> Losses:
    module = strategy.shard(model().float())
    return compiled(strategy, module, SGD(module.parameters(), lr=1e-2))


@careless()
def output_changed_in_place(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, lambda x: module(x).div_(2.0), optimizer)


@careless()
def schedulers(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    return steps(strategy, module, optimizer, lambda: optimizer.step() or scheduler.step() or optimizer.zero_grad())


@careless()
def evaluation_between_steps(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    held_out = []

    def evaluate() -> None:
        module.eval()
        with torch.no_grad():
            held_out.extend(mean_loss(module(x), y) for x, y in shares(strategy)[:1])
        module.train()

    losses = steps(strategy, module, optimizer, evaluate)
    evaluate()
    return losses + held_out


@careless()
def forward_that_is_thrown_away(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, module, optimizer, lambda: module(shares(strategy)[0][0]))


@careless("a copy of a sharded model")
def average_of_weights(strategy: Any) -> Losses:
    module = strategy.shard(model())
    average = torch.optim.swa_utils.AveragedModel(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    losses = steps(strategy, module, optimizer, lambda: average.update_parameters(module))
    with torch.no_grad():
        return [*losses, *(mean_loss(average(x), y) for x, y in shares(strategy))]


@careless()
def average_of_weights_by_hand(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    averages = [item.detach().clone() for item in module.parameters()]

    def update() -> None:
        for average, item in zip(averages, module.parameters()):
            average.lerp_(item.detach(), 0.5)

    losses = steps(strategy, module, optimizer, update)
    with torch.no_grad():
        for average, item in zip(averages, module.parameters()):
            item.copy_(average)
        return [*losses, *(mean_loss(module(x), y) for x, y in shares(strategy))]


@careless("a copy of a sharded model")
def copy_that_is_trained(strategy: Any) -> Losses:
    return trained(strategy, copy.deepcopy(strategy.shard(model())))


@careless()
def optimizer_made_after_a_forward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    module(shares(strategy)[0][0])
    return trained(strategy, module)


@careless()
def accumulation_given_up(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = steps(strategy, module, optimizer)
    for clear in (optimizer.zero_grad, lambda: module.zero_grad(set_to_none=False)):
        optimizer.zero_grad()
        x, y = shares(strategy)[0]
        with strategy.accumulate():
            mean_loss(module(x), y).backward()
        clear()
        losses += updates([(x, y)], lambda x, y: mean_loss(module(x), y), optimizer.step)
    return losses


@careless()
def weights_loaded_after_shard(strategy: Any) -> Losses:
    torch.manual_seed(3)
    other = PlainModel(VOCAB, 12, 2).double().state_dict()
    module = strategy.shard(model())
    module.load_state_dict(other)
    return trained(strategy, module)


@careless("state_dict() would give this rank's part", (SPLIT,))
def weights_saved_by_state_dict(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = steps(strategy, module, optimizer)
    return [*losses, *(whole(value).double().sum() for value in module.state_dict().values())]


@careless("state is of this rank's parts", (SHARDS, SPLIT))
def optimizer_saved_by_state_dict(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer)
    return [*losses, *(item["exp_avg"].sum() for item in optimizer.state_dict()["state"].values())]


@careless()
def frozen_before_shard(strategy: Any) -> Losses:
    module = model()
    module.blocks[0].requires_grad_(False)
    return trained(strategy, strategy.shard(module))


@careless()
def frozen_after_shard(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer)
    module.blocks[0].requires_grad_(False)
    return losses + steps(strategy, module, optimizer)


@careless("was frozen when the model was sharded")
def thawed_after_shard(strategy: Any) -> Losses:
    module = model()
    module.blocks[0].requires_grad_(False)
    module = strategy.shard(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    losses = steps(strategy, module, optimizer)
    module.blocks[0].requires_grad_(True)
    return losses + steps(strategy, module, optimizer)


@careless("a hook was registered on")
def hook_on_a_gradient(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    for item in module.parameters():
        item.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return steps(strategy, module, optimizer)


@careless("a hook was registered on")
def hook_on_a_gradient_before_shard(strategy: Any) -> Losses:
    module = model()
    for item in module.parameters():
        item.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return trained(strategy, strategy.shard(module))


@careless("a hook was registered on")
def optimizer_within_backward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    optimizers = {item: AdamW([item], lr=1e-2) for item in module.parameters()}
    for item in module.parameters():
        item.register_post_accumulate_grad_hook(lambda item: optimizers[item].step())
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), lambda: None)


@careless()
def groups_by_name(strategy: Any) -> Losses:
    module = strategy.shard(model())
    named = dict(module.named_parameters())
    decayed = [item for name, item in named.items() if "norm" not in name]
    others = [item for name, item in named.items() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    return steps(strategy, module, strategy.optimizer(AdamW, groups, lr=1e-2))


def by_closure(strategy: Any, module: Any, optimizer: Any) -> Losses:
    losses = []
    for x, y in shares(strategy):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(module(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses


@careless("LBFGS decides by the loss")
def lbfgs(strategy: Any) -> Losses:
    return by_closure(strategy, *sharded(strategy, torch.optim.LBFGS, 0.1, max_iter=3))


@careless("step() takes no closure", (SHARDS, SPLIT))
def closures(strategy: Any) -> Losses:
    return by_closure(strategy, *sharded(strategy))


@careless("doesn't work element by element", (SHARDS, SPLIT))
def adafactor(strategy: Any) -> Losses:
    module = strategy.shard(model())
    return steps(strategy, module, strategy.optimizer(torch.optim.Adafactor, by_rank(module)[0], lr=1e-2))


@between(AdamW, 1e-2, own=True, fused=True)
def fused_optimizer(_module: Any, _optimizer: Any) -> None:
    pass


@between(AdamW, 1e-2, foreach=True)
def foreach_optimizer(_module: Any, _optimizer: Any) -> None:
    pass


@careless()
def penalty_on_weights(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        penalty = 0.05 * sum(item.square().sum() for item in module.parameters())
        (loss + whole(penalty)).backward()
        step_and_clear(optimizer)()
        losses.append(loss.detach())
    return losses


@careless("mixed torch.Tensor and DTensor", (SHARDS,))
def submodule_called_alone(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        try:
            return module.embedding(x).square().mean()
        except RuntimeError as error:  # torch's own sentence
            raise SystemError(str(error)) from error

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = PlainModel(VOCAB, 12, 2), nn.Linear(VOCAB, 5), nn.Linear(VOCAB, 5)

    def forward(self, tokens: torch.Tensor, second: bool = False) -> torch.Tensor:
        found = (self.second if second else self.first)(self.body(tokens))
        return functional.pad(found, (0, VOCAB - 5))


@careless()
def heads_in_turn(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(TwoHeads().double())
    optimizer = AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    turns = iter(range(100))
    return updates(
        shares(strategy), lambda x, y: mean_loss(module(x, next(turns) % 2 == 1), y), step_and_clear(optimizer)
    )


class SomeTokens(nn.Module):
    """Calls a linear for the tokens it is for, where there are any, as experts in a list are called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.experts = PlainModel(VOCAB, 12, 2), nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.body(tokens)
        for number, expert in enumerate(self.experts):
            chosen = tokens == 3 * number
            if chosen.any():
                logits = logits.index_put((chosen,), logits[chosen] + expert(logits[chosen]))
        return logits


@careless()
def experts_that_a_rank_has_no_tokens_for(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(SomeTokens().double())
    optimizer = AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


@careless()
def checkpoint_around_the_model(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, lambda x: checkpoint(module, x, use_reentrant=False), optimizer)


@careless("has a copy", (COPIES,))
def layer_drawn_anew_on_each_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    with torch.no_grad():  # as on one device for the first rank alone
        module.scale.add_(0.1 * strategy.reader[0])
    return steps(strategy, module, optimizer)


UNCOMPARED = {("layer_drawn_anew_on_each_rank", SHARDS)}
"""A shard has no copy: its values are what the loop put there."""


@careless("not have been used in the graph", (SHARDS,))
def gradients_by_autograd_grad(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        try:
            grads = torch.autograd.grad(loss, list(module.parameters()))
        except RuntimeError as error:  # torch's own sentence
            raise SystemError(str(error)) from error
        for item, grad in zip(module.parameters(), grads):
            item.grad = grad
        optimizer.step()
        losses.append(loss.detach())
    return losses


LOOPS[-1].refused.update({COPIES: "torch.autograd.grad gives this rank's", SPLIT: "torch.autograd.grad gives this"})


@careless()
def update_by_hand(strategy: Any) -> Losses:
    module = strategy.shard(model())

    @torch.no_grad()
    def update() -> None:
        for item in module.parameters():
            item.sub_(item.grad, alpha=0.1)
        module.zero_grad()

    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), update)


@careless("called on other rows", (SPLIT,))
def rows_by_global_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    alone = isinstance(strategy.reader, tuple) and not torch.distributed.is_initialized()
    index, count = (0, 1) if alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    batches = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]
    return updates(batches, lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


@careless()
def same_rows_on_every_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return updates(rows(), lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = PlainModel(VOCAB, 12, 2), nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(tokens))


@careless("BatchNorm", (COPIES, SHARDS))
def batch_norm(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Normed().double()))


class Averaging(PlainModel):
    """Keeps an average of what it saw, and a count, and uses both."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__(VOCAB, 12, 2)
        self.of_rows = of_rows
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens) * (1 + self.average)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(logits.abs().mean() if self.of_rows else 0.1)
        return logits


@careless("the buffer 'average'", (COPIES, SHARDS))
def average_of_rows(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Averaging(of_rows=True).double()))


@careless()
def average_of_steps(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Averaging(of_rows=False).double()))


@careless("is a weight of layer 'blocks.0' too", (SHARDS,))
def norm_of_two_layers(strategy: Any) -> Losses:
    module: Any = model()
    first, second = module.blocks
    (name,) = [key for key, child in first.named_children() if isinstance(child, nn.LayerNorm)][:1]
    setattr(second, name, getattr(first, name))
    return trained(strategy, strategy.shard(module))


@careless("max_norm=1")
def embedding_that_shortens_its_rows(strategy: Any) -> Losses:
    module: Any = model()
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.max_norm = 1.0
    return trained(strategy, strategy.shard(module))


@careless("scale_grad_by_freq=True", (COPIES, SHARDS))
def embedding_that_counts_its_rows(strategy: Any) -> Losses:
    module: Any = model()
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.scale_grad_by_freq = True
    return trained(strategy, strategy.shard(module))


@careless("call strategy.optimizer after shard()")
def function_and_optimizer(strategy: Any) -> Losses:
    return steps(strategy, *strategy.shard(model, AdamW(model().parameters(), lr=1e-2)))


@careless("isn't one of the sharded model")
def parameters_listed_before_shard(strategy: Any) -> Losses:
    module = model()
    listed = list(module.parameters())
    module = strategy.shard(module)
    return steps(strategy, module, strategy.optimizer(AdamW, listed, lr=1e-2))


@careless("a backward ended in an error", (SHARDS,))
def error_in_a_backward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    x, y = shares(strategy)[0]
    logits = module(x)
    logits.register_hook(lambda _: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        mean_loss(logits, y).backward()
    module.zero_grad()
    return trained(strategy, module)


@careless()
def two_optimizers(strategy: Any) -> Losses:
    module = strategy.shard(model())
    matrices, vectors = by_rank(module)
    first, second = strategy.optimizer(AdamW, matrices, lr=1e-2), SGD(vectors, lr=0.1)
    return steps(strategy, module, first, lambda: second.step() or second.zero_grad())
