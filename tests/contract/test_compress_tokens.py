"""Tokens in float8 on their way to experts: rounded as plain numpy does, where it is said, and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral import modeling_mixtral

from meshwright.data.config import DataConfig
from meshwright.errors import PlanError
from meshwright.jobs import layouts as job_layouts
from meshwright.jobs.layouts import make_plans, plan_for_fewer_ranks
from meshwright.jobs.machines import Machines
from meshwright.jobs.model_reading import read_model
from meshwright.launch.devices import Devices
from meshwright.parallel import row_codec
from meshwright.parallel.block_codec import widen_into
from meshwright.parallel.row_codec import RowCodec, RowTransfer
from meshwright.planner.cost.expert_dispatch import ROUND_BYTES, ROUND_MOVES
from meshwright.planner.lossy import lossy_variants
from meshwright.proof.compare import EXACT, Deviation
from meshwright.proof.compressed_sums import CompressedSums
from meshwright.proof.plain_rounding import round_rows
from meshwright.proof.verify import verify
from meshwright.spec.compression import row_bytes
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig
from tests.contract.test_expert_parallel import case, config, layouts
from tests.contract.test_node_dispatch import EXPERTS, VOCAB, totals_of
from tests.tiers import further

FLOAT8 = ",compress_tokens=fp8"


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """Returns what comes of ``rows: (N, D)``, and asserts how many bytes travel."""
    encoded = RowCodec().encode(rows)
    assert encoded.dtype == torch.uint8 and encoded.shape == (len(rows), row_bytes(rows.shape[1]))
    arrived = torch.full_like(rows, 7.0)
    RowCodec().decode_into(arrived, encoded)
    return arrived


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 128, 129, 384])
def test_rows_are_rounded_as_in_plain_numpy(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    sizes = torch.exp2(torch.randint(-24, 15, (400, 1), generator=generator).double())
    rows = torch.randn(400, width, dtype=torch.float64, generator=generator) * sizes
    rows[0] = 0.0
    # Powers of two over the largest number, just above and below it, where the scale changes; and ties.
    rows[1:4, 0] = torch.tensor([448.0 * 2.0**-8, 448.1 * 2.0**-8, 447.9])
    rows[4, 0], rows[5, :] = 448.0, 1.0625
    rows = rows.to(dtype)
    wide = rows if dtype in (torch.float32, torch.float64) else rows.float()
    plain = torch.from_numpy(round_rows(wide.numpy())).to(dtype)
    arrived = decoded(rows)
    assert torch.equal(arrived, plain)
    # Rounded once, a row is rounded to itself: the second exchange, inside a node, changes nothing.
    assert torch.equal(decoded(arrived), arrived)
    # Half a step of three bits; what is small beside its run is off by half the smallest step.
    sizes = rows.double().abs()
    limit = torch.maximum(sizes / 16, sizes.amax(dim=1, keepdim=True) / 224 * 2.0**-10)
    assert bool(((arrived.double() - rows.double()).abs() <= limit).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_spoils_its_run_and_no_other(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 256).to(dtype)
    rows[0, 3], rows[1, 200], rows[2, 0] = torch.nan, -torch.inf, -torch.nan
    is_nan = decoded(rows).isnan().view(4, 2, 128)
    assert torch.equal(is_nan.all(dim=2), is_nan.any(dim=2))
    assert is_nan[:, :, 0].tolist() == [[True, False], [False, True], [True, False], [False, False]]


def test_the_smallest_and_largest_numbers() -> None:
    largest, tiny = torch.finfo(torch.float16).max, torch.finfo(torch.float32).tiny
    # 65504 is nearest to 65536, which float16 lacks: no step may be skipped for it.
    assert decoded(torch.tensor([[largest, -largest]], dtype=torch.float16)).tolist() == [[largest, -largest]]
    for value in (tiny, tiny / 8, 3e38, 1e-300):
        rows = torch.full((1, 3), value, dtype=torch.float64)
        assert torch.equal(decoded(rows), torch.from_numpy(round_rows(rows.numpy())))
    # A run's scale is that of its largest value in float32, above which float64 has some that round to it.
    for rows in ([448 * (1 + 2.0**-30), 2.0**-9], [float(torch.finfo(torch.float32).max) * (1 + 2.0**-30), 1e35]):
        values = torch.tensor([rows], dtype=torch.float64)
        assert torch.equal(decoded(values), torch.from_numpy(round_rows(values.numpy())))
    assert decoded(torch.full((1, 3), 1e300, dtype=torch.float64)).isnan().all()
    assert decoded(torch.empty(0, 256)).shape == (0, 256)


def test_numbers_are_looked_up_as_torch_widens_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        expected, found = codes.to(dtype), widen_into(torch.empty(256, dtype=dtype), codes)
        assert torch.equal(expected.nan_to_num(1e4), found.nan_to_num(1e4))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_kernels_round_alike() -> None:
    eager, fused = RowCodec(), RowCodec(is_fused=True)
    for count, width in ((5, 256), (300, 256), (7, 130)):
        rows = torch.randn(count, width).bfloat16() * torch.logspace(-20, 10, count, base=2.0).bfloat16().unsqueeze(1)
        rows[0, 0] = torch.nan
        encoded, arrived = fused.encode(rows), [torch.empty_like(rows) for _ in range(2)]
        assert torch.equal(encoded[1:], eager.encode(rows)[1:])
        for codec, target in zip((eager, fused), arrived):
            codec.decode_into(target, encoded)
        assert arrived[1][0, :128].isnan().all() and torch.equal(arrived[0][1:], arrived[1][1:])


class _Bytes(TorchDispatchMode):
    """Counts what operations on large tensors read and write, without views."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copies = func._overloadpacket is torch.ops.aten.copy_
        if copies or not (func.is_view or "view" in str(func) or "empty" in str(func)):
            # A copy doesn't read what it overwrites.
            read = [item for item in args[copies:] if isinstance(item, torch.Tensor)]
            self.moved += sum(item.nbytes for item in (*read, result) if item.numel() >= 1 << 16)
        return result


def test_the_price_counts_the_bytes_that_rounding_moves() -> None:
    rows = torch.randn(1024, 1024, dtype=torch.bfloat16)
    arrived = torch.empty_like(rows)
    with _Bytes() as counted, pytest.MonkeyPatch.context() as patch:
        # As on GPUs, which have no use for a table.
        patch.setattr(row_codec, "widen_into", lambda target, values: target.copy_(values))
        RowCodec().decode_into(arrived, RowCodec().encode(rows))
    assert counted.moved == pytest.approx(rows.numel() * (2 * ROUND_MOVES + ROUND_BYTES), rel=0.01)


def prove_rounded(proof: Any, *texts: str) -> None:
    for verdict in verify(proof, layouts(*(text + FLOAT8 for text in texts))):
        assert verdict.passed and verdict.worst.error < 1e-9, verdict
        assert verdict.method_error == 0 and 0.01 < verdict.rounding_distance < 0.05, verdict


@pytest.mark.extended("test_every_axis_and_form_of_the_exchange")
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_models(name: str) -> None:
    prove_rounded(case(config(name, experts=6)), "shard=4,zero=1,ep=4,ep_node=2,recompute=full,ep_keep=true")


def test_every_axis_and_form_of_the_exchange() -> None:
    prove_rounded(
        case(config("mixtral", layers=4), rows=12, sequence=7),
        "shard=2,zero=3,ep=2,microbatches=2,recompute=selective,ep_keep=true",
        "shard=4,zero=2,ep=4,ep_node=1,ep_overlap=2,recompute=full",
    )


@pytest.mark.extended("test_every_axis_and_form_of_the_exchange")
def test_halves_and_pairs() -> None:
    prove_rounded(
        case(config("mixtral", layers=4), rows=12, sequence=7),
        "tp=2,ep=2,ep_halves=true",
        "pp=2,shard=2,zero=1,ep=2,microbatches=6,schedule=dualpipev,recompute=full",
    )


class _Round(torch.autograd.Function):
    """Rounds in forward, or in backward, by plain numpy."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, in_forward: bool) -> torch.Tensor:
        ctx.in_forward = in_forward
        return torch.from_numpy(round_rows(rows.detach().numpy())) if in_forward else rows.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = upstream
        return gradient if ctx.in_forward else torch.from_numpy(round_rows(gradient.numpy())), None


def by_hand(forward: Callable[..., torch.Tensor], by_node: bool) -> Callable[..., torch.Tensor]:
    """Returns a mixture's forward that rounds on one device what ranks would send each other."""

    def rounded(
        self: object, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if dist.is_initialized():
            return forward(self, hidden_states, top_k_index, top_k_weights)
        width, k = hidden_states.shape[-1], top_k_index.shape[-1]
        tokens = _Round.apply(hidden_states.reshape(-1, width), True)
        index, weights = top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k)
        if by_node:
            # A node weighs and sums: the gradient of the sum goes to each.
            return _Round.apply(forward(self, tokens, index, weights), False).view_as(hidden_states)
        # The sender weighs: each expert of a token gets the gradient of its own output.
        slots = tokens.repeat_interleave(k, dim=0)
        outputs = forward(self, slots, index.reshape(-1, 1), weights.new_ones(len(slots), 1))
        outputs = _Round.apply(outputs.reshape(-1, width), False).view(-1, k, width)
        return (outputs * weights.unsqueeze(-1)).sum(dim=1).view_as(hidden_states)

    return rounded


@pytest.mark.parametrize("node", further([0, 1, 2], (0, 1)))
def test_training_is_that_of_one_device_which_rounds_by_hand(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exact values that a proof puts in place: what is rounded must be that, and nothing else."""
    experts = modeling_mixtral.MixtralExperts
    monkeypatch.setattr(experts, "forward", by_hand(experts.forward, by_node=node > 0))
    check = CompressedSums._check_rows

    def compare_alone(self: CompressedSums, transfer: RowTransfer) -> None:
        check(self, RowTransfer(exact=transfer.exact, arrived=transfer.arrived.clone()))

    monkeypatch.setattr(CompressedSums, "_check_rows", compare_alone)
    prove_rounded(case(config("mixtral")), f"shard=4,zero=1,ep=4,ep_node={node}")
    # And the comparison sees what isn't rounded.
    monkeypatch.setattr(CompressedSums, "_check_rows", check)
    (verdict,) = verify(case(config("mixtral")), layouts(f"shard=4,zero=1,ep=4,ep_node={node}{FLOAT8}"))
    assert not verdict.passed and verdict.grad_error > 1e-4


def test_the_proof_knows_where_float16_ends() -> None:
    exact = torch.tensor([[65504.0, -1.0]], dtype=torch.float16)
    check = CompressedSums.__new__(CompressedSums)
    check.method, check._squared_error, check._squared_exact = Deviation(error=0.0, bound=EXACT), 0.0, 0.0
    check._check_rows(RowTransfer(exact=exact, arrived=decoded(exact)))
    assert check.method.error == 0


@pytest.mark.parametrize("fault", ["scale", "order"])
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "scale":
        monkeypatch.setattr(row_codec, "_ABOVE_LARGEST", 0)
    else:
        decode = RowCodec.decode_into
        monkeypatch.setattr(
            RowCodec, "decode_into", lambda self, rows, encoded: decode(self, rows, encoded.roll(1, dims=0))
        )
    (verdict,) = verify(case(config("mixtral", layers=1)), layouts(f"shard=2,zero=1,ep=2{FLOAT8}"))
    assert not verdict.passed and verdict.method_error > 1e-6


def test_metrics_tell_both_bytes() -> None:
    """Under a router that chooses every pair of experts as often, which rounding can't sway."""
    sums = {"": [0, 0], FLOAT8: [0, 0]}
    for more, (sent, raw) in sums.items():
        for _, totals in totals_of(f"shard=4,zero=1,ep=4{more}", every_pair=True):
            sent += sum(total.bytes for total in totals if total.axis == "ep")
            raw += sum(total.raw_bytes for total in totals if total.axis == "ep")
        sums[more] = [sent, raw]
    (exact, raw), (rounded, raw_of_rounded) = sums.values()
    # Of four journeys of a row two are rounded: 16 values and a scale for 64 bytes. Two layers tell counts of experts.
    journeys = (exact - 2 * 4 * 8 * (EXPERTS - 1)) // 64
    assert exact == raw == raw_of_rounded and exact - rounded == journeys // 2 * (64 - 17)


def test_layouts() -> None:
    with pytest.raises(PlanError, match="compress_tokens=fp8 has no effect without ep; write ep=2 or more"):
        Layout.parse("shard=2,zero=1,compress_tokens=fp8")
    with pytest.raises(PlanError, match="compress_tokens=int8 is unknown"):
        Layout.parse("shard=2,zero=1,ep=2,compress_tokens=int8")
    layout = Layout.parse(f"shard=4,zero=1,ep=4{FLOAT8}")
    assert layout.is_lossy and Layout.from_json(layout.to_json()) == layout
    assert layout.with_degrees({"shard": 2, "ep": 2}).is_lossy and not layout.with_degrees({"shard": 2}).is_lossy
    exact = dataclasses.replace(layout, compress_tokens="none")
    assert next(variant.compress_tokens for variant in lossy_variants(exact, 1)) == "fp8"
    assert not any(variant.compress_tokens != "none" for variant in lossy_variants(Layout.parse("replicate=4"), 1))


@pytest.mark.parametrize(
    ("full", "left", "rounded", "words"),
    [
        ("shard=4,zero=1,ep=4", "shard=2,zero=1,ep=2", FLOAT8, "; rounded as shard=4"),
        ("shard=4,zero=1,ep=4", "shard=2,zero=1", "", "; sends exactly what compress_tokens=fp8 rounded"),
        (
            "replicate=2,shard=2,zero=1,ep=2,compress=int8",
            "replicate=2",
            ",compress=int8",
            "compress_tokens=fp8 was; sends exactly what compress_tokens=fp8 rounded",
        ),
    ],
)
def test_fewer_ranks_round_as_before_or_say_that_they_do_not(
    full: str, left: str, rounded: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(model=config("mixtral"), data=DataConfig(sequence=8))
    read, machines = (
        read_model(run, VOCAB, 8),
        Machines(devices=Devices(kind="cpu", count=2, found=2, cores=2), ranks=2),
    )
    exact = make_plans(dataclasses.replace(run, layout=left), read, machines)
    monkeypatch.setattr(job_layouts, "_planner_plans", lambda *_: exact)
    plan, _ = plan_for_fewer_ranks(run, read, machines, Layout.parse(full + FLOAT8))
    assert plan.layout == Layout.parse(left + rounded)
    assert plan.reason.startswith("named by the user") and words in plan.reason


def test_what_float64_loses_is_said() -> None:
    """Its layouts are those like the run's, without the planner."""
    run = RunConfig(model=config("mixtral"), data=DataConfig(sequence=8))
    read, machines = (
        read_model(run, VOCAB, 8),
        Machines(devices=Devices(kind="cpu", count=2, found=2, cores=2), ranks=2),
    )
    plan, _ = plan_for_fewer_ranks(run, read, machines, Layout.parse(f"shard=4,zero=1,ep=4,precision=float64{FLOAT8}"))
    assert not plan.layout.is_lossy and plan.reason.endswith("sends exactly what compress_tokens=fp8 rounded")
