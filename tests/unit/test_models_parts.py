"""Structure, calling, sampling, counting, reading and writing, on users' modules and damaged directories."""

import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.models.export import export_hf
from meshwright.models.forward import IGNORED, model_forward, model_output
from meshwright.models.generate import generate_tokens
from meshwright.models.measure import measure_shape
from meshwright.models.structure import read_structure
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.price import price
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelShape

torch.set_num_threads(1)

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + self.mix(self.norm(x))

class Small(nn.Module):
    def __init__(self, vocab, width, layers, loss):
        super().__init__()
        self.loss = loss
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, targets=None):
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        if not self.loss:
            return logits if targets is None else (logits, None)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

def make(vocab, width=16, layers=3, loss=False):
    return Small(vocab, width, layers, loss)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch):
    (tmp_path / "own_model.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return "own_model:make"


def test_anatomy_and_shape_of_a_users_module(own):
    built = build_meta(ModelConfig(name=own, layers=2), vocab=30, context=8)
    structure = built.structure
    assert (structure.embedding, structure.head, structure.final_norm) == ("embed", "head", "norm")
    assert structure.layers == ("blocks.0", "blocks.1")
    assert (structure.token_argument, structure.target_argument) == ("tokens", "targets")
    shape = measure_shape(built)
    block = 16 * 16 + 3 * 16
    assert shape.layer_parameters == (block, block)
    assert shape.parameters == 2 * block + 2 * 30 * 16 + 32 == sum(p.numel() for p in built.module.parameters())
    assert shape.matmul_parameters == 2 * 256 + 30 * 16
    assert shape.train_flops_per_token(8) == 6 * shape.matmul_parameters + 12 * 2 * 8 * 16
    assert ModelShape.from_json(shape.to_json()) == shape


def test_a_mixture_counts_only_active_experts():
    shape = measure_shape(build_meta(ModelConfig(name="mixtral", experts=4, layers=1, width=32, ffn=64), 50, 16))
    assert (shape.experts, shape.active_experts) == (4, 2)
    assert shape.matmul_parameters == 4 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 64 + 50 * 32


@pytest.mark.parametrize(
    ("family", "normed"),
    [
        ("olmo2", 32 + 16),
        ("olmo3", 32 + 16),
        ("qwen3", 0),
        ("llama", 0),
        ("gemma3_text", 0),
        ("gpt2", 0),
        ("olmoe", 48),
    ],
)
def test_norms_over_all_heads_are_told_from_those_of_each(family: str, normed: int) -> None:
    """Of 4 query heads and 2 key heads of 8; only the former meet between ranks of tp, which take longer for them."""
    sizes = {} if family == "gpt2" else {"kv_heads": 2}
    config = ModelConfig(name=family, layers=2, width=32, heads=4, **sizes)
    if family.startswith("gemma") or family == "qwen3":
        config = dataclasses.replace(config, overrides={"head_dim": 8})
    shape = measure_shape(build_meta(config, 50, 16))
    assert {block.normed_width for block in shape.blocks} == {normed}
    job, cluster = PricedJob(shape=shape, sequence=16, rows=8, precision="float32"), Cluster.parse("2xa100-80")
    plain = tuple(dataclasses.replace(block, normed_width=0) for block in shape.blocks)
    without = dataclasses.replace(job, shape=dataclasses.replace(shape, blocks=plain))
    seconds = [price(item, Layout.parse("tp=2"), cluster).parts["tp"] for item in (job, without)]
    assert seconds[0] > seconds[1] if normed else seconds[0] == seconds[1]


def test_settings_that_a_function_does_not_take_are_refused(own):
    with pytest.raises(ConfigError, match=r"model.heads has no effect"):
        build_meta(ModelConfig(name=own, heads=2), 30, 8)


def test_logits_or_loss_of_a_users_module(own):
    tokens = torch.randint(30, (2, 8))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORED
    built = build_meta(ModelConfig(name=own), 30, 8)
    module = materialise(built.module, built.recipe, 1)
    logits = model_forward(module, built.structure, tokens)
    assert torch.equal(model_output(module, built.structure, tokens, targets).logits, logits)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    built = build_meta(ModelConfig(name=own, overrides={"loss": "true"}), 30, 8)
    module = materialise(built.module, built.recipe, 1)
    assert torch.equal(model_output(module, built.structure, tokens, targets).loss, expected)
    with pytest.raises(ConfigError, match="position_ids"):
        model_forward(module, built.structure, tokens, torch.zeros_like(tokens), True)


def test_an_output_without_logits_is_refused():
    class Wrong(nn.Linear):
        def forward(self, x):
            return x.float()

    module = Wrong(2, 2)
    with pytest.raises(ConfigError, match=r"must give logits .* one value a token is "):
        model_forward(module, read_structure(module), torch.zeros(2, 3, dtype=torch.long))


def test_sampling_is_repeatable(own):
    built = build_meta(ModelConfig(name=own), 30, 8)
    module = materialise(built.module, built.recipe, 1)
    first, again, other = (
        generate_tokens(module, built.structure, [1], max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other and len(first) == 12
    assert module.training
    stop = first[3]
    assert stop not in generate_tokens(
        module, built.structure, [1], max_tokens=12, temperature=1.5, seed=1, stop=[stop]
    )
    with pytest.raises(ConfigError, match="no token"):
        generate_tokens(module, built.structure, [])


def test_a_small_model_generates_in_one_thread_with_its_cache_up_to_its_context(monkeypatch):
    """A cached token reads one id; beyond the context, as without a cache, the last ids that fit; alike in tokens."""
    built = build_meta(ModelConfig(name="gpt2", layers=2, width=16, heads=2), 30, 8)
    module = materialise(built.module, built.recipe, 1)
    calls = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((kwargs["input_ids"].shape[1], torch.get_num_threads())), with_kwargs=True
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tokens = generate_tokens(module, built.structure, [1, 2, 3], max_tokens=10, temperature=0)
        assert torch.get_num_threads() == 2
        # a model of the size from which on tokens are worth several threads
        monkeypatch.setattr("meshwright.models.generate.ONE_THREAD_PARAMETERS", 1)
        generate_tokens(module, built.structure, [1, 2, 3], max_tokens=1, temperature=0)
    finally:
        torch.set_num_threads(threads)
    assert [width for width, _ in calls] == [3, 1, 1, 1, 1, 1, 8, 8, 8, 8, 3]
    assert [count for _, count in calls] == [1] * 10 + [2]
    monkeypatch.setattr("meshwright.models.generate._cache_name", lambda _: None)
    assert tokens == generate_tokens(module, built.structure, [1, 2, 3], max_tokens=10, temperature=0)


def test_a_cache_that_is_refused_midway_is_not_used_again(monkeypatch):
    """The tokens of a refused call aren't in it: going on with it would leave them out."""
    built = build_meta(ModelConfig(name="llama", layers=2, width=32, heads=2), 60, 32)
    module = materialise(built.module, built.recipe, 1)
    forward, calls = type(module).forward, []

    def refusing(self, *args, **kwargs):
        calls.append(kwargs["use_cache"])
        if kwargs["use_cache"] and len(calls) == 4:
            raise ValueError("no more")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", functools.wraps(forward)(refusing))
    tokens = generate_tokens(module, built.structure, [1, 2, 3], max_tokens=8, temperature=0)
    assert calls == [True] * 4 + [False] * 5
    monkeypatch.setattr("meshwright.models.generate._cache_name", lambda _: None)
    assert tokens == generate_tokens(module, built.structure, [1, 2, 3], max_tokens=8, temperature=0)
    assert len(set(tokens)) > 2


def test_a_users_module_is_exported_as_safetensors(own, tmp_path):
    built = build_meta(ModelConfig(name=own), 30, 8)
    weights = {name: built.tensor(name) for name, _ in built.module.named_parameters()}
    out = export_hf(built, weights.items(), tmp_path / "out", dtype=torch.bfloat16)
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], value.bfloat16()) for name, value in weights.items())
    assert (out / "meshwright.json").is_file()
    with pytest.raises(CheckpointError, match="is in use"):
        export_hf(built, weights.items(), out)
    weights.pop("head.weight")
    with pytest.raises(CheckpointError, match=r"missing \['head.weight'\]"):
        export_hf(built, weights.items(), tmp_path / "other")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_export_that_is_cut_short_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what it had written nor what a killed one before it left; and the next one succeeds."""
    built = build_meta(ModelConfig(name="llama", layers=1, width=32), 20, 16)
    weights = [(name, built.tensor(name)) for name, _ in built.module.named_parameters()]
    out = tmp_path / "models" / "out"
    left = out.with_name(".out.part")
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"half")
    saved = built.hf_config.save_pretrained

    def cut_short(folder: Path, **more: object) -> None:
        saved(folder, **more)
        assert {path.name for path in left.iterdir()} == {"config.json"}
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(built.hf_config), "save_pretrained", lambda _self, *args, **more: cut_short(*args, **more))
        with pytest.raises(error):
            export_hf(built, weights, out)
    assert not list(out.parent.iterdir())
    assert (export_hf(built, weights, out) / "model.safetensors").is_file()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_export_that_a_scheduler_ends_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM would end the process on the spot; so it gets to clear away what it had written."""
    job = importlib.import_module("meshwright.jobs.export")
    monkeypatch.setattr(job, "newest_weights", lambda *_: (1, []))
    monkeypatch.setattr(job, "run_model", lambda *_: None)
    monkeypatch.setattr(job, "read_text", lambda _: SimpleNamespace(folder=None))
    monkeypatch.setattr(job, "export_hf", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        job.export(tmp_path / "run", tmp_path / "out", trust=True)


@pytest.fixture
def folder(tmp_path: Path):
    built = build_meta(ModelConfig(name="llama", layers=1, width=32), 20, 16)
    weights = [(name, built.tensor(name)) for name, _ in built.module.named_parameters()]
    return export_hf(built, weights, tmp_path / "model")


def test_a_directory_that_does_not_fit_is_refused(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    moved = dict(tensors)
    moved["model.layers.9.foreign"] = moved.pop("model.norm.weight")
    save_file(moved, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing \(model.norm.weight\); 1 foreign \(model.layers.9.foreign\)"):
        build_meta(ModelConfig(name=str(folder)))
    save_file(tensors | {"model.norm.weight": torch.ones(5)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"\(5,\).*\(32,\)"):
        build_meta(ModelConfig(name=str(folder)))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        build_meta(ModelConfig(name=str(folder)))
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        build_meta(ModelConfig(name=str(folder)))


def test_a_directory_keeps_its_sizes_unless_made_fresh(folder):
    with pytest.raises(ConfigError, match=r"model.fresh"):
        build_meta(ModelConfig(name=str(folder), layers=2))
    built = build_meta(ModelConfig(name=str(folder), layers=3, fresh=True))
    assert len(built.structure.layers) == 3 and built.source is None and built.vocab == 20
    with pytest.raises(ConfigError, match="vocabulary of 21"):
        build_meta(ModelConfig(name=str(folder)), vocab=21)


def test_a_fresh_directorys_key_heads_divide_other_heads(tmp_path: Path):
    built = build_meta(ModelConfig(name="llama", layers=1, width=32, heads=8, kv_heads=4), 20, 16)
    folder = export_hf(
        built, [(name, built.tensor(name)) for name, _ in built.module.named_parameters()], tmp_path / "m"
    )
    config = build_meta(ModelConfig(name=str(folder), heads=6, width=48, fresh=True)).hf_config
    assert (config.num_attention_heads, config.num_key_value_heads) == (6, 3)
    assert build_meta(ModelConfig(name=str(folder), layers=2, fresh=True)).hf_config.num_key_value_heads == 4


def test_what_a_directory_says_of_generation_is_exported_with_it(folder, tmp_path: Path):
    said = {"eos_token_id": [3, 7], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said))
    kept = tmp_path / "kept"
    kept.mkdir()
    build_meta(ModelConfig(name=str(folder))).save_config(kept)
    # A run exports from the folder that it keeps of its model.
    built = build_meta(ModelConfig(name=str(kept)), weights=False)
    weights = [(name, torch.zeros(value.shape)) for name, value in built.module.named_parameters()]
    out = export_hf(built, weights, tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text()) == said
    # New weights end texts as their own tokenizer says.
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    build_meta(ModelConfig(name=str(folder), fresh=True)).save_config(fresh)
    assert not (fresh / "generation_config.json").exists()
