"""What a model writes at the end of its run: it goes on from the text, or answers a conversation's question."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from meshwright.data.tokenizer import chat_template, given_tokenizer
from meshwright.data.tokens import TokenSet, TokenStream
from meshwright.errors import DataError
from meshwright.jobs.trained_model import open_run, tokenizer_folder
from meshwright.train.config import TrainConfig

_CHARACTERS = 64
"""Of the prompt where the text gives it."""
_LONGEST = 256
"""Tokens of a question that is answered; longer ones would fill the report."""


def draw_sample(train: TrainConfig, run_dir: Path, token_set: TokenSet) -> tuple[str, str]:
    """Returns a prompt and what the run's newest checkpoint makes of it.

    Without ``train.sample`` the prompt is the question of the first conversation that was held out, up to where its
    answer begins, or the beginning of the held-out text; of the training text where none was held out.

    Args:
        train: settings of the run.
        run_dir: its directory, whose config is what this command was given.
        token_set: the prepared text.
    """
    trained = open_run(run_dir, trust=True)
    splits = [split for split in (token_set.validation, token_set.train) if len(split.tokens)]
    if train.sample:
        return train.sample, trained.complete(train.sample, max_tokens=train.sample_tokens)
    for split in splits:
        if question := _first_question(split, token_set):
            end = _answer_end(run_dir)
            # The template has written all special tokens.
            answer = trained.complete(question, max_tokens=train.sample_tokens, add_special_tokens=False, end=end)
            return question, answer
    prompt = _beginning(splits[0], token_set)
    return prompt, trained.complete(prompt, max_tokens=train.sample_tokens)


def _first_question(split: TokenStream, token_set: TokenSet) -> str:
    """Returns the text of a split's first conversation before its answer; "" without one, or where it is long."""
    split.check_index()
    split.check_answers()
    if split.answers is None or not len(split.answers):
        return ""
    answer = int(split.answers[0, 0])
    ends_before = split.ends[: int(np.searchsorted(split.ends, answer, side="right"))]
    start = int(ends_before[-1]) if len(ends_before) else 0
    if not 0 < answer - start <= _LONGEST:
        return ""
    ids = split.read(start, answer).tolist()
    return str(token_set.tokenizer().decode(ids, skip_special_tokens=False))


def _beginning(split: TokenStream, token_set: TokenSet) -> str:
    """Returns the first characters of a split."""
    if split is token_set.validation:
        return token_set.held_out_text(4 * _CHARACTERS).decode("utf-8", errors="ignore")[:_CHARACTERS]
    return str(token_set.tokenizer().decode(split.read(0, _CHARACTERS).tolist()))[:_CHARACTERS]


def _answer_end(run_dir: Path) -> str:
    """Returns what the run's chat template writes behind an answer; "" where it has none, or doesn't say."""
    template = chat_template(given_tokenizer(str(tokenizer_folder(run_dir))), "")
    with contextlib.suppress(DataError):
        return template.answer_end("so") if template is not None else ""
    return ""
