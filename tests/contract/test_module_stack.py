"""A rank's modules are wrapped in the declared order under every kind of layout, and the command shows it."""

from __future__ import annotations

import json

import pytest
import torch

from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.jobs.module_stack import module_stacks
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.spec.layout import Layout

ORDER = [layer.name.lower() for layer in sorted(ForwardLayer, reverse=True)]


def model(name: str = "gpt2") -> BuiltModel:
    dropout = 0.1 if name == "gpt2" else 0.0
    return build_meta(ModelConfig(name=name, layers=2, width=32, heads=4, dropout=dropout), vocab=61, context=32)


def wrapper_layers(lines: tuple[str, ...]) -> list[str]:
    return [line.split()[1].rstrip(":") for line in lines if line.startswith("wrapper")]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
@pytest.mark.parametrize(
    ("layout", "name", "outermost_first"),
    [
        ("tp=2,recompute=full", "llama", ["progress", "recompute"]),
        ("tp=2,recompute=selective,precision=float64", "gpt2", ["progress", "recompute", "dropout", "float64"]),
        ("cp=2,attention=gather,recompute=full", "gpt2", ["progress", "recompute", "dropout", "context"]),
        ("shard=2,zero=3,compile=true", "llama", ["progress", "data", "compile"]),
    ],
)
def test_a_layer_is_wrapped_in_the_declared_order(layout: str, name: str, outermost_first: list[str]) -> None:
    built = model(name)
    (layer, *_) = module_stacks(built, Layout.parse(layout), built.structure.layers[0])
    found = wrapper_layers(layer.lines)
    assert sorted(found) == sorted(outermost_first)
    assert found == sorted(found, key=ORDER.index), "outermost first, as declared"


def test_a_stage_shows_stubs_of_the_layers_that_others_compute() -> None:
    built = model()
    second = built.structure.layers[1]
    stacks = module_stacks(built, Layout.parse("pp=2,microbatches=2"), "", rank=0)
    (stub,) = [stack for stack in stacks if stack.module == second]
    assert "wrapper     stage: a stub: another stage computes it" in stub.lines


def test_an_unknown_module_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no module 'transformer\.h\.00'.*transformer\.h\.0"):
        module_stacks(model(), Layout.parse("tp=2"), "transformer.h.00")
    with pytest.raises(ConfigError, match=r"'1'; did you mean 'transformer\.h\.1'"):
        module_stacks(model(), Layout.parse("tp=2"), "1")
    with pytest.raises(ConfigError, match=r"no module 'zzz'; its outermost modules are transformer, lm_head$"):
        module_stacks(model(), Layout.parse("tp=2"), "zzz")


def test_the_command_shows_a_layer_under_each_layout(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.layers", "2", "--model.width", "32", "--model.heads", "4", "--model.vocab", "61"]
    words = ["inspect", "llama", *sizes, "--stack", "model.layers.0", "--layout", "tp=2,sequence=true", "cp=2"]
    assert main([*words]) == 0
    told = capfd.readouterr().err
    assert "rank 0 of tp=2,sequence=true, outermost first" in told and "rank 0 of cp=2" in told
    assert "model.layers.0.self_attn (LlamaAttention)" in told
    assert "hidden state: all-gather of tokens forward, reduce-scatter backward" in told
    assert main([*words, "--json"]) == 0
    stacks = json.loads(capfd.readouterr().out)["stacks"]
    assert [stack["layout"] for stack in stacks] == ["tp=2,sequence=true", "cp=2"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--stack", "model.layers.0"], "name one, as --layout tp=2"),
        (["--rank", "1", "--layout", "tp=2"], "no effect without stack"),
        (["--stack", "model.layers.0", "--rank", "2", "--layout", "tp=2"], "has the ranks 0 to 1"),
    ],
)
def test_what_shows_nothing_is_refused(words: list[str], rule: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "llama", "--model.layers", "2", "--model.width", "32", *words]) == 2
    assert rule in capfd.readouterr().err


def test_nothing_of_the_pretended_rank_stays_in_this_process() -> None:
    """DTensor caches the mesh of a result, with the rank that it was made for: a rank forked later would use it."""
    computed_here = torch._C._get_DTensor_sharding_propagator_cache_stats()
    for layout in ("pp=2,microbatches=2", "tp=2", "shard=2,zero=2", "shard=2,zero=3"):
        module_stacks(model("llama"), Layout.parse(layout), "")
    assert torch._C._get_DTensor_sharding_propagator_cache_stats() == computed_here
    assert not torch.distributed.is_initialized()
