"""FSDP2's own objects, found under every version of torch that is supported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshwright.torch_compat.fsdp2 import fsdp_groups


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"_fsdp_param_groups": ["a", "b"]}, ["a", "b"]),  # torch 2.12 and newer
        ({"_fsdp_param_groups": []}, []),
        ({"_fsdp_param_group": "a"}, ["a"]),  # torch 2.11
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_groups_of_a_unit_are_found_in_old_and_new_torch(state: dict[str, object], names: list[str]) -> None:
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))
    assert fsdp_groups(unit) == names
