"""Direct preference optimisation by hand: a policy, a frozen reference, and a loss that no mean over tokens gives.

python examples/dpo.py tp=2,sequence=true     # any layout of two ranks; without one, shard=2,zero=3
meshwright verify --loop examples/dpo.py:loop --devices 2
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import HybridParallelStrategy, launch_ranks

LAYOUT = sys.argv[1] if __name__ == "__main__" and sys.argv[1:] else "shard=2,zero=3"
VOCAB, PROMPT, TOKENS, PAIRS, BETA, STEPS = 48, 4, 12, 8, 0.1, 15


def build() -> nn.Module:
    """The policy, and the reference: the same random weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **sizes)).double()


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and a mask of the answers', (2, PAIRS, TOKENS) each: chosen answers count upwards."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (2, PAIRS, TOKENS), generator=draw)
    ids[1, :, :PROMPT] = ids[0, :, :PROMPT]
    ids[0, :, PROMPT:] = (ids[0, :, PROMPT - 1 : PROMPT] + torch.arange(TOKENS - PROMPT)) % (VOCAB - 1) + 1
    length, place = torch.randint(PROMPT + 2, TOKENS + 1, (2, PAIRS, 1), generator=draw), torch.arange(TOKENS)
    return ids * (place < length), (place >= PROMPT) & (place < length)


def answer_log_probability(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, S) tokens and mask to (B,): the sum over each row's answer."""
    scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return (scores.gather(2, ids[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(1)


def train(strategy: Any, reference_strategy: Any = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns loss and reward margin of this rank's pairs, a step each."""
    policy, reference = build(), build().requires_grad_(False).eval()
    policy, optimizer = strategy.shard(policy, torch.optim.SGD(policy.parameters(), lr=0.5))
    # without a strategy of its own, every rank has the whole reference
    reference = reference_strategy.shard(reference) if reference_strategy else reference
    index, count = strategy.reader  # both answers of a pair go to one rank
    ids, mask = (item.chunk(count, dim=1)[index].flatten(0, 1) for item in pairs())
    expected = answer_log_probability(reference, ids, mask)  # frozen: no graph
    history = []
    for _ in range(STEPS):
        chosen, rejected = (answer_log_probability(policy, ids, mask) - expected).chunk(2)
        margin = BETA * (chosen - rejected)
        (loss := -logsigmoid(margin).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.detach(), margin.detach().mean()))
    return history


def loop(strategy: Any) -> list[torch.Tensor]:
    """Trains and returns the losses, for `verify --loop`."""
    return [loss for loss, _ in train(strategy)]


def work(context: Any) -> None:
    """What every rank does."""
    strategy = HybridParallelStrategy(LAYOUT)
    first, *_, last = [strategy.mean(margin) for _, margin in train(strategy, HybridParallelStrategy(LAYOUT))]
    if context.rank == 0:
        print(f"{LAYOUT}: reward margin {first:.4f} before, {last:.4f} after {STEPS - 1} steps")


if __name__ == "__main__":
    launch_ranks(work, 2, kind="cpu", timeout_s=100)
