"""Group-relative policy optimisation by hand: rollouts under any layout, and two updates on each.

python examples/grpo.py tp=2,sequence=true     # any layout of two ranks; without one, shard=2,zero=3
meshwright verify --loop examples/grpo.py:loop --devices 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import HybridParallelStrategy, launch_ranks

LAYOUT = sys.argv[1] if __name__ == "__main__" and sys.argv[1:] else "shard=2,zero=3"
VOCAB, END, PROMPT, TOKENS, PROMPTS, GROUP, CLIP, KL, ROUNDS = 24, 1, 3, 8, 4, 8, 0.2, 0.02, 8


def build() -> torch.nn.Module:
    """The policy, and the reference: the same random weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **sizes)).double()


@torch.no_grad()
def rollouts(policy: torch.nn.Module, reader: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws answers to this reader's prompts: tokens (B, S), and which of an answer's count, (B, A): up to its end."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, VOCAB, (PROMPTS, TOKENS), generator=draw).repeat_interleave(GROUP, 0)
    noise = -(-torch.rand(*rows.shape, VOCAB, generator=draw, dtype=torch.float64).log()).log()
    ids, noise = (item.chunk(reader[1])[reader[0]] for item in (rows, noise))  # drawn for the global batch
    for place in range(PROMPT, TOKENS):
        ids[:, place] = (policy(input_ids=ids).logits[:, place - 1] + noise[:, place]).argmax(-1)
    return ids, (ids[:, PROMPT - 1 : -1] == END).cumsum(1) == 0


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """(B, S) tokens to (B, A): the log-probability of each token of the answers."""
    return model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def train(strategy: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields loss and mean reward of this rank's answers, one an update."""
    policy, reference = build(), build().requires_grad_(False)
    policy, optimizer = strategy.shard(policy, torch.optim.AdamW(policy.parameters(), lr=5e-3))
    for seed in range(ROUNDS):
        ids, counted = rollouts(policy, strategy.reader, seed)  # a group goes to one reader
        reward = ((ids[:, PROMPT:] >= VOCAB // 2) & counted).double().mean(1).view(-1, GROUP)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        before, expected = (log_probabilities(model, ids).detach() for model in (policy, reference))
        total = strategy.mean(counted.sum())  # of a reader, on average
        for _ in range(2):
            now = log_probabilities(policy, ids)
            ratio, drift = (now - before).exp(), expected - now
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (loss := -((gain - KL * (drift.exp() - drift - 1)) * counted).sum() / total).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), reward.mean()


def loop(strategy: Any) -> list[torch.Tensor]:
    """Trains and returns the losses, for `verify --loop`."""
    return [loss for loss, _ in train(strategy)]


def work(context: Any) -> None:
    """What every rank does."""
    strategy = HybridParallelStrategy(LAYOUT)
    first, *_, last = [strategy.mean(reward) for _, reward in train(strategy)]
    if context.rank == 0:
        print(f"{LAYOUT}: mean reward {first:.4f} in the first round, {last:.4f} in the last")


if __name__ == "__main__":
    launch_ranks(work, 2, kind="cpu", timeout_s=100)
