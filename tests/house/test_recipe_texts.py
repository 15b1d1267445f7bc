"""Recipes and flags that benchmarks, device tests, examples and docs hand to a run are ones that it takes."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from meshwright.cli.arguments import read_config
from meshwright.train.run_config import RunConfig
from tests.house.source import ROOT

PROGRAMS = [
    path for folder in ("benchmarks", "tests/gpu", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md", ROOT / "CONTRIBUTING.md"]
SECTIONS = {
    "model",
    "data",
    "train",
    "optimizer",
    "schedule",
    "evaluation",
    "checkpoint",
    "recovery",
    "monitor",
    "outer",
}
"""Tables of a recipe by which its text is known."""
SETTING = re.compile(rf"--(?:{'|'.join(sorted(SECTIONS))})\.[a-z]")
RECIPES = {"tests/gpu/parts/train.py": "recipes/first.toml", "tests/gpu/parts/quality.py": "recipes/llama-10m.toml"}
"""Program to the recipe over which it writes its flags."""


def recipe_texts() -> Iterator[tuple[str, str]]:
    """Yields where a recipe's text stands, and the text."""
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for page in PAGES:
        for block in re.findall(r"```(?:toml)?\n(\[.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            if is_recipe(block):
                yield page.name, block
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_recipe(node.value):
                yield str(path.relative_to(ROOT)), node.value


def is_recipe(text: str) -> bool:
    try:
        return bool(SECTIONS & tomllib.loads(text).keys())
    except tomllib.TOMLDecodeError:
        return False


def flag_lists() -> Iterator[tuple[str, list[str]]]:
    """Yields where words of a run are written out, and the words: a tuple or list, or text that a shell would part."""
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = written_words(node)
            if words and SETTING.match(words[0]):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", words


def written_words(node: ast.AST) -> list[str]:
    """Returns the words of a literal; none where one of them isn't written out."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and SETTING.match(node.value)
        and " " in node.value
    ):
        return shlex.split(node.value)
    if isinstance(node, (ast.Tuple, ast.List)):
        parts = [part.value if isinstance(part, ast.Starred) else part for part in node.elts]
        nested = [part.elts if isinstance(part, (ast.Tuple, ast.List)) else [part] for part in parts]
        words = [part.value for row in nested for part in row if isinstance(part, ast.Constant)]
        if len(words) == sum(map(len, nested)) and all(isinstance(word, str) for word in words):
            return [str(word) for word in words]
    return []


def test_recipes_that_are_written_out_are_taken() -> None:
    texts = dict(recipe_texts())
    assert {"benchmarks/bench_slow_train.py", "large-runs.md", "recipes/first.toml"} <= texts.keys()
    for text in texts.values():
        RunConfig.from_dict(tomllib.loads(text)).check_all()


def test_flags_that_are_written_out_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lists = list(flag_lists())
    assert len(lists) > 15 and {place.partition(":")[0] for place, _ in lists} >= RECIPES.keys()
    for place, words in lists:
        recipe = [RECIPES[place.partition(":")[0]]] if place.partition(":")[0] in RECIPES else []
        directory = ["--model.name", str(ROOT)] if "--model.fresh" in words else []
        read_config(RunConfig, [*recipe, *words, *directory], "train")
