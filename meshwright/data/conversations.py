"""Conversations as text: messages rendered by a chat template, and which characters of it the model is to answer.

A record is one of those that TRL and the hub's sets have: ``messages`` (a list of objects with ``role`` and
``content``), ``conversations`` (the same with ``from`` and ``value``), or ``prompt`` and ``completion``, both text or
both messages.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import DataError

MESSAGE_FIELDS = ("messages", "conversations")
"""Fields that hold messages, besides the one that ``data.text_field`` names."""
FIELDS = (*MESSAGE_FIELDS, "prompt", "completion", "tools")
"""Fields of a record that are read, besides that one."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's records as chat templates name them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Mark in a template of where an answer begins. Source: transformers' `apply_chat_template`."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of the corpus."""

    text: str
    """Its text."""
    answers: tuple[tuple[int, int], ...] = ()
    """Ranges of characters, (start, stop), that a model is to answer with; ascending."""
    needs_end: bool = True
    """Whether the end token follows it; not where a chat template wrote that token itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """How a tokenizer writes conversations."""

    text: str
    """Jinja, which transformers renders in a sandbox."""
    special_tokens: dict[str, str]
    """Names that it may use for special tokens, as ``bos_token``, and their text."""
    end_token: str
    """Text that the tokenizer reads as its end token; empty where no text is."""

    @property
    def marks_answers(self) -> bool:
        """Whether it says by ``{% generation %}`` where answers are."""
        return bool(_GENERATION.search(self.text))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and the ranges of characters that the template marks as answers.

        Args:
            messages: of one conversation.
            tools: JSON schemas of what the model may call.
            prompt: end with what an answer begins with.

        Raises:
            DataError: when the template refuses them.
        """
        # Imports torch, which text without conversations doesn't wait for.
        module: Any = importlib.import_module("transformers.utils.chat_template_utils")
        try:
            texts, ranges = module.render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.text,
                return_assistant_tokens_mask=self.marks_answers,
                add_generation_prompt=prompt,
                **self.special_tokens,
            )
        except Exception as error:  # jinja2's, and what a template raises of its own
            raise DataError(f"the chat template refuses it: {str(error)[:300]}") from None
        return texts[0], ranges[0] if ranges else []


def holds_conversation(record: Mapping[str, Any], text_field: str) -> bool:
    """Returns whether a record has messages, or a prompt and its completion."""
    return bool(_message_field(record, text_field)) or _is_pair(record)


def conversation_document(
    record: Mapping[str, Any], text_field: str, template: ChatTemplate | None, normal: Callable[[str], str]
) -> Document:
    """Returns the text of a record for which `holds_conversation`, with its answers.

    Args:
        record: of a file.
        text_field: field that may hold messages, besides `MESSAGE_FIELDS`.
        template: None where the tokenizer has none; enough for a prompt and a completion that are text.
        normal: brings a text to its normal form.

    Raises:
        DataError: for messages without role or text, that the template refuses, or whose answers it doesn't show.
    """
    field = _message_field(record, text_field)
    if not field and isinstance(record["prompt"], str):
        prompt, completion = normal(record["prompt"]), normal(record["completion"])
        return Document(text=prompt + completion, answers=((len(prompt), len(prompt) + len(completion)),))
    if template is None:
        raise DataError(
            "it holds messages, and the tokenizer has no chat template; give data.chat_template the path of one "
            "(Jinja, as chat_template.jinja beside a tokenizer)"
        )
    given = record[field] if field else [*record["prompt"], *record["completion"]]
    messages = [_message(value, normal) for value in given]
    first = 0 if field else len(record["prompt"])
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"its tools are a {type(tools).__name__}, and a list of JSON schemas is due")
    text, marked = template.render(messages, tools)
    if template.marks_answers:
        begins = len(template.render(messages[:first], tools)[0]) if first else 0
        answers = [(start, stop) for start, stop in marked if start >= begins]
    else:
        answers = _answers_by_prefix(template, messages, first, tools, text)
    return Document(
        text=text,
        answers=tuple((start, stop) for start, stop in answers if stop > start),
        needs_end=not template.end_token or template.end_token not in text,
    )


def _answers_by_prefix(
    template: ChatTemplate, messages: Sequence[Message], first: int, tools: Sequence[Any] | None, text: str
) -> list[tuple[int, int]]:
    """Returns where the answers are, each between the texts of the messages before it and up to it.

    Args:
        template: without marks of its own.
        messages: of the conversation.
        first: number of the first message that may be learned.
        tools: as `ChatTemplate.render` takes them.
        text: of all messages.

    Raises:
        DataError: when a message changes how the ones before it are written.
    """
    answers = []
    for number, message in enumerate(messages):
        if number < first or message["role"] != "assistant":
            continue
        before = template.render(messages[:number], tools, prompt=True)[0]
        through = template.render(messages[: number + 1], tools)[0]
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template writes messages otherwise once others follow, so where answer {number + 1} is "
                "isn't known; give data.chat_template one with {% generation %} and {% endgeneration %} around "
                "answers, or conversations of one answer"
            )
        answers.append((len(before), len(through)))
    return answers


def _message_field(record: Mapping[str, Any], text_field: str) -> str:
    """Returns the field that holds messages; "" where none does."""
    for name in (text_field, *MESSAGE_FIELDS):
        value = record.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return name
    return ""


def _is_pair(record: Mapping[str, Any]) -> bool:
    prompt, completion = record.get("prompt"), record.get("completion")
    return any(isinstance(prompt, kind) and isinstance(completion, kind) for kind in (str, list))


def _message(value: object, normal: Callable[[str], str]) -> Message:
    """Returns a message as chat templates take it, its texts in normal form.

    Raises:
        DataError: when it has no role, or holds something else than text.
    """
    if not isinstance(value, dict):
        raise DataError(f"a message is a {type(value).__name__}, and an object with role and content is due")
    # Parquet gives a message the fields of all others, as None.
    message = {name: item for name, item in value.items() if item is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise DataError(f"a message has the fields {', '.join(map(str, value))}, and role and content are due")
    content = message.get("content", "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"a message of role {message['role']} holds something else than text")
    normalised: Message = _normalised(message, normal)
    return normalised


def _normalised(value: Any, normal: Callable[[str], str]) -> Any:
    """Returns a value of JSON with its texts in normal form; names of fields stay."""
    if isinstance(value, str):
        return normal(value)
    if isinstance(value, list):
        return [_normalised(item, normal) for item in value]
    if isinstance(value, dict):
        return {name: _normalised(item, normal) for name, item in value.items()}
    return value
