"""Rounded numbers on the wire: the codec against another formula, its edges, and the mean of many random roundings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.errors import PlanError
from meshwright.parallel import block_codec
from meshwright.parallel.block_codec import BlockCodec, WeightBlocks, WeightStore
from meshwright.proof.plain_rounding import representable, round_weight
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, Compression, assign_buckets
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import TorchDispatchMode
from tests.tiers import further

SIZES = (0, 1, 255, 256, 257, 1000)
UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Half the distance from 1 to the next number."""


def coded(values: torch.Tensor, name: str, draw: str = "") -> torch.Tensor:
    """What is decoded of a weight called ``w``; rounded at random where a draw is named."""
    weights, codec = WeightBlocks(["w"], [values.numel()]), BlockCodec(name, FORMATS[name])
    blocks = weights.read([values], 0, weights.count, values.dtype)
    fractions = weights.fractions(draw, 0, weights.count, values.device) if draw else None
    out = torch.empty_like(values)
    weights.write([out], 0, codec.decode(codec.encode(blocks, fractions), values.dtype))
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codec_equals_the_plain_formula_to_the_bit(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        for spread in (1.0, 1e-6, 1e6):
            values = torch.randn(size, dtype=dtype, generator=generator).mul_(spread).pow_(3)
            for draw in ("", "0,1,2"):
                expected = torch.from_numpy(round_weight(values.numpy(), name, draw, "w"))
                assert torch.equal(coded(values, name, draw), expected), (size, spread, draw)


class _DivideAsCuda(TorchDispatchMode):
    """Divides by a plain number as CUDA does: by a product with its rounded reciprocal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__ and not isinstance(args[1], torch.Tensor):
            return args[0] * float(torch.ones((), dtype=args[0].dtype) / args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_rounds_to_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    codec, blocks = BlockCodec(name, FORMATS[name]), torch.randn(300, 256, dtype=dtype)
    expected = codec.encode(blocks, None)
    with _DivideAsCuda():
        assert not torch.equal(blocks / 448, blocks / torch.full((1, 1), 448.0, dtype=dtype))
        assert torch.equal(codec.encode(blocks, None), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_format(name: str) -> None:
    codec, weights = BlockCodec(name, FORMATS[name]), WeightBlocks(["a", "b"], [257, 1])
    encoded = codec.encode(weights.read([torch.randn(257), torch.randn(1)], 0, weights.count, torch.float32), None)
    width = {"int8": 1, "fp8": 1}.get(name, 2)
    assert encoded.shape == (3, BLOCK_VALUES * width + (0 if name == "bf16" else 4)) and encoded.dtype == torch.uint8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("draw", ["", "0,0"])
def test_what_is_not_finite_arrives_as_nan(name: str, bad: float, draw: str) -> None:
    values = torch.ones(512)
    values[3] = bad
    out = coded(values, name, draw)
    assert torch.isnan(out[3]) and torch.isfinite(out[256:]).all(), "the next block is sound"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("draw", ["", "0,0"])
def test_zeros_denormals_and_huge_values(name: str, draw: str) -> None:
    assert not coded(torch.zeros(300), name, draw).any()
    tiny = coded(torch.full((256,), 1e-42), name, draw)
    assert torch.isfinite(tiny).all() and (tiny.abs() <= 2e-40).all()
    huge = coded(torch.full((256,), 3e38).mul_(torch.tensor([1.0, -1.0]).repeat(128)), name, draw)
    assert torch.isfinite(huge).all() and (huge.abs() - 3e38).abs().max() <= 3e38 / 100
    assert torch.isnan(coded(torch.full((1,), 1e300, dtype=torch.float64), name, draw)).all()


@pytest.mark.parametrize("name", further(FORMATS, (2, 3)))
def test_the_mean_of_random_roundings_is_the_value(name: str) -> None:
    """The mean of n roundings, each off by at most one distance d, lies within 6 d / (2 sqrt(n)) of the value."""
    values, draws = torch.randn(256, dtype=torch.float64), 4000
    total = torch.zeros_like(values)
    for draw in range(draws):
        total += coded(values, name, f"7,{draw}")
    numbers, _ = representable(name)
    scale = 1.0 if name == "bf16" else float(np.float32(values.abs().max() / FORMATS[name].largest))
    upper = np.searchsorted(numbers, (values / scale).numpy(), side="right").clip(1, len(numbers) - 1)
    distance = torch.from_numpy(numbers[upper] - numbers[upper - 1]) * scale
    assert ((total / draws - values).abs() <= 3 * distance / math.sqrt(draws) + 1e-12).all()
    # Rounding to the nearest instead would stand still.
    assert (coded(values, name, "7,0") != coded(values, name, "7,1")).any()


@pytest.mark.parametrize(("name", "unit"), UNITS.items())
def test_rounding_to_the_nearest_is_off_by_half_a_distance_at_most(name: str, unit: float) -> None:
    values = torch.linspace(0.5, 1.0, 256, dtype=torch.float64)
    assert ((coded(values, name) - values).abs() <= unit * values.abs() * (1 + 1e-6)).all()


def test_a_block_is_rounded_alike_wherever_it_travels() -> None:
    values, other = torch.randn(300), torch.randn(100)
    together, codec = WeightBlocks(["other", "w"], [100, 300]), BlockCodec("int8", FORMATS["int8"])
    blocks = together.read([other, values], 0, together.count, torch.float32)
    encoded = codec.encode(blocks, together.fractions("0,0", 0, together.count, values.device))
    decoded = codec.decode(encoded, torch.float32)
    out = [torch.empty(100), torch.empty(300)]
    together.write(out, 0, decoded)
    assert torch.equal(out[1], coded(values, "int8", "0,0"))
    # A part of the message, as each copy of a node has one, draws the same numbers.
    part = together.fractions("0,0", 1, 2, values.device)
    assert torch.equal(part, together.fractions("0,0", 0, together.count, values.device)[1:])


def test_buckets_hold_every_gradient_once_back_to_front() -> None:
    for sizes in ([], [5], [1 << 21, 8, 8, 1 << 19, 1 << 19, 4, 1 << 20], [100] * 40, [100, 1 << 20] * 40):
        buckets = list(assign_buckets(sizes, ["a" if size % 3 else "b" for size in sizes]))
        assert sorted(position for bucket in buckets for position in bucket) == list(range(len(sizes)))
        assert all(bucket == sorted(bucket, reverse=True) for bucket in buckets)
        assert all(len(bucket) == 1 for bucket in buckets if max(sizes[position] for position in bucket) >= 1 << 20)
        # Messages leave in this order, so none may wait for a gradient that backward makes after those of a later one.
        *full, _ = [bucket[-1] for bucket in assign_buckets(sizes)] or [0]
        assert full == sorted(full, reverse=True)


def test_small_gradients_between_large_ones_share_messages() -> None:
    """Vectors of a layer wait for others: each message costs a round trip, however short it is."""
    layer = [256, 768 * 256, 768, 256 * 256, 256, 256, 1024 * 256, 1024, 1024 * 256, 256]
    sizes = [4 * count for count in [2048 * 256, *layer * 6]]
    messages = [sum(sizes[position] for position in bucket) for bucket in assign_buckets(sizes)]
    # Two products of a layer travel alone, the others and its vectors together; the embedding alone.
    assert len(messages) in (6 * 3 + 1, 6 * 3 + 2) and sum(messages) == sum(sizes)
    assert sum(size < 1 << 20 for size in messages) <= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replicate=2,compress=int9", "did you mean 'int8'"),
        ("replicate=4,compress=int8:1", "K copies of a node, 2 or more"),
        ("replicate=4,compress=none:2", "write int8:K"),
        ("replicate=4,compress=fp8:3", "nearest that works: compress=fp8"),
        ("replicate=4,compress=fp8:4", "nearest that works: compress=fp8"),
        ("shard=8,compress=int8", "write replicate=2,shard=4"),
        ("tp=2,compress=int8", "this layout has none; write replicate=2"),
        ("replicate=2,compress_weights=int8", "write shard=2,zero=3"),
        ("shard=2,compress_weights=int4", "did you mean 'int8'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Layout.parse(text)


def test_a_layout_with_other_copies_keeps_what_fits() -> None:
    layout = Layout.parse("replicate=4,shard=2,compress=int8:2,compress_weights=int8")
    assert Layout.from_json(layout.to_json()) == layout == Layout.parse(str(layout))
    assert str(layout.with_degrees({"replicate": 3})) == "replicate=3,compress=int8"
    assert str(layout.with_degrees({"shard": 2})) == "shard=2,zero=3,compress_weights=int8"
    assert layout.with_degrees({"replicate": 8}).compress == Compression("int8", 2)
    assert str(layout.with_degrees({"tp": 2})) == "tp=2"


def test_slices_have_the_bytes_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a slice is, a message is the weights' values, each weight filled up with zeros to full blocks."""
    generator, sizes = torch.Generator().manual_seed(0), [1000, 0, 3, 1500, 512]
    weights, codec = WeightBlocks(list("uvwxy"), sizes), BlockCodec("int8", FORMATS["int8"])
    values = [torch.randn(size, generator=generator) for size in sizes]
    filled = [torch.nn.functional.pad(item, (0, -item.numel() % BLOCK_VALUES)) for item in values]
    blocks = torch.cat([*filled, torch.zeros(2 * BLOCK_VALUES)]).view(-1, BLOCK_VALUES)
    assert torch.equal(weights.read(values, 0, weights.count + 2, torch.float32), blocks)
    at_once = codec.encode(blocks, weights.fractions("0,1", 0, len(blocks), blocks.device))
    decoded = codec.decode(at_once, torch.float32)
    for length in (1, 3, 5, 100):
        monkeypatch.setattr(block_codec, "SLICE_BLOCKS", length)
        store = WeightStore(weights, values, torch.float32)
        draw = lambda first, count: weights.fractions("0,1", first, count, blocks.device)  # noqa: E731
        assert torch.equal(codec.encode_store(store, len(blocks), draw), at_once)
        out = [torch.empty(size) for size in sizes]
        codec.decode_to_store(WeightStore(weights, out, torch.float32), at_once)
        expected, offset = decoded.view(-1), 0
        for size, item in zip(sizes, out):
            assert torch.equal(item, expected[offset : offset + size])
            offset += -(-size // BLOCK_VALUES) * BLOCK_VALUES
        assert torch.equal(codec.sum_terms([at_once, at_once], torch.float32), 2 * decoded)
        counts = [weights.count_elements(first, length) for first in range(0, len(blocks), length)]
        assert sum(counts) == sum(sizes) and max(counts) <= length * BLOCK_VALUES
