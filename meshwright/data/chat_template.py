"""Chat templates: how a tokenizer writes the messages of a conversation as text, and where it says answers are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Mark in a template of where an answer begins. Source: transformers' `apply_chat_template`."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages as a chat template takes them, and which of them are to be learned."""

    messages: Sequence[Message]
    """All of them, in order."""
    learned: Sequence[bool] = ()
    """Of each message whether it is an answer to be learned."""
    first: int = 0
    """Number of messages that are a prompt."""
    tools: Sequence[Any] = ()
    """JSON schemas of what the model may call."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further names that the template may use."""

    def upto(self, count: int) -> Conversation:
        """Returns its first messages."""
        return replace(self, messages=self.messages[:count])


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """How a tokenizer writes conversations."""

    text: str
    """Jinja, which transformers renders in a sandbox."""
    special_tokens: dict[str, str]
    """Names that it may use for special tokens, as ``bos_token``, and their text."""
    end_token: str
    """Text that the tokenizer reads as its end token; empty where no text is."""
    tool_text: str = ""
    """Jinja for conversations with tools; empty where `text` writes them too."""

    def marks_answers(self, conversation: Conversation) -> bool:
        """Whether it says by ``{% generation %}`` where answers are."""
        return bool(_GENERATION.search(self._text_for(conversation)))

    def render(self, conversation: Conversation, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the ranges of characters that the template marks as answers.

        Args:
            conversation: its messages, tools and options.
            prompt: end with what an answer begins with.

        Raises:
            DataError: when the template refuses them, or doesn't write tools.
        """
        text = self._text_for(conversation)
        if conversation.tools and "tools" not in text:
            raise DataError("it has tools, which the chat template doesn't write; leave them out, or give another one")
        # Imports torch, which text without conversations doesn't wait for.
        module: Any = importlib.import_module("transformers.utils.chat_template_utils")
        names = {
            "return_assistant_tokens_mask": self.marks_answers(conversation),
            "add_generation_prompt": prompt,
            "tools": list(conversation.tools) or None,
            "chat_template": text,
        }
        try:
            texts, ranges = module.render_jinja_template(
                conversations=[list(conversation.messages)], **{**self.special_tokens, **conversation.options, **names}
            )
        except Exception as error:  # jinja2's, and what a template raises of its own
            raise DataError(f"the chat template refuses it: {str(error)[:300]}") from None
        return texts[0], ranges[0] if ranges else []

    def answer_end(self, said: str) -> str:
        """Returns what it writes behind an answer to what a user says; "" where that isn't known."""
        answer, words = "", "so"
        asked = Conversation(messages=[{"role": "user", "content": said}])
        whole = replace(asked, messages=[*asked.messages, {"role": "assistant", "content": words}])
        before, text = self.render(asked, prompt=True)[0], self.render(whole)[0]
        if text.startswith(before):
            answer = text[len(before) :]
        return answer.partition(words)[2]

    def ends_itself(self, text: str, start: int) -> bool:
        """Returns whether a text has the end token behind ``start``, its last answer's first character."""
        # At its very beginning it is the token that begins texts: many models have one for both.
        begin = len(self.special_tokens.get("bos_token", "")) if not start else 0
        return bool(self.end_token) and self.end_token in text[max(start, begin) :]

    def _text_for(self, conversation: Conversation) -> str:
        return self.tool_text if conversation.tools and self.tool_text else self.text
