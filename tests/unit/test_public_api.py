"""The names that `import meshwright` gives: each is there, says what it is, is typed, and loads what it needs alone."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import meshwright

SMALL = "layers=4,width=256,heads=4,vocab=1000"
FUNCTIONS = [
    name for name in meshwright.__all__ if isinstance(getattr(meshwright, name), types.FunctionType)
]  # those of a class are the library's, which its own tests hold


def run(code: str, folder: Path) -> str:
    """Runs a program in a process of its own, as a user would, and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", meshwright.__all__)
def test_a_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(meshwright, name)
    assert name in dir(meshwright)
    if name not in ("__version__", "Hook"):  # a string, and the type of a function
        assert (value.__doc__ or "").strip()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_arguments_and_result_have_types_and_words(name: str) -> None:
    function = getattr(meshwright, name)
    signature = inspect.signature(function)
    hints = inspect.get_annotations(function)
    assert "return" in hints
    for argument, parameter in signature.parameters.items():
        assert argument in hints, f"{name}({argument}) has no type"
        assert f"{argument}:" in function.__doc__, f"{name}({argument}) has no words"
        assert parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is not parameter.empty


def test_the_table_and_the_names_for_type_checkers_are_the_same() -> None:
    tree = ast.parse(Path(meshwright.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names}
    assert typed == meshwright._MODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = meshwright.trian


def test_the_package_alone_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow', 'tensorboard', 'tyro', 'rich'}"
    code = f"import meshwright, sys; print(sorted({heavy} & sys.modules.keys())); meshwright.RunConfig(); "
    code += "meshwright.model_of_sizes; print('torch' in sys.modules)"
    assert run(code, tmp_path).split("\n") == ["[]", "False", ""]


def test_a_loop_is_measured_by_either_name(tmp_path: Path) -> None:
    """In a process that has loaded nothing else, and with the loss as a loop has it: with its graph."""
    loop = "\n m.step(loss=torch.ones((), requires_grad=True) * 2)\n m.evaluated(torch.ones((), requires_grad=True))\n"
    code = "import warnings; warnings.simplefilter('error')\nimport meshwright\nmeter = meshwright.monitor.meter\n"
    code += f"import torch\nwith meter('first') as m:{loop}with meshwright.meter('second') as m:{loop}"
    run(code, tmp_path)
    for name in ("first", "second"):
        (line,) = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["loss"] == 2.0


def test_every_name_comes_by_a_star_and_a_room_never_hides_a_job(tmp_path: Path) -> None:
    code = (
        "import meshwright.train.run_config, meshwright.calibrate.machine\n"
        "from meshwright import *\nimport meshwright\n"
        "import meshwright.train.session, meshwright.calibrate.host\n"
        "print(train is meshwright.train, meshwright.train.__name__, calibrate.__module__, callable(verify))"
    )
    assert run(code, tmp_path).split() == ["True", "train", "meshwright.jobs.calibrate", "True"]


def test_a_plan_from_sizes() -> None:
    result = meshwright.plan(sizes=SMALL, cluster="8xh100", batch=64, sequence=512, layout="tp=8")
    assert result.layout.world == 8 and result.step_s > 0 and 0 < result.peak_bytes < 80 * 2**30
    assert result.tokens_per_s == pytest.approx(64 * 512 / result.step_s)
    assert "slower" in result.compared["tp=8,precision=bf16"]
    report = json.loads(json.dumps(result.to_json()))
    assert report["plan"] == str(result.layout) and report["reason"] == result.reason
    again = meshwright.plan(meshwright.PlanConfig(sizes=SMALL, batch=64), cluster="8xh100", sequence=512)
    assert again.layout == result.layout


def test_a_model_is_read_once_and_planned_for_several_clusters() -> None:
    model = meshwright.plannable_model(meshwright.ModelConfig(name="gpt2", layers=2, width=64, heads=2), sequence=64)
    for cluster, devices in (("8xh100", 8), (meshwright.Cluster.parse("2xcpu"), 2)):
        assert meshwright.plan(model=model, cluster=cluster, batch=16, sequence=64).layout.world == devices


def test_a_curve_of_devices() -> None:
    result = meshwright.scaling(sizes=SMALL, cluster="8xh100", batch=64, sequence=512, devices="2..8")
    assert [point.devices for point in result.points] == [2, 4, 8]
    assert result.to_json()["knee"] == result.knee


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: meshwright.plan(sizes=SMALL, cluster="8xh100", batch=0), "at least 1"),
        (lambda: meshwright.plan(sizes="layers=4", cluster="8xh100"), "width, heads, vocab missing"),
        (lambda: meshwright.plan(sizes=SMALL, cluster="8xh100", devices="2..8"), "scaling"),
        (lambda: meshwright.plan(sizes=SMALL, cluster="8xh100", fix="tq=2"), "'tq' can't be given"),
        (lambda: meshwright.verify(layout="tp=0"), "tp=0"),
        (lambda: meshwright.verify(steps=0), "steps = 0 must be at least 1"),
        (lambda: meshwright.verify_job(meshwright.RunConfig(), steps=3), "an even number"),
        (lambda: meshwright.train(meshwright.RunConfig(trials=-1)), "trials = -1"),
        (lambda: meshwright.trials(meshwright.RunConfig(layout="tp=2")), "layout = auto"),
        (lambda: meshwright.calibrate(meshwright.CalibrateConfig(practice=-1)), "practice = -1"),
        (lambda: meshwright.export("nowhere", "there"), "not a run directory"),
        (
            lambda: meshwright.train("recipe.toml"),
            "config = 'recipe.toml' is a str; it must be RunConfig",
        ),
        (lambda: meshwright.run_recipe("recipe.toml"), "RunConfig.from_dict(tomllib.load(file))"),
        (lambda: meshwright.trials({}), "config = {} is a dict; it must be RunConfig"),
        (lambda: meshwright.prepare("text"), "config = 'text' is a str; it must be DataConfig"),
        (
            lambda: meshwright.train(meshwright.RunConfig(model="gpt2")),
            "model = 'gpt2' is a str",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_numbers_and_rule(call: Any, words: str) -> None:
    with pytest.raises(meshwright.MeshwrightError) as refused:
        call()
    assert words in str(refused.value)


def test_only_the_broken_rule_of_a_proof_is_named() -> None:
    with pytest.raises(meshwright.ConfigError, match=r"^verify: steps = 0 must be at least 1$"):
        meshwright.verify(steps=0)


@pytest.mark.slow
def test_a_model_is_trained_written_tried_and_goes_on_from_its_prompt(tmp_path: Path) -> None:
    code = """
import dataclasses, pathlib
import meshwright as m

config = m.RunConfig(
    layout="shard=2,zero=1", devices=2, run="run",
    model=m.ModelConfig(name="gpt2", layers=1, width=32, heads=2),
    data=m.DataConfig(limit_bytes=60_000, vocab_size=300, sequence=32, cache="prepared"),
    train=m.TrainConfig(steps=4, batch=8, sample_tokens=0, prove=False),
    schedule=m.ScheduleConfig(warmup=1),
)
lines = []
result = m.train(config, say=lines.append)
assert result.finished and result.step == 4 and result.loss > 0 and result.sample is None, result
assert result.leads and not result.terminated and result.validation_loss > 0 and result.state, result
assert any(line.startswith("text: prepared") for line in lines)
written = m.generate(result.run, "import ", max_tokens=4, temperature=0)
assert written.prompt == "import " and written.text
exported = m.export(result.run, "hf")
assert exported.step == 4 and (exported.to / "config.json").is_file()
folders = {item.name for item in pathlib.Path.cwd().iterdir()}
tried = m.trials(dataclasses.replace(config, layout="auto"), 1, say=lines.append)
assert len(tried) == 1 and tried[0].measured_s > 0 and not tried[0].why, tried
assert lines[-1].startswith("trial 1 of 1: ") and {item.name for item in pathlib.Path.cwd().iterdir()} == folders
assert m.launch_ranks(lambda context, more: context.rank + more, 2, 5, kind="cpu", timeout_s=100) == [5, 6]
print(sorted(result.to_json()))
"""
    printed = run(code, tmp_path)
    for key in ("bits_per_byte", "finished", "gzip_bits_per_byte", "report", "run", "state", "step", "time"):
        assert f"'{key}'" in printed
