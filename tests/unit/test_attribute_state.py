"""Attributes of modules between calls: what changed is named, and all of it is put back, shared objects as one."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.models.analysis.attribute_state import MISSING, AttributeState, are_equal


class Counting(nn.Module):
    """Has attributes of many kinds; some are shared with a module below it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls, self.seen, self.recent = 0, {3}, deque([1.0], maxlen=2)
        self.shared = {"scale": torch.ones(2), "nan": float("nan")}
        self.inner.shared = self.shared
        self.own = [self]


def test_changes_are_named_by_their_places_and_taken_back() -> None:
    module = Counting()
    before = AttributeState(module)
    assert before.changes_to(AttributeState(module)) == {}
    module.calls += 1
    module.seen = {4}  # as many as before
    module.recent.append(2.0)
    module.shared["scale"].mul_(2)
    del module.own
    module.inner.fresh = "new"
    changes = before.changes_to(AttributeState(module))
    assert set(changes) == {("", name) for name in ("calls", "seen", "recent", "shared", "own")} | {
        ("inner", "shared"), ("inner", "fresh"),
    }  # fmt: skip
    assert changes["", "own"] is MISSING and changes["inner", "fresh"] == "new"
    before.restore()
    assert (module.calls, module.seen, list(module.recent), module.own) == (0, {3}, [1.0], [module])
    assert module.shared is module.inner.shared and module.shared["scale"].tolist() == [1, 1]
    assert not hasattr(module.inner, "fresh") and before.changes_to(AttributeState(module)) == {}
    # What is put back is a copy: a change after it doesn't reach what was kept.
    module.shared["scale"].zero_()
    before.set({("", "calls"): 7})
    assert module.calls == 7 and module.shared["scale"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "other", "expected"),
    [
        ({1, 2}, {1, 3}, False),
        ({1, 2}, {2, 1}, True),
        (frozenset({"a"}), frozenset({"b"}), False),
        ({torch.ones(1)}, {torch.ones(1)}, True),
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        ([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, float("nan")])], True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        ({"a": (1, [2])}, {"a": (1, [3])}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
    ],
    ids=range(10),
)
def test_values_are_equal_by_what_they_hold(value: Any, other: Any, expected: bool) -> None:
    assert are_equal(value, other) is expected
