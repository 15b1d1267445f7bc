"""How a run ended, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.cli.arguments import say
from meshwright.units import format_bytes, format_seconds


def show_result(summary: Mapping[str, Any]) -> None:
    """Prints the end of a run: losses, bits per byte beside gzip and xz, a sample, where everything lies."""
    lines = [""]
    if not summary["finished"]:
        lines.append(f"interrupted after step {summary['step']}; the same command goes on from there")
    if "validation_loss" in summary:
        lines.append(
            f"validation loss {summary['validation_loss']:.4f} nats a token, next token right in "
            f"{100 * summary['accuracy']:.1f} %"
        )
    if "bits_per_byte" in summary:
        found = {name: summary.get(f"{name}_bits_per_byte") for name in ("gzip", "xz")}
        others = ", ".join(f"{name} {bits:.3f}" for name, bits in found.items() if bits is not None)
        lines.append(f"bits per byte of the held-out text: {summary['bits_per_byte']:.3f} (the same bytes by {others})")
    if summary.get("time"):
        time = summary["time"]
        off = time["measured"] / time["planned"] - 1
        lines.append(
            f"a step took {format_seconds(time['measured'])}, planned {format_seconds(time['planned'])} ({off:+.0%})"
        )
    if summary.get("state"):
        lines += ["", *_state_lines(summary["state"])]
    if summary.get("sample"):
        lines += ["", "sample:", f"  | {summary['prompt']}".replace("\n", "\n  | ") + "[...]"]
        lines += ["  | " + line for line in str(summary["sample"]).strip("\n").split("\n")]
    lines += ["", f"run directory: {summary['run']}"]
    if summary.get("report"):
        lines.append(f"report: {summary['report']}")
    say("\n".join(lines))


def _state_lines(state: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a table of what each part of the model's state took on a rank, beside the plan."""
    lines = [f"{'state of a rank':<16}{'measured':>12}{'planned':>12}"]
    for part, row in state.items():
        lines.append(f"{part:<16}{format_bytes(row['measured']):>12}{format_bytes(row['planned']):>12}")
    paper = state["total"]["zero_paper"]
    return [*lines, f"the ZeRO paper's formula for this level: {format_bytes(paper)} a rank"]
