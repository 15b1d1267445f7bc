"""Conversations as text: messages rendered by a chat template, and which characters of it the model is to answer.

A record is one of those that TRL and the hub's sets have: ``messages`` (a list of objects with ``role`` and
``content``), ``conversations`` (the same with ``from`` and ``value``), or ``prompt`` and ``completion``, both text or
both messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.data.chat_template import ChatTemplate, Conversation, Message
from meshwright.errors import DataError
from meshwright.records import parse_json

MESSAGE_FIELDS = ("messages", "conversations")
"""Fields that hold messages, besides the one that ``data.text_field`` names."""
FIELDS = (*MESSAGE_FIELDS, "prompt", "completion", "tools", "system", "chat_template_kwargs")
"""Fields of a record that are read, besides that one."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles of ShareGPT's records as chat templates name them."""
_LEARNED = ("weight", "train", "training")
"""Fields of a message that say whether it is learned. Source: OpenAI's fine-tuning format; axolotl's chat_template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of the corpus."""

    text: str
    """Its text."""
    answers: tuple[tuple[int, int], ...] = ()
    """Ranges of characters, (start, stop), that a model is to answer with; ascending. An empty one at the text's end
    has the end token alone learned."""
    needs_end: bool = True
    """Whether the end token follows it; not where its text ends with that token."""
    needs_begin: bool = False
    """Whether the tokens go before it that the tokenizer puts before every text."""


def holds_conversation(record: Mapping[str, Any], text_field: str) -> bool:
    """Returns whether a record has messages, or a prompt and its completion."""
    return bool(_message_field(record, text_field)) or _is_pair(record)


def conversation_document(
    record: Mapping[str, Any],
    text_field: str,
    template: ChatTemplate | None,
    normal: Callable[[str], str],
    answers: bool = True,
    end_token: str = "",
) -> Document:
    """Returns the text of a record for which `holds_conversation`, with its answers.

    Args:
        record: of a file.
        text_field: field that may hold messages, besides `MESSAGE_FIELDS`.
        template: None where the tokenizer has none; enough for a prompt and a completion that are text.
        normal: brings a text to its normal form.
        answers: whether it matters where they are.
        end_token: text that the tokenizer reads as its end token; empty where no text is.

    Raises:
        DataError: for messages without role or text, that the template refuses, or whose answers it doesn't show.
    """
    name = _message_field(record, text_field)
    if not name and isinstance(record["prompt"], str):
        prompt, completion = normal(record["prompt"]), normal(record["completion"])
        text = prompt + completion
        needs_end = not end_token or not completion.endswith(end_token)
        return Document(text=text, answers=((len(prompt), len(text)),), needs_end=needs_end, needs_begin=True)
    if template is None:
        raise DataError(
            "it holds messages, and the tokenizer has no chat template; give data.chat_template the path of one "
            "(Jinja, as chat_template.jinja beside a tokenizer)"
        )
    conversation = _conversation(record, name, normal)
    if not answers:
        if skipped := [m for m, is_learned in zip(conversation.messages, conversation.learned) if not is_learned]:
            _refuse_weights(skipped)
        conversation, text, _ = _fitting(template, conversation)
        return Document(text=text, needs_end=not template.ends_itself(text, 0))
    conversation, text, marked = _fitting(template, conversation)
    if template.marks_answers(conversation):
        places = _marked_answers(template, conversation, marked)
    else:
        places = _answers_by_prefix(template, conversation, text)
    last = max((start for start, _, _ in places), default=0)
    return Document(
        text=text,
        answers=tuple((start, stop) for start, stop, is_learned in places if is_learned and stop > start),
        needs_end=not template.ends_itself(text, last),
    )


def _refuse_weights(messages: Sequence[Message]) -> None:
    """Refuses messages that say that they aren't learned, where all tokens are.

    Raises:
        DataError: for the first such message.
    """
    for message in messages:
        if named := next((name for name in _LEARNED if name in message and not message[name]), None):
            raise DataError(
                f"a message of role {message['role']} has {named} = {message[named]}, and data.targets = 'all' learns "
                "every token; use data.targets = 'answers', or leave the field out"
            )


def _conversation(record: Mapping[str, Any], name: str, normal: Callable[[str], str]) -> Conversation:
    """Returns the conversation of a record, whose messages are in a field, or in prompt and completion for "".

    Raises:
        DataError: when a field of it isn't what it must be.
    """
    given = record[name] if name else [*record["prompt"], *record["completion"]]
    messages = [_message(value, normal) for value in given]
    first = 0 if name else len(record["prompt"])
    system = record.get("system")
    if system and not isinstance(system, str):
        raise DataError(f"its system is a {type(system).__name__}, and a text is due")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": normal(system)})
        first += 1 if first else 0
    elif system and messages and messages[0].get("content") != normal(system):
        raise DataError("it has a system prompt in its field system and another one as first message; keep one of both")
    tools, options = (_json_field(record, field) for field in ("tools", "chat_template_kwargs"))
    if not isinstance(tools or [], list):
        raise DataError(f"its tools are a {type(tools).__name__}, and a list of JSON schemas is due")
    if not isinstance(options or {}, dict):
        raise DataError(f"its chat_template_kwargs are a {type(options).__name__}, and an object is due")
    learned = [_is_learned(message) and number >= first for number, message in enumerate(messages)]
    return Conversation(messages=messages, learned=learned, first=first, tools=tools or [], options=options or {})


def _json_field(record: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a record, which may be JSON in a text: a parquet file has no other place for objects."""
    value = record.get(name)
    if not isinstance(value, str) or not value:
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _is_learned(message: Message) -> bool:
    """Returns whether a message is an answer, and not one that says that it isn't learned.

    Raises:
        DataError: when it says something else than yes or no, or another role is to be learned.
    """
    is_answer = message["role"] == "assistant"
    for name in _LEARNED:
        if name not in message:
            continue
        value = message[name]
        if value not in (0, 1):
            raise DataError(
                f"a message of role {message['role']} has {name} = {value!r}, and an answer is learned (1, true) or "
                "isn't (0, false)"
            )
        if value and message["role"] != "assistant":
            raise DataError(
                f"a message of role {message['role']} has {name} = {value!r}, and only the assistant's are learned; "
                "leave it out"
            )
        is_answer = is_answer and bool(value)
    return is_answer


def _fitting(template: ChatTemplate, conversation: Conversation) -> tuple[Conversation, str, list[tuple[int, int]]]:
    """Renders a conversation whose contents are as the template takes them: text, or a list of its parts.

    Returns:
        the conversation in that form; its text; the ranges that the template marks.

    Raises:
        DataError: when the template refuses it, or writes none of its texts.
    """
    refusal = "the chat template writes none of its texts; give data.chat_template another one"
    for candidate in (conversation, _in_other_form(conversation)):
        if candidate is None:
            break
        try:
            text, marked = template.render(candidate)
        except DataError as error:
            refusal = str(error) if candidate is conversation else refusal
            continue
        if _writes(text, candidate.messages):
            return candidate, text, marked
    raise DataError(refusal)


def _in_other_form(conversation: Conversation) -> Conversation | None:
    """Returns a conversation with texts for lists of one part, or such lists for texts; None where parts are more."""
    contents = [message.get("content") for message in conversation.messages]
    if any(isinstance(content, list) and len(content) != 1 for content in contents):
        return None
    has_parts = any(isinstance(content, list) for content in contents)

    def other(content: Any) -> Any:
        if isinstance(content, list):
            return content[0]["text"]
        return content if has_parts else [{"type": "text", "text": content}]

    messages = [m | {"content": other(m["content"])} if "content" in m else m for m in conversation.messages]
    return replace(conversation, messages=messages)


def _writes(text: str, messages: Sequence[Message]) -> bool:
    """Returns whether any of the messages' texts is in a text, and no list of parts as Python prints it."""
    contents = [message.get("content") for message in messages]
    if any(isinstance(content, list) and content and str(content) in text for content in contents):
        return False
    texts = [
        part["text"].strip()
        for content in contents
        for part in (content if isinstance(content, list) else [{"text": content or ""}])
    ]
    return not any(texts) or any(said and said in text for said in texts)


def _marked_answers(
    template: ChatTemplate, conversation: Conversation, marked: Sequence[tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Returns the answers behind the prompt that a template marks: first character, the one after, whether learned.

    Raises:
        DataError: when some aren't learned, and it doesn't mark one place an answer.
    """
    first = conversation.first
    # Counted, since what follows may change how the prompt is written.
    places = marked[len(template.render(conversation.upto(first))[1]) if first else 0 :]
    answers = [number for number in range(first, len(conversation.messages)) if _is_answer(conversation, number)]
    if all(conversation.learned[number] for number in answers):
        return [(start, stop, True) for start, stop in places]
    if len(places) != len(answers):
        raise DataError(
            f"it has answers that aren't learned, and the chat template marks {len(places)} places for "
            f"{len(answers)} answers; give data.chat_template one with {{% generation %}} once around each"
        )
    return [(start, stop, conversation.learned[number]) for (start, stop), number in zip(places, answers)]


def _is_answer(conversation: Conversation, number: int) -> bool:
    return bool(conversation.messages[number]["role"] == "assistant")


def _answers_by_prefix(template: ChatTemplate, conversation: Conversation, text: str) -> list[tuple[int, int, bool]]:
    """Returns the answers behind the prompt, each between the texts of the messages before it and up to it.

    Args:
        template: without marks of its own.
        conversation: its messages.
        text: of all messages.

    Returns:
        of each answer the first character, the one after the last, and whether it is learned.

    Raises:
        DataError: when a message changes how the ones before it are written.
    """
    answers = []
    for number in range(conversation.first, len(conversation.messages)):
        # Where an answer that isn't learned is doesn't matter.
        if not conversation.learned[number]:
            continue
        before = _before_answer(template, conversation, number)
        through = template.render(conversation.upto(number + 1))[0]
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template writes messages otherwise once others follow, so where answer {number + 1} is "
                "isn't known; give data.chat_template one with {% generation %} and {% endgeneration %} around "
                "answers, or conversations of one answer"
            )
        answers.append((len(before), len(through), True))
    return answers


def _before_answer(template: ChatTemplate, conversation: Conversation, number: int) -> str:
    """Returns what a template writes before message ``number``, with what an answer begins with.

    Raises:
        DataError: when it is the first message, and the template writes nothing without one.
    """
    try:
        return template.render(conversation.upto(number), prompt=True)[0]
    except DataError:
        if number:
            raise
        raise DataError(
            "it begins with an answer, and the chat template writes nothing without a message before, so where the "
            "answer begins isn't known; put a message of the user before it, or give data.chat_template one with "
            "{% generation %} and {% endgeneration %} around answers"
        ) from None


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
