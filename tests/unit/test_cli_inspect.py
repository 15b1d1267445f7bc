"""`inspect` says what a model is made of, how it can be split, and what a layout's ranks would hold."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

import pytest

from meshwright import InspectConfig, inspect
from meshwright.cli.inspect_output import abbreviate_names, inspection_lines
from meshwright.cli.main import main
from meshwright.models.analysis.objective import Objective
from meshwright.models.analysis.objective_trial import ForwardTrial, try_forward
from meshwright.models.analysis.table import ShardingAnalysis, analyse_sharding
from meshwright.models.build import BuiltModel
from meshwright.models.config import ModelConfig

LAYOUTS = ("tp=2", "pp=2,shard=2,tp=2,zero=1,microbatches=2")


@functools.cache
def found() -> dict[str, Any]:
    model = ModelConfig(name="gpt2", layers=3, width=32, heads=4, vocab=97, context=16)
    return json.loads(json.dumps(inspect(InspectConfig(model=model, layout=LAYOUTS)).to_json()))


@pytest.mark.slow
def test_anatomy_and_ways_to_split() -> None:
    structure, sharding = found()["structure"], found()["sharding"]
    assert (
        structure["embedding"] == "transformer.wte" and structure["positions"] == 16 and structure["head"] == "lm_head"
    )
    assert structure["ties"] == [["transformer.wte.weight", "lm_head.weight"]]
    (kind,) = structure["layers"]
    assert kind["type"] == "GPT2Block" and len(kind["layers"]) == 3
    assert sum(len(rows["layers"]) for rows in sharding["kinds"]) == 3
    groups = {group["row_linear"]: group for group in sharding["kinds"][0]["groups"]}
    assert groups["attn.c_proj"]["units"] == 4 and groups["mlp.c_proj"]["units"] == 128
    assert groups["attn.c_proj"]["heads"] and not groups["mlp.c_proj"]["heads"]
    assert found()["pipeline"] == {"layers": 3, "stages": 3, "payload": [1], "blocked": {}}


@pytest.mark.slow
def test_a_rows_name_and_its_text_stand_apart() -> None:
    lines = list(inspection_lines(found()))
    rows = [line for line in lines[lines.index("pipeline (pp)") + 1 :] if line.startswith("  ")][:3]
    assert [row[2:16].strip() for row in rows] == ["stages", "no layer", "payload"]
    assert rows[1].endswith("  the stage with the embedding and the one with the head may have none")


@pytest.mark.slow
def test_the_table_is_read_with_the_models_own_loss_which_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a training run reads it: the loss is part of what a split must give, and a forward for it takes seconds."""
    objectives, tried = [], []

    def read_table(built: BuiltModel, degree: int, objective: Objective | None) -> ShardingAnalysis:
        objectives.append(objective)
        return analyse_sharding(built, degree, objective)

    def try_once(built: BuiltModel) -> ForwardTrial:
        tried.append(built)
        return try_forward(built)

    # By import: the package's attributes `inspect` and `train` are its public functions.
    job = importlib.import_module("meshwright.jobs.inspect")
    monkeypatch.setattr(job, "analyse_sharding", read_table)
    for module in (job, importlib.import_module("meshwright.train.model_analysis")):
        monkeypatch.setattr(module, "try_forward", try_once)
    model = ModelConfig(
        name="mixtral", layers=2, width=32, heads=4, vocab=97, context=16, overrides={"output_router_logits": "true"}
    )
    inspect(InspectConfig(model=model, layout=("tp=2", "replicate=2")))
    assert [term.name for term in objectives[0].terms] == ["aux_loss"] and len(tried) == 1


@pytest.mark.slow
def test_bytes_of_layouts() -> None:
    tensor, both = found()["layouts"]
    assert tensor["ranks"] == 2 and both["ranks"] == 8
    assert [row["place"] for row in both["positions"]] == [{"pp": p, "tp": t} for p in range(2) for t in range(2)]
    for layout in (tensor, both):
        assert layout["fullest"]["total"] == max(row["total"] for row in layout["positions"])
        for row in layout["positions"]:
            assert row["total"] == sum(row["memory"].values())
    # Every weight is at some place; those that tp doesn't split are at both.
    assert sum(row["memory"]["parameters"] for row in tensor["positions"]) > 4 * tensor["parameters"]


@pytest.mark.slow
def test_a_row_of_the_config_keeps_its_group_whole() -> None:
    model = ModelConfig(
        name="gpt2", layers=3, width=32, heads=4, vocab=97, context=16, sharding={"*.mlp.c_proj": "whole"}
    )
    result = inspect(InspectConfig(model=model, layout=("tp=2",))).to_json()
    (kind,) = result["sharding"]["kinds"]
    assert [group["row_linear"] for group in kind["groups"]] == ["attn.c_proj"] and "mlp.c_fc" in kind["whole"]
    # Three layers have both matrices of the feed-forward part on both ranks, not half of them: 4 bytes an element.
    more_bytes = 3 * 4 * (2 * 32 * 128 + 128) // 2
    both = [layouts[0]["positions"][0]["memory"]["parameters"] for layouts in (result["layouts"], found()["layouts"])]
    assert both[0] - both[1] == more_bytes


@pytest.mark.slow
def test_the_text_names_what_was_found() -> None:
    text = "\n".join(inspection_lines(found()))
    for part in ("3 x GPT2Block: transformer.h.0-2", "attn.c_attn -> attn.c_proj: 4 heads", "sequence=true works"):
        assert part in text
    for part in ("tied          transformer.wte.weight = lm_head.weight", "pp 0, tp 0", "n = ", "3 at most"):
        assert part in text
    assert all(f"{layout}: bytes of state" in text for layout in LAYOUTS)


def test_the_verb_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tests.plain_model:build", "--json", "--layout", "replicate=2"]
    assert main(["inspect", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == "tests.plain_model:build" and said["layouts"][0]["ranks"] == 2
    whole = said["sharding"]["kinds"][0]["whole"]
    assert whole["mix"] and said["layouts"][0]["fullest"]["memory"]["parameters"] == 4 * said["shape"]["parameters"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["needs a model"]),
        (["gpt22"], ["gpt22", "did you mean 'gpt2'?"]),
        (["gpt2", "--layout", "tp=2,zero=9"], ["zero=9"]),
        (["gpt2", "--layot", "tp=2"], ["--layot"]),
        (["gpt2", "--model.layers", "2", "--layout", "ep=2,shard=2"], ["ep=2", "no mixture of experts"]),
    ],
)
def test_refusals(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *words]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message


def test_numbered_names_are_told_in_runs() -> None:
    assert abbreviate_names(["h.0", "h.1", "h.2", "h.5"]) == "h.0-2, h.5"
    assert abbreviate_names(["a.1.mlp", "a.2.mlp", "b"]) == "a.1-2.mlp, b"
    assert abbreviate_names(["layer1.x", "layer2.x"]) == "layer1.x, layer2.x"
