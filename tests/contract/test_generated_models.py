"""Random models under random layouts equal one device, or are refused by name; `tests.generated.prove` has more."""

import pytest
import torch

from tests.generated import oddities
from tests.generated.prove import ODD_LAYOUTS, prove, prove_oddity, sound
from tests.tiers import cases, further

torch.set_num_threads(1)


@pytest.mark.parametrize("seed", further([1, 2, 5, 8]))
def test_a_random_model_equals_one_device_or_is_refused(seed: int) -> None:
    assert [verdict for verdict in prove(seed, 2) if not sound(verdict)] == []


PIPELINES = tuple(text for text in ODD_LAYOUTS if text.startswith("pp"))
REFUSED = {
    "rwkv": ("cp=2",),  # a state runs along the tokens
    "mixture_of_depths": ("cp=2",),  # the router compares all tokens of a row
    "hyper_connections": ("cp=2",),  # its streams are no hidden state (B, S, D)
    "memory_tokens": ("cp=2",),  # a row is longer inside of the model
    "table_in_each_layer": ("cp=2",),  # a layer counts tokens from its own first
    "skips": PIPELINES[1:],  # four stages cut through a skip
    "exits": PIPELINES,  # the output reads every layer
}
"""Layouts that an odd model can't run under, by what it is; under every other of `ODD_LAYOUTS` it must pass."""


@pytest.mark.parametrize("name", cases((model.__name__ for model in oddities.ALL), each_time=("skips",)))
def test_an_odd_model_passes_but_where_its_mathematics_forbids(name: str) -> None:
    verdicts = prove_oddity(name)
    assert [verdict for verdict in verdicts if not sound(verdict)] == []
    assert tuple(text for text, verdict in zip(ODD_LAYOUTS, verdicts) if not verdict.passed) == REFUSED.get(name, ())
