"""What a command's own process does for its imports and its end, and what it leaves alone."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
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
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: order.append("freeze"))
    if fails:
        with pytest.raises(RuntimeError):
            program.main()
    else:
        assert program.main() == 7
    assert order == ["command", "freeze"]


def test_a_command_that_used_triton_ends_in_silence() -> None:
    """Its bindings report what is frozen as leaked, forty lines after the command's own."""
    pytest.importorskip("triton")
    code = "import gc, sys, triton; from meshwright import __main__ as program; gc.freeze(); "
    code += "program.run_command = lambda argv: 0; sys.exit(program.main())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_frozen_objects_are_let_go_before_triton_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(program, "run_command", lambda _argv: 0)
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", ModuleType("libtriton"))
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: order.append(name))
    assert program.main() == 0 and order == ["unfreeze"]


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
