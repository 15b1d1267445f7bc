"""The house's own rules hold over every module of the package, and the checkers see what breaks them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import language, shapes, source


@pytest.mark.parametrize("rule", source.RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    assert list(rule()) == []


BAD = '''
"""Module."""
import os
from os import getenv
def loud():
    print(os.environ)
class FooConfig:
    """Doc."""
    width: int = 1
    depth: int = 2
    """Depth."""
    def check(self): ...
    def _hidden(self): ...
'''


def test_rules_see_what_breaks_them(monkeypatch, tmp_path):
    path = source.PACKAGE / "made_up.py"
    monkeypatch.setattr(source, "modules", lambda: {path: ast.parse(BAD)})
    assert [line.split(" ", 1)[1] for line in source.missing_docstrings()] == [
        "loud has no docstring",
        "FooConfig.check has no docstring",
        "FooConfig.width has no docstring under it",
    ]
    assert len(list(source.prints())) == 1
    assert sorted(line.split()[-1] for line in source.environment_reads()) == ["os.environ", "os.getenv"]


def test_private_names_of_torch_are_seen_wherever_they_are_used(monkeypatch):
    user = """
import torch._dynamo
def read(tensor, module, config):
    getattr(tensor, "_hidden", None)
    return tensor._grad_fn_of, module._parameters, config._fields, torch._C, user._own
class User:
    def _own(self): self._mine, super()._base
"""
    wrapper = """
from torch.utils._pytree import tree_map, tree_flatten
PRIVATE_NAMES = (PrivateName("torch.utils._pytree:tree_map", "nested"), PrivateName("torch:Tensor._stated", "it"))
def read(x): return x._stated, x._unstated, hasattr(x, "_also"), torch.__version__
"""
    stated = source.modules()[source.USED_IN_PLACE]
    paths = {source.PACKAGE / "user.py": user, source.COMPAT / "wrapper.py": wrapper}
    trees = {path: ast.parse(text) for path, text in paths.items()} | {source.USED_IN_PLACE: stated}
    monkeypatch.setattr(source, "modules", lambda: trees)
    seen = [line.split(" uses ")[1].split(";")[0] for line in source.private_torch()]
    assert sorted(set(seen)) == ["_C", "_grad_fn_of", "_hidden", "torch._C", "torch._dynamo"]
    unstated = [line.split(" uses ")[1].split(" and ")[0] for line in source.unstated_private_names()]
    assert sorted(set(unstated)) == ["_also", "_unstated", "tree_flatten"]


def test_a_docstring_of_parameters_that_are_gone_is_seen(monkeypatch):
    text = """
class Gate:
    '''Admits peers.

    Args:
        wire, limit_s: purpose and limit.
    '''
    def __init__(self, channel, limit_s): ...
    def admit(self, peer, *others):
        '''Admits.

        Args:
            peer: one: or more.
            others: the rest.

        Returns:
            nothing: ever.
        '''
"""
    monkeypatch.setattr(source, "modules", lambda: {source.PACKAGE / "made_up.py": ast.parse(text)})
    assert [line.split(" ", 1)[1] for line in source.stale_arguments()] == [
        "__init__'s docstring explains 'wire', which isn't a parameter"
    ]


def test_the_structure_of_imports_is_seen(monkeypatch, tmp_path):
    texts = {
        "spec/one.py": "def f():\n    import meshwright.spec.two\n    import torch\n",
        "spec/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from meshwright.spec import one\n",
        "parallel/three.py": "def g(module):\n    module.forward = print\n",
        "models/four.py": "import meshwright.models.analysis.five\n",
        "models/analysis/five.py": "from meshwright.models.six import name\n",
        "models/six.py": "",
    }
    for name, text in texts.items():
        (tmp_path / "meshwright" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "meshwright" / name).write_text(text)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "meshwright")
    parsed = {tmp_path / "meshwright" / name: ast.parse(text) for name, text in texts.items()}
    monkeypatch.setattr(source, "modules", lambda: parsed)
    assert len(list(source.inner_imports())) == 2 and len(list(source.type_only_imports())) == 1
    assert list(source.torch_below()) == ["meshwright/spec/one.py:3 imports torch"]
    assert list(source.import_circles()) == ["meshwright.spec.one <-> meshwright.spec.two import each other"]
    assert len(list(source.forward_assignments())) == 1
    assert [line.split(" ", 1)[1] for line in source.two_way_rooms()] == [
        "imports meshwright.models.analysis.five, and models/analysis/ imports models/"
    ]


LAZY = """
import importlib
from os import path
def plan():
    import torch
    from meshwright.jobs import train
    def inner():
        import tyro
    importlib.import_module("torch")
"""


def test_imports_inside_functions_of_jobs_are_seen(monkeypatch):
    names = ("jobs/made_up.py", "cli/arguments.py")
    monkeypatch.setattr(source, "modules", lambda: {source.PACKAGE / name: ast.parse(LAZY) for name in names})
    assert sorted(f"{line.partition(':')[0]} {line.split()[2]}" for line in source.inner_imports()) == [
        "meshwright/cli/arguments.py meshwright.jobs",
        "meshwright/cli/arguments.py torch",
        "meshwright/jobs/made_up.py meshwright.jobs",
        "meshwright/jobs/made_up.py torch",
        "meshwright/jobs/made_up.py tyro",
    ]
    assert len(list(source.lazy_tables())) == 2


def test_long_files_and_functions_want_a_reason(monkeypatch, tmp_path):
    body = "def f():\n" + "    x = 1\n" * 410
    monkeypatch.setattr(source, "ROOT", tmp_path)
    path = tmp_path / "long.py"
    monkeypatch.setattr(source, "modules", lambda: {path: ast.parse(path.read_text())})
    path.write_text(body)
    assert [line.split(" ", 1)[1] for line in source.oversized()] == [
        "has 411 lines, over 400",
        "f has 411 lines, over 60",
    ]
    path.write_text("# long: one table\n" + body)
    assert list(source.oversized()) == []


def _modules_after(import_line: str) -> set[str]:
    code = f"import sys\n{import_line}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "numpy", "pyarrow", "tensorboard"}


@pytest.mark.skipif(not (source.PACKAGE / "cli" / "main.py").exists(), reason="no command line yet")
def test_the_command_line_starts_without_torch():
    assert _modules_after("import meshwright.cli.main") & HEAVY == set()


def test_configs_import_nothing_heavy():
    configs = sorted(source.PACKAGE.rglob("config.py"))
    names = [".".join(path.relative_to(source.ROOT).with_suffix("").parts) for path in configs]
    assert _modules_after("import " + ", ".join(names)) & HEAVY == set()


def test_packages_have_an_init_file():
    folders = {path.parent for path in source.PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not Path(folder, "__init__.py").exists()] == []


def test_a_type_name_has_one_meaning():
    assert language.shared_type_names() == []


def test_tensor_functions_state_shapes():
    assert shapes.without_shapes() == []


def test_a_function_without_a_shape_is_listed(monkeypatch, tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        'def norm(grad: Tensor) -> float:\n    """Returns the norm."""\n\n'
        'def scale(grad: Tensor) -> None:\n    """Scales ``grad: (n_local,)``."""\n\n'
        'def call(f: Callable[[Tensor], None]) -> None:\n    """Calls."""\n'
    )
    monkeypatch.setattr(shapes, "modules", lambda: {path: ast.parse(path.read_text())})
    monkeypatch.setattr(shapes, "place", lambda path, node: f"{path.name}:{node.lineno}")
    assert shapes.without_shapes() == ["one.py:1 norm"]


def test_the_language_is_measured_by_names_comments_and_imports(monkeypatch, tmp_path):
    text = (
        "# why\nimport os\n\n\nclass Found:\n    def take(self, grad_norm):\n        import json\n        found = 1\n"
    )
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(text)
    for module in (language, source):
        monkeypatch.setattr(
            module, "modules", lambda: {p: ast.parse(p.read_text()) for p in sorted(tmp_path.iterdir())}
        )
        monkeypatch.setattr(module, "PACKAGE", tmp_path, raising=False)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(language, "place", lambda path, node: path.name)
    assert language.shared_type_names() == ["Found: one.py, two.py"]
    measured = language.figures()
    assert measured["names"] == 8  # Found, take, grad_norm and found, twice
    assert measured["everyday words, wide"] == 0.5 and measured["everyday words, strict"] == 0.25
    assert measured["comment lines"] == 1 / 8 and measured["imports inside functions"] == 2
