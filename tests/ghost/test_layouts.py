"""The CUDA path of every kind of layout, run once: autograd threads, streams, NCCL groups, FSDP2, Inductor.

What is computed means nothing, since kernels don't run. What is held: the run ends well, on GPUs, and the ranks of each
group ask NCCL for the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.proof import one_device
from tests.ghost.runs import GhostRun, command, has_ghost, train
from tests.runs import events, rows

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]

LAYOUTS: tuple[tuple[str, int, str], ...] = (
    ("llama", 1, "replicate=1"),
    ("llama", 1, "precision=bf16"),
    ("llama", 1, "precision=fp16"),
    ("llama", 1, "precision=float64"),
    ("llama", 1, "precision=fp8"),
    ("llama", 1, "precision=tf32,compile=true"),
    ("llama", 2, "tp=2,sequence=true,precision=fp8,recompute=selective"),
    ("llama", 2, "tp=2,sequence=true,tp_overlap=2,precision=bf16,compile=true"),
    ("gpt2", 2, "tp=2,tp_overlap=2,precision=bf16,recompute=full"),
    ("llama", 1, "microbatches=4"),
    ("llama", 1, "recompute=full"),
    ("llama", 1, "recompute=selective,precision=bf16"),
    ("llama", 1, "offload=optimizer"),
    ("llama", 1, "offload=parameters,microbatches=2"),
    ("llama", 1, "loss_chunk=100,precision=bf16"),
    ("llama", 2, "replicate=2"),
    ("llama", 2, "replicate=2,precision=bf16,microbatches=2"),
    ("llama", 2, "shard=2,zero=1"),
    ("llama", 2, "shard=2,zero=2,precision=bf16"),
    ("llama", 2, "shard=2,zero=3,recompute=full"),
    ("llama", 2, "shard=2,zero=3,offload=parameters"),
    ("llama", 4, "replicate=2,shard=2,zero=3,microbatches=2"),
    ("llama", 2, "tp=2"),
    ("llama", 2, "tp=2,sequence=true,precision=bf16"),
    ("llama", 2, "tp=2,recompute=full,compile=true"),
    ("llama", 2, "tp=2,sequence=true,recompute=selective,compile=true,precision=fp8"),
    ("mixtral", 2, "shard=2,ep=2,recompute=selective,compile=true,precision=bf16"),
    ("llama", 2, "tp=2,loss_chunk=100"),
    ("llama", 2, "cp=2"),
    ("llama", 2, "cp=2,attention=heads"),
    ("llama", 2, "cp=2,attention=heads,recompute=selective,compile=true,precision=bf16"),
    ("llama", 2, "pp=2,microbatches=4,schedule=gpipe"),
    ("llama", 2, "pp=2,microbatches=4,schedule=1f1b"),
    ("llama", 2, "pp=2,microbatches=4,schedule=interleaved,stages=2"),
    ("llama", 2, "pp=2,microbatches=4,schedule=zbv"),
    ("llama", 2, "pp=2,microbatches=4,schedule=zerobubble"),
    ("llama", 2, "pp=2,microbatches=4,schedule=dualpipev"),
    ("gpt2", 2, "pp=2,microbatches=2,recompute=full"),
    ("llama", 4, "pp=2,tp=2,microbatches=2"),
    ("llama", 4, "pp=2,shard=2,zero=2,microbatches=2"),
    ("llama", 4, "cp=2,tp=2"),
    ("mixtral", 1, "replicate=1"),
    ("mixtral", 2, "ep=2,shard=2,zero=1"),
    ("mixtral", 4, "ep=2,shard=4,zero=3"),
    ("mixtral", 2, "tp=2"),
    ("mixtral", 4, "ep=4,shard=4,zero=1,ep_node=2,ep_overlap=2"),
    ("mixtral", 2, "ep=2,shard=2,zero=1,ep_halves=true"),
    ("mixtral", 4, "ep=4,shard=4,zero=1,ep_node=2,recompute=full,ep_keep=true"),
    ("mixtral", 2, "ep=2,shard=2,zero=1,precision=bf16,compress_tokens=fp8"),
    ("mixtral", 4, "ep=4,shard=4,zero=1,ep_node=2,recompute=full,ep_keep=true,compress_tokens=fp8"),
)

SOON = (
    "precision=fp16",
    "precision=fp8",
    "precision=tf32,compile=true",
    "tp=2,sequence=true,tp_overlap=2,precision=bf16,compile=true",
    "recompute=selective,precision=bf16",
    "offload=optimizer",
    "replicate=2",
    "replicate=2,precision=bf16,microbatches=2",
    "shard=2,zero=3,offload=parameters",
    "tp=2,sequence=true,precision=bf16",
    "cp=2,attention=heads,recompute=selective,compile=true,precision=bf16",
    "pp=2,microbatches=4,schedule=zbv",
    "pp=2,microbatches=2,recompute=full",
)
"""What of `LAYOUTS` is tried with the newest torch too."""

COMPILED_LONG: tuple[tuple[str, int, str], ...] = (
    ("llama", 1, "compile=true"),
    ("llama", 1, "precision=fp8,compile=true"),
    ("llama", 2, "tp=2,compile=true"),
    ("llama", 2, "tp=2,sequence=true,recompute=full,compile=true"),
    ("llama", 2, "tp=2,sequence=true,recompute=selective,compile=true,precision=bf16"),
    ("llama", 2, "cp=2,attention=heads,compile=true"),
)
"""More pairs of what compiled layouts of `LAYOUTS` try with something else; they take longest: left to `make long`."""


def param(words: tuple[str, int, str]) -> Any:
    """Returns a layout as a case, with the marks of what leaves it out."""
    marks = [pytest.mark.long] * (words in COMPILED_LONG) + [pytest.mark.oldest] * (words[2] not in SOON)
    return pytest.param(*words, marks=marks, id=name_of(*words))


def name_of(*words: object) -> str:
    return "-".join(str(word).replace("=", "").replace(",", "-") for word in words)


def holds(run: GhostRun, devices: int) -> None:
    """Asserts what is true of every run that ended well."""
    assert run.status == 0, run.text
    assert not run.disagreements, "\n".join(run.disagreements)
    places = {event["device"] for event in events(run.folder, "rank_started")}
    assert places == {f"cuda:{index}" for index in range(devices)}
    assert run.steps, "no step was counted"
    assert run.steps[-1]["launches"] > 100


def waits_allowed(model: str, layout: str) -> float:
    """Returns how often a step may copy something to the host, for which a GPU drains its queue.

    Never, but for its outcome, which goes to pinned memory and is read late (`test_waits`); once a layer of experts,
    whose token counts size an all-to-all, for each half of the rows; and once in float64. Without ``ep`` transformers
    loops over experts on the host; what is offloaded goes to the host by nature: no limit. Recompute counts again, but
    with ``ep_keep``.
    """
    if "offload" in layout or (model == "mixtral" and "ep=" not in layout):
        return math.inf
    layers = 2 if model == "mixtral" else 0
    counts = (2 if "ep_halves" in layout else 1) * (2 if "recompute" in layout and "ep_keep" not in layout else 1)
    return 1 + layers * counts + ("float64" in layout)


@pytest.mark.parametrize(("model", "devices", "layout"), [param(words) for words in (*LAYOUTS, *COMPILED_LONG)])
def test_a_layout_trains_on_gpus(root: Path, model: str, devices: int, layout: str) -> None:
    # Schedules with several stages a rank have a layer for each.
    words = ("--model.layers", "4") if model == "llama" and "pp=" in layout else ()
    run = train(root, name_of(model, devices, layout), model, devices, *words, layout=layout)
    holds(run, devices)
    assert devices == 1 or run.collectives
    # How often threads beside the step wait (snapshots, clocks) depends on when they run: `syncs` has no bound.
    assert run.steps[-1]["to_host"] <= waits_allowed(model, layout), run.steps[-1]
    assert not run.steps[-1]["pageable"], run.steps[-1]


VOCAB = 4096
LOGITS = 8 * 64 * VOCAB * 4
"""Bytes of the logits of a micro-batch in float32, of which nothing else has as many."""


def largest(root: Path, layout: str) -> int:
    run = train(root, name_of("logits", layout), "llama", 1, "--model.vocab", str(VOCAB), layout=layout)
    holds(run, 1)
    return max(step["largest"] for step in run.steps)


def test_chunked_logits_allocate_no_micro_batchs_logits(root: Path) -> None:
    assert largest(root, "loss_chunk=off") >= LOGITS
    # A chunk of 64 of the 512 tokens; the weight of the head has as many bytes, and its state a few times those.
    assert largest(root, "loss_chunk=64") <= LOGITS / 4


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_the_planner_chooses_on_gpus(root: Path, model: str) -> None:
    run = train(root, f"auto-{model}", model, 2)
    holds(run, 2)


def test_verify_runs_on_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros everywhere: what holds is that the reference and four layouts run to their end there."""
    # What isn't computed differs from run to run, which would be taken for random numbers of the model.
    monkeypatch.setattr(one_device, "measure_batch_spread", lambda *_args, **_kwargs: 0.0)
    words = ["verify", "--model", "llama", "--model.layers", "2", "--model.width", "32", "--steps", "1", "--layout"]
    run = command(root, "verify", [*words, "replicate=2", "shard=2,zero=3", "tp=2", "pp=2,microbatches=2"], 2)
    assert "Traceback" not in run.text and "fork" not in run.text, run.text
    assert not any(word in run.text for word in ("refused", "CRASH")), run.text
    assert "attending by documents as a run on these GPUs does" in run.text
    assert not run.disagreements


def test_recovery_goes_on_on_gpus(root: Path) -> None:
    """A rank is killed in the middle of a run and its successor trains on the same device."""
    words = ("--recovery.faults", "kill:rank=1,step=4", "--recovery.snapshot-every", "1", "--recovery.back-s", "1e-6")
    run = train(root, "recovery", "llama", 2, *words, layout="shard=2,zero=2", steps=8)
    assert run.status == 0, run.text
    happened = [row["kind"] for row in events(run.folder, "rank_lost") + events(run.folder, "recovered")]
    assert happened == ["rank_lost", "recovered"], run.text
    assert {row["device"] for row in events(run.folder, "rank_started")} == {"cuda:0", "cuda:1"}


def test_memory_of_snapshots_is_there_before_one_is_due(root: Path) -> None:
    words = ("--recovery.snapshot-every", "100", "--checkpoint.every", "0")
    run = train(root, "ahead", "llama", 2, *words, layout="shard=2,zero=2", steps=4)
    assert run.status == 0, run.text
    found = rows(run.folder)
    assert not any("snapshot" in row["parts"] for row in found)
    assert "snapshots" not in found[0]["memory"] and found[-1]["memory"]["snapshots"] > 0


def test_snapshots_are_copied_where_their_memory_cannot_be_registered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some virtual machines; the driver's refusal is nobody else's error."""
    monkeypatch.setenv("GHOST_REGISTERS_NOTHING", "1")
    words = ("--recovery.faults", "kill:rank=0,step=4", "--recovery.snapshot-every", "1")
    run = train(root, "unregistered", "llama", 1, *words, layout="replicate=1", steps=6)
    assert run.status == 0, run.text
    assert [row["tier"] for row in events(run.folder, "restored")] == ["memory"]


def test_recovery_plans_for_fewer_gpus(root: Path) -> None:
    """A GPU whose rank dies twice is left out; the supervisor plans for the other, and its rank can run backward."""
    faults = "kill:rank=1,step=3,generation=0;kill:rank=1,step=3,generation=1"
    run = train(root, "fewer", "llama", 2, "--recovery.faults", faults, layout="tp=2", steps=6)
    assert run.status == 0, run.text
    assert [row["ranks"] for row in events(run.folder, "planned")] == [2, 1], run.text


def test_buffers_stay_on_gpus_where_parameters_do_not(root: Path) -> None:
    """A snapshot copies them beside the next update, whose weights lie in host memory."""
    words = ("--model", "tests.plain_model:build_buffered", "--recovery.snapshot-every", "1")
    run = train(root, "buffers", "own", 2, *words, layout="shard=2,zero=3,offload=parameters")
    holds(run, 2)
