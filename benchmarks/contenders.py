"""Who takes part in `throughput.py`: scripts written by hand, other frameworks, and meshwright under its layouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One way to train."""

    name: str
    rival: str
    """The script that it is measured against beside ddp."""
    script: str = ""
    """File under benchmarks/; empty for meshwright."""
    mode: str = ""
    """Mode of the script, or meshwright's layout."""
    extra: tuple[str, ...] = ()
    """More flags for meshwright."""
    optional: bool = False
    """Runs only when named."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for its processes."""
    model: str = "gpt2"
    """What it trains: ``gpt2`` or ``llama``."""
    ranks: int = 2
    """Its processes."""
    micro: int = 1
    """Micro-batches of a step."""

    @property
    def peer(self) -> bool:
        """Whether it needs the other environment."""
        return self.script.startswith("peers/")


KEPT = (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", str(2**40)), ("MALLOC_TOP_PAD_", str(2**26)))
"""What meshwright asks of glibc by ``launch.keep_memory``, as variables."""

DATA_AXES = (
    Contender("ddp", "ddp", "scripts/ddp.py"),
    Contender("fsdp2-zero2", "fsdp2-zero2", "scripts/fsdp2.py", "zero2"),
    Contender("fsdp2-zero3", "fsdp2-zero3", "scripts/fsdp2.py", "zero3"),
    Contender("meshwright-replicate", "ddp", mode="replicate=2"),
    Contender("meshwright-zero1", "fsdp2-zero2", mode="shard=2,zero=1"),
    Contender("meshwright-zero2", "fsdp2-zero2", mode="shard=2,zero=2"),
    Contender("meshwright-zero3", "fsdp2-zero3", mode="shard=2,zero=3"),
    Contender("meshwright-lean-replicate", "ddp", "", "replicate=2", ("--launch.no-keep-memory",), True),
    Contender("meshwright-lean-zero3", "fsdp2-zero3", "", "shard=2,zero=3", ("--launch.no-keep-memory",), True),
    Contender("ddp-kept", "ddp", "scripts/ddp.py", optional=True, environment=KEPT),
    Contender("fsdp2-kept-zero3", "fsdp2-zero3", "scripts/fsdp2.py", "zero3", optional=True, environment=KEPT),
    Contender("accelerate-ddp", "ddp", "peers/accelerate_.py", "ddp"),
    Contender("accelerate-zero2", "fsdp2-zero2", "peers/accelerate_.py", "zero2"),
    Contender("accelerate-zero3", "fsdp2-zero3", "peers/accelerate_.py", "zero3"),
    Contender("deepspeed-zero1", "fsdp2-zero2", "peers/deepspeed_.py", "zero1"),
    Contender("deepspeed-zero2", "fsdp2-zero2", "peers/deepspeed_.py", "zero2"),
    Contender("deepspeed-zero3", "fsdp2-zero3", "peers/deepspeed_.py", "zero3"),
    Contender("trainer-ddp", "ddp", "peers/trainer_.py", "ddp"),
    Contender("trainer-zero2", "fsdp2-zero2", "peers/trainer_.py", "zero2"),
    Contender("trainer-zero3", "fsdp2-zero3", "peers/trainer_.py", "zero3"),
    Contender("fabric-ddp", "ddp", "peers/fabric_.py", "ddp"),
    Contender("fabric-zero2", "fsdp2-zero2", "peers/fabric_.py", "zero2"),
    Contender("fabric-zero3", "fsdp2-zero3", "peers/fabric_.py", "zero3"),
)
"""On the GPT-2, every rank with rows of its own."""

SPLITS = {"1f1b": "5-3", "gpipe": "5-3", "interleaved": "3-2-2-1", "zbv": "2-3-2-1"}
"""Layers of each stage by schedule, the head being worth about two; the same by hand and in meshwright."""


def _llama(
    name: str, rival: str, script: str = "", mode: str = "", ranks: int = 2, micro: int = 1, kept: bool = False
) -> Contender:
    """A contender on the llama; ``kept`` ones run only when named, with meshwright's allocator settings."""
    environment = KEPT if kept else ()
    return Contender(name, rival, script, mode, (), kept, environment, "llama", ranks, micro)


def _pipelines() -> list[Contender]:
    """Every schedule at 4 and 8 micro-batches, by hand and in meshwright."""
    found = []
    for micro in (4, 8):
        for kind, split in SPLITS.items():
            rival = f"pipeline-{kind}-{micro}"
            layout = f"pp=2,schedule={kind},microbatches={micro},split={split}"
            found.append(_llama(rival, rival, "scripts/pipeline.py", f"{kind}:{split}", micro=micro))
            found.append(_llama(f"meshwright-pp-{kind}-{micro}", rival, mode=layout))
    return found


MODEL_AXES = (
    _llama("ddp", "ddp", "scripts/ddp.py"),
    _llama("meshwright-replicate", "ddp", mode="replicate=2"),
    _llama("tensor-plain", "tensor-plain", "scripts/tensor.py", "plain"),
    _llama("tensor-loss", "tensor-loss", "scripts/tensor.py", "loss"),
    _llama("tensor-sequence", "tensor-sequence", "scripts/tensor.py", "loss+sequence"),
    _llama("tensor-kept-loss", "tensor-loss", "scripts/tensor.py", "loss", kept=True),
    _llama("transformers-tp", "tensor-plain", "peers/transformers_tp.py"),
    _llama("meshwright-tp", "tensor-loss", mode="tp=2"),
    _llama("meshwright-tp-sequence", "tensor-sequence", mode="tp=2,sequence=true"),
    _llama("context", "context", "scripts/context.py"),
    _llama("context-kept", "context", "scripts/context.py", kept=True),
    _llama("meshwright-cp", "context", mode="cp=2"),
    _llama("meshwright-cp-gather", "context", mode="cp=2,attention=gather"),
    *_pipelines(),
    _llama("pipeline-kept-1f1b-4", "pipeline-1f1b-4", "scripts/pipeline.py", "1f1b:5-3", micro=4, kept=True),
    _llama("ddp", "ddp", "scripts/ddp.py", ranks=4),
    _llama("tensor-shard", "tensor-shard", "scripts/tensor.py", "loss+shard", ranks=4),
    _llama("meshwright-tp-shard", "tensor-shard", mode="tp=2,shard=2", ranks=4),
    _llama("pipeline-tensor", "pipeline-tensor", "scripts/pipeline.py", "1f1b:5-3:tp", ranks=4, micro=4),
    _llama("meshwright-pp-tp", "pipeline-tensor", mode="pp=2,tp=2,schedule=1f1b,microbatches=4,split=5-3", ranks=4),
)
"""On the llama, all from the same weights over the same rows, so that their losses are the same numbers."""

CONTENDERS = (*DATA_AXES, *MODEL_AXES)


def select(only: str, model: str, ranks: int, peers: bool) -> list[Contender]:
    """Returns the contenders of a model and a number of ranks that were asked for; without names all that can run.

    Args:
        only: names or beginnings of names, separated by commas.
        model: that they train.
        ranks: that they have.
        peers: whether the other frameworks' environment is there.
    """
    field = [one for one in CONTENDERS if (one.model, one.ranks) == (model, ranks)]
    names = [name for name in only.split(",") if name]
    unknown = [n for n in names if not any(one.name == n or one.name.startswith(n + "-") for one in field)]
    if unknown or not field:
        raise SystemExit(f"no contender {unknown}; there are {', '.join(one.name for one in field)}")
    if names:
        chosen = [one for one in field if any(one.name == n or one.name.startswith(n + "-") for n in names)]
        return [one for one in chosen if not one.optional or one.name in names]
    chosen = [one for one in field if not one.optional]
    if not peers and any(one.peer for one in chosen):
        print("without the other frameworks: sh benchmarks/peers/install.sh makes their environment", flush=True)
        chosen = [one for one in chosen if not one.peer]
    return chosen
