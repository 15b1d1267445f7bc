"""Rows from token files to this rank's micro-batches, read ahead of the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from meshwright.data.loader import IGNORED, Batch, Loader, evaluation_batches
from meshwright.data.packing import PackedRows, Packing
from meshwright.data.prefetch import Prefetcher, tensors
from meshwright.data.tokens import TokenSet
from meshwright.parallel.document_attention import DocumentBounds, document_bounds
from meshwright.spec.placement import halved

AHEAD = 2
"""Steps whose rows are read ahead."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass."""

    tokens: torch.Tensor
    """(B, S) int64."""
    targets: torch.Tensor
    """(B, S) int64, -100 where nothing is predicted."""
    positions: torch.Tensor | None
    """(B, S) int64 where a document begins inside a row; None where every row counts from 0 without a break."""
    bounds: DocumentBounds | None = None
    """Of the documents, on the model's device; None where it is cheap to compute them from the positions."""

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Returns the first and the second half of the rows."""
        first, second = (
            MicroBatch(self.tokens[rows], self.targets[rows], None if self.positions is None else self.positions[rows])
            for rows in itertools.starmap(slice, halved((0, len(self.tokens))))
        )
        return first, second


class Feed(Protocol):
    """The trainer's source of micro-batches."""

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """Returns this rank's micro-batches of a step (steps done before it)."""

    def targets(self, step: int) -> int:
        """Returns the target tokens of a step's whole global batch."""

    def epoch(self, step: int) -> float:
        """Returns the passes over the training rows before a step."""

    def evaluation(self, rows: int | None) -> Iterator[MicroBatch]:
        """Yields this rank's batches of held-out rows, as many on every rank; None for all rows."""

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss over all held-out text, nats per token, to bits per byte of it."""


class _SpanReader:
    """Reads the batch of a step in the last of some spans that has begun by then; each is (first step, rows)."""

    def __init__(self, loader: Loader, spans: Sequence[tuple[int, tuple[int, int]]]) -> None:
        self._loader, self._spans = loader, spans

    def batch(self, step: int) -> Batch:
        """Returns this reader's rows of a step."""
        return self._loader.batch(step, next(span for first, span in reversed(self._spans) if first <= step))


class TokenFeed:
    """Reads this rank's rows of every global batch.

    Args:
        token_set: prepared text.
        rows: rows of the global batch.
        sequence: tokens a row, S.
        seed: of the rows' order.
        span: [start, stop) of this rank's rows in each global batch.
        micro: micro-batches a step.
        mask_documents: whether documents in a row are kept apart.
        packing: how documents are put into rows, as for `Loader`.
        device: of the tensors.
        start: first step.
        site: (index, count) of a site among those that share the rows of a step, each with ``rows`` of them.
    """

    def __init__(
        self,
        token_set: TokenSet,
        *,
        rows: int,
        sequence: int,
        seed: int,
        span: tuple[int, int],
        micro: int,
        mask_documents: bool,
        device: torch.device,
        packing: Packing = "stream",
        start: int = 0,
        site: tuple[int, int] = (0, 1),
    ) -> None:
        self._set, self._rows, self._sequence, self._span = token_set, rows, sequence, span
        self._micro, self._device = micro, device
        # The site's first row in a step; its own rows are counted from there.
        self._first_row = site[0] * rows
        self._loader = Loader(
            token_set.train,
            rows=site[1] * rows,
            sequence=sequence,
            seed=seed,
            row_range=self._shift(span),
            mask_documents=mask_documents,
            packing=packing,
        )
        self._packing: Packing = packing
        self._packed: PackedRows | None = None
        self._spans = [(start, self._shift(span))]
        reader = _SpanReader(self._loader, self._spans)
        self._prefetcher = Prefetcher(reader, start, AHEAD, to_device=lambda batch: self._split(batch, micro))

    def _shift(self, span: tuple[int, int]) -> tuple[int, int]:
        """Returns rows of this site as rows of all sites."""
        return self._first_row + span[0], self._first_row + span[1]

    def _split(self, batch: Batch, count: int) -> list[MicroBatch]:
        """Splits a reader's rows into equal micro-batches and moves them; runs in the prefetching thread.

        Args:
            batch: this reader's rows, (rows of span, S).
            count: number of micro-batches.
        """
        # A row without a document break counts its positions from 0 to S - 1: then no mask is needed.
        has_document_breaks = np.any(batch.positions[:, -1] != self._sequence - 1)
        moved = tensors(batch, self._device)
        fields = (moved.tokens, moved.targets, moved.positions)
        chunks = zip(*(tensor.chunk(count) for tensor in fields))
        if has_document_breaks and self._device.type != "cpu":
            host_chunks = torch.from_numpy(batch.positions).chunk(count)
            return [
                self._with_bounds(tokens, targets, positions, document_bounds(host_positions))
                for (tokens, targets, positions), host_positions in zip(chunks, host_chunks)
            ]
        return [
            MicroBatch(tokens, targets, positions if has_document_breaks else None)
            for tokens, targets, positions in chunks
        ]

    def _with_bounds(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor, bounds: DocumentBounds
    ) -> MicroBatch:
        """Returns a micro-batch of (B, S) int64 tensors on an accelerator, whose documents the host has counted."""
        if len(bounds.starts) == len(tokens) + 1:
            # One document a row: the causal kernel is faster than any mask.
            return MicroBatch(tokens, targets, None)
        return MicroBatch(tokens, targets, positions, bounds.to(self._device))

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """Returns this rank's micro-batches of a step; steps must be asked for in order."""
        # The prefetcher reads ahead in order: another step would need another reader.
        if step != self._prefetcher.step:
            raise AssertionError(f"step {step} asked for, step {self._prefetcher.step} is next")
        return next(self._prefetcher)

    @property
    def next_step(self) -> int:
        """Step whose micro-batches are asked for next."""
        return self._prefetcher.step

    @property
    def next_unread(self) -> int:
        """First step whose rows nobody has begun to read, between the steps of the consumer."""
        # `AHEAD` batches are in the queue, and the thread holds the next.
        return self._prefetcher.step + AHEAD + 1

    def change_span(self, first_step: int, span: tuple[int, int]) -> None:
        """Reads other rows of each global batch from a step on; evaluation keeps its rows.

        Args:
            first_step: at least `next_unread`.
            span: [start, stop) of this rank's rows, which micro-batches divide.
        """
        if first_step < self.next_unread:
            raise AssertionError(f"rows of step {first_step} change, and those before {self.next_unread} may be read")
        self._spans.append((first_step, self._shift(span)))

    def targets(self, step: int) -> int:
        """Returns the target tokens of a step's whole global batch, from the index alone."""
        return self._loader.global_targets(step, self._shift((0, self._rows)))

    def epoch(self, step: int) -> float:
        """Returns the passes over the training rows before a step."""
        return self._loader.epoch(step)

    def evaluation(self, rows: int | None) -> Iterator[MicroBatch]:
        """Yields this rank's batches of held-out rows in order, the first ``rows`` of them or all, in any layout.

        Rows beyond those, which fill up the last batch, have no targets.
        """
        start, stop = (row // self._micro for row in self._span)
        # Evaluation batches are one micro-batch of the global batch, so memory suffices.
        share = self._rows // self._micro
        rows_yielded = 0
        if len(self._set.validation.tokens) < 2:
            return
        if self._packing != "stream" and self._packed is None:
            self._packed = PackedRows(self._set.validation, self._sequence, single=self._packing == "single")
        for batch in evaluation_batches(
            self._set.validation, rows=share, sequence=self._sequence, row_range=(start, stop), packed=self._packed
        ):
            if rows is not None and rows_yielded >= rows:
                return
            if rows is not None:
                # Rows of the last batch beyond ``rows`` are masked: the result doesn't depend on the batch size.
                batch.targets[rows_yielded + np.arange(start, stop) >= rows] = IGNORED
            rows_yielded += share
            yield from self._split(batch, 1)

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss over the whole held-out text, nats per token, to bits per byte of its UTF-8."""
        return self._set.validation.bits_per_byte(loss)

    def close(self) -> None:
        """Ends the reading thread."""
        self._prefetcher.close()
