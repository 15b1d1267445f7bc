"""`python -m tests.ghost.fsdp_loop LAYERS FOLDER`: training loops by hand, as in FSDP2's tutorial.

Nothing in it is meshwright's. Each line of standard input asks for a loop: a family and how many ranks. Ranks are forks
of this process, which imports torch and transformers once for all loops, and meet at a file of FOLDER. Rank 0 prints
the kernels that a warm step launches.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB, TOKENS, ROWS, STEPS = 512, 64, 8, 4


def build(family: str, layers: int) -> torch.nn.Module:
    """Returns a model of the sizes of `runs.MODELS`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_hidden_layers": layers, "max_position_embeddings": TOKENS}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_head": 4, "n_layer": layers, "n_positions": TOKENS}
        sizes |= {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    if family == "mixtral":
        sizes["num_local_experts"] = 4
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes, vocab_size=VOCAB)).to("cuda").train()


def train(family: str, layers: int, store: Path, rank: int, ranks: int) -> None:
    """Trains a few steps and prints the launches of the last."""
    os.environ["GHOST_GPUS"] = str(ranks)
    warnings.simplefilter("ignore")
    torch.cuda.set_device(rank)
    place = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    distributed.init_process_group("nccl", **place, device_id=torch.device("cuda", rank))
    model = build(family, layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.transformer.h if family == "gpt2" else model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.zeros(ROWS // ranks, TOKENS, dtype=torch.int64, device="cuda")
    ghost = ctypes.CDLL(None)
    ghost.ghost_count.restype = ctypes.c_long
    launches = 0
    for _ in range(STEPS):
        before = ghost.ghost_count(0)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        launches = ghost.ghost_count(0) - before
    if rank == 0:
        print(launches, flush=True)


def start(*words: Any) -> int:
    """Forks a rank, whose NCCL groups end with it: nothing waits for them."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(*words)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def main(layers: int, folder: Path) -> None:
    """Runs loops, one after the other, until one fails or no more are asked for."""
    for line in sys.stdin:
        family, ranks = line.split()
        store = folder / f"{family}-{ranks}.store"
        pids = [start(family, layers, store, rank, int(ranks)) for rank in range(int(ranks))]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            sys.exit(f"{line.strip()} failed")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
