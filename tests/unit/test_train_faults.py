"""Every form of a fault that is written anywhere can be read, and each does what its sentence says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import store
from meshwright.errors import ConfigError
from meshwright.train import config as train_config
from meshwright.train import faults as faults_module
from meshwright.train.faults import FLIPPED, FOLDER, KINDS, SAVE_POINTS, Fault, Faults, parse_faults
from meshwright.train.spoiler import _flip

ROOT = Path(__file__).parents[2]
FORM = re.compile(rf"\b(?:{'|'.join(KINDS)}):rank=[-\w=,.;:]*\w")


def written_forms() -> list[str]:
    """Returns every text of faults in docstrings and documents."""
    texts = [inspect.getsource(faults_module), inspect.getsource(train_config)]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    forms = {form for text in texts for form in FORM.findall(text)}
    return sorted(form for form in forms if "=N" not in form)


def test_every_form_that_is_written_down_is_understood() -> None:
    forms = written_forms()
    assert "kill:rank=3,step=20" in forms and any("nan:rank=0,step=30" in form for form in forms)
    for form in forms:
        for fault in parse_faults(form):
            assert Fault.parse(str(fault)) == fault
    for kind in KINDS:
        assert Fault.parse(f"{kind}:rank=1,step=5") == Fault(kind=kind, rank=1, step=5)


@pytest.mark.parametrize("phase", ["", "data", "forward", "forward.0", "backward", "reduce", "record", "snapshot"])
def test_what_spoils_gradients_waits_until_there_are_some(phase: str, tmp_path: Path) -> None:
    there, spoiled = False, []

    def spoil() -> bool:
        if there:
            spoiled.append(step)
        return there

    known = [Fault(kind="nan", rank=1, step=5, phase=phase)]
    faults = Faults(tmp_path, 1, 0, known, spoil=spoil)
    for step in range(1, 9):
        faults.begin_step(step)
        for place in ("data", "forward", "forward.0", "backward", "reduce", "optimizer", "record", "snapshot"):
            there = place in ("reduce", "optimizer")
            faults.reach(place)
    assert spoiled == [6 if phase in ("record", "snapshot") else 5]


def test_a_file_that_says_nothing_is_told_of_once_and_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "a.ask").write_bytes(b"\xff\x00garbage")
    (folder / "b.ask").write_text("melt:rank=0", encoding="utf-8")
    (folder / "c.ask").mkdir()
    refused = []
    faults = Faults(tmp_path, 0, 0)
    faults.refuse = lambda path, why: refused.append(path.name)
    for step in (1, 2, 3):
        faults.begin_step(step)
    assert refused == ["a.ask", "b.ask", "c.ask"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_flip_changes_one_bit_of_one_element(dtype: torch.dtype) -> None:
    import random

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for seed in range(40):
        tensors = [torch.randn(3, 5).to(dtype), torch.randn(4, 6).to(dtype).t()]
        before = [tensor.clone() for tensor in tensors]
        _flip(tensors, Fault(kind="flip", rank=0, bit=seed % 32, seed=seed), random.Random(seed))
        changed = [
            int(old) ^ int(new)
            for was, now in zip(before, tensors)
            for old, new in zip(was.reshape(-1).view(integer), now.reshape(-1).view(integer))
            if int(old) != int(new)
        ]
        assert len(changed) == 1 and (changed[0] % 2 ** (8 * dtype.itemsize)).bit_count() == 1


def test_a_flip_of_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="of=weihgts is unknown"):
        Fault.parse("flip:rank=0,of=weihgts")
    with pytest.raises(ConfigError, match="bit=32"):
        Fault.parse("flip:rank=0,bit=32")
    assert {Fault.parse(f"flip:rank=0,of={what}").of for what in FLIPPED} == set(FLIPPED)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "kill:rank=0,step=4,phase=bakward",
            "phase=bakward is unknown; did you mean 'backward'?; of a layer, backward.3",
        ),
        ("kill:rank=0,step=4,phase=backward.x", "phase=backward.x is unknown; did you mean 'backward'?"),
        ("kill:rank=-1,step=4,phase=checkpoint.renam", "did you mean 'checkpoint.rename'?"),
        ("kill:3", "'3' is unknown; did you mean 'rank=3'?"),
    ],
)
def test_a_fault_that_would_never_happen_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Fault.parse(text)


def test_the_points_of_a_save_are_those_that_its_writer_stamps() -> None:
    stamped = re.findall(r'_stamp\("(\w+)"\)', Path(store.__file__).read_text(encoding="utf-8"))
    assert sorted(stamped) == sorted(SAVE_POINTS)
    for point in (*(f"checkpoint.{name}" for name in SAVE_POINTS), "forward.12", "collective", "send", "snapshot"):
        assert Fault.parse(f"kill:rank=0,phase={point}").phase == point
