"""Sums of the largest values: those of a full sort travel, the rest is owed, skipped steps leave no trace."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import PlanError
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.top_k import largest_indices
from meshwright.spec.layout import Layout
from tests.tiers import cases
from tests.unit.test_low_rank import SHAPES, Copies, added, filled, random_gradients

MATRICES = ("wide", "deep", "small")


def test_the_largest_are_those_of_a_full_sort_and_ties_go_by_index() -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 7, 100, 1000):
        # Few different magnitudes of either sign: nearly all are ties, in places zeros alone.
        values = torch.randint(-2, 3, (size,), generator=generator).double() * (size != 7)
        order = sorted(range(size), key=lambda index, values=values: (-abs(float(values[index])), index))
        for count in {1, size // 3 or 1, size}:
            assert largest_indices(values, count, LiveBytes()).tolist() == sorted(order[:count]), (size, count)
    spoilt = torch.tensor([1.0, float("nan"), 5.0, float("-inf"), 7.0])
    assert largest_indices(spoilt, 2, LiveBytes()).tolist() == [1, 3]
    assert largest_indices(spoilt, 3, LiveBytes()).tolist() == [1, 3, 4]


@pytest.mark.parametrize("choice", ["topk:4", "topk:1000", "topk:5:3"])
def test_decoded_sums_and_what_is_owed_are_the_exact_sums(choice: str) -> None:
    copies = Copies(3, choice)
    decoded, exact = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in "12")
    for step in range(12):
        grads, valid = random_gradients(3, step), step not in (4, 7)
        sums = copies.step(grads, valid, scale=2.0 ** (step % 5 * 4))
        sent = 0 if choice == "topk:5:3" and step < 3 else int(choice.split(":")[1])
        for name, shape in SHAPES.items():
            nonzero, elements = int(sums[name].count_nonzero()), torch.Size(shape).numel()
            if sent and name in MATRICES:
                # As many as one copy sends where all send the same, and three times as many where none do.
                assert -(-elements // sent) <= nonzero <= 3 * -(-elements // sent)
            else:
                assert nonzero == elements and torch.allclose(sums[name], added(grads, name), rtol=1e-14)
            decoded[name] += sums[name] * valid
            exact[name] += added(grads, name) * valid
    assert set(copies.feedback[0].errors) == set(MATRICES)
    for name in MATRICES:
        assert float(copies.owed(name).norm()) > 0.1 * float(exact[name].norm())
        off = (decoded[name] + copies.owed(name) - exact[name]).norm() / exact[name].norm()
        assert float(off) < 1e-14, (name, off)


def test_a_skipped_step_leaves_no_bit_behind_even_where_it_overflowed() -> None:
    whole, broken = Copies(2, "topk:10"), Copies(2, "topk:10")
    for step in range(4):
        whole.step(random_gradients(2, step))
    for step in range(4):
        bad = random_gradients(2, 100 + step)
        bad[1]["wide"][3, 4] = torch.inf if step % 2 else torch.nan
        bad[0]["deep"].fill_(torch.nan)
        if step < 3:
            sums = broken.step(bad, valid=False)
            assert not torch.isfinite(sums["wide"]).all() and not torch.isfinite(sums["deep"]).all()
        broken.step(random_gradients(2, step))
    for one, two in zip(whole.feedback, broken.feedback):
        assert all(torch.equal(item.error, two.errors[name].error) for name, item in one.errors.items())


def test_every_value_travels_in_the_end() -> None:
    """Of a constant gradient each value waits its turn, the small ones longer: the mean tends to the gradient."""
    copies, grads, total = Copies(2, "topk:8"), random_gradients(2, 0), 0.0
    exact, off = added(grads, "wide"), []
    for step in range(1, 129):
        total = copies.step(grads)["wide"] + total
        off.append(float((total / step - exact).norm() / exact.norm()))
    assert off[0] > 0.5 and off[31] < 0.3 and off[127] < off[31] / 3
    assert int((total == 0).sum()) < 0.1 * exact.numel()


@pytest.mark.parametrize("count", [2, 3])
def test_another_number_of_copies_or_method_owes_as_much(count: int) -> None:
    before = Copies(3, "topk:6")
    for step in range(3):
        before.step(random_gradients(3, step))
    saved = {name: tensor.clone() for feedback in before.feedback for name, tensor in feedback.state()}
    assert all(name.startswith("copy") for name in saved)
    after, other = Copies(count, "topk:6"), Copies(count, "powersgd:2")
    for feedback in (*after.feedback, *other.feedback):
        filled(feedback, saved)
    for name in ("wide", "deep"):
        for copies in (after, other):
            torch.testing.assert_close(copies.owed(name), before.owed(name), rtol=1e-14, atol=1e-14)
    if count == 3:
        for mine, theirs in zip(after.feedback, before.feedback):
            assert torch.equal(mine.errors["small"].error, theirs.errors["small"].error)


REFUSED = {
    "replicate=2,compress=topk": "topk:D",
    "replicate=2,compress=topk:1": "2 or more",
    "replicate=2,compress=topk:100:x": "first S steps",
    "replicate=4,compress=topk:4": "topk:5 or more",
    "compress=topk:100": "replicate=2",
    "replicate=2,pp=2,compress=topk:100": "drop pp",
    "cp=2,replicate=2,ep=2,compress=topk:100": "drop ep",
    "replicate=2,islands=2,compress=topk:100": "islands",
    "replicate=2,offload=parameters,compress=topk:100": "offload=optimizer",
}


@pytest.mark.parametrize("text", cases(list(REFUSED), range(len(REFUSED))))
def test_what_it_cannot_do_is_refused_with_what_works(text: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[text]):
        Layout.parse(text)


def test_other_degrees_keep_it_where_it_saves_bytes() -> None:
    layout = Layout.parse("replicate=4,tp=2,compress=topk:6:100")
    assert str(layout) == "replicate=4,tp=2,compress=topk:6:100" and Layout.from_json(layout.to_json()) == layout
    assert str(layout.with_degrees({"replicate": 3})) == "replicate=3,compress=topk:6:100"
    assert not layout.with_degrees({"tp": 2}).compress and not layout.with_degrees({"replicate": 6}).compress
