"""Every axis under recovery: a rank dies, the next ranks stand otherwise, the state is the same to the bit.

Each run loses a rank again and again, and goes on along the curve of one rank under the next of `recovery.layouts`: so
every layout is left once and taken up once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec.layout import Layout
from tests.runs import call, curve, events, words, write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
STEPS = 13
MODELS = {
    # Tied weights, and tokens that five ranks divide; experts that no number of ranks under five does.
    "tied": ("--model", "llama", "--model.layers", "3", "--model.tie", "True", "--data.sequence", "30"),
    "mixtral": (
        *("--model", "mixtral", "--model.layers", "2", "--model.kv-heads", "2", "--model.experts", "5"),
        *("--data.sequence", "24"),
    ),
}
CHAINS = {
    "experts": (
        "mixtral", "float64",
        ("shard=5,ep=5,zero=3,rows=3x2-2x3", "cp=2,tp=2,ep=4,sequence=true", "shard=3,ep=3,zero=1", "pp=2"),
    ),
    "tokens": (
        "tied", "float64",
        ("cp=5,attention=gather", "pp=2,cp=2,microbatches=2", "pp=3,microbatches=2", "tp=2,sequence=true"),
    ),
    "masters": (
        "tied", "bf16",
        ("shard=2,tp=2,zero=2", "shard=3,zero=3", "pp=2,microbatches=2"),
    ),
}  # fmt: skip
BOUNDS = {"float64": 1e-9, "bf16": 2e-2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    write_corpus(root / "corpus.txt")
    return root


def command(root: Path, run: str, model: str, layout: str, devices: int, *more: str) -> list[str]:
    """Returns the command of a run of some model."""
    sizes = ("--model.heads", "4", "--model.width", "32", "--train.batch", "12")
    rest = ("--train.steps", str(STEPS), "--checkpoint.every", "0", "--recovery.snapshot-every", "1")
    return words(root, run, *MODELS[model], *sizes, *rest, *more, layout=layout, devices=devices)


def noted(folder: Path) -> Callable[[], None]:
    """Returns what makes ranks write down each state that they copy, and each that they take up from a copy."""

    def before() -> None:
        from meshwright.checkpoint.tensor_shards import collect_local_shards
        from meshwright.train.memory import RankMemory
        from meshwright.train.state import state_tensors

        take, restore = RankMemory.save_snapshot, RankMemory.restore

        def note(self: RankMemory, kind: str, step: int, program: Any, optimizer: Any) -> None:
            held = collect_local_shards(state_tensors(program, optimizer))
            found = [(part, view.contiguous().numpy().tobytes()) for part, view in held]
            name = f"{kind}-{step}-{self._generation}-{self._rank}"
            (folder / f".{name}").write_bytes(pickle.dumps(found))
            (folder / f".{name}").rename(folder / name)

        def taken(self: RankMemory, step: int, program: Any, optimizer: Any, *rest: Any, **more: Any) -> float:
            note(self, "taken", step, program, optimizer)
            return take(self, step, program, optimizer, *rest, **more)

        def restored(self: RankMemory, program: Any, optimizer: Any, scaler: Any) -> Any:
            values = restore(self, program, optimizer, scaler)
            if self.state is not None:
                note(self, "restored", self.state.step, program, optimizer)
            return values

        RankMemory.save_snapshot, RankMemory.restore = taken, restored  # type: ignore[method-assign]

    return before


def whole(folder: Path, kind: str, step: int, generation: int) -> dict[str, Any]:
    """Puts together what the ranks of a generation wrote down; copies of an element must be equal to the bit."""
    import torch

    tensors: dict[str, Any] = {}
    for path in folder.glob(f"{kind}-{step}-{generation}-*"):
        for part, data in pickle.loads(path.read_bytes()):
            dtype = getattr(torch, part.dtype)
            values = torch.frombuffer(bytearray(data), dtype=dtype).view(part.sizes)
            value, seen = tensors.setdefault(
                part.name, (torch.zeros(part.shape, dtype=dtype), torch.zeros(part.shape, dtype=torch.bool))
            )
            place = tuple(slice(*span) for span in part.box)
            known = seen[place]
            assert torch.equal(value[place][known], values[known]), f"copies of {part.name} differ"
            value[place], seen[place] = values, True
    assert tensors and all(bool(seen.all()) for _, seen in tensors.values())
    return {name: value for name, (value, _) in tensors.items()}


@pytest.mark.extended("test_recovery.py::test_a_lost_device_means_another_layout_and_the_same_curve")
@pytest.mark.parametrize("name", cases(CHAINS))
def test_each_layout_is_left_and_taken_up(name: str, root: Path) -> None:
    import torch

    model, precision, layouts = CHAINS[name]
    folder = root / f"{name}-states"
    folder.mkdir()
    phases = ("backward", "collective", "forward", "optimizer")
    ranks = 1 + len(layouts)
    faults = ";".join(
        f"kill:rank={(ranks - 1 - at) // (1 + at % 2)},step={4 + 3 * at},phase={phase},generation={at}"
        for at, phase in zip(range(len(layouts)), phases)
    )
    options = ("--recovery.layouts", "; ".join((*layouts[1:], "replicate=1")), "--recovery.faults", faults)
    shrink = ("--recovery.on-death", "shrink", "--recovery.back-s", "10000")
    layout = f"{layouts[0]},precision={precision}"
    argv = command(root, name, model, layout, ranks, *options, *shrink)
    status, text = call(argv, root / f"{name}.log", noted(folder))
    assert status == 0, text
    run = root / name
    wanted = [Layout.parse(f"{one},precision={precision}") for one in (*layouts[1:], "replicate=1")]
    assert [row["layout"] for row in events(run, "planned")] == list(map(str, wanted))
    told = events(run, "restored")
    assert len(told) == len(layouts)
    for generation, row in enumerate(told):
        left = whole(folder, "taken", row["step"], generation)
        taken = whole(folder, "restored", row["step"], generation + 1)
        assert left.keys() == taken.keys()
        for key, value in left.items():
            assert torch.equal(value, taken[key]), f"{key} after generation {generation}"
    alone = command(root, f"{name}-alone", model, f"replicate=1,precision={precision}", 1)
    status, text = call(alone, root / f"{name}-alone.log")
    assert status == 0, text
    expected = curve(root / f"{name}-alone")
    found = curve(run)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, pair in expected.items():
        assert found[step] == pytest.approx(pair, rel=BOUNDS[precision]), step
