"""How a run ended, for people."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.train_result import TrainResult
from meshwright.units import format_bytes, format_seconds


def show_result(result: TrainResult) -> None:
    """Prints the end of a run: losses, bits per byte beside gzip and xz, a sample, where everything lies."""
    lines = [""]
    if not result.finished:
        lines.append(f"interrupted after step {result.step}; the same command goes on from there")
    if result.nothing_left:
        lines.append(result.nothing_left)
    if result.validation_loss is not None and result.accuracy is not None:
        lines.append(
            f"validation loss {result.validation_loss:.4f} nats a token, next token right in "
            f"{100 * result.accuracy:.1f} %"
        )
    if result.bits_per_byte is not None:
        baselines = {"gzip": result.gzip_bits_per_byte, "xz": result.xz_bits_per_byte}
        baseline_text = ", ".join(f"{name} {bits:.3f}" for name, bits in baselines.items() if bits is not None)
        # Where only answers are learned, nothing else has the same bytes to press.
        compared = f"text: {result.bits_per_byte:.3f} (the same bytes by {baseline_text})"
        answers = f"answers: {result.bits_per_byte:.3f}"
        lines.append(f"bits per byte of the held-out {compared if baseline_text else answers}")
    if result.time:
        measured, planned = result.time["measured"], result.time["planned"]
        lines.append(
            f"a step took {format_seconds(measured)}, planned {format_seconds(planned)} ({measured / planned - 1:+.0%})"
        )
    if "measured" in result.energy:
        planned_text = f", planned {result.energy['planned']:.3g} J" if "planned" in result.energy else ""
        parts = " and ".join(name for name in ("devices", "processors") if name in result.energy)
        lines.append(f"a token took {result.energy['measured']:.3g} J of {parts}{planned_text}")
    if result.state:
        lines += ["", *_state_lines(result.state)]
    if result.sample:
        lines += ["", "sample:", f"  | {result.prompt}".replace("\n", "\n  | ") + "[...]"]
        lines += ["  | " + line for line in result.sample.strip("\n").split("\n")]
    lines += ["", f"run directory: {result.run}"]
    if result.not_mirrored:
        lines.append(f"the newest checkpoint is there alone: {result.not_mirrored}")
    if result.report:
        lines.append(f"report: {result.report}")
    say("\n".join(lines))


def _state_lines(state: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a table of what each part of the model's state took on a rank, beside the plan."""
    lines = [f"{'state of a rank':<16}{'measured':>12}{'planned':>12}"]
    for category, row in state.items():
        lines.append(f"{category:<16}{format_bytes(row['measured']):>12}{format_bytes(row['planned']):>12}")
    paper = state["total"]["zero_paper"]
    return [*lines, f"the ZeRO paper's formula for this level: {format_bytes(paper)} a rank"]
