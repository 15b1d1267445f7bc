"""No call on a float64 tensor gives a narrower one, however the call passes its tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from meshwright.parallel.float64_ops import Float64Ops

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "method": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "to tensor": lambda x: x.to(torch.zeros(1)),
    "to tensor by name": lambda x: x.to(tensor=torch.zeros(1)),
    "to dtype by name": lambda x: x.to(dtype=torch.float32),
    "type of": lambda x: x.type_as(torch.zeros(1)),
    "type of by name": lambda x: x.type_as(other=torch.zeros(1)),
    "input by name": lambda x: torch.softmax(input=x, dim=-1, dtype=torch.float32),
    "function": lambda x: functional.softmax(input=x, dim=-1, dtype=torch.float32),
    "sum": lambda x: torch.sum(input=x, dim=-1, dtype=torch.float32),
    "later argument": lambda x: torch.full((2,), x.sum(), dtype=torch.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_float64_stays(name: str) -> None:
    with Float64Ops():
        assert CALLS[name](torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_other_types_go_where_they_are_sent() -> None:
    narrow, wide = torch.ones(2), torch.ones(2, dtype=torch.float64)
    with Float64Ops():
        assert narrow.to(wide).dtype == torch.float64
        assert narrow.to(torch.bfloat16).dtype == torch.bfloat16
        assert wide.to(torch.int64).dtype == torch.int64
        assert torch.arange(2).to(narrow).dtype == torch.float32
