"""What the modules of public models keep and move, counted on them once: ``preset_bytes.toml``.

A public model is planned by its sizes, without a library, and standard formulas know nothing of a family's further
norms, of an activation function that is written out, or of attention that no fused kernel computes. So its modules were
run on fake tensors, as a plan runs those of any other model, and their bytes stand in a file
(``benchmarks/count_presets.py``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from meshwright.json_types import JsonObject
from meshwright.spec.model_shape import KeptBytes, ModelShape, ModelWork, ModuleWork, Operator

FILE = Path(__file__).with_name("preset_bytes.toml")
SAME, SAME_BYTES = 1e-3, 64.0
"""Relative difference, and bytes beside it, up to which what a token takes doesn't depend on the row's length."""
FIGURES = ("saved", "working", "compiled_saved", "compiled_working", "moved", "compiled_moved")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedLayer:
    """Bytes a token of one kind of layer, on one device in bf16; see `KeptBytes` and `models.fused`."""

    count: int
    """Layers of the kind."""
    saved: tuple[float, ...]
    """Kept from forward to backward: without recompute, with ``selective``, with ``full``."""
    working: tuple[float, ...]
    """Most that exists at once while backward runs, likewise."""
    compiled_saved: tuple[float, ...]
    """`saved` of a compiled layer."""
    compiled_working: tuple[float, ...]
    """`working` of a compiled layer."""
    moved: tuple[float, ...]
    """Read and written by all but products and attention, in forward and in backward."""
    compiled_moved: tuple[float, ...]
    """The same with all that lies between two products as one operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedModel:
    """Bytes a token of a whole model, in rows of one length."""

    tokens: int
    """Tokens of a row, S."""
    outside: float
    """Kept by what lies around the layers: embedding, final norm, head."""
    layers: tuple[CountedLayer, ...]
    """Each kind."""

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds it from plain values."""
        layers = tuple(
            CountedLayer(count=layer["count"], **{name: tuple(layer[name]) for name in FIGURES})
            for layer in values["layers"]
        )
        return cls(tokens=values["tokens"], outside=values["outside"], layers=layers)

    def at(self, tokens: int, other: CountedModel) -> CountedModel:
        """Returns the bytes in rows of another length, on the line through these and those of an ``other`` length."""
        share = (tokens - self.tokens) / (other.tokens - self.tokens)

        def between(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
            return tuple(max(0.0, low + share * (high - low)) for low, high in zip(first, second))

        layers = tuple(
            CountedLayer(count=own.count, **{name: between(getattr(own, name), getattr(its, name)) for name in FIGURES})
            for own, its in zip(self.layers, other.layers)
        )
        return CountedModel(tokens=tokens, outside=between([self.outside], [other.outside])[0], layers=layers)

    def is_near(self, other: CountedModel) -> bool:
        """Returns whether a token takes the same in rows of both lengths."""
        ends = zip(self._figures(), other._figures())
        return all(abs(own - its) <= SAME * max(own, its) + SAME_BYTES for own, its in ends)

    def _figures(self) -> list[float]:
        return [self.outside, *(value for layer in self.layers for name in FIGURES for value in getattr(layer, name))]

    def work(self, is_compiled: bool) -> ModelWork:
        """Returns one row as a measured micro-batch, whose operators beside products and attention are one each.

        Args:
            is_compiled: whether its layers keep what compiled ones keep.
        """

        def kept(saved: Sequence[float], working: Sequence[float]) -> KeptBytes:
            (a, b, c), (d, e, f) = ((round(size * self.tokens) for size in sizes) for sizes in (saved, working))
            return KeptBytes(saved=(a, b, c), working=(d, e, f))

        def moved(size: float) -> list[Operator]:
            return [Operator("element", "counted", (), 0.0, round(size * self.tokens))]

        layers = []
        for layer in self.layers:
            eager, fused = ([moved(size) for size in sizes] for sizes in (layer.moved, layer.compiled_moved))
            compiled = kept(layer.compiled_saved, layer.compiled_working)
            layers.append(
                ModuleWork(
                    forward=eager[0],
                    backward=eager[1],
                    fused_forward=fused[0],
                    fused_backward=fused[1],
                    kept=compiled if is_compiled else kept(layer.saved, layer.working),
                    compiled=compiled,
                )
            )
        outside = ModuleWork(kept=KeptBytes(saved=(round(self.outside * self.tokens),) * 3))
        return ModelWork(rows=1, layers=tuple(layers), counts=tuple(layer.count for layer in self.layers), rest=outside)


@cache
def read_counted() -> dict[str, tuple[CountedModel, ...]]:
    """Returns the file's models, each with one or two lengths of rows."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: tuple(map(CountedModel.from_json, entry["rows"])) for name, entry in entries.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedPreset:
    """A public model whose modules were counted."""

    shape: ModelShape
    """Its sizes, of which they were counted."""
    lengths: tuple[CountedModel, ...]
    """One length of rows, or two where a token's bytes depend on it."""

    def at(self, tokens: int) -> CountedModel:
        """Returns the bytes in rows of so many tokens."""
        first, last = self.lengths[0], self.lengths[-1]
        return first if first is last else first.at(tokens, last)


def counted_preset(name: str, shape: ModelShape) -> CountedPreset | None:
    """Returns what the modules of a public model take; None where they weren't counted.

    Args:
        name: of the preset, as the file has it.
        shape: its sizes.
    """
    lengths = read_counted().get(name)
    return None if lengths is None else CountedPreset(shape=shape, lengths=lengths)
