"""The job ``verify_loop``: proves a custom training loop under layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from meshwright.jobs.proof_reports import LoopReport
from meshwright.jobs.requests import Layouts, LoopConfig, with_fields
from meshwright.spec.layout import Layout
from meshwright.strategy.loop_proof import LoopCase, LoopVerdict, check_loop, loop_layouts
from meshwright.strategy.loop_proof import verify_loop as prove_loop


def verify_loop(
    loop: str | LoopConfig,
    /,
    *,
    layout: Layouts | None = None,
    devices: int | None = None,
    dtype: Literal["float64", "float32"] | None = None,
    on_start: Callable[[str, Sequence[Layout]], None] | None = None,
    on_verdict: Callable[[LoopVerdict], None] | None = None,
) -> LoopReport:
    """Proves that a custom training loop gives the losses and weights of one device under layouts.

    Args:
        loop: ``FILE:FUNCTION``, which takes a strategy, trains, and returns the losses of its rows; or a config.
        layout: layouts; every layout of ``devices`` ranks that a custom loop can run when none is named.
        devices: number of CPU ranks.
        dtype: torch's default type while the loop runs.
        on_start: called before the first proof with what is proven and under which layouts.
        on_verdict: called with each layout's verdict as it comes.

    Raises:
        ConfigError, PlanError: for what can't be.
    """
    config = LoopConfig(loop=loop) if isinstance(loop, str) else loop
    config = with_fields(config, layout=layout, devices=devices, dtype=dtype)
    layouts = [Layout.parse(text) for text in config.layout] or loop_layouts(config.devices)
    case = LoopCase(source=config.loop, dtype=config.dtype, timeout_s=config.timeout_s)
    check_loop(case)
    if on_start is not None:
        on_start(config.loop, layouts)
    verdicts = prove_loop(case, layouts, on_verdict)
    return LoopReport(verdicts=tuple(verdicts), named=bool(config.layout))
