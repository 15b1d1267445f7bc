"""The typed result of ``train``; loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended, and where everything of it lies. Losses are in nats a token for a plain language model."""

    finished: bool
    """Whether the run reached its last step; else the same config goes on where it stopped."""
    step: int = 0
    """Optimizer steps done, over all commands of the run."""
    scaled_steps: float | None = None
    """Steps of ``optimizer.lr_batch`` rows that these were worth, where ``optimizer.lr_rule`` follows the noise."""
    loss: float | None = None
    """Training loss of the last step; None when this command did no step."""
    validation_loss: float | None = None
    """Over all of the text that is held out; None when the run was interrupted, or nothing is held out."""
    accuracy: float | None = None
    """Share of held-out tokens that were the likeliest, 0 to 1."""
    bits_per_byte: float | None = None
    """Of the held-out text, which compares tokenizers."""
    gzip_bits_per_byte: float | None = None
    """The same bytes by gzip."""
    xz_bits_per_byte: float | None = None
    """The same bytes by xz."""
    terminated: bool = False
    """Whether SIGTERM ended it."""
    leads: bool = True
    """Whether this process concluded the run; on other nodes what follows stays empty."""
    run: str = ""
    """The run's directory."""
    prompt: str | None = None
    """What the sample goes on from."""
    sample: str | None = None
    """Text of the trained model; None when none was asked for."""
    nothing_left: str | None = None
    """Why this command had no step to train, and what trains on; None where it trained."""
    report: str | None = None
    """Path of ``report.html``; None when none was asked for."""
    not_mirrored: str | None = None
    """Why the newest checkpoint isn't in ``checkpoint.mirror``; None where it is, or none is named."""
    state: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes of a rank's state by part and in ``total``: ``planned`` and ``measured``; empty where none was measured."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step, ``planned`` and ``measured`` (median); empty where one of them isn't known."""
    energy: Mapping[str, float] = field(default_factory=dict)
    """Joules a token, those known of ``planned``, ``measured``, and its parts ``devices`` and ``processors``."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields; what wasn't found is left out, but for the loss."""
        always = ("loss", "state", "time")
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "leads"}
        return {name: value for name, value in values.items() if value is not None or name in always}
