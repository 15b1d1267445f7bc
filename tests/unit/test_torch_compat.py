"""The private names of torch that the package rests on are there, and do what they are used for."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils import _triton as triton_support
from torch.utils.flop_counter import FlopCounterMode

from meshwright import torch_compat
from meshwright.torch_compat import PrivateName, dtensors, fsdp2, pipelining, tensors, torchao_import
from meshwright.torch_compat.tensors import TorchFunction
from tests.ranks.group import run_ranks

MODULES = [
    importlib.import_module(f"{torch_compat.__name__}.{m.name}") for m in pkgutil.iter_modules(torch_compat.__path__)
]
NAMES = [name for module in MODULES for name in module.PRIVATE_NAMES]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_torch_has_the_name(name: PrivateName) -> None:
    assert name.reason
    if name.needs_cuda and not torch.backends.cuda.is_built():
        pytest.skip("of a build for GPUs")
    if name.is_in(torch.__version__):
        assert name.resolve() is not None
    elif not name.of_instances:
        with pytest.raises((AttributeError, ImportError)):
            name.resolve()


def test_versions_are_compared_by_number() -> None:
    name = PrivateName("torch:nothing", "made up", since="2.9", until="2.11")
    versions = ("2.8.1", "2.9.0+cpu", "2.10.0a0+git1", "2.11.1", "2.12.0", "3.0.0")
    assert [name.is_in(version) for version in versions] == [False, True, True, True, False, False]


def test_objects_of_torch_have_the_attributes_that_only_they_have() -> None:
    """On objects as a run makes them: FSDP2 after a gather, a pipeline's runtime, a module, an operator, a node."""
    names = [name for name in NAMES if name.of_instances]
    (missing,) = run_ranks(1, lambda rank: _missing_attributes(names))
    assert len(names) > 10 and missing == []


def _missing_attributes(names: list[PrivateName]) -> list[str]:
    """Returns the names that this torch should have and its objects lack, or has and shouldn't."""
    unit = _sharded_unit()
    unit.set_reshard_after_forward(True)  # type: ignore[operator]
    fsdp2.set_post_forward_mesh(unit, init_device_mesh("cpu", (1, 1)))
    unit(torch.ones(1, 2)).sum().backward()
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), input_args=(torch.ones(1, 2),))
    runtime: Any = pipelining.make_runtime([stage], 1, torch.sum)
    pipelining.load_actions(runtime, {0: ["0F0", "0B0"]})
    groups = fsdp2.fsdp_groups(unit)
    state: Any = unit._get_fsdp_state()
    objects = [unit, state, *groups, *fsdp2.fsdp_parameters(unit), runtime, torch.ops.aten.mul_.Tensor]
    objects.append(torch.ones(1, requires_grad=True).mul(2).grad_fn)
    missing = []
    for name in names:
        owner, attribute = name.resolve(), name.path.rpartition(".")[2]
        assert isinstance(owner, type)
        (instance, *_) = [item for item in objects if isinstance(item, owner)]
        if hasattr(instance, attribute) != name.is_in(torch.__version__):
            missing.append(name.path)
    return missing


def _sharded_unit() -> nn.Module:
    """Returns a linear layer of one weight, (4, 2) of ones, as a unit of FSDP2 over all ranks, computing in bf16."""
    unit = nn.Linear(2, 4, bias=False)
    nn.init.ones_(unit.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    return unit


def test_gathered_memory_of_a_unit_is_seen_and_its_sums_are_kept_and_dropped() -> None:
    """What `fsdp2` reads by private attributes is there: a renamed one would look like no memory at all."""
    run_ranks(2, _use_a_sharded_unit)


def _use_a_sharded_unit(rank: int) -> None:
    unit, batch = _sharded_unit(), torch.tensor([[1.0, 2.0]])
    assert fsdp2.gathered_tensors(unit) == ([], [])
    fsdp2.set_async_unshard(unit)
    pending = unit.unshard(async_op=True)  # type: ignore[operator]
    (in_flight, *_), _ = fsdp2.gathered_tensors(unit)
    assert in_flight.numel() == 8
    pending.wait()
    assert sum(item.numel() for item in fsdp2.gathered_tensors(unit)[0]) == 8
    unit.set_requires_gradient_sync(False)  # type: ignore[operator]
    for count in (1, 2):
        unit(batch).sum().backward()
        (gradient,) = fsdp2.gathered_tensors(unit)[1]
        assert gradient.dtype == torch.float32 and gradient.tolist() == [[count, 2.0 * count]] * 4
    # Second halves of a backward, which call no hook of FSDP2: bf16 would round 256 and 1 to 256.
    for scale in (256.0, 1.0):
        received = batch.clone().requires_grad_()
        output, output_grad = unit(received), torch.full((1, 4), scale, dtype=torch.bfloat16)
        _, groups = pipelining.stage_backward_input([output], [output_grad], [received], unit.parameters())
        unit.unshard()  # type: ignore[operator]
        pipelining.stage_backward_weight(unit.parameters(), groups)
        fsdp2.accumulate_unsharded_gradients(unit)
    (gradient,) = fsdp2.gathered_tensors(unit)[1]
    assert gradient.dtype == torch.float32 and gradient.tolist() == [[259.0, 518.0]] * 4
    fsdp2.clear_unsharded_gradients(unit)
    assert fsdp2.gathered_tensors(unit)[1] == []
    unit.set_requires_gradient_sync(True)  # type: ignore[operator]
    unit(batch).sum().backward()
    (weight,) = unit.parameters()
    assert tensors.local_tensor(weight.grad).tolist() == [[1.0, 2.0]] * 2  # the mean of two ranks with the same batch


@pytest.mark.parametrize("last_in_backward", [True, False])
def test_weights_that_few_or_no_micro_batches_reach_are_sent_with_the_sums_of_others(last_in_backward: bool) -> None:
    """Sums are float32 and gradients of one micro-batch bf16, which FSDP2 refuses to send together.

    Pipelines send after all backwards, other layouts in the last one.
    """
    run_ranks(2, lambda rank: _leave_weights_out(rank, last_in_backward))


class _PartlyUsed(nn.Module):
    """Three weights, (2, 2) each: every forward uses the first, ``late`` ones the second too, none the third."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.late, self.unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        return x @ self.used + (x @ self.late if late else 0.0)


def _leave_weights_out(rank: int, last_in_backward: bool) -> None:
    unit, reached, batch = _PartlyUsed(), dict[torch.Tensor, bool](), torch.tensor([[1.0, 2.0]])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy, reshard_after_forward=False)
    fsdp2.complete_gradients(unit, reached)
    for late in (False, True):
        sends = late and last_in_backward
        unit.set_requires_gradient_sync(sends)  # type: ignore[operator]
        unit.set_reshard_after_backward(sends)  # type: ignore[operator]
        unit(batch, late).sum().backward()
    if not last_in_backward:
        unit.set_requires_gradient_sync(True)  # type: ignore[operator]
        for group in fsdp2.fsdp_groups(unit):
            group.post_backward()
        unit.reshard()  # type: ignore[operator]
    gradients = [tensors.local_tensor(weight.grad).tolist() for weight in (unit.used, unit.late, unit.unused)]
    assert gradients == [[[2.0 + 2.0 * rank] * 2], [[1.0 + rank] * 2], [[0.0, 0.0]]]
    assert list(reached.values()) == [True, True, False]


def test_attributes_that_are_used_in_place_do_what_they_are_used_for() -> None:
    module = nn.Module()
    module.register_parameter("absent", None)
    module.register_buffer("table", torch.ones(1), persistent=False)
    assert dict(module._parameters) == {"absent": None} and set(module._buffers) == {"table"}
    assert module._non_persistent_buffers_set == {"table"}
    module.register_forward_hook(lambda *_: None)
    assert len(module._forward_hooks) == 1 and not module._forward_pre_hooks
    x = torch.empty(4, device="meta", requires_grad=True)
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata != torch.empty_like(x).untyped_storage()._cdata
    assert not x._backward_hooks and not x._post_accumulate_grad_hooks
    x.register_hook(lambda grad: grad)
    x.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(x._backward_hooks or {}) == len(x._post_accumulate_grad_hooks or {}) == 1


def test_a_name_that_torch_drops_is_noticed() -> None:
    with pytest.raises(AttributeError):
        PrivateName("torch:Tensor._no_such_name", "made up").resolve()


def test_views_are_told_from_tensors_of_their_own() -> None:
    x = torch.zeros(4, requires_grad=True) * 1.0
    assert tensors.is_view(x.view(2, 2)) and not tensors.is_view(x)
    assert tensors.local_tensor(x) is x


def test_a_recomputed_forward_knows_that_it_runs_in_backward() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(tensors.in_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch_checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_a_checkpoint_computes_again_what_was_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put under a name that torch no longer calls it would be passed over, and recompute draw other numbers."""
    for name, value in list(vars(torch_checkpoint).items()):
        if name.startswith("_checkpoint_without_reentrant"):
            monkeypatch.setattr(torch_checkpoint, name, value)
    recomputed = []

    def recording(generator: TorchFunction) -> TorchFunction:
        def generate(function: TorchFunction, *arguments: object, **kwargs: object) -> object:
            return generator(lambda x: recomputed.append(x) or function(x), *arguments, **kwargs)

        return generate

    tensors.wrap_checkpoint_generator(recording)
    x = torch.ones(1, requires_grad=True)
    output = torch_checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
    assert recomputed == []
    output.sum().backward()
    assert len(recomputed) == 1


def test_modes_are_seen_and_left() -> None:
    mode = TorchFunctionMode()
    with mode:
        assert tensors.function_modes()[-1] is mode
    with FlopCounterMode(display=False) as counter:
        assert tensors.dispatch_mode() is not None
        with tensors.without_dispatch_mode():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 16
    assert tensors.dispatch_mode() is None


def test_backward_runs_without_the_module_around_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * torch.arange(3.0)).sum()
    (grad,) = tensors.run_backward(
        (loss,), (torch.ones(()),), True, False, (weight,), allow_unreachable=False, accumulate_grad=False
    )
    assert grad.tolist() == [0.0, 1.0, 2.0]


def test_factories_make_tensors_on_a_device() -> None:
    factories = tensors.tensor_factories()
    assert torch.zeros in factories and torch.arange in factories and torch.tensor in factories


def test_batch_norms_have_one_base() -> None:
    assert all(isinstance(norm(3), tensors.BatchNormBase) for norm in (nn.BatchNorm1d, nn.BatchNorm3d))


def test_many_tensors_in_one_kernel_are_the_same_as_one_by_one() -> None:
    values = [torch.full((3,), 2.0), torch.full((2,), 3.0)]
    assert [float(norm) for norm in tensors.foreach_norm(values, 2)] == pytest.approx([12.0**0.5, 18.0**0.5])
    tensors.foreach_mul_(values, 2.0)
    assert values[0].tolist() == [4.0] * 3
    tensors.foreach_copy_(values, [torch.zeros(3), torch.zeros(2)])
    assert float(torch.cat(values).abs().sum()) == 0.0


def test_actions_can_be_run() -> None:
    assert pipelining.unsupported() == ""


ORDER = """
import sys
{first}
import torch
torch.cuda.is_available = lambda: True
{second}
import torchao.kernels
print(torchao.seen, torchao.kernels.seen, torch.cuda.is_available())
"""


def test_a_users_import_of_torchao_after_meshwright_sees_no_gpus(tmp_path: Path) -> None:
    package = tmp_path / "torchao"
    package.mkdir()
    for name in ("__init__", "kernels"):
        (package / f"{name}.py").write_text("import torch\nseen = torch.cuda.is_available()\n")

    def seen(first: str, second: str = "") -> str:
        code = ORDER.format(first=first, second=second)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert seen("import meshwright") == "False False True"
    # One that has initialised CUDA forks no ranks anyway.
    assert seen("import meshwright", "torch.cuda.is_initialized = lambda: True") == "True True True"


def test_torchao_is_imported_without_a_look_at_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that asks for GPUs and for Triton at its import, as torchao's do: neither answer is kept."""
    asked = []

    def look(_name: str) -> object:
        asked.append((torch.cuda.is_available(), triton_support.has_triton()))
        return torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torchao_import.importlib, "import_module", look)
    torchao_import.import_torchao("torchao.anything")
    assert asked == [(False, False)]
    assert torch.cuda.is_available() and triton_support.has_triton.cache_info().currsize == 0


def test_detach_of_dtensors_is_what_torch_finds_by_trial() -> None:
    """Of every kind of placement and stride, in processes that haven't found it yet; no fake tensor is made."""
    (known, *more), (tried, *others) = (run_ranks(2, _detach_dtensors, is_known) for is_known in (True, False))
    assert known.pop() == 0 < tried.pop()
    assert [known] == [tried] and [item[:-1] for item in more] == [item[:-1] for item in others]


def test_a_shard_like_another_shares_its_spec_unless_its_type_is_another() -> None:
    assert all(run_ranks(2, _shards_like_another))


def _shards_like_another(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    full = DTensor.from_local(torch.ones(3 - rank, 2), mesh, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1))
    local = torch.full((3 - rank, 2), 7.0)
    alike: Any = dtensors.dtensor_like(full, local)
    wide: Any = dtensors.dtensor_like(full, local.double())
    assert alike._spec is full._spec and alike._local_tensor.data_ptr() == local.data_ptr()
    assert wide.dtype == torch.float64 and full.dtype == torch.float32
    return all(item.shape == (5, 2) and item.placements == full.placements for item in (alike, wide))


def test_a_torch_without_the_trial_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dtensors.ShardingPropagator, dtensors._TRIAL)
    with dtensors.known_detach():
        assert not hasattr(dtensors.ShardingPropagator, dtensors._TRIAL)


def _detach_dtensors(rank: int, is_known: bool) -> list[Any]:
    """Returns the spec and strides of parameters made of DTensors; last, how many fake modes torch made for them."""
    mesh, modes, make = init_device_mesh("cpu", (2,)), [], FakeTensorMode.__init__
    shards = (torch.ones(3, 2), torch.ones(2, 3).t(), torch.ones(0, 2), torch.ones(rank, 2, dtype=torch.bfloat16))
    tensors_of_mesh = [
        DTensor.from_local(shard, mesh, [placement], run_check=False, shape=torch.Size((6, 4)), stride=stride)
        for shard in shards
        for stride in ((4, 1), (1, 6))
        for placement in (Shard(0), Shard(1), Replicate(), Partial())
    ]

    def count(mode: FakeTensorMode, *args: Any, **more: Any) -> None:
        modes.append(mode)
        make(mode, *args, **more)

    with pytest.MonkeyPatch.context() as patch, dtensors.known_detach() if is_known else nullcontext():
        patch.setattr(FakeTensorMode, "__init__", count)
        parameters: list[Any] = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors_of_mesh]
    facts = [
        (str(item._spec), str(item._spec.tensor_meta), item.stride(), item._local_tensor.stride())
        for item in parameters
    ]
    return [*facts, len(modes)]
