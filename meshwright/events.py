"""Records of a run: steps and events, the lines of ``metrics.jsonl`` and ``events.jsonl``."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ConfigError

_MOST_NAME = 100
_SCALAR = re.compile(rf"[A-Za-z][A-Za-z0-9_./-]{{0,{_MOST_NAME - 1}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTotals:
    """Traffic of one kind of collective along one axis during one step, as this rank saw it."""

    axis: str
    """Axis whose ranks took part: ``replicate``, ``shard``, or ``world``."""
    op: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``send``."""
    calls: int
    """Number of collectives."""
    bytes: int
    """Bytes that this rank put on the wire (ring or direct exchange: payload x (n-1)/n, twice for all-reduce)."""
    seconds: float
    """Time between the start of a collective and its end, summed; overlapped time counts."""
    exposed_s: float
    """Time that the rank stood still for it."""
    raw_bytes: int = 0
    """What it would have sent of the same values uncompressed: ``bytes`` where nothing is compressed."""
    rounding_error: float = 0.0
    """Of a compressed sum: 2-norm of what rounding adds to it over the sum's own, as this rank's chunk shows it."""
    latency_p50_s: float = 0.0
    """Median time of a collective from its start to its end; 0 where no time is known. Where compute hides it on the
    CPU, its end is the moment at which the rank asks for the result."""
    latency_p99_s: float = 0.0
    """Time within which 99 % of the collectives ended."""
    bandwidth_p50: float = 0.0
    """Median of a collective's bytes over its time, bytes per second; 0 where unknown."""
    bandwidth_p99: float = 0.0
    """Bytes per second that 99 % of the collectives reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step, identical on every rank but for memory, parts and traffic: a line of ``metrics.jsonl``."""

    step: int
    """Steps done, counted from 1."""
    loss: float
    """The model's own loss of the global batch; where the model adds nothing to it the mean cross-entropy over target
    tokens, nats per token."""
    grad_norm: float
    """Global 2-norm of the gradient before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Target tokens in this step's global batch."""
    tokens_total: int
    """Target tokens since step 0 of the run."""
    tokens_per_s: float
    """tokens / step_s."""
    step_s: float
    """Wall time of the step on rank 0."""
    parts: Mapping[str, float]
    """Parts of step_s in seconds: data, forward, backward, reduce, optimizer, other."""
    memory: Mapping[str, int]
    """Bytes: peak (allocated, or resident on CPU), parameters, gradients, optimizer."""
    layout: str
    """The layout's text form."""
    accuracy: float = 0.0
    """Share of target tokens whose logit was the largest."""
    mfu: float | None = None
    """Model FLOP/s over the dense peak of all devices by their data sheets, as the planner's; where a device has none,
    as a processor core, over the rate of `mfu_of_measured`."""
    mfu_of_measured: float | None = None
    """Model FLOP/s over the rate at which all ranks multiply matrices, measured at the start."""
    experts: tuple[float, ...] = ()
    """In a mixture: share of the router's choices that went to each expert, over all layers."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Terms of the model's own loss, which sum to it; none where the cross-entropy is the whole loss."""
    skipped: bool = False
    """True when the loss scaler skipped the update because a gradient was not finite."""
    comm: tuple[CommTotals, ...] = ()
    """Traffic by axis and operation."""
    epoch: float = 0.0
    """Passes over the training rows so far."""
    processor_s: Mapping[str, float] = field(default_factory=dict)
    """Processor seconds of rank 0 in the step: ``thread``, that which computes, and ``rank``, all of its threads. Other
    programs and waiting don't count, unlike in step_s."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of hooks or of a custom loop, by name."""
    last_step: int | None = None
    """Steps after which the run ends, as it looks after this one, where steps count by their gain (`train.rate`); None
    where the run has as many as its settings say."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Where the islands joined after this step: each island's loss and tokens, norms, bytes (`train.outer`)."""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain values."""
        return dataclasses.asdict(self)


def check_scalar(name: str) -> str:
    """Returns the name of a scalar, if it can be one.

    Raises:
        ConfigError: for another one.
    """
    if not isinstance(name, str) or not _SCALAR.fullmatch(name):
        raise ConfigError(f"scalar {name!r}: give a name of letters, digits and _ . / - up to {_MOST_NAME}, as my/norm")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened once: a line of ``events.jsonl``."""

    kind: str
    """``rank_started``, ``run_started``, ``resumed``, ``checkpoint_saved``, ``checkpoint_refused``, ``evaluated``,
    ``sampled``, ``step_skipped``, ``interrupted``, ``failed``, ``run_finished`` and what later floors add; from
    the command ``proved``, ``not_proved``."""
    rank: int
    """Global rank; -1 for the launcher."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The kind's fields: step, path, seconds, loss ..."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    pid: int = field(default_factory=os.getpid)
    """Process that reports."""
    host: str = field(default_factory=socket.gethostname)
    """Host name."""

    def to_json(self) -> dict[str, Any]:
        """Returns the event as plain values, ``data`` merged into the top level."""
        head = {"kind": self.kind, "rank": self.rank, "pid": self.pid, "host": self.host, "time": self.time}
        return head | dict(self.data)
