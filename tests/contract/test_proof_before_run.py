"""Before a run of several ranks trains, its layout is proven on a small clone; where that fails nothing trains."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.jobs import train_proof
from meshwright.parallel.axis_group import AxisGroup
from meshwright.proof import before_run
from meshwright.proof.before_run import few_ranks
from meshwright.proof.case import Case
from meshwright.proof.plain_islands import OuterRecipe
from meshwright.spec.layout import Layout
from meshwright.train.config import OuterConfig
from meshwright.train.run_config import RunConfig
from tests.contract import test_pipeline_models as models
from tests.runs import call, events, rows, words, write_corpus

TINY = (
    "--train.prove",
    "--train.prove-s",
    "200",
    "--train.steps",
    "4",
    "--model.heads",
    "4",
    "--checkpoint.every",
    "0",
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


def proof(root: Path, run: str) -> dict:
    return json.loads((root / run / "proof.json").read_text())


def halve() -> None:
    """Plants a bug: gradients are averaged over the copies once more, which every rank does alike."""
    reduce = AxisGroup.all_reduce

    def halved(self: AxisGroup, tensor: torch.Tensor, of: str = "") -> Any:
        if self.axis == "replicate":
            tensor.div_(self.size)
        return reduce(self, tensor, of)

    AxisGroup.all_reduce = halved  # type: ignore[method-assign]


def test_a_layout_that_equals_one_device_is_proven_and_trains(root: Path) -> None:
    status, text = call(words(root, "good", *TINY, layout="shard=2,zero=2", devices=2), root / "log")
    assert status == 0, text
    assert "proved: shard=2,zero=2 equals one device, gradient off by at most" in text
    found = proof(root, "good")
    assert found["passed"] and found["layout"] == found["proven"] == "shard=2,zero=2"
    assert found["verdict"]["grad_error"] < 1e-9
    kinds = [row["kind"] for row in map(json.loads, (root / "good" / "events.jsonl").read_text().splitlines())]
    assert kinds[0] == "proved" and "run_finished" in kinds


def proved_islands(monkeypatch: pytest.MonkeyPatch, outer: OuterConfig) -> tuple[before_run.Proof, Case]:
    """The proof of two islands that join so, and what was compared."""
    cases: list[Case] = []

    def prove_here(stand_in: Any, documents: bool, limit_s: float, folder: str) -> Any:
        def noted(case: Case, _layouts: Any) -> list[Any]:
            cases.append(case)
            return [SimpleNamespace(outcome="passed", refused="", crashed="", to_json=lambda: {"grad_error": 0.0})]

        monkeypatch.setattr(before_run, "verify", noted)
        return before_run._prove_in_process(cast(Any, None), stand_in, documents, limit_s, folder)

    monkeypatch.setattr(before_run, "_prove_in_child", prove_here)
    # A child sets this to a folder that is then removed.
    monkeypatch.setattr(tempfile, "tempdir", None)
    built, layout = models.case("llama").build(), Layout.parse("islands=2")
    sizes = {"vocab": models.VOCAB, "tokens": models.SEQUENCE, "documents": False, "limit_s": 20.0}
    return before_run.prove_ahead(built, layout, **cast(Any, sizes), outer=outer), cases[0]


def test_the_outer_step_of_a_run_is_proven_over_several_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    found, case = proved_islands(monkeypatch, OuterConfig(every=1, lr=0.3, momentum=0.5, nesterov=False))
    assert case.outer == OuterRecipe(every=1, lr=0.3, momentum=0.5, nesterov=False) and len(case.batches) == 2
    assert found.passed and not [text for text in found.instead if "join" in text or "rounds" in text]
    gossip = OuterConfig(kind="local_sgd", topology="ring", compress="int8")
    found, case = proved_islands(monkeypatch, gossip)
    assert (case.outer.every, case.outer.lr, case.outer.momentum, len(case.batches)) == (2, 1.0, 0.0, 4)
    differences = {"rounds of 2 of 30 steps", "joins by all_reduce, not ring", "no rounding to int8 between islands"}
    assert differences <= set(found.instead)


def test_a_resumed_run_is_proven_again_when_its_layout_or_model_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def counted(_built: Any, layout: Layout, *, limit_s: float, **_rest: Any) -> before_run.Proof:
        asked.append((str(layout), limit_s))
        return before_run.Proof(outcome="refused", layout=str(layout), why="none here")

    def begin(layout: str, model: str, nodes: bool = False) -> None:
        plan = SimpleNamespace(layout=Layout.parse(layout))
        config = RunConfig()
        built = SimpleNamespace(module=torch.nn.Linear(2, 2), config=config.model)
        job = SimpleNamespace(
            plan=plan, config=config, fingerprint=model, model=built, run_dir=tmp_path, outer=config.outer
        )
        text = SimpleNamespace(vocab_size=9, train=SimpleNamespace(ends=[4]))
        assert config.train.prove, "it is made unless told otherwise"
        train_proof.prove_before(cast(Any, job), cast(Any, text), forks=True, nodes=nodes)

    monkeypatch.setattr(before_run, "prove_ahead", counted)
    begin("tp=1", "m")
    assert asked == [] and not (tmp_path / "proof.json").exists(), "one device has nothing to prove"
    begin("tp=2", "m")
    begin("tp=2", "m")
    assert asked == [("tp=2", 20.0)]
    begin("tp=2", "n")
    begin("shard=2", "n", nodes=True)
    begin("shard=2", "n")
    assert asked[1:] == [("tp=2", 20.0), ("shard=2,zero=3", 20.0)]
    assert [row["layout"] for row in rows(tmp_path, "events.jsonl")] == ["tp=2", "tp=2", "shard=2,zero=3"]


def test_a_proof_is_known_by_what_was_proven(tmp_path: Path) -> None:
    path, subject = tmp_path / "proof.json", {"layout": "tp=2", "model": "m"}
    for text in ("", "[]", "{}", '{"subject": 3}'):
        path.write_text(text)
        assert not train_proof.has_proof(path, subject, 20.0)
    for outcome, known in {"passed": True, "refused": True, "wrong": False, "crashed": False}.items():
        path.write_text(json.dumps({"subject": subject, "outcome": outcome, "limit_s": 20.0}))
        assert train_proof.has_proof(path, subject, 20.0) is known
        assert not train_proof.has_proof(path, subject | {"model": "n"}, 20.0)
    path.write_text(json.dumps({"subject": subject, "outcome": "unfinished", "limit_s": 20.0}))
    assert train_proof.has_proof(path, subject, 20.0) and not train_proof.has_proof(path, subject, 21.0)


def test_a_models_code_is_part_of_what_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edited_model.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("edited_model").Net(2, 2)
    before = train_proof.code_hash(module)
    assert train_proof.code_hash(module) == before
    (tmp_path / "edited_model.py").write_text("# another function now\n")
    assert train_proof.code_hash(module) != before


def test_files_that_a_models_function_uses_are_part_of_what_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of torch's whose forward and loss are written elsewhere: no class of the user's names these files."""
    made = "from torch import nn\nfrom own_parts.sums import scaled\n\ndef make():\n    return nn.Linear(2, 2)\n"
    files = {"own_parts/__init__.py": "", "own_parts/models.py": made, "own_parts/sums.py": "scaled = 1\n"}
    (tmp_path / "own_parts").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_parts.models").make()
    found = {train_proof.code_hash(module, "own_parts.models:make")}
    assert found == {train_proof.code_hash(module, "own_parts.models:make")}
    for name in files:
        (tmp_path / name).write_text("# otherwise\n")
        found.add(train_proof.code_hash(module, "own_parts.models:make"))
    assert len(found) == 1 + len(files)
    # What is installed beside an installed package is none of its own.
    installed = tmp_path / "site-packages"
    for name in ("own_kit", "other_kit"):
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(installed)
    for name in ("own_kit", "other_kit"):
        importlib.import_module(name)
    before = train_proof.code_hash(module, "own_kit:make")
    (installed / "other_kit/__init__.py").write_text("x = 2\n")
    assert train_proof.code_hash(module, "own_kit:make") == before
    (installed / "own_kit/__init__.py").write_text("x = 2\n")
    assert train_proof.code_hash(module, "own_kit:make") != before
    # Of a model by its type the classes' files count alone.
    assert train_proof.code_hash(module, "llama") == train_proof.code_hash(module)


def test_what_goes_wrong_in_the_proof_itself_keeps_no_run_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise ValueError("no such clone")

    monkeypatch.setattr(before_run, "_small_stand_in", broken)
    layout = Layout.parse("replicate=2")
    proof = before_run.prove_ahead(cast(Any, None), layout, vocab=9, tokens=8, documents=False, limit_s=20.0)
    assert not proof.failed and str(proof) == "not proved: replicate=2: ValueError: no such clone"


def test_a_planted_bug_is_refused_before_a_rank_trains(root: Path) -> None:
    argv = words(root, "bad", *TINY, layout="replicate=2", devices=2)
    status, text = call(argv, root / "log", before=halve)
    assert status == 2, text
    assert "layout replicate=2 failed the proof before training" in text and "--train.no-prove" in text
    assert proof(root, "bad")["outcome"] == "wrong"
    assert [row["outcome"] for row in events(root / "bad", "not_proved")] == ["wrong"]
    assert not events(root / "bad", "rank_started") and not events(root / "bad", "run_started")
    # The switch turns it off, for the same directory too.
    status, text = call([*argv, "--train.no-prove"], root / "log", before=halve)
    assert status == 0 and "proved" not in text, text
    assert events(root / "bad", "run_started")


def test_one_rank_needs_no_proof(root: Path) -> None:
    status, text = call(words(root, "one", *TINY), root / "log")
    assert status == 0 and "proved" not in text, text
    assert not (root / "one" / "proof.json").exists()


def test_a_proof_that_takes_too_long_is_ended_and_the_run_trains(root: Path) -> None:
    argv = words(root, "late", *TINY, "--train.prove-s", "0.01", layout="replicate=2", devices=2)
    status, text = call(argv, root / "log")
    assert status == 0, text
    assert "not proved: replicate=2: it wasn't finished within 0.01 s (train.prove_s)" in text
    assert proof(root, "late")["outcome"] == "unfinished"
    assert events(root / "late", "run_finished")


@pytest.mark.parametrize(
    ("text", "few"),
    [
        ("replicate=2", "replicate=2"),
        ("tp=8,shard=8,pp=4,microbatches=32", "shard=2,tp=2,zero=3,microbatches=2"),
        ("replicate=64,microbatches=8,compile=true", "replicate=4,microbatches=2"),
        ("tp=7", "tp=2"),
        ("shard=8,ep=8,zero=1,offload=optimizer,precision=bf16", "shard=4,ep=4,zero=1"),
        ("replicate=2,rows=3-1", "replicate=2,rows=3-1"),
        ("replicate=16,rows=5x8-3x8", "replicate=4"),
        ("pp=4,microbatches=64,schedule=dualpipev,recompute=full:7", "pp=4,microbatches=8,schedule=dualpipev"),
    ],
)
def test_many_ranks_are_proven_over_few(text: str, few: str) -> None:
    found = few_ranks(Layout.parse(text), 4, None)
    assert found.precision == "float64" and found.world <= 4
    wanted = Layout.parse(few + ",precision=float64")
    assert found.degrees == wanted.degrees and found.rows == wanted.rows, str(found)
    assert (found.microbatches, found.schedule) == (wanted.microbatches, wanted.schedule), str(found)
