"""What is made of the figures of `parts.throughput`: ratios to the best script, and 32 layers of 8B projected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.gpu.parts.throughput_cases import CASES, PEAK, Shape

BARS = {"bf16": 6667.0, "fp8": 8532.0}
"""Tokens/s of a GPU: torchtitan, Llama 3 8B on 8 H100, batch 2, S = 8,192, compiled. Source: its performance pages."""
LAYERS_8B, GPUS_8B = 32, 8
ALIKE, ALIKE_STEPS = 5e-3, 4
"""Relative difference of first losses that rounding to bf16 may make."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Compares the figures of contenders that ran.

    Args:
        shapes: by name.
        results: figures by the contender's name.
        say: prints a line.
    """

    shapes: dict[str, Shape]
    results: dict[str, dict[str, Any]]
    say: Callable[[dict[str, Any]], None]

    def compare(self) -> bool:
        """Prints ratios to the best script of each setting; returns whether first losses agree."""
        agree, ratios = True, {}
        for setting in {case.setting for case in CASES.values() if case.setting}:
            here = {name: found for name, found in self.results.items() if found["setting"] == setting}
            scripts = {name: found["step_ms"] for name, found in here.items() if not found["ours"]}
            best = min(scripts, key=lambda name: scripts[name], default="")
            for name in (name for name, found in here.items() if found["ours"] and best):
                pairs = zip(here[name]["loss"][:ALIKE_STEPS], here[best]["loss"])
                apart = max(abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in pairs)
                # In 8 bits two programs scale other tensors: their losses differ by more than bf16 rounds.
                agree &= apart <= ALIKE * (4 if setting == "fp8" else 1)
                ratios[name] = {
                    "script": best,
                    "speed": round(scripts[best] / here[name]["step_ms"], 4),
                    "peak": round(here[name]["peak_bytes"] / max(1, here[best]["peak_bytes"]), 4),
                    "losses_apart": round(apart, 6),
                }
        self.say({"case": "ratios", "agree": agree, "of_best_script": ratios, "of_before": self.of_before()})
        for kind, bar in BARS.items():
            self.project(kind, bar)
        return agree

    def of_before(self) -> dict[str, dict[str, float]]:
        """Returns speed, peak and distance of the first losses of what also ran without a part."""
        ratios = {}
        for name, case in CASES.items():
            own = name.replace("before", "ours").replace("copies", "ours")
            if case.without and name in self.results and own in self.results:
                before, now = self.results[name], self.results[own]
                pairs = zip(now["loss"][:ALIKE_STEPS], before["loss"])
                ratios[name] = {
                    "speed": round(before["step_ms"] / now["step_ms"], 4),
                    "peak": round(now["peak_bytes"] / max(1, before["peak_bytes"]), 4),
                    "losses_apart": round(max(abs(ours - theirs) for ours, theirs in pairs), 6),
                }
        return ratios

    def project(self, kind: str, bar: float) -> None:
        """Prints tokens/s a GPU of 32 layers, by the time that three more layers take; no communication is in it.

        Of update and norm, which FSDP over 8 GPUs divides, an eighth counts; beside it the whole.
        """
        four, one = (self.results.get(f"8b-{layers}-{kind}") for layers in (4, 1))
        if four is None or one is None:
            return
        shape = self.shapes["8b"]

        def whole(read: Callable[[dict[str, Any]], float]) -> float:
            """Returns a time of 32 layers by a line through those of 1 and 4."""
            return read(four) + (LAYERS_8B - 4) * (read(four) - read(one)) / 3

        step_ms = whole(lambda found: found["step_ms"])
        update_ms = whole(lambda found: found["parts_ms"]["optimizer"] + found["parts_ms"]["norm"])
        sharded_ms = max(step_ms - update_ms * (1 - 1 / GPUS_8B), 1e-6)
        tokens = shape.rows * shape.sequence
        self.say({
            "case": f"8b-projection-{kind}", "layers": LAYERS_8B, "step_ms": round(sharded_ms, 1),
            "tokens_per_s_per_gpu": round(tokens / sharded_ms * 1e3), "bar": bar,
            "of_bar": round(tokens / sharded_ms * 1e3 / bar, 4), "with_whole_update": round(tokens / step_ms * 1e3),
            "mfu": round(shape.flops_per_token(LAYERS_8B) * tokens / sharded_ms * 1e3 / PEAK, 4),
            "layer_ms": round((four["step_ms"] - one["step_ms"]) / 3, 3),
            "ends_ms": round(one["step_ms"] - (four["step_ms"] - one["step_ms"]) / 3, 3),
            "is": "a projection from 1 and 4 layers on one GPU, without communication",
        })  # fmt: skip
