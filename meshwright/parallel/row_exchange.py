"""Exchanges of rows between ranks that go on while something else is computed, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.progress_hooks import layer_report
from meshwright.parallel.row_codec import RowCodec, RowTransfer
from meshwright.parallel.turns import give_way

Journey = Generator[None, None, torch.Tensor]
"""What becomes of some rows: it stops wherever it has begun an exchange, and returns what came back in the end."""


def exchange(tensor: torch.Tensor, axis_group: AxisGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Sends each rank its rows and returns the rows that came, both in rank order; without a gradient.

    Args:
        tensor: (n_sent, ...) rows, those for rank 0 first; n_sent is the sum of ``sent``.
        axis_group: the ranks.
        sent: rows for each rank.
        received: rows from each rank.
    """
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    axis_group.all_to_all_rows(out, tensor, received, sent).wait()
    return out


def travel_in_turns(journeys: Sequence[Journey]) -> list[torch.Tensor]:
    """Returns what each of some journeys returns, (T, D) of its tokens; each is one exchange ahead of the next.

    So the exchange that one begins goes on under what the one before it computes. Autograd runs backward in the
    opposite order, and so does the same there.
    """
    results: dict[int, torch.Tensor] = {}
    turn = 0
    while len(results) < len(journeys):
        # The one that sets out last comes first: it begins its exchange before another waits and computes.
        for number in reversed(range(min(turn + 1, len(journeys)))):
            if number not in results:
                try:
                    next(journeys[number])
                except StopIteration as end:
                    results[number] = end.value
        turn += 1
    return [results[number] for number in range(len(journeys))]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Rows whose exchange has begun."""

    pending: Sequence[PendingCollective]
    sent: Sequence[torch.Tensor]
    """What stays in memory until it has gone."""
    message: torch.Tensor
    """(n_received, ...), what comes: the rows, or their bytes where they are rounded."""
    rows: torch.Tensor
    """(n_received, ...), which are filled in the end."""
    exact: torch.Tensor | None = None
    """(n_received, ...) unrounded, which travel as well where a proof compares them."""


@dataclass(frozen=True, slots=True)
class _Came:
    """What came in a layer's first run, for its second."""

    message: torch.Tensor
    """(n_received, ...) as it came; of one number where only the shape is needed."""
    shape: torch.Size
    version: int
    """How often the message had been written to."""
    rows_shape: torch.Size
    rows_dtype: torch.dtype
    exact: torch.Tensor | None

    @classmethod
    def of(cls, journey: _UnderWay, keeps: bool) -> _Came:
        """Keeps what came, or its shape alone."""
        # Zeros are made in the first run too: selective recompute refuses operators that it didn't see there.
        message, rows = journey.message, journey.rows
        kept, exact = (message.detach(), journey.exact) if keeps else (message.new_zeros(()), None)
        return cls(kept, message.shape, kept._version, rows.shape, rows.dtype, exact)

    def again(self) -> _UnderWay:
        """Returns what came, or as many zeros.

        Raises:
            RuntimeError: the experts have written into it since.
        """
        if self.message._version != self.version:
            raise RuntimeError(
                "experts changed the rows that they were sent in place, and ep_keep=true keeps these for the forward "
                "that recompute runs again; drop ep_keep"
            )
        is_kept = self.message.shape == self.shape
        message = self.message.detach() if is_kept else self.message.new_zeros(self.shape)
        is_rounded = self.rows_dtype != message.dtype
        rows = message.new_empty(self.rows_shape, dtype=self.rows_dtype) if is_rounded else message
        return _UnderWay([], [], message, rows, self.exact)


@dataclass(slots=True)
class Leg:
    """A way of rows between the ranks of a group: how many go to and come from each, and what is under way."""

    axis_group: AxisGroup
    sent: list[int]
    received: list[int]
    is_short: bool = False
    """Whether it lies inside of a node: the other half of a micro-batch needn't run meanwhile (`parallel.turns`)."""
    keeps: tuple[bool, ...] = ()
    """Where a layer's second run receives nothing (`parallel.kept_exchange`): which of the tensors that travel together
    it needs; it gets zeros for the others. Empty where all travel again."""
    codec: RowCodec | None = None
    """Rounds the rows on this way; None sends them as they are. Whole numbers are never rounded."""
    codec_back: RowCodec | None = None
    """The same of their gradients, and of the way back."""
    report: Callable[[], None] | None = field(default_factory=layer_report)
    """Reports the layer that it belongs to."""
    _under_way: list[_UnderWay] = field(default_factory=list)
    _came: list[_Came] = field(default_factory=list)
    """What came in the first run."""
    _homeward: Leg | None = None
    _gradients: Leg | None = None

    def reversed(self, keeps: tuple[bool, ...] = (True,)) -> Leg:
        """Returns the way back; `keeps` of it, where this one keeps anything."""
        if not self.keeps:
            return self._turned()
        if self._homeward is None:
            self._homeward = self._turned(keeps)
        return self._homeward

    def of_gradients(self) -> Leg:
        """Returns the way of the gradients, back.

        It is all that autograd's nodes keep, which last until the whole backward has ended: what came goes before.
        """
        if self._gradients is None:
            self._gradients = self._turned()
        return self._gradients

    def _turned(self, keeps: tuple[bool, ...] = ()) -> Leg:
        group, way = self.axis_group, (self.received, self.sent, self.is_short, keeps)
        return Leg(group, *way, codec=self.codec_back, codec_back=self.codec)

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to send ``tensor: (n_sent, ...)`` and returns (n_received, ...), which is filled after `end`."""
        if self._came:
            return tensor
        tensor = tensor.contiguous()
        if self.codec is None or not tensor.is_floating_point():
            transfer, message = self._send(tensor)
            self._under_way.append(_UnderWay([transfer], [tensor], message, message))
            return message
        encoded, exact = self.codec.encode(tensor), None
        transfer, message = self._send(encoded)
        transfer.raw_bytes = tensor[:1].nbytes * (sum(self.sent) - self.sent[self.axis_group.index])
        pending, sent = [transfer], [encoded]
        if self.codec.observer is not None:
            further, exact = self._send(tensor)
            pending.append(further)
            sent.append(tensor)
        rows = tensor.new_empty((len(message), *tensor.shape[1:]))
        self._under_way.append(_UnderWay(pending, sent, message, rows, exact))
        return rows

    def _send(self, tensor: torch.Tensor) -> tuple[PendingCollective, torch.Tensor]:
        """Begins to send ``tensor: (n_sent, ...)``, and returns what will come too, (n_received, ...)."""
        out = tensor.new_empty((sum(self.received), *tensor.shape[1:]))
        return self.axis_group.all_to_all_rows(out, tensor, self.received, self.sent), out

    def give_way(self) -> None:
        """Lets the other half, or pass, run before this one waits; in forward before autograd numbers what waits."""
        if not self.is_short and not self._came:
            give_way()

    def give_way_in_backward(self) -> None:
        """Does likewise in backward, where the layer may be another than that of the nodes before."""
        if not self.is_short:
            give_way()
        if self.report is not None:
            self.report()

    def end(self) -> list[torch.Tensor]:
        """Waits for all that has begun, and returns it in this order: each (n_received, ...)."""
        if self._came:
            return [self._rows(came.again()) for came in self._came]
        under_way, self._under_way = self._under_way, []
        for journey in under_way:
            for pending in journey.pending:
                pending.wait()
        if self.keeps:
            self._came = [_Came.of(journey, keeps) for journey, keeps in zip(under_way, self.keeps)]
        return [self._rows(journey) for journey in under_way]

    def _rows(self, journey: _UnderWay) -> torch.Tensor:
        """Returns the rows that came, (n_received, ...), decoded where they were rounded."""
        rows, exact = journey.rows, journey.exact
        if self.codec is not None and rows is not journey.message:
            self.codec.decode_into(rows, journey.message)
            if self.codec.observer is not None and exact is not None:
                self.codec.observer(RowTransfer(exact=exact, arrived=rows))
        return rows


class RowExchange:
    """An exchange of rows that has begun; their gradients travel back while something else is computed.

    Args:
        rows: (n_sent, D), those for rank 0 first.
        leg: where they go.
    """

    def __init__(self, rows: torch.Tensor, leg: Leg) -> None:
        self._leg = leg
        self._departed: list[torch.Tensor] = [_Depart.apply(rows, leg)]

    def wait(self) -> torch.Tensor:
        """Returns the rows that came, (n_received, D), once; those that were sent needn't stay any longer."""
        self._leg.give_way()
        rows: torch.Tensor = _Arrive.apply(self._departed.pop(), self._leg)
        return rows


class _Depart(torch.autograd.Function):
    """Begins to send rows; in backward it waits for their gradient. In between they stand for what is under way."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg.of_gradients()
        leg.begin(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leg.give_way_in_backward()
        ctx.leg.end()
        return upstream[0], None


class _Arrive(torch.autograd.Function):
    """Waits for rows; in backward it begins to send their gradient back."""

    @staticmethod
    def forward(ctx: FunctionCtx, _: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg.of_gradients()
        return leg.end()[0]

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.leg.begin(upstream[0]), None
