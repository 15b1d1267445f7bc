"""Settings at their borders, and damaged files, are refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.files import lone_writer
from meshwright.errors import ConfigError, DataError
from meshwright.jobs.run_directory import CONFIG, PLAN, claim_directory
from meshwright.launch.config import LaunchConfig
from meshwright.train.config import OptimizerConfig
from meshwright.train.run_config import RunConfig


@pytest.mark.parametrize("eps", [0.0, 1e-300, -1.0])
def test_an_eps_that_float32_takes_for_zero_is_refused(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.eps = .*: it must be at least 1.2e-38"):
        OptimizerConfig(eps=eps).check()


@pytest.mark.parametrize("name", ["group_s", "collective_s"])
def test_a_wait_that_torch_can_not_count_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"launch.{name} = 1e\+30: at most 2000000 seconds"):
        LaunchConfig(**{name: 1e30}).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("contents", [b"\x00\xff{", b"{}", b"[]", b'{"layout": 3}'])
def test_a_damaged_plan_is_named(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("")
    (tmp_path / PLAN).write_bytes(contents)
    with pytest.raises(ConfigError, match=r"plan.json is damaged \(.*; delete it, and the same train command"):
        claim_directory(RunConfig(run=str(tmp_path)))


def test_a_cache_that_can_not_be_made_is_named() -> None:
    with (
        pytest.raises(DataError, match=r"cannot write under /proc/none: .*; set data.cache"),
        lone_writer(Path("/proc/none/set.lock"), 1.0),
    ):
        pass
