"""Conversations for tests: drawn messages with awkward text, tokenizers whose templates mark answers or don't."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML that says where answers are, as the training templates of TRL do."""
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as models are released with."""
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
)
"""One that writes the last answer otherwise than those before it, as Qwen3's does."""
WORDS = ["der", "na\u00efve", "\u65e5\u672c", "cat", "\U0001f600", "seven", "plus", "x=1;", "\n", "  ", "e\u0301"]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Draws conversations of one to three answers, some with a system prompt."""
    draw = random.Random(seed)

    def said(words: tuple[int, ...]) -> str:
        return " ".join(draw.choices(WORDS, k=draw.choice(words)))

    drawn = []
    for _ in range(count):
        messages = [{"role": "system", "content": said((4,))}] if draw.random() < 0.4 else []
        for _ in range(draw.choice((1, 1, 2, 3))):
            messages.append({"role": "user", "content": said((2, 9, 30))})
            messages.append({"role": "assistant", "content": said((1, 5, 12))})
        drawn.append(messages)
    return drawn


def write_jsonl(path: Path, records: list[dict[str, object]]) -> str:
    """Writes records a line each; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_tokenizer(folder: Path, template: str = PLAIN) -> str:
    """Writes a byte-level BPE with ChatML's tokens and a chat template; returns the folder."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS) * 3, "user assistant system"], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.chat_template = template or None
    whole.save_pretrained(folder)
    return str(folder)
