"""``meshwright verify --loop FILE:FUNCTION``: proves a custom training loop under layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshwright.cli.arguments import answer, read_config, say, take_flag
from meshwright.cli.verify import FAILED, PASSED, REFUSED
from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.launch.preload import prepare_environment
from meshwright.spec.layout import Layout

if TYPE_CHECKING:
    from meshwright.strategy.loop_proof import LoopVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig(Config):
    """What to prove. Without layouts: every layout of ``devices`` ranks that a custom loop can run."""

    loop: str = ""
    """``FILE:FUNCTION``: takes a strategy, trains, and returns the losses of its rows."""
    layout: tuple[str, ...] = ()
    """Layouts by text form; several may follow one ``--layout``."""
    devices: int = 2
    """Number of ranks when no layout is named; CPU ranks of this machine."""
    dtype: Literal["float64", "float32"] = "float64"
    """Torch's default type while the loop runs: float64 is the proof, float32 shows rounding."""
    timeout_s: float = 600.0
    """Limit for one layout."""

    def check(self) -> None:
        """Refuses counts under one."""
        if self.devices < 1 or self.timeout_s <= 0:
            raise ConfigError(
                f"verify: devices = {self.devices} must be at least 1 and timeout_s = {self.timeout_s} above 0"
            )


def run_loop(argv: Sequence[str]) -> int:
    """Proves and prints a table or JSON; exit status as `meshwright verify`."""
    words = list(argv)
    as_json = take_flag(words, "--json")
    config = read_config(LoopConfig, words, "verify")
    prepare_environment()
    from meshwright.strategy.loop_proof import LoopCase, loop_layouts, verify_loop

    layouts = [Layout.parse(text) for text in config.layout] or loop_layouts(config.devices)
    case = LoopCase(source=config.loop, dtype=config.dtype, timeout_s=config.timeout_s)
    if not as_json:
        say(f"{config.loop}: {len(layouts)} layouts against one device, {config.dtype}")
    width = max(len(str(layout)) for layout in layouts)
    verdicts = verify_loop(case, layouts, None if as_json else lambda verdict: show_loop(verdict, width))
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    failed = any(not verdict.passed and not verdict.refused for verdict in verdicts)
    # A layout that nobody asked for may be refused; one that was named may not.
    passed = not failed and refused < len(verdicts) and not (refused and config.layout)
    if as_json:
        answer(json.dumps({"passed": passed, "layouts": [verdict.to_json() for verdict in verdicts]}, indent=2))
    else:
        say(("PASS" if passed else "FAIL") + (f" ({refused} of {len(verdicts)} layouts refused)" if refused else ""))
    if failed:
        return FAILED
    return PASSED if passed else REFUSED


def show_loop(verdict: LoopVerdict, width: int) -> None:
    """Prints one layout's line, its name padded to ``width``."""
    if verdict.refused:
        say(f"  refused  {verdict.layout}: {verdict.refused}")
        return
    word = "pass" if verdict.passed else "FAIL"
    errors = f"loss {verdict.loss_error:.1e}  weight {verdict.weight_error:.1e}"
    say(f"  {word:<8} {verdict.layout:<{width}}  {errors}  worst {verdict.worst}")
