"""What a run under torchrun can't honour is refused, or named as it starts."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.errors import ConfigError
from meshwright.jobs.start_checks import check_torchrun
from meshwright.train.run_config import RunConfig


def changed(*settings: tuple[str, object]) -> RunConfig:
    config = RunConfig()
    for path, value in settings:
        config = config.with_value(path, value)
    return config


def test_settings_that_only_a_supervisor_reads_are_named() -> None:
    settings = (("recovery.hang_s", 4.0), ("recovery.snapshot_every", 1), ("recovery.layouts", "tp=2"))
    lines: list[str] = []
    check_torchrun(changed(*settings, ("launch.stop_s", 30.0), ("recovery.spike", 2.0)), lines.append)
    (line,) = lines
    for path in (
        "recovery.hang_s = 4.0",
        "recovery.snapshot_every = 1",
        "recovery.layouts = tp=2",
        "launch.stop_s = 30.0",
    ):
        assert path in line
    assert "spike" not in line and "torchrun starts ranks alone" in line


def test_nothing_is_said_without_such_settings_or_on_other_ranks() -> None:
    lines: list[str] = []
    check_torchrun(RunConfig(), lines.append)
    check_torchrun(changed(("recovery.hang_s", 4.0)), None)
    assert lines == []


@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("monitor.port", 8787, "type meshwright watch RUN --port 8787"),
        ("monitor.health_s", 5.0, "start the run without torchrun"),
        ("recovery.on_sick", "rewind", "write recovery.on_sick = skip or stop"),
    ],
)
def test_what_needs_a_process_beside_the_ranks_is_refused(setting: str, value: object, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        check_torchrun(changed((setting, value)), None)


def test_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop trials"):
        check_torchrun(dataclasses.replace(RunConfig(), trials=3), None)
