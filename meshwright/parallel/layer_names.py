"""Names the layers whose weights or gradients a collective sends, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REST = -1
"""Stands for what belongs to no layer: embedding, head, last norm."""


def layer_of(name: str, numbers: Mapping[str, int]) -> int:
    """Returns the number of the layer that a parameter belongs to, counted from 0; `REST` for none.

    Args:
        name: of the parameter.
        numbers: of the layers, by their names.
    """
    while name:
        name = name.rpartition(".")[0]
        if name in numbers:
            return numbers[name]
    return REST


def format_layers(numbers: Iterable[int]) -> str:
    """Returns ``layer 3``, ``layers 2-4, 7``, ``layers 0-1 and the rest`` or ``the rest``; empty for nothing."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in (candidate for candidate in ordered if candidate >= 0):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    run_text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    labels = [f"layer{'s' if len(ordered) - (REST in ordered) > 1 else ''} {run_text}"] if runs else []
    return " and ".join([*labels, *(["the rest"] if REST in ordered else [])])
