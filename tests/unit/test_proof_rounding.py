"""The bound of a proof in low precision: measured on one device, and met by another draw of the same rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from meshwright.proof.one_device import COMPUTE
from meshwright.proof.reference import OptimizerRecipe, Trace, train_plainly
from meshwright.proof.rounding import (
    DRAWS,
    FACTOR,
    JUMPS,
    LARGEST,
    LATER,
    PRIOR,
    UNITS,
    ErrorStatistics,
    PlainDeviation,
    Rounding,
    TensorScale,
    moderate_error,
    plain_deviations,
    rms,
    small_sample_factor,
    tensor_scales,
)

BF16 = Rounding(unit=UNITS["bf16"])


@pytest.mark.parametrize("precision", UNITS)
def test_a_unit_roundoff_is_half_the_distance_to_the_next_number(precision: str) -> None:
    # TF32 has no type of its own: 10 bits of mantissa.
    eps = 2.0**-10 if precision == "tf32" else torch.finfo(COMPUTE[precision]).eps
    assert UNITS[precision] == eps / 2


def test_a_bound_is_the_plain_device_s_error_and_one_rounding() -> None:
    assert BF16.allowed(0.01, 0) == FACTOR * 0.01 + 2.0**-8
    assert BF16.allowed(0.01, 1) == LATER * BF16.allowed(0.01, 0)
    assert BF16.allowed(0.01, 0, LARGEST) == LARGEST * 0.01 + 2.0**-8
    gap = BF16.scalar(2.02, 2.0, 0.01, 0)
    assert gap.error == pytest.approx(0.01) and gap.bound == BF16.allowed(0.01, 0) and gap.within
    assert not BF16.scalar(2.02, 2.0, 0.001, 0).within and not BF16.scalar(math.nan, 2.0, 0.01, 0).within


def test_few_entries_are_drawn_towards_other_tensors_and_may_scatter() -> None:
    assert moderate_error(0.0, 1, 0.02) == pytest.approx(0.02 * math.sqrt(PRIOR / (PRIOR + 1)))
    assert moderate_error(0.01, 10**6, 0.02) == pytest.approx(0.01, rel=1e-3)
    assert small_sample_factor(1) == 3 * FACTOR and small_sample_factor(10**6) == pytest.approx(FACTOR, rel=1e-2)


def test_errors_of_tiny_tensors_are_relative_to_a_share_of_the_model_s_largest() -> None:
    found = tensor_scales({"matrix": torch.tensor([3.0, -4.0]), "bias": torch.tensor([1e-9])})
    assert found["matrix"] == TensorScale(rms=math.sqrt(12.5), largest=4.0)
    assert found["bias"] == TensorScale(rms=pytest.approx(1e-3 * math.sqrt(12.5)), largest=pytest.approx(4e-3))


def _trace(loss: float, gradient: torch.Tensor) -> Trace:
    return Trace(losses=[loss], norms=[1.0], gradients={0: {"weight": gradient}}, weights={"weight": gradient})


def test_errors_of_all_draws_are_kept_entry_by_entry() -> None:
    wanted = torch.tensor([1.0, 2.0], dtype=torch.float64)
    errors = ErrorStatistics(_trace(2.0, wanted))
    for off in (0.3, -0.4):
        errors.add(_trace(2.0 + off, wanted + torch.tensor([off, 0.0], dtype=torch.float64)))
    each, most = errors.mean_errors[0, "weight"]
    assert each.tolist() == pytest.approx([math.sqrt(0.125), 0.0]) and most == pytest.approx(0.4)
    assert float(errors.mean_errors["losses"][0]) == pytest.approx(math.sqrt(0.125), rel=1e-6)
    known = plain_deviations({"weight": (each, most)}, tensor_scales({"weight": wanted}))["weight"]
    assert known.rms == pytest.approx(0.25 / rms(wanted)) and known.largest == pytest.approx(0.2)


def _known(rounded: float, scale: float) -> PlainDeviation:
    return PlainDeviation(
        size=TensorScale(rms=scale, largest=4 * scale), rms=rounded, median_abs=0.67 * rounded, largest=rounded
    )


def test_a_gradient_as_far_off_as_another_draw_passes_and_a_systematic_error_or_a_wrong_entry_does_not() -> None:
    draw = torch.Generator().manual_seed(0)
    wanted, plain, noise = (torch.randn(4096, generator=draw, dtype=torch.float64) for _ in range(3))
    known = _known(0.01, 1.0)
    found = wanted + 0.015 * noise
    assert BF16.gradient(found, wanted, 0.01 * plain, known, 0).within
    assert not BF16.gradient(1.04 * found, wanted, 0.01 * plain, known, 0).within
    spoiled = found.clone()
    spoiled[7] += 0.5
    gap = BF16.gradient(spoiled, wanted, 0.01 * plain, known, 0)
    assert not gap.within and gap.bound == BF16.allowed(0.01, 0, LARGEST)
    assert BF16.gradient(found.fill_(math.inf), wanted, plain, known, 0).error == math.inf
    assert BF16.gradient(found[1:], wanted, plain, known, 0).error == math.inf
    assert BF16.gradient(found[:0], wanted[:0], plain[:0], known, 0).within  # a rank that holds nothing of it


def test_some_entries_of_a_trained_weight_may_jump_but_not_all_of_them_drift() -> None:
    wanted = torch.zeros(64, dtype=torch.float64)
    known = _known(0.01, 1e-3)
    jumped = wanted.clone()
    jumped[:JUMPS] = 1e-3
    assert BF16.weight(jumped, wanted, wanted, known, 1).within
    jumped[: 4 * JUMPS] = 2e-3
    assert not BF16.weight(jumped, wanted, wanted, known, 1).within
    assert not BF16.weight(wanted + 1e-4, wanted, wanted, known, 1).within
    assert BF16.weight(wanted + 1e-4, wanted, wanted + 1e-4, known, 1).within  # a part that is rounding alone


class _Narrow(nn.Module):
    """Says in which type it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, 7))
        self.seen: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        return (self.weight * self.weight).sum()


def _train(compute: torch.dtype | None, scale: float = 1.0, share: float = 0.0) -> tuple[_Narrow, Trace]:
    module = _Narrow()

    def call(part: nn.Module, _: object) -> tuple[None, torch.Tensor]:
        return None, part()

    recipe, batches = OptimizerRecipe(), [[None], [None]]
    return module, train_plainly(module, call, batches, recipe, True, (0, 1), compute, scale, (share, 1))


def test_a_plain_device_computes_in_one_type_and_keeps_weights_in_another() -> None:
    module, trace = _train(torch.bfloat16)
    first = torch.linspace(0.9, 1.1, 7)
    assert torch.equal(module.seen[0], first.bfloat16()) and trace.weights["weight"].dtype == torch.float32
    assert torch.equal(trace.gradients[0]["weight"], (2 * first.bfloat16()).float())
    assert float((trace.weights["weight"] - first).abs().max()) < 2.1e-3  # two updates of 1e-3 aren't rounded away
    assert torch.equal(_train(torch.bfloat16, 2.0**10)[1].gradients[0]["weight"], trace.gradients[0]["weight"])
    _, wide = _train(None)
    assert torch.equal(wide.gradients[0]["weight"], 2 * first)


def test_draws_move_the_rounded_weights_and_not_those_that_are_kept() -> None:
    unit = UNITS["bf16"]
    module, trace = _train(torch.float32, share=unit / 2)
    first = torch.linspace(0.9, 1.1, 7)
    moved: Mapping[bool, torch.Tensor] = {True: (module.seen[0] / first - 1).abs()}
    assert 0 < float(moved[True].max()) <= unit / 2 * 1.001
    assert float((trace.weights["weight"] - first).abs().max()) < 2.1e-3
    assert DRAWS > 1
