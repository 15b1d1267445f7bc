"""The choices of a layout that have a grammar of their own, parsed once: recompute, stage split and batch shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from meshwright.errors import PlanError, nearest

AUTO_CHUNK, WHOLE_LOGITS = 0, -1
"""What stands for ``auto`` and ``off`` among numbers of tokens."""
_CHUNK_WORDS = {"auto": AUTO_CHUNK, "off": WHOLE_LOGITS}
GPU_CHUNK_LOGITS = 1 << 28
"""Logits of a chunk on a GPU: 512 MiB in bf16, and nothing in float32 beside them. At V = 128k that is two thousand
tokens, beside whose products adding up the weight's gradient is little traffic. With a thousand, each product rounded
and then added, an H100 took 40 % longer than for whole logits (N = 8192, D = 4096)."""
CPU_CHUNK_TOKENS = 512
"""Tokens of a chunk on processor cores: with fewer, adding up the weight's gradient costs time."""
RECOMPUTES = ("none", "full", "selective")
"""What a recomputed layer keeps: everything; its input alone; its input and the outputs of matrix products."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation recompute: ``none``, ``full``, ``selective``, or of K evenly spaced layers as ``full:3``.

    All other layers keep everything, or as ``full:3+selective`` what selective recompute keeps.

    Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al. (2022), section 5, for ``selective``.
    """

    mode: str = "none"
    """One of `RECOMPUTES`."""
    count: int = 0
    """Number of layers that recompute by `mode`; 0 for all of them."""
    rest: str = "none"
    """What the other layers do, one of `RECOMPUTES` that keeps more than `mode`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for an unknown mode, a count that is no whole number of at least 1, or two modes in another
                order.
        """
        first, plus, rest = text.partition("+")
        mode, colon, count = first.partition(":")
        for word in (mode, rest) if plus else (mode,):
            if word not in RECOMPUTES:
                raise PlanError(f"recompute={word} is unknown{nearest(word, RECOMPUTES)}")
        if colon and (mode == "none" or not count.isdigit() or int(count) < 1):
            raise PlanError(f"recompute={text}: write full:K or selective:K with K layers of at least 1")
        if plus and ((mode, rest) != ("full", "selective") or not colon):
            raise PlanError(
                f"recompute={text}: of two ways the one that keeps less has a number of layers and comes first, and "
                "all other layers do the second: write full:K+selective; without a second they keep everything"
            )
        return cls(mode, int(count or 0), rest if plus else "none")

    def __str__(self) -> str:
        """Returns the text form."""
        text = f"{self.mode}:{self.count}" if self.count else self.mode
        return text if self.rest == "none" else f"{text}+{self.rest}"

    def __bool__(self) -> bool:
        """Returns whether any layer recomputes."""
        return self.mode != "none"

    def modes(self, layers: int) -> list[str]:
        """Returns what each layer does, of a model that has ``layers`` of them: one of `RECOMPUTES` for each.

        Raises:
            PlanError: when K is more than the layers there are, or there are none to recompute.
        """
        count = self.count or layers
        if self and (not layers or count > layers):
            raise PlanError(f"recompute={self}: the model has {layers} repeated layers; K is at most that")
        modes = [self.rest] * layers
        # Evenly spaced: layers floor(i L / K).
        for number in range(count if layers else 0):
            modes[number * layers // count] = self.mode
        return modes

    def layers(self, layers: int) -> list[int]:
        """Returns the numbers of the layers that recompute, rising, of a model that has ``layers`` of them.

        Raises:
            PlanError: see `modes`.
        """
        return [number for number, mode in enumerate(self.modes(layers)) if mode != "none"]

    def share(self, layers: int, mode: str = "") -> float:
        """Returns the share of a model's layers with a mode, `mode` itself where none is named."""
        counted = min(1.0, self.count / layers) if self.count else 1.0
        wanted = mode or self.mode
        return counted * (wanted == self.mode) + (1.0 - counted) * (wanted == self.rest)


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Layers of each pipeline stage in order, as ``5-7-6-6``; without any, stages are balanced by cost.

    The first and the last stage may have none: the first one has the embedding beside its layers, the last the head.
    """

    layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for a stage that is no whole number, or 0 between the first and the last stage.
        """
        sizes = text.split("-") if text else []
        if not all(map(str.isdigit, sizes)) or 0 in map(int, sizes[1:-1]):
            raise PlanError(
                f"split={text}: write the layers of each stage, as split=5-7-6-6; only the first stage, which has the "
                "embedding, and the last one, which has the head, may have 0"
            )
        return cls(tuple(map(int, sizes)))

    def __str__(self) -> str:
        """Returns the text form; empty for balanced stages."""
        return "-".join(map(str, self.layers))

    def __bool__(self) -> bool:
        """Returns whether the stages are given."""
        return bool(self.layers)

    @property
    def bounds(self) -> tuple[int, ...]:
        """First layer of each stage, and the number of layers."""
        bounds = [0]
        for size in self.layers:
            bounds.append(bounds[-1] + size)
        return tuple(bounds)


@dataclass(frozen=True, slots=True)
class BatchShares:
    """Share of each reader in every micro-batch's rows, as ``5-3`` or ``5x4-3x2``; without any, all are equal."""

    shares: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for a share or a count that is no whole number of at least 1.
        """
        shares: list[int] = []
        for run in text.split("-") if text else []:
            share, times, count = run.partition("x")
            if not all(number.isdigit() and int(number) for number in (share, *([count] if times else []))):
                raise PlanError(f"rows={text}: write the share of each reader, at least 1, as rows=5-3 or 5x4-3x2")
            shares += [int(share)] * int(count or 1)
        return cls(tuple(shares))

    @classmethod
    def of(cls, shares: Sequence[int]) -> Self:
        """Returns the shares of readers in order; without any where all are equal."""
        return cls(tuple(shares) if len(set(shares)) > 1 else ())

    def __str__(self) -> str:
        """Returns the text form, equal neighbours as ``share x count``; empty for equal shares."""
        runs = [(share, len(list(run))) for share, run in groupby(self.shares)]
        return "-".join(f"{share}x{count}" if count > 1 else str(share) for share, count in runs)

    def __bool__(self) -> bool:
        """Returns whether the shares differ."""
        return bool(self.shares)


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Tokens whose logits exist at once: ``auto`` lets the device decide, ``off`` is a micro-batch's, or a number."""

    tokens: int = AUTO_CHUNK
    """Tokens of a chunk; `AUTO_CHUNK`, or `WHOLE_LOGITS` for no chunks."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for anything but ``auto``, ``off`` and a whole number of at least 1.
        """
        if text in _CHUNK_WORDS:
            return cls(_CHUNK_WORDS[text])
        if not text.isdigit() or int(text) < 1:
            raise PlanError(f"loss_chunk={text}: write auto, off, or the tokens whose logits exist at once, as 1024")
        return cls(int(text))

    def __str__(self) -> str:
        """Returns the text form."""
        return next((word for word, tokens in _CHUNK_WORDS.items() if tokens == self.tokens), str(self.tokens))

    @property
    def on(self) -> bool:
        """Whether a run may compute its logits in chunks."""
        return self.tokens != WHOLE_LOGITS

    def size(self, tokens: int, columns: int, on_cpu: bool) -> int:
        """Returns the tokens of a chunk of the logits of a micro-batch, where it is `on`.

        Args:
            tokens: N, of the micro-batch on this rank.
            columns: of the vocabulary on this rank.
            on_cpu: whether processor cores compute.
        """
        chunk = self.tokens
        if chunk == AUTO_CHUNK:
            chunk = CPU_CHUNK_TOKENS if on_cpu else max(1, GPU_CHUNK_LOGITS // columns)
        # Chunks of equal size, so that the last one's product isn't a thin one.
        return -(-tokens // -(-tokens // min(chunk, tokens)))


def parse_int(key: str, value: str) -> int:
    """Reads a whole number of a layout's text.

    Raises:
        PlanError: it is none.
    """
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"layout: {key}={value} is not a whole number") from None


def parse_choice(key: str, value: str, kind: str) -> object:
    """Reads a value of a layout's text; ``kind`` is its type's name: ``int``, ``bool``, or any other for text.

    Raises:
        PlanError: it is no value of that type.
    """
    if kind == "int":
        return parse_int(key, value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise PlanError(f"layout: {key}={value}: write {key}=true or {key}=false")
        return value == "true"
    return value
