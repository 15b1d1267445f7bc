"""Initial weights: the family's own distribution, and the same numbers whichever part is asked for."""

import functools
import importlib
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from meshwright.models import deferred, random_init, replay
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise, materialise_tensor, recipe_of, retie
from meshwright.models.recorder import SILENT_ON_META, record
from tests.house.source import ROOT

torch.set_num_threads(1)


class Mixed(nn.Module):
    """Every way of initialising that a user may think of."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(700, 96, padding_idx=3)
        self.linear = nn.Linear(96, 200)
        self.norm = nn.LayerNorm(96)
        self.conv = nn.Conv1d(8, 16, 3)
        self.scaled = nn.Parameter(torch.randn(96, 50) * 0.02 + 1.0)
        self.trunc = nn.Parameter(torch.empty(300, 70))
        nn.init.trunc_normal_(self.trunc, std=0.5, a=-1.0, b=1.0)
        self.square = nn.Parameter(torch.empty(20, 20))
        nn.init.orthogonal_(self.square)
        self.fused = nn.Parameter(torch.empty(120, 60))
        with torch.no_grad():
            self.fused[:60].normal_(std=2.0)
            self.fused[60:].zero_()
        self.head = nn.Linear(96, 700, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5).float() ** 2, persistent=False)
        self.register_buffer("constant", torch.tensor([1.5, 2.5]))
        self.plain = torch.tensor([4.0])


@pytest.fixture(scope="module")
def mixed():
    with record(0) as recording:
        module = Mixed()
    return module, recipe_of(module, recording)


def test_nothing_is_real_before_it_is_asked_for(mixed):
    module, recipe = mixed
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers(), module.plain))
    assert sorted(name for name, ref in recipe.refs.items() if not recipe.replay.by_runs(ref)) == ["square", "table"]
    assert recipe.ties == (("embed.weight", "head.weight"),)


def test_what_is_imported_while_recording_is_recorded_the_next_time_too(tmp_path, monkeypatch):
    """Libraries import their initialisers late; the second model of a process must be the first one's equal."""
    (tmp_path / "late_initialiser.py").write_text("from torch.nn.init import orthogonal_\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_initialiser", raising=False)
    made = []
    for _ in range(2):
        with record(0) as recording:
            module = nn.Linear(6, 6, bias=False)
            importlib.import_module("late_initialiser").orthogonal_(module.weight)
        made.append(materialise_tensor(recipe_of(module, recording), "weight", seed=1))
    assert torch.equal(made[0], made[1])
    assert torch.allclose(made[1] @ made[1].T, torch.eye(6), atol=1e-6)
    monkeypatch.delitem(sys.modules, "late_initialiser")


@pytest.mark.parametrize("held", ["a partial", "a list", "a closure", "another name"])
def test_an_initialiser_is_recorded_however_a_module_holds_it(held, monkeypatch):
    initialise = {
        "a partial": functools.partial(nn.init.orthogonal_, gain=2.0),
        "a list": [nn.init.orthogonal_][0],
        "a closure": lambda weight, start=nn.init.orthogonal_: start(weight),
        "another name": nn.init.orthogonal_,
    }[held]
    monkeypatch.setattr(sys.modules[__name__], "start_square", nn.init.orthogonal_, raising=False)
    with record(0) as recording:
        module = nn.Linear(8, 8, bias=False)
        (start_square if held == "another name" else initialise)(module.weight)  # noqa: F821 - set above
    weight = materialise(module, recipe_of(module, recording), 0).weight
    gain = 4.0 if held == "a partial" else 1.0
    assert torch.allclose(weight @ weight.T, gain * torch.eye(8), atol=1e-5)


def test_initialisers_are_torchs_own_again_after_a_recording_that_failed():
    functions = [getattr(nn.init, name) for name in SILENT_ON_META]
    before = [(item.__code__, item.__defaults__, item.__kwdefaults__) for item in functions]
    with pytest.raises(ValueError, match="of the model"), record(0):
        assert all(item.__code__ is not code for item, (code, *_) in zip(functions, before))
        raise ValueError("of the model")
    assert [(item.__code__, item.__defaults__, item.__kwdefaults__) for item in functions] == before
    assert nn.init.trunc_normal_(torch.empty(9), std=0.5, a=-0.1, b=0.1).abs().max() <= 0.1


def test_values_do_not_depend_on_the_number_of_threads():
    with record(0) as recording:
        module = nn.Linear(192, 64, bias=False)
        nn.init.orthogonal_(module.weight)
    recipe = recipe_of(module, recording)
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made.append(materialise_tensor(recipe, "weight", seed=1))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert torch.equal(made[0], made[1])


def test_any_box_is_a_cut_of_the_whole(mixed, monkeypatch):
    module, recipe = mixed
    monkeypatch.setattr(deferred, "CHUNK", 1000)
    for name, parameter in module.named_parameters():
        whole = materialise_tensor(recipe, name, 7)
        halves = [((0, n // 2), (n // 3, n), (n, n)) for n in parameter.shape]
        for box in itertools.product(*halves):
            part = materialise_tensor(recipe, name, 7, box=box)
            assert torch.equal(part, whole[tuple(slice(*edge) for edge in box)]), (name, box)


def test_the_seed_and_the_name_decide(mixed):
    _, recipe = mixed
    first = materialise_tensor(recipe, "linear.weight", 1)
    assert torch.equal(first, materialise_tensor(recipe, "linear.weight", 1))
    assert not torch.equal(first, materialise_tensor(recipe, "linear.weight", 2))
    wide = materialise_tensor(recipe, "linear.weight", 1, dtype=torch.float64)
    assert wide.dtype == torch.float64 and torch.equal(wide.float(), first)


def test_values_of_a_users_module(mixed):
    with record(0) as recording:
        module = Mixed()
    module = materialise(module, recipe_of(module, recording), seed=5)
    assert module.head.weight is module.embed.weight
    assert module.embed.weight[3].abs().max() == 0 and abs(module.embed.weight[4:].std() - 1) < 0.02
    bound = 96**-0.5
    assert module.linear.weight.abs().max() <= bound and abs(module.linear.weight.std() - bound / 3**0.5) < 0.002
    assert module.norm.weight.eq(1).all() and module.norm.bias.eq(0).all()
    assert abs(module.scaled.mean() - 1) < 0.002 and abs(module.scaled.std() - 0.02) < 0.001
    assert module.trunc.abs().max() <= 1 and abs(module.trunc.std() - 0.5 * 0.8796) < 0.01
    assert torch.allclose(module.square @ module.square.T, torch.eye(20), atol=1e-5)
    assert abs(module.fused[:60].std() - 2) < 0.1 and module.fused[60:].eq(0).all()
    assert module.table.tolist() == [0, 1, 4, 9, 16]
    assert module.constant.tolist() == [1.5, 2.5] and module.plain.tolist() == [4.0]


class WrittenElsewhere(nn.Module):
    """Weights that an operator writes which isn't called on them: ``out=``, and one call for a list of tensors."""

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.arange(6.0))
        self.doubled = nn.Parameter(torch.empty(6))
        self.resized = torch.empty(0)
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((2, 2), 3.0))
        with torch.no_grad():
            torch.mul(self.base, 2.0, out=self.doubled)
            torch.add(self.doubled, 1.0, out=self.resized)
            torch._foreach_mul_([self.first, self.second], 5.0)
            torch._foreach_add_([self.first, self.second], [self.first, torch.eye(2)])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_an_operator_writes_is_recorded_wherever_it_writes_it():
    with record(0) as recording:
        module = WrittenElsewhere()
    module = materialise(module, recipe_of(module, recording), seed=0)
    assert module.doubled.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert module.resized.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert module.first.tolist() == [10.0] * 4 and module.second.tolist() == [[16.0, 15.0], [15.0, 16.0]]


def test_blocks_of_one_weight_differ():
    with record(0) as recording:
        module = nn.Linear(1024, 256)
    recipe = recipe_of(module, recording)
    blocks = materialise_tensor(recipe, "weight", 1).view(4, -1)
    assert len({float(block.sum()) for block in blocks}) == 4
    assert abs(float(torch.corrcoef(blocks)[0, 1])) < 0.02


def test_threads_share_the_draws_of_a_large_weight(monkeypatch):
    """Also of a part whose ends lie inside of blocks; each block is drawn once."""
    with record(0) as recording:
        module = nn.Linear(1024, 1024)
    recipe = recipe_of(module, recording)
    expected, drawn = materialise_tensor(recipe, "weight", 1)[3:1021], {}

    def noted(*args):
        drawn.setdefault(args[-1][-1], set()).add(threading.get_ident())
        return random_init.draw(*args)

    monkeypatch.setattr(replay, "draw", noted)
    recipe.replay._blocks.clear()
    torch.set_num_threads(3)
    try:
        found = materialise_tensor(recipe, "weight", 1, box=((3, 1021), (0, 1024)))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(found, expected)
    assert sorted(drawn) == list(range(16)) and all(len(threads) == 1 for threads in drawn.values())
    assert threading.get_ident() not in set().union(*drawn.values())


def test_retie_after_to_empty(mixed):
    with record(0) as recording:
        module = Mixed()
    recipe = recipe_of(module, recording)
    module.to_empty(device="cpu")
    assert module.head.weight is not module.embed.weight
    retie(module, recipe.ties)
    assert module.head.weight is module.embed.weight


def test_a_module_with_real_values_keeps_them():
    real = nn.Linear(3, 2)
    expected = real.weight.detach().clone()
    with record(0) as recording:
        pass
    recipe = recipe_of(real, recording)
    assert real.weight.is_meta
    assert torch.equal(materialise_tensor(recipe, "weight", 1, box=((1, 2), (0, 3))), expected[1:2])


FAMILIES = ["gpt2", "llama", "qwen3", "mixtral", "gemma3_text", "bloom", "falcon", "mamba"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_distribution_is_the_familys_own(name):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    built = build_meta(ModelConfig(name=name, layers=2, width=64), vocab=200, context=64)
    reference = transformers.AutoModelForCausalLM.from_config(built.hf_config, dtype=torch.float32)
    module = materialise(built.module, built.recipe, seed=3)
    expected = dict(reference.named_parameters())
    for key, parameter in module.named_parameters():
        other = expected[key]
        if other.numel() < 2 or other.std() == 0:
            assert torch.equal(parameter, other), key
            continue
        margin = 6 * other.std() / other.numel() ** 0.5
        assert abs(parameter.mean() - other.mean()) < margin, key
        assert abs(parameter.std() - other.std()) < margin, key
    buffers = dict(reference.named_buffers())
    for key, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


IMPORTED_MEANWHILE = """
import contextlib, sys
from meshwright.models import build
from meshwright.models.config import ModelConfig

@contextlib.contextmanager
def recorded(seed, record=build.record):
    before = set(sys.modules)
    with record(seed) as recording:
        yield recording
    print("recorded", *sorted(set(sys.modules) - before))

build.record = recorded
build.build_meta(ModelConfig(name=sys.argv[1], layers=2, width=32, heads=2), 64, 16)
"""


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_recording_holds_nothing_of_an_import(family: str) -> None:
    """In a process of its own, whose first model this is: an import's operations would move all random numbers."""
    words = [sys.executable, "-c", IMPORTED_MEANWHILE, family]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["recorded"]


def test_normal_numbers_are_recorded_with_their_mean_and_spread_and_what_torch_refuses_is_refused():
    with record(0) as recording:
        module = nn.Module()
        for name, options in (("named", {"mean": 3.0, "std": 0.5}), ("plain", {}), ("still", {"std": 0.0})):
            weight = nn.Parameter(torch.empty(300, 40))
            with torch.no_grad():
                assert weight.normal_(**options) is weight
            setattr(module, name, weight)
        module.placed = nn.Parameter(torch.empty(300, 40))
        nn.init.normal_(module.placed[:, :20], -2.0, 0.1)
        nn.init.zeros_(module.placed[:, 20:])
    made = materialise(module, recipe_of(module, recording), 0)
    for name, mean, std in (("named", 3.0, 0.5), ("plain", 0.0, 1.0), ("still", 0.0, 0.0)):
        weight = getattr(made, name)
        assert weight.mean().item() == pytest.approx(mean, abs=0.05) and weight.std().item() == pytest.approx(std, 0.05)
    assert made.placed[:, :20].mean().item() == pytest.approx(-2.0, abs=0.01) and not made.placed[:, 20:].any()
    for options in ({"std": -1.0}, {"mean": 0.0, "std": -1.0}):
        with pytest.raises(RuntimeError, match="std"), record(0), torch.no_grad():
            torch.empty(4).normal_(**options)
