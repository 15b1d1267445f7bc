"""Sums in low rank: what is left out is owed, skipped steps leave no trace, matrices of low rank are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import RoundingKey
from meshwright.parallel.error_feedback import ErrorFeedback
from meshwright.parallel.feedback_compressor import FeedbackCompressor
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.low_rank import LowRankCompressor
from meshwright.parallel.top_k import TopKCompressor
from meshwright.parallel.weights import Weight
from meshwright.spec.compression import Compression
from meshwright.spec.layout import Layout
from meshwright.spec.placement import LocalShard
from tests.tiers import cases

SHAPES = {"wide": (24, 60), "deep": (40, 5, 9), "vector": (31,), "small": (3, 5)}


class _Pending:
    raw_bytes = 0


class _Loopback:
    """The group of a copy among several in one process: its message is added to the others' by `Copies`."""

    axis, on_cuda = "replicate", False

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index, self.log = size, index, TrafficLog()
        self.sent: torch.Tensor | None = None
        self.received: torch.Tensor | None = None
        """Of an all-gather, (copies * n,); None where `sent` is summed."""

    def all_reduce(self, tensor: torch.Tensor, _of: str = "") -> _Pending:
        self.sent, self.received = tensor, None
        return _Pending()

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, _of: str = "") -> _Pending:
        self.sent, self.received = shard, output
        return _Pending()


def exchange(groups: Sequence[_Loopback]) -> None:
    """Ends what all copies have started: an all-reduce or an all-gather."""
    sent = [group.sent for group in groups if group.sent is not None]
    assert len(sent) == len(groups) and len({group.received is None for group in groups}) == 1
    total, gathered = (torch.stack(sent).sum(dim=0), None) if groups[0].received is None else (None, torch.cat(sent))
    for group, tensor in zip(groups, sent):
        if group.received is None:
            tensor.copy_(total)
        else:
            group.received.copy_(gathered)


class Copies:
    """Copies of a model's weights, stepped in turn."""

    def __init__(self, count: int, choice: str, dtype: torch.dtype = torch.float64, seed: int = 3) -> None:
        compression = Compression.parse(choice)
        self.keys = [RoundingKey(seed, 0) for _ in range(count)]
        self.groups = [_Loopback(count, index) for index in range(count)]
        kind = LowRankCompressor if compression.is_low_rank else TopKCompressor
        self.sums: list[FeedbackCompressor] = [
            kind(compression, group, key) for group, key in zip(self.groups, self.keys)
        ]
        for index, low_rank in enumerate(self.sums):
            weights = [
                Weight(nn.Parameter(torch.zeros(shape, dtype=dtype)), LocalShard.unsharded(name, shape, count))
                for name, shape in SHAPES.items()
            ]
            low_rank.error_feedback = ErrorFeedback(weights, compression, count, index, (), {}, LiveBytes())
        self.feedback = [low_rank.error_feedback for low_rank in self.sums if low_rank.error_feedback is not None]

    def step(self, grads: Sequence[dict[str, torch.Tensor]], valid: bool = True, scale: float = 1.0) -> dict:
        """Sums gradients, unscaled, of each copy; returns the sums, unscaled, which all copies have alike."""
        given = [{name: grad * scale for name, grad in copy.items()} for copy in grads]
        blocks = WeightBlocks(list(SHAPES), [torch.Size(shape).numel() for shape in SHAPES.values()])
        for feedback in self.feedback:
            feedback.begin_step(scale)
        runs = [low_rank._phases(blocks, list(copy.values()), "") for low_rank, copy in zip(self.sums, given)]
        # Every copy sends before any reads.
        while None not in [next(run, None) for run in runs]:
            exchange(self.groups)
        for feedback, key in zip(self.feedback, self.keys):
            feedback.commit(torch.tensor(valid))
            key.step = int(key.step) + 1
        for copy in given[1:]:
            for name in copy:
                torch.testing.assert_close(copy[name], given[0][name], rtol=0, atol=0, equal_nan=True)
        return {name: grad / scale for name, grad in given[0].items()}

    def owed(self, name: str) -> torch.Tensor:
        return torch.stack([feedback.errors[name].error for feedback in self.feedback]).sum(dim=0)


def random_gradients(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def added(copies: Sequence[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([copy[name] for copy in copies]).sum(dim=0)


@pytest.mark.parametrize("choice", ["powersgd:1", "powersgd:2:3"])
def test_decoded_sums_and_what_is_owed_are_the_exact_sums(choice: str) -> None:
    copies = Copies(3, choice)
    decoded, exact = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in "12")
    for step in range(12):
        grads, valid = random_gradients(3, step), step not in (4, 7)
        sums = copies.step(grads, valid, scale=2.0 ** (step % 5 * 4))
        for name in SHAPES if valid else ():
            decoded[name] += sums[name]
            exact[name] += added(grads, name)
        assert torch.allclose(sums["vector"], added(grads, "vector"), rtol=1e-14)
    assert set(copies.feedback[0].errors) == {"wide", "deep"}
    for name in ("wide", "deep"):
        owed = copies.owed(name)
        assert float(owed.norm()) > 0.1 * float(exact[name].norm())
        off = (decoded[name] + owed - exact[name]).norm() / exact[name].norm()
        assert float(off) < 1e-12, (name, off)


def test_a_skipped_step_leaves_no_bit_behind_even_where_it_overflowed() -> None:
    whole, broken = Copies(2, "powersgd:2"), Copies(2, "powersgd:2")
    for step in range(4):
        whole.step(random_gradients(2, step))
    for step in range(4):
        bad = random_gradients(2, 100 + step)
        bad[1]["wide"][3, 4] = torch.inf if step % 2 else torch.nan
        if step < 2:
            assert not torch.isfinite(broken.step(bad, valid=False)["wide"]).all()
        broken.step(random_gradients(2, step))
        for key in broken.keys:
            key.step = step + 1
    for one, two in zip(whole.feedback, broken.feedback):
        for name, matrix in one.errors.items():
            assert torch.equal(matrix.error, two.errors[name].error)
            assert torch.equal(matrix.basis, two.errors[name].basis)


def test_gradients_of_that_rank_are_summed_exactly_and_first_steps_to_the_bit() -> None:
    copies, generator = Copies(2, "powersgd:4:2"), torch.Generator().manual_seed(5)

    def thin(shape: tuple[int, ...]) -> torch.Tensor:
        left, right = (
            torch.randn(size, 2, generator=generator, dtype=torch.float64)
            for size in (shape[0], torch.Size(shape[1:]).numel())
        )
        return (left @ right.t()).view(shape)

    for step in range(5):
        # Two of each copy: of rank four together. The third step has none at all, the fourth less.
        grads = [{name: thin(shape) * (step != 2) for name, shape in SHAPES.items()} for _ in range(2)]
        if step == 3:
            grads[1] = {name: grad * 0 for name, grad in grads[1].items()}
        sums = copies.step(grads)
        for name in SHAPES:
            exact = added(grads, name)
            assert (sums[name] - exact).norm() <= (0.0 if step < 2 else 1e-11) * exact.norm(), (step, name)


def test_rounding_noise_of_a_thin_gradient_sets_no_direction() -> None:
    """After a gradient of rank one, the second direction is drawn again: noise would make runs part."""
    sums = []
    for noise in (0.0, 1e-15):
        copies, generator = Copies(2, "powersgd:2"), torch.Generator().manual_seed(9)
        thin = {
            name: torch.ones(shape, dtype=torch.float64).cumsum(dim=0)
            + noise * torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in SHAPES.items()
        }
        copies.step([thin, thin])
        sums.append(copies.step(random_gradients(2, 1)))
    for name in SHAPES:
        torch.testing.assert_close(sums[0][name], sums[1][name], rtol=1e-9, atol=1e-9)


def test_more_steps_bring_the_whole_of_a_constant_gradient() -> None:
    """What every step leaves out isn't lost: the mean of the sums tends to the gradient, as 1 / steps."""
    copies, grads, total = Copies(2, "powersgd:2"), random_gradients(2, 0), 0.0
    exact, off = added(grads, "wide"), []
    for step in range(1, 65):
        total = copies.step(grads)["wide"] + total
        off.append(float((total / step - exact).norm() / exact.norm()))
    assert off[0] > 0.7 and off[15] < 0.5 and off[63] < off[15] / 2


def filled(feedback: ErrorFeedback, saved: dict[str, torch.Tensor]) -> None:
    for name, target in feedback.restore_targets(saved.keys()).items():
        target.copy_(saved[name])
    feedback.restored()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_another_number_of_copies_owes_as_much_and_goes_on_alike(count: int) -> None:
    """The sums of later steps follow from what all copies owe together, however it is shared out."""
    before = Copies(3, "powersgd:2")
    for step in range(3):
        before.step(random_gradients(3, step))
    saved = {name: tensor.clone() for feedback in before.feedback for name, tensor in feedback.state()}
    after = Copies(count, "powersgd:2")
    for feedback in after.feedback:
        filled(feedback, saved)
    for name in ("wide", "deep"):
        torch.testing.assert_close(after.owed(name), before.owed(name), rtol=1e-14, atol=1e-14)
    for step in range(3, 6):
        grads = random_gradients(3, step)
        shared = [{name: added(grads, name) / count for name in SHAPES} for _ in range(count)]
        sums, others = before.step(grads), after.step(shared)
        for name in SHAPES:
            torch.testing.assert_close(others[name], sums[name], rtol=1e-10, atol=1e-11)
    if count == 3:
        own = before.feedback[1].errors["wide"].error
        filled(after.feedback[1], {name: tensor for feedback in before.feedback for name, tensor in feedback.state()})
        assert torch.equal(after.feedback[1].errors["wide"].error, own)


def test_a_state_without_errors_begins_anew() -> None:
    copies = Copies(2, "powersgd:2")
    copies.step(random_gradients(2, 0))
    filled(copies.feedback[0], {})
    assert not copies.feedback[0].errors["wide"].error.any() and not copies.feedback[0].errors["deep"].basis.any()


def _other_seed() -> Copies:
    return Copies(2, "powersgd:2", seed=4)


@pytest.mark.parametrize(("make", "equal"), [(lambda: Copies(2, "powersgd:2"), True), (_other_seed, False)])
def test_a_run_begins_from_its_seed(make: Callable[[], Copies], equal: bool) -> None:
    first, second = Copies(2, "powersgd:2").step(random_gradients(2, 0)), make().step(random_gradients(2, 0))
    assert torch.equal(first["wide"], second["wide"]) is equal


REFUSED = {
    "replicate=2,compress=powersgd": "powersgd:R",
    "replicate=2,compress=powersgd:0": "1 or more",
    "replicate=2,compress=powersgd:4:x": "first S steps",
    "compress=powersgd:4": "replicate=2",
    "shard=4,zero=1,compress=powersgd:4": "replicate=2,shard=2",
    "replicate=2,pp=2,compress=powersgd:4": "drop pp",
    "cp=2,replicate=2,ep=2,compress=powersgd:4": "drop ep",
    "replicate=2,islands=2,compress=powersgd:4": "islands",
    "replicate=2,offload=parameters,compress=powersgd:4": "offload=optimizer",
}


@pytest.mark.parametrize("text", cases(list(REFUSED), range(len(REFUSED))))
def test_what_it_cannot_do_is_refused_with_what_works(text: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[text]):
        Layout.parse(text)


def test_other_degrees_keep_it_where_they_can() -> None:
    layout = Layout.parse("replicate=4,tp=2,compress=powersgd:4:100")
    assert str(layout) == "replicate=4,tp=2,compress=powersgd:4:100" and Layout.from_json(layout.to_json()) == layout
    assert str(layout.with_degrees({"replicate": 3})) == "replicate=3,compress=powersgd:4:100"
    assert not layout.with_degrees({"tp": 2}).compress
    assert str(layout.with_degrees({"replicate": 2, "shard": 2}).compress) == "powersgd:4:100"
    assert not layout.with_degrees({"shard": 4}).compress
    assert not layout.with_degrees({"replicate": 2, "pp": 2}).compress
