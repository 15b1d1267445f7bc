"""What selective recompute keeps, which isn't computed again, and that what code writes into it changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from meshwright.forking import fork_obstacle
from meshwright.launch.contract import RankContext
from meshwright.parallel import compiled_layers, overlapped_products, recompute, selective
from meshwright.parallel.compiled_layers import compiled, compiled_whole
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.recompute import apply, recomputing
from meshwright.spec.layout_choices import RECOMPUTES
from meshwright.torch_compat.tensors import GROUPED_PRODUCT, TorchDispatchMode
from tests.ranks.group import run_contexts
from tests.tiers import further


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return functional.silu(torch._grouped_mm(tokens, self.weight, offs=ends)).sin()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append("product" if func.overloadpacket is GROUPED_PRODUCT else func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_selective_recompute_keeps_the_products_of_experts() -> None:
    tokens, ends = torch.randn(64, 16, dtype=torch.bfloat16), torch.tensor([10, 20, 40, 64], dtype=torch.int32)
    found = {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        experts = Experts()
        if mode != "none":
            apply([experts], mode, None)
        with Counted() as counted:
            experts(tokens.clone().requires_grad_(), ends).square().sum().backward()
        assert experts.weight.grad is not None
        found[mode] = counted.names.count("product"), counted.names.count("silu"), experts.weight.grad
    assert [found[mode][:2] for mode in found] == [(3, 1), (3, 2), (4, 2)]
    assert all(torch.equal(found[mode][2], found["none"][2]) for mode in found)


@pytest.mark.parametrize(("width", "products"), [(0, 3), (16, 3), (17, 4)])
def test_products_that_sum_fewer_values_than_the_width_run_again(width: int, products: int) -> None:
    tokens, ends = torch.randn(64, 16, dtype=torch.bfloat16), torch.tensor([10, 20, 40, 64], dtype=torch.int32)
    experts = Experts()
    apply([experts], "selective", None, width=width)
    with Counted() as counted:
        experts(tokens.requires_grad_(), ends).square().sum().backward()
    assert counted.names.count("product") == products


@pytest.mark.parametrize(
    ("call", "summed"),
    [
        (torch.mm, (torch.zeros(3, 8), torch.zeros(8, 2))),
        (torch.addmm, (torch.zeros(2), torch.zeros(3, 8), torch.zeros(8, 2))),
        (torch.bmm, (torch.zeros(1, 3, 8), torch.zeros(1, 8, 2))),
        (torch.baddbmm, (torch.zeros(2), torch.zeros(1, 3, 8), torch.zeros(1, 8, 2))),
    ],
)
def test_what_a_product_sums_is_read_off_its_left_factor(call: Any, summed: tuple[torch.Tensor, ...]) -> None:
    operator = getattr(torch.ops.aten, call.__name__).default
    for width, kept in ((8, True), (9, False)):
        assert selective.is_kept(operator, summed, width) is kept
    # Of a summand the sum over ranks is kept, whatever is summed in it.
    assert selective.sent_product(lambda *factors: selective.is_kept(operator, factors, 99), *summed)
    assert not selective.is_kept(torch.ops.aten.add.Tensor, summed[-2:], 0)


class Layer(nn.Module):
    """A block whose code goes on with the results of a product in some way."""

    def __init__(self, go_on: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.go_on = go_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.go_on(self.up(x))
        heads = h.view(2, 4, 2, 4).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        batched = self.go_on(torch.bmm(h, h.transpose(1, 2)))
        return x + torch.sin(batched @ self.down(torch.sin(h) * mixed.transpose(1, 2).reshape(2, 4, 8) * h))


def added(x: torch.Tensor) -> torch.Tensor:
    x += 0.5
    return x


def added_as_lists(x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x], 0.5)
    return x


def half_doubled(x: torch.Tensor) -> torch.Tensor:
    x[..., :2].mul_(2.0)
    return x


def out_of_place(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 0.25, out=x) if not x.requires_grad else x.add_(0.25)


WAYS = {
    "read": torch.sin,
    "+=": added,
    "activation": lambda x: functional.silu(x, inplace=True),
    "twice": lambda x: x.add_(1.0).tanh_(),
    "a part": half_doubled,
    "lists": added_as_lists,
    "rows": lambda x: x.index_fill_(0, torch.tensor([0]), 2.0),
    "zeros": lambda x: x.masked_fill_(x > 0, 0.0),
    "out": out_of_place,
}


def gradients(way: str, mode: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, x = Layer(WAYS[way]).double(), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    if mode != "none":
        apply([layer], mode, None)
    y = layer(layer(x))
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("way", WAYS)
def test_code_may_write_into_what_is_kept(way: str) -> None:
    for plain, recomputed in zip(gradients(way, "none"), gradients(way, "selective"), strict=True):
        assert torch.equal(plain, recomputed)


def test_code_that_reads_alone_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    plain = selective._FirstRun._copy_ahead

    def counted(run: Any, func: Any, args: Any, kwargs: Any) -> None:
        before = len(run._places)
        plain(run, func, args, kwargs)
        copied.append(before - len(run._places))

    monkeypatch.setattr(selective._FirstRun, "_copy_ahead", counted)
    gradients("read", "selective")
    assert sum(copied) == 0
    gradients("+=", "selective")
    # Of each call of the layer two products.
    assert sum(copied) == 4


def test_a_graph_runs_backward_once_and_says_so() -> None:
    layer, x = Layer(torch.sin), torch.randn(2, 4, 8, requires_grad=True)
    apply([layer], "selective", None)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"kept results were asked for twice.*nearest that works: recompute=full"):
        loss.backward()


class Changing(nn.Module):
    """Computes something else in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(8, 8)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = x @ self.weight if self.calls % 2 else torch.bmm(x[None], self.weight[None])[0]
        return torch.sin(h).cos()


def test_a_layer_that_computes_something_else_again_is_named() -> None:
    layer = Changing()
    apply([layer], "selective", None)
    with pytest.raises(RuntimeError, match=r"second run came to aten.bmm.* first had aten.mm.*recompute=full"):
        layer(torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_what_is_kept_is_free_after_backward() -> None:
    stored: list[StorageWeakRef] = []
    plain = selective._FirstRun._keep

    def seen(run: Any, operator: object, out: Any) -> None:
        plain(run, operator, out)
        leaves = [leaf for leaf in run.results[-1].leaves if isinstance(leaf, torch.Tensor)]
        stored.extend(StorageWeakRef(leaf.untyped_storage()) for leaf in leaves)

    layer, x = Layer(torch.sin), torch.randn(2, 4, 8, requires_grad=True)
    apply([layer], "selective", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selective._FirstRun, "_keep", seen)
        y = layer(x)
    assert len(stored) >= 3 and not any(reference.expired() for reference in stored)
    y.sum().backward()
    del y
    assert all(reference.expired() for reference in stored)


class TwoOutputs(nn.Module):
    """Returns a product, and what it computes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.up(x)
        return {"hidden": h, "score": self.down(torch.sin(h.clone()))}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_other_code_may_write_into_what_a_layer_returns(mode: str) -> None:
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        layer, x = TwoOutputs(), torch.randn(2, 4, 8, requires_grad=True)
        if recomputed:
            apply([layer], mode, None)
        out = layer(x)
        out["hidden"] += x
        loss = out["hidden"].square().sum() + out["score"].square().sum()
        found.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


class Flexible(nn.Module):
    """Calls an operator of higher order, which has no schema, on a product without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x.detach()).detach().view(2, 16, 2, 16).transpose(1, 2)
        mixed = flex_attention(heads, heads, heads).transpose(1, 2).reshape(2, 16, 32)
        return x + torch.sin(self.down(torch.sin(x) * mixed))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_layers_may_call_operators_of_higher_order() -> None:
    found = []
    for mode in ("", "selective"):
        torch.manual_seed(0)
        layer, x = Flexible(), torch.randn(2, 16, 32, requires_grad=True)
        if mode:
            apply([layer], mode, None)
        found.append(torch.autograd.grad(layer(x).square().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_functions_that_a_layer_has_compiled_run_compiled() -> None:
    runs = []

    def backend(graph: GraphModule, _example: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> object:
            runs.append(graph)
            return graph.forward(*args)

        return run

    layer, x = Layer(torch.compile(lambda h: torch.sin(h) + 1.0, backend=backend)), torch.randn(2, 4, 8)
    apply([layer], "selective", None)
    layer(x.requires_grad_()).sum().backward()
    # Two calls in each run of the layer.
    assert len(runs) == 4


def with_a_break(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.add_(0.5)


def noting(saved: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(item: torch.Tensor) -> torch.Tensor:
        saved.append(item)
        return item

    return note


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
@pytest.mark.parametrize("go_on", further([added, with_a_break]))
def test_compiled_layers_may_write_into_what_is_kept(go_on: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def work(_context: RankContext) -> list[tuple[tuple[torch.Tensor, ...], int]]:
        found, eagerly = [], recomputing("selective", None, False, 8)
        for wrap in (None, eagerly, partial(compiled_whole, "selective", 8, eagerly)):
            torch.manual_seed(0)
            layer, x = Layer(go_on).double(), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
            if wrap is not None:
                wrap_forward(layer, ForwardLayer.COMPILE, "recompute", wrap)
            saved: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(noting(saved), lambda item: item):
                out = layer(x)
            gradients = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
            found.append((gradients, sum(item.numel() for item in saved)))
        return found

    # The compiler's threads stay as long as their process, which then can't fork ranks for other tests.
    (((plain, all_saved), (_, eager_saved), (compiled, saved)),) = run_contexts(1, work)
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other)
    # Of an eager checkpoint these hooks see nothing but inputs.
    assert eager_saved < saved < all_saved if go_on is added else saved == eager_saved


class Fading(nn.Module):
    """Changes a buffer that the rest of its forward reads, and reads another ahead of its change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("before", torch.linspace(0.1, 1.0, 16))
        self.register_buffer("after", torch.linspace(0.2, 0.9, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sin(self.before.view(2, 8).max(0)[0].repeat(2))
        self.before.mul_(0.5).add_(0.1)
        self.after.mul_(0.5)
        return x + self.down(torch.sin(self.up(x)) * first * torch.sin(self.after.view(1, 16)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
@pytest.mark.parametrize("wrap", further([partial(compiled, mode, 8) for mode in RECOMPUTES], (2,)), ids=RECOMPUTES)
def test_compiled_layers_may_change_what_backward_computes_again(wrap: Callable[[Forward], Forward]) -> None:
    def work(_context: RankContext) -> list[list[torch.Tensor]]:
        found = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            layer, x = Fading().double(), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
            forward = wrap(layer.forward) if is_compiled else layer.forward
            steps = [torch.autograd.grad(forward(x).square().sum(), [x, *layer.parameters()]) for _ in range(2)]
            found.append([*itertools.chain(*steps), *layer.buffers()])
        return found

    (found,) = run_contexts(1, work)
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)


class Lending(nn.Module):
    """Returns a product, and a view of it, that its own backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(x)
        return h, h.view(8, 16)[:4], self.down(torch.sin(h.clone()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
def test_other_code_may_write_into_what_a_compiled_layer_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(_context: RankContext) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for mode in (None, "selective"):
            torch.manual_seed(0)
            layer, x = Lending().double(), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
            h, part, out = (layer.forward if mode is None else compiled(mode, 8, layer.forward))(x)
            with torch.no_grad():
                h.mul_(1.5)
            assert torch.equal(part, h.view(8, 16)[:4]), "what is returned twice is one memory"
            found.append(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))
        return found

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        assert bool(list(tmp_path.glob("aotautograd/*"))) == cached, "the second time its graphs are found on disk"
        ((plain, again),) = run_contexts(1, work)
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("module", [selective, recompute, overlapped_products])
def test_graphs_on_disk_are_known_by_the_code_that_marked_them(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = compiled_layers._options.__wrapped__("selective", 8)["joint_custom_pre_pass"].uuid()
    changed = tmp_path / "changed.py"
    changed.write_text(f"{Path(str(module.__file__)).read_text(encoding='utf-8')}\n", encoding="utf-8")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert compiled_layers._options.__wrapped__("selective", 8)["joint_custom_pre_pass"].uuid() != key


def test_these_tests_leave_no_thread() -> None:
    assert fork_obstacle() is None


def test_a_sum_leaves_alone_what_other_modes_see() -> None:
    x = torch.randn(2, 4)
    assert selective.own_copy(x) is x
    with Counted():
        assert selective.own_copy(x).data_ptr() != x.data_ptr()
