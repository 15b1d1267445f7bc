"""How many files a run may have open is seen to before its first rank starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshwright.errors import ConfigError
from meshwright.resilience import descriptors
from meshwright.resilience.agent import Agent
from meshwright.resilience.descriptors import count_descriptors, raise_descriptor_limit
from meshwright.resilience.supervisor import Supervisor
from meshwright.spec.layout import Layout


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limit as the process has it, soft and hard; the last one counts."""
    found = [(64, 256)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: found[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda which, pair: found.append(pair))
    return found


def test_the_limit_is_raised_as_far_as_it_may_be_and_else_refused_with_the_number(limits: list) -> None:
    raise_descriptor_limit(64)
    assert limits == [(64, 256)]
    raise_descriptor_limit(65)
    assert limits[1:] == [(256, 256)]
    with pytest.raises(ConfigError, match=r"need 257 open files .* the limit is 256: .*ulimit -Hn 257"):
        raise_descriptor_limit(257)


@pytest.mark.parametrize(
    ("layout", "most"),
    [("replicate=1", 48), ("shard=2,zero=3", 72), ("replicate=4", 92), ("shard=2,tp=2,zero=3", 99), ("pp=2,tp=2", 99)],
)
def test_what_is_counted_is_what_runs_had_open_after_a_failure(
    layout: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: the rank with the most, among those that replaced others, started by a process with 9 open.

    Two more are counted since: the pipes of a supervisor's keepers.
    """
    monkeypatch.setattr(descriptors, "_open_descriptors", lambda: 9)
    found = Layout.parse(layout)
    assert most <= count_descriptors(found, found.world) <= most * 1.3 + 2


def test_nodes_and_devices_take_more() -> None:
    layout = Layout.parse("replicate=4")
    alone = count_descriptors(layout, 4)
    assert count_descriptors(layout, 4, cuda=True) > alone
    assert count_descriptors(layout, 2, nodes=2, peers=1) < count_descriptors(layout, 2, nodes=2, peers=2)


def test_a_run_whose_ranks_could_not_be_replaced_is_refused_before_the_first_one(limits: list) -> None:
    limits.append((16, 16))
    job = SimpleNamespace(
        plan=SimpleNamespace(layout=Layout.parse("pp=2")), config=SimpleNamespace(recovery=SimpleNamespace(copies=1))
    )
    devices = SimpleNamespace(count=2, kind="cpu")
    for begin in (
        lambda: Supervisor(job, devices, None),  # type: ignore[arg-type]
        lambda: Agent(job, devices, SimpleNamespace(nodes=2), None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="the limit is 16") as caught:
            begin()
        assert caught.value.exit_status == 2
