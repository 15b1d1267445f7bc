"""Every file that a command reads, damaged and forged: it ends in an error of ours, soon, and nothing is run or grows.

Each reader is called as a command calls it. What a reader passes over on purpose (a line of a log, a cache that can be
made again) counts as well: the rule is that nothing but a `MeshwrightError` comes out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import resource
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.dcp import BACKEND as DCP
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Origin, _with_checksum
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.notation import read_file
from meshwright.config import read_toml
from meshwright.data.config import DataConfig
from meshwright.data.digests import DIGESTS, digest_sources
from meshwright.data.loader import Loader
from meshwright.data.prepare import prepare
from meshwright.data.sources import list_sources
from meshwright.data.tokenizer import given_tokenizer
from meshwright.data.tokens import TokenSet, render_manifest
from meshwright.errors import MeshwrightError
from meshwright.jobs.migrate.recipe import migrate
from meshwright.jobs.run_contents import read_text
from meshwright.jobs.run_directory import run_config
from meshwright.jobs.trained_model import newest_weights, run_model
from meshwright.launch.hostfile import read_hostfile
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.monitor.report import write_report
from meshwright.planner.run_history import learn, record
from meshwright.resilience.claims import Claim, Claims
from meshwright.schedules.file import build_schedule
from meshwright.schedules.spec import find_schedule
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.outcome import TrainOutcome
from meshwright.train.run_config import RunConfig
from meshwright.transport.key import run_key
from tests.chats import conversations, write_jsonl, write_tokenizer
from tests.fuzz.mutations import changed, mutations

CASES = int(os.environ.get("FUZZ_CASES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
SLOW_S = 40.0
"""Soon, on a machine that does other things beside; what hangs would take for ever."""
LARGE_BYTES = 256 << 20


@pytest.fixture(autouse=True)
def memory() -> None:
    """What a file asks for is refused by the kernel rather than had: this process may grow by some GiB at most."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def attack(path: Path, read: Callable[[], object], label: str = "", cases: int = CASES) -> None:
    """Damages a file again and again, and reads it; then puts it back."""
    whole, draw = path.read_bytes(), random.Random(f"{SEED} {label or path.name}")
    read()
    refused = 0
    for number, data in enumerate(mutations(whole, draw, cases)):
        path.write_bytes(data)
        began = time.monotonic()
        tracemalloc.start()
        try:
            read()
        except MeshwrightError as error:
            refused += 1
            assert len(str(error)) < 20_000
        except BaseException as error:
            Path(f"/tmp/fuzz-{path.name}").write_bytes(data)
            raise AssertionError(f"{path.name}, case {number}, kept as /tmp/fuzz-{path.name}: {error!r}") from error
        finally:
            grown = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.monotonic() - began < SLOW_S and grown < LARGE_BYTES, (number, data[:200])
    path.write_bytes(whole)
    read()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    root = tmp_path_factory.mktemp("text")
    (root / "a.txt").write_text("the cat sat on mats. " * 300)
    return prepare(DataConfig(paths=(str(root / "a.txt"),), tokenizer="chars", split="tail"), root / "set", workers=1)


@pytest.mark.parametrize("name", ["manifest.json", "train.bin", "train.idx", "tokenizer.json", "chunks.crc32"])
def test_prepared_text(text: TokenSet, tmp_path: Path, name: str) -> None:
    shutil.copytree(text.path, tmp_path / "set")

    def read() -> None:
        found = TokenSet.open(tmp_path / "set")
        loader = Loader(found.train, rows=2, sequence=64, seed=1)
        for step in range(1 + loader.epoch_rows // 2):
            loader.batch(step)
        found.tokenizer()

    attack(tmp_path / "set" / name, read)


@pytest.mark.parametrize("packs_whole", [True, False])
def test_answers_of_prepared_text(tmp_path: Path, packs_whole: bool) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat} for chat in conversations(60)])
    config = DataConfig(paths=(path,), tokenizer=write_tokenizer(tmp_path / "tokenizer"), targets="answers")
    made = prepare(config, tmp_path / "set", workers=1)

    def read() -> None:
        found = TokenSet.open(made.path)
        Loader(found.train, rows=2, sequence=64, seed=1, packing="whole" if packs_whole else "stream").batch(0)

    attack(made.path / "train.answers", read)


def test_a_forged_manifest_of_prepared_text_whose_checksum_holds(text: TokenSet, tmp_path: Path) -> None:
    shutil.copytree(text.path, tmp_path / "set")
    path, draw = tmp_path / "set" / "manifest.json", random.Random(SEED)
    for _ in range(2 * CASES):
        forged = changed(json.loads(json.dumps(dict(text.manifest))), draw)
        try:
            path.write_bytes(render_manifest(forged) if isinstance(forged, dict) else b"[]")
        except (ValueError, TypeError):
            continue
        try:
            found = TokenSet.open(tmp_path / "set")
            Loader(found.train, rows=2, sequence=64, seed=1).batch(0)
            assert found.vocab_size and (found.eos_id is None or found.eos_id >= 0) and found.fingerprint
        except MeshwrightError:
            continue


def save(root: Path, backend: str) -> CheckpointStore:
    from meshwright.checkpoint.config import CheckpointConfig

    store = CheckpointStore(root, CheckpointConfig(backend=backend))
    store.save(1, {"weights/a": torch.arange(6.0), "weights/b": torch.ones(2, 3)}, {"tokens": 5})
    return store


@pytest.mark.parametrize("backend", ["image", "dcp"])
def test_checkpoints(tmp_path: Path, backend: str) -> None:
    save(tmp_path / "c", backend)
    folder = tmp_path / "c" / "step-00000001"

    def read() -> None:
        store = CheckpointStore(tmp_path / "c")
        found = store.find()
        if found is not None:
            dict(store.read_full(found, list(found.manifest.tensors)))

    for path in sorted(folder.iterdir()):
        attack(path, read, f"{backend} {path.name}")


@pytest.mark.parametrize("backend", ["image", "dcp"])
def test_forged_checkpoints_whose_checksums_hold(tmp_path: Path, backend: str) -> None:
    """Manifests that were changed and sealed again, and files that were changed and listed as they are."""
    save(tmp_path / "c", backend)
    folder, draw = tmp_path / "c" / "step-00000001", random.Random(SEED)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    body = json.loads(whole[MANIFEST])["body"]
    manifest = Manifest.read(folder)

    def read() -> None:
        store = CheckpointStore(tmp_path / "c")
        try:
            found = store.find()
            if found is not None:
                for _, value in store.read_full(found, list(found.manifest.tensors)):
                    assert value.numel() < 1 << 20
                Layout.from_json(found.manifest.origin.layout.to_json()) if found.manifest.origin.layout else None
        except MeshwrightError:
            pass

    for _ in range(2 * CASES):
        forged = changed(json.loads(json.dumps(body)), draw)
        if isinstance(forged, dict):
            try:
                (folder / MANIFEST).write_bytes(_with_checksum(forged))
            except (ValueError, TypeError):
                continue
            read()
    from meshwright.checkpoint.files import Checksum

    for name in sorted(set(whole) - {MANIFEST}):
        for data in mutations(whole[name], draw, CASES):
            (folder / name).write_bytes(data)
            checksum = Checksum(manifest.files[name].checksum.partition(":")[0])
            checksum.update(data)
            files = dict(manifest.files) | {name: checksum.record}
            (folder / MANIFEST).write_bytes(dataclasses.replace(manifest, files=files).render())
            read()
        (folder / name).write_bytes(whole[name])


def test_pickles_of_every_module_that_is_there_call_nothing(tmp_path: Path) -> None:
    """Random names of what is imported, called by the pickle: only the closed list is made."""
    import sys

    DCP.write(tmp_path, {"a": torch.ones(2)}, None)
    draw = random.Random(SEED)
    mark = tmp_path / "mark"
    names = [(module, name) for module, found in sorted(sys.modules.items()) if found for name in dir(found)[:40]]
    names += [("os", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen"), ("torch", "load")]
    for module, name in draw.sample(names, min(len(names), 500)) + names[-5:]:
        command = f"touch {mark}".encode()
        code = b"c" + f"{module}\n{name}\n".encode() + b"(X" + len(command).to_bytes(4, "little") + command + b"tR."
        (tmp_path / ".metadata").write_bytes(code)
        with pytest.raises(MeshwrightError):
            DCP.describe(tmp_path)
    assert not mark.exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(10**1000) + b"." * 1000)
    with pytest.raises(MeshwrightError):
        DCP.describe(tmp_path)


@pytest.fixture
def run_dir(text: TokenSet, tmp_path: Path) -> Path:
    import tomli_w

    from meshwright.jobs.run_contents import write_contents

    run = tmp_path / "run"
    run.mkdir()
    config = RunConfig.from_dict({"model": {"name": "gpt2", "layers": 1, "width": 32}, "data": {"sequence": 64}})
    (run / "config.toml").write_text(tomli_w.dumps(config.to_dict()))
    plan = Plan(layout=Layout.parse("shard=2"), prediction=Prediction(memory={"parameters": 5}), ranks=2, reason="")
    (run / "plan.json").write_text(plan.dumps())
    write_contents(run, build_meta(config.model, vocab=text.vocab_size, context=64), text)
    row = {"step": 1, "loss": 2.5, "memory": {"peak": 5}, "comm": [], "layout": "shard=2"}
    (run / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (run / "events.jsonl").write_text('{"kind": "evaluated", "rank": 0, "time": 1.0, "loss": 2.0}\n' * 3)
    return run


@pytest.mark.parametrize("name", ["config.toml", "text.json", "model/config.json", "tokenizer/tokenizer.json"])
def test_run_directories(run_dir: Path, name: str) -> None:
    def read() -> None:
        run_config(run_dir)
        read_text(run_dir).tokenizer()
        run_model(run_dir)
        try:
            newest_weights(run_dir)
        except MeshwrightError as error:
            assert "has no checkpoint yet" in str(error) or run_config(run_dir).checkpoint

    attack(run_dir / name, read, cases=CASES // 3)


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "metrics.jsonl", "events.jsonl"])
def test_reports(run_dir: Path, name: str) -> None:
    attack(run_dir / name, lambda: write_report(run_dir, 0.2))


def test_schedules(tmp_path: Path) -> None:
    csv = tmp_path / "schedule.csv"
    csv.write_text(find_schedule("1f1b").build(2, 1, 4).to_csv())
    attack(csv, lambda: build_schedule(f"file:{csv}", 2, 1, 4))


def test_caches_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", {"layout": "shard=2", "flops": 1e9, "priced_s": 1.0, "measured_s": 1.5})
    attack(path, lambda: learn(path, "here", 1e9, "float32"))
    table = tmp_path / "calibration.json"
    made = Calibration(machine={"cpu": "x", "cores": 2}, ranks=2)
    made.write(table)
    attack(table, lambda: Calibration.load(table))


def test_words_of_the_user(tmp_path: Path) -> None:
    recipe, hosts, cluster = tmp_path / "r.toml", tmp_path / "hosts", tmp_path / "c.toml"
    recipe.write_text('[model]\nname = "gpt2"\nlayers = 2\n[train]\nsteps = 5\n[data]\npaths = ["a.txt"]\n')
    hosts.write_text("a slots=8\nb slots=4 # two\n")
    cluster.write_text('[[nodes]]\ncount = 2\nnode = "8xh100"\n')
    attack(recipe, lambda: RunConfig.from_dict(read_toml(recipe)).check_all())
    attack(hosts, lambda: read_hostfile(hosts))
    attack(cluster, lambda: read_file(cluster))


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml", ".sh"])
def test_configurations_of_other_frameworks(suffix: str, tmp_path: Path) -> None:
    theirs = tmp_path / f"theirs{suffix}"
    theirs.write_text(
        {
            ".json": '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}',
            ".yaml": "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: 1}\n",
            ".toml": "[training]\nseq_len = 64\n[parallelism]\ntensor_parallel_degree = 2\n",
            ".sh": 'A=(--lr 1e-3 --bf16)\nB="$A --seed 1"\npython gpt.py ${A[@]} $B --micro-batch-size $((2 * 2))\n',
        }[suffix]
    )
    attack(theirs, lambda: migrate(theirs, 4))


def test_keys_claims_and_digests(tmp_path: Path) -> None:
    run_key(tmp_path)
    attack(tmp_path / "key", lambda: run_key(tmp_path))
    claims = Claims(tmp_path)
    assert claims.try_claim(Claim(generation=0, node=0, session="s", host="127.0.0.1", port=1))
    attack(tmp_path / "generations" / "000000", lambda: Claims(tmp_path).newest())
    claims.newest()
    claims.record_outcome(0, TrainOutcome(step=5, finished=True))

    def ending() -> None:
        later = Claims(tmp_path)
        later.newest()
        later.read_outcome(-1)

    attack(tmp_path / "generations" / "000000.ended", ending)
    (tmp_path / "a.txt").write_text("abc")
    sources = list_sources([str(tmp_path / "a.txt")])
    os.utime(tmp_path / "a.txt", (1, 1))
    digest_sources(sources, tmp_path)
    if (tmp_path / DIGESTS).exists():
        attack(tmp_path / DIGESTS, lambda: digest_sources(sources, tmp_path))


def test_models_and_tokenizers(text: TokenSet, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    (folder / "config.json").write_text(json.dumps(config))
    built = build_meta(ModelConfig(name=str(folder)), weights=False)
    tensors = {name: torch.zeros(item.shape) for name, item in built.module.named_parameters()}
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def read() -> None:
        found = build_meta(ModelConfig(name=str(folder)))
        for name, _ in found.module.named_parameters():
            found.tensor(name)

    for name in ("config.json", "model.safetensors.index.json", "a.safetensors"):
        attack(folder / name, read, cases=CASES // 6)
    shutil.copy(text.path / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        attack(tmp_path / name, lambda: given_tokenizer(str(tmp_path / "tokenizer.json")))


def test_origins(tmp_path: Path) -> None:
    assert Origin.from_json(Origin().to_json()) == Origin()
