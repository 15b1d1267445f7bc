"""Compiled layers train along the same curve."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from tests.runs import call, curve, words, write_corpus


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile wants a C++ compiler")
def test_compiled_layers_train_along_the_same_curve(tmp_path: Path) -> None:
    layout, devices = "shard=2,zero=3", 2
    write_corpus(tmp_path / "corpus.txt", 100)
    more = ("--train.steps", "4", "--checkpoint.every", "0", "--model.layers", "1")
    assert call(words(tmp_path, "plain", *more, layout=layout, devices=devices), tmp_path / "log")[0] == 0
    argv = words(tmp_path, "compiled", *more, layout=layout + ",compile=true", devices=devices)
    # The compiler warns of its own deprecated parts.
    status, text = call(argv, tmp_path / "log", before=lambda: warnings.simplefilter("ignore"))
    assert status == 0, text
    plain, compiled = curve(tmp_path / "plain"), curve(tmp_path / "compiled")
    for step in plain:
        assert compiled[step] == pytest.approx(plain[step], rel=1e-4)
