"""Verdicts of a proof for people, a line or two a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.jobs.progress import to_stderr as say

if TYPE_CHECKING:
    from meshwright.proof.compare import Verdict
    from meshwright.proof.job import JobVerdict
    from meshwright.strategy.loop_proof import LoopVerdict


def show(verdict: Verdict, width: int) -> None:
    """Prints one layout's lines, its name padded to ``width``: the verdict, and what it covers."""
    if verdict.refused or verdict.crashed:
        label = "refused" if verdict.refused else "CRASH"
        say(f"  {label:<8} {verdict.layout}: {verdict.refused or verdict.crashed}")
        return
    label = "pass" if verdict.passed else "FAIL"
    say(f"  {label:<8} {verdict.layout:<{width}}  {_error_columns(verdict)}  worst {verdict.worst.name}")
    if verdict.wrong:
        say(f"           {verdict.wrong}")
    if verdict.rounding_distance:
        say(
            f"           rounded as in plain numpy to {verdict.method_error:.1e}; rounding takes what is sent "
            f"{verdict.rounding_distance:.1e} from exact values, with which the errors above are"
        )
    if verdict.scope:
        say(f"           {verdict.scope.summary}")


def _error_columns(verdict: Verdict) -> str:
    """Returns each kind's error; outside of float64 beside its bound, as ``error<=bound`` or ``error>bound``."""
    errors = {
        "loss": verdict.loss_error,
        "gradient": verdict.grad_error,
        "norm": verdict.grad_norm_error,
        "weight": verdict.weight_error,
    }
    if verdict.buffer_error is not None:
        errors["buffer"] = verdict.buffer_error
    columns = []
    for kind, error in errors.items():
        # Float64 has one fixed tolerance: only other precisions have a bound for each kind.
        bound = verdict.bounds.get(kind)
        sign = "<=" if bound is not None and error <= bound else ">"
        columns.append(f"{kind} {error:.1e}" + ("" if bound is None else f"{sign}{bound:.1e}"))
    return "  ".join(columns)


def show_job(verdict: JobVerdict) -> None:
    """Prints the verdict of one pair of layouts."""
    layout_pair = f"{verdict.layout} -> {verdict.resumed}"
    if verdict.refused:
        say(f"  refused  {layout_pair}: {verdict.refused}")
        return
    numbers = "  ".join(f"{name} {error:.1e}" for name, error in verdict.errors.items())
    say(f"  {'pass' if verdict.passed else 'FAIL':<8} {layout_pair}\n           {numbers}  worst {verdict.worst}")


def show_loop(verdict: LoopVerdict, width: int) -> None:
    """Prints one layout's line, its name padded to ``width``."""
    if verdict.refused:
        say(f"  refused  {verdict.layout}: {verdict.refused}")
        return
    label = "pass" if verdict.passed else "FAIL"
    errors = f"loss {verdict.loss_error:.1e}  weight {verdict.weight_error:.1e}"
    say(f"  {label:<8} {verdict.layout:<{width}}  {errors}  worst {verdict.worst}")


def show_outcome(passed: bool, refused: int = 0, layouts: int = 0) -> None:
    """Prints the last line of a proof."""
    say(("PASS" if passed else "FAIL") + (f" ({refused} of {layouts} layouts refused)" if refused else ""))
