"""What a command's own process does for its imports and its end, and what it leaves alone."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType

import pytest

from meshwright import __main__ as program
from meshwright.cli import main as command_line


@pytest.mark.parametrize("fails", [False, True])
def test_what_lives_when_a_command_ends_is_left_to_the_end_of_its_process(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def command(_argv: list[str]) -> int:
        order.append("command")
        if fails:
            raise RuntimeError
        return 7

    monkeypatch.setattr(program, "run_command", command)
    monkeypatch.setattr(gc, "freeze", lambda: order.append("freeze"))
    if fails:
        with pytest.raises(RuntimeError):
            program.main()
    else:
        assert program.main() == 7
    assert order == ["command", "freeze"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_commands_file_is_imported(
    enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def import_module(name: str) -> ModuleType:
        seen.append(gc.isenabled())
        if fails:
            raise ImportError(name)
        return ModuleType(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        if fails:
            with pytest.raises(ImportError, match=r"meshwright\.cli\.serve_outer"):
                command_line.load_file("serve-outer")
        else:
            assert command_line.load_file("serve-outer").__name__ == "meshwright.cli.serve_outer"
        assert seen == [False] and gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
