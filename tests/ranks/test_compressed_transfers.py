"""Rounded sums on the wire and in whole runs: bytes by the kernel's counters, draws by step, what isn't finite."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.parallel import block_codec
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import CopyGroups, GradientCompressor, RoundingKey, WeightCompressor
from meshwright.planner.cost.rounding import RoundingTimes
from meshwright.spec.compression import Compression
from meshwright.strategy import HybridParallelStrategy
from meshwright.train.trainer import Trainer
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks
from tests.runs import call, curve, rows, words, write_corpus
from tests.tiers import further

SIZE = 1 << 20
TRANSFERS = 4


def compressor(log: TrafficLog, key: RoundingKey, name: str = "int8") -> GradientCompressor:
    group = AxisGroup("replicate", dist.group.WORLD, log)
    return GradientCompressor(Compression(name), CopyGroups(group, None, group), key)


def summed(rank: int, step: int, bad: float | None = None) -> torch.Tensor:
    key = RoundingKey(3, step)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    if bad is not None and rank == 1:
        gradient[300] = bad
    compressor(TrafficLog(), key).all_reduce(WeightBlocks(["w"], [1000]), [gradient]).wait()
    return gradient


def test_draws_follow_from_the_step_and_what_is_not_finite_reaches_every_rank() -> None:
    def work(rank: int) -> list[torch.Tensor]:
        return [summed(rank, 5), summed(rank, 5), summed(rank, 6), summed(rank, 5, float("inf"))]

    ranks = run_ranks(3, work)
    for first, again, later, bad in ranks:
        assert torch.equal(first, again) and not torch.equal(first, later)
        assert torch.isnan(bad[256:512]).all() and torch.equal(bad[:256], first[:256])
    for results in ranks[1:]:
        for mine, theirs in zip(results[:3], ranks[0][:3]):
            assert torch.equal(mine, theirs)


def counted_work(rank: int) -> tuple[float, float, float]:
    """Returns how many values a rank rounds, decodes, and books the error of in a sum, of `SIZE`."""
    counts = {"encode": 0, "decode": 0, "rounding_error": 0}
    sums = compressor(TrafficLog(), RoundingKey())
    codec = sums._codec
    encode, decode, rounding_error = codec.encode, codec.decode, codec.rounding_error

    def counting_encode(blocks: torch.Tensor, fractions: torch.Tensor | None) -> torch.Tensor:
        counts["encode"] += blocks.numel()
        return encode(blocks, fractions)

    def counting_decode(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        decoded = decode(encoded, dtype)
        counts["decode"] += decoded.numel()
        return decoded

    def counting_error(*arguments: Any) -> Any:
        counts["rounding_error"] += arguments[3].numel()
        before = counts["decode"]
        result = rounding_error(*arguments)
        # What it decodes itself is part of booking.
        counts["decode"] = before
        return result

    codec.encode, codec.decode, codec.rounding_error = counting_encode, counting_decode, counting_error  # type: ignore[method-assign, assignment]
    sums.all_reduce(WeightBlocks(["w"], [SIZE]), [torch.randn(SIZE)]).wait()
    return counts["encode"] / SIZE, counts["decode"] / SIZE, counts["rounding_error"] / SIZE


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_is_priced_by_the_values_that_a_rank_rounds_and_decodes(ranks: int) -> None:
    for counts in run_ranks(ranks, counted_work):
        for position, count in enumerate(counts):
            # A second to round, to decode or to book a value, and none for the rest.
            tables = [(0.0, float(index == position)) for index in range(3)]
            times = RoundingTimes(round_s=tables[0], nearest_s=(0.0, 0.0), decode_s=tables[1], book_s=tables[2])
            seconds = times.sum_s(np.ones(1), np.ones((1, 1)), np.array([float(ranks)]))
            assert count == seconds[0, 0]


class LiveStorages(TorchDispatchMode):
    """Adds up storages that operators make, while they live: whatever code makes them, and whatever it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {item.untyped_storage().data_ptr() for item in tree_leaves((args, kwargs)) if torch.is_tensor(item)}
        result = func(*args, **(kwargs or {}))
        for tensor in (item for item in tree_leaves(result) if torch.is_tensor(item) and item.numel()):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and storage.data_ptr() not in self._sizes:
                self._sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage.data_ptr())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def allocated(rank: int) -> tuple[int, int, int]:
    """Returns bytes that live at most in a sum, and afterwards, and the peak that the log has."""
    block_codec.SLICE_BLOCKS = 16
    log = TrafficLog()
    engine, weights, gradient = compressor(log, RoundingKey()), WeightBlocks(["w"], [SIZE]), torch.randn(SIZE)
    with LiveStorages() as live:
        engine.all_reduce(weights, [gradient]).wait()
        gc.collect()
        torch.empty(1)
    return live.peak, sum(live._sizes.values()), log.buffers.total_peak


def test_a_sum_needs_the_bytes_on_the_wire_twice_and_its_part_of_the_sum() -> None:
    blocks = SIZE // 256
    expected = 2 * blocks * 260 + blocks // 2 * (1024 + 260)
    for peak, after, logged in run_ranks(2, allocated):
        assert logged == expected and after < 1 << 16
        assert expected <= peak <= expected + 32 * 16 * 1024, "temporaries of a slice come on top"


def counted(rank: int, name: str) -> tuple[int, int]:
    """Returns bytes over loopback during `TRANSFERS`, by the kernel's counter, and what both ranks book.

    Args:
        rank: of two.
        name: format of a sum of gradients; with ``weights`` before it, of a gather.
    """
    log = TrafficLog()
    weights, gradient = WeightBlocks(["w"], [SIZE]), torch.randn(SIZE)
    if name.startswith("weights"):
        engine = WeightCompressor(name.removeprefix("weights "), AxisGroup("shard", dist.group.WORLD, log))
        whole = torch.empty(2 * SIZE)
        start = lambda: engine.all_gather(weights, whole, gradient)  # noqa: E731
    else:
        sums = compressor(log, RoundingKey(), name)
        start = lambda: sums.all_reduce(weights, [gradient.clone()])  # noqa: E731
    start().wait()
    log.drain()
    dist.barrier()
    before = _loopback_bytes()
    for _ in range(TRANSFERS):
        start().wait()
    dist.barrier()
    return _loopback_bytes() - before, sum(total.bytes for total in log.drain())


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


BLOCK_BYTES = {"int8": 260, "bf16": 512, "weights int8": 260}


def test_the_kernel_counts_the_bytes_that_are_booked() -> None:
    """In a network namespace of its own, whose loopback carries nothing else."""
    command = "ip link set lo up && exec " + sys.executable + " -m tests.ranks.test_compressed_transfers"
    try:
        result = subprocess.run(["unshare", "-n", "sh", "-c", command], capture_output=True, text=True, timeout=200)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if "Operation not permitted" in result.stderr:
        pytest.skip("no namespaces for this user")
    assert result.returncode == 0, result.stderr
    for line, (name, block_bytes) in zip(result.stdout.splitlines()[-3:], BLOCK_BYTES.items(), strict=True):
        kernel, booked = map(int, line.split())
        # A sum sends half of the blocks twice, a gather all of them once. Headers of packets come on top.
        assert booked == TRANSFERS * 2 * (SIZE // 256) * block_bytes, name
        assert booked <= kernel <= 1.03 * booked, name


def custom_loop(rank: int, text: str) -> list[Any]:
    torch.manual_seed(0)
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(PlainModel(61, 8, 2))
    optimizer = strategy.optimizer(torch.optim.SGD, lr=0.1)
    tokens = torch.randint(0, 61, (8, 11), generator=torch.Generator().manual_seed(1))
    index, count = strategy.reader
    mine = tokens.chunk(count)[index]
    gradients = []
    for step in range(3):
        if step == 2 and "compress=" in text:
            # As a checkpoint of the start is loaded: in place.
            strategy.state_dict()["random"]["rounding_step"].zero_()
        for half, part in enumerate(mine.chunk(2)):
            with strategy.accumulate() if half == 0 else nullcontext():
                strategy.loss(model(part[:, :-1]), part[:, 1:]).div(2).backward()
        gradients.append(torch.cat([weight.gradient.flatten().clone() for weight in strategy.weights]))  # type: ignore[union-attr]
        optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("text", further(["replicate=2", "shard=2,zero=3"], (1,)))
def test_a_custom_loop_compresses_too(text: str) -> None:
    choice = "compress=int8" if text.startswith("replicate") else "compress_weights=int8"
    exact, rounded = run_ranks(2, custom_loop, text), run_ranks(2, custom_loop, f"{text},{choice}")
    for rank in range(2):
        for step in range(2):
            off = (rounded[rank][step] - exact[rank][step]).norm() / exact[rank][step].norm()
            assert 1e-4 < off < 0.1, (rank, step, off)
    if text.startswith("replicate"):
        assert torch.equal(rounded[0][0], rounded[1][0])
        # The same gradient again is rounded by other numbers.
        assert not torch.equal(rounded[0][0], rounded[0][1])
        assert torch.equal(rounded[0][0], rounded[0][2])


def test_copies_over_tp_stay_equal_in_a_run(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    options = ("--train.steps", "4", "--recovery.compare-every", "2")
    argv = words(tmp_path, "run", *options, layout="replicate=2,tp=2,compress=int8", devices=4)
    status, text = call(argv, tmp_path / "run.log")
    assert status == 0 and sorted(curve(tmp_path / "run")) == [1, 2, 3, 4], text
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "damaged" not in events and "copies_left" not in events, events


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_and_another_layout_takes_it_up(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    layout = "replicate=2,compress=int8"
    for run, stops in (("whole", (9,)), ("resumed", (3, 6, 9))):
        for stop in stops:
            argv = words(tmp_path, run, "--train.steps", "9", layout=layout, devices=2)
            status, text = call(argv, tmp_path / f"{run}.log", before=lambda stop=stop: _end_after(stop))
            assert status == (0 if stop == 9 else 1), text
    assert curve(tmp_path / "whole") == curve(tmp_path / "resumed")
    line = rows(tmp_path / "whole")[-1]["comm"]
    assert {total["op"] for total in line if total["rounding_error"]} == {"all_gather"}
    argv = words(tmp_path, "resumed", "--train.steps", "12", layout="shard=2,zero=2,compress_weights=int8", devices=2)
    status, text = call(argv, tmp_path / "other.log")
    assert status == 0 and sorted(curve(tmp_path / "resumed")) == list(range(1, 13)), text


def _end_after(step: int) -> None:
    """Makes ranks fail once a step is done and saved."""
    one_step = Trainer._one_step

    def ending(self: Trainer) -> Any:
        if self.step >= step and step < self._deps.config.train.steps:
            raise RuntimeError("the end, for now")
        return one_step(self)

    Trainer._one_step = ending  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in BLOCK_BYTES:
        results = run_ranks(2, counted, name)
        print(max(kernel for kernel, _ in results), sum(booked for _, booked in results))
