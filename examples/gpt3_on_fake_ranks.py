"""GPT-2 of 96 layers and width 12288 (175 billion weights) on 1,024 ranks that exist in name only: bytes of any rank.

    python examples/gpt3_on_fake_ranks.py [LAYOUT] [RANK ...]

Nothing is allocated: the model is on meta, and the process group is torch's fake one. With `tp` in the layout, as in
`shard=128,tp=8`, the split is first tried out on a narrow clone of as many heads, which takes a while on few cores.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import HybridParallelStrategy, Layout

GIB = 2**30


def build() -> GPT2LMHeadModel:
    """The model, without memory."""
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048))


def main(text: str = "replicate=8,shard=128,zero=3", *ranks: str) -> None:
    """Prints what some ranks hold under a layout."""
    layout = Layout.parse(text)
    for rank in (int(word) for word in ranks or ("0", "1023")):
        store: Any = FakeStore()
        dist.init_process_group("fake", store=store, rank=rank, world_size=layout.world)
        model = build()
        weights = sum(item.numel() for item in model.parameters())
        strategy = HybridParallelStrategy(layout)
        strategy.shard(model, device="meta")
        held = strategy.bytes
        print(f"{layout.describe_rank(rank)}: {held} bytes of {weights / 1e9:.1f} billion weights; with gradients and")
        print(f"  two moments of AdamW {4 * held / GIB:.2f} GiB of {16 * weights / GIB:.0f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
