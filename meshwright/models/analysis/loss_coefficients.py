"""Solves for the factors with which scalars that a forward returns enter its loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.models.forward import ModelOutput


def solve_coefficients(extra_losses: Sequence[float], outputs: Sequence[ModelOutput], scale: float) -> dict[str, float]:
    """Solves for the factor of each named scalar in the extra losses; none where the scalars don't explain them."""
    names = [name for name in outputs[0].scalars if all(name in output.scalars for output in outputs)]
    # more unknowns than batches: least squares would explain anything
    if not names or len(names) >= len(outputs) - 1:
        return {}
    scalar_matrix = torch.tensor(
        [[float_of(output.scalars[name]) for name in names] for output in outputs], dtype=torch.float64
    )
    # proportional scalars (a rank below their number) have no factors of their own
    if int(torch.linalg.matrix_rank(scalar_matrix)) < len(names):
        return {}
    solution = torch.linalg.lstsq(
        scalar_matrix, torch.tensor(extra_losses, dtype=torch.float64).unsqueeze(1)
    ).solution.squeeze(1)
    coefficients = {
        name: float(coefficient) for name, coefficient in zip(names, solution) if abs(float(coefficient)) > 1e-6
    }
    explained = unexplained_loss(extra_losses, outputs, coefficients) <= 1e-7 * scale
    return coefficients if explained else {}


def unexplained_loss(
    extra_losses: Sequence[float], outputs: Sequence[ModelOutput], coefficients: dict[str, float]
) -> float:
    """Returns the largest extra loss, in absolute value, that the named scalars leave unexplained."""
    return max(
        abs(
            extra_loss - sum(coefficient * float_of(output.scalars[name]) for name, coefficient in coefficients.items())
        )
        for extra_loss, output in zip(extra_losses, outputs)
    )


def float_of(value: torch.Tensor | None) -> float:
    """Returns the value of a scalar tensor."""
    assert value is not None
    return float(value.detach())
