"""Tokenizers in Hugging Face's format: a trained byte-level BPE, the characters of a corpus, or the user's own."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.config import TRAINED_TOKENIZERS
from meshwright.errors import ConfigError, DataError
from meshwright.records import parse_json

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""File of a tokenizer's chat template. Source: ``save_pretrained`` of transformers' tokenizers."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's further chat templates. Source: as `CHAT_TEMPLATE`."""
SPECIAL_TOKENS = "special_tokens_map.json"
"""File of special tokens, of earlier tokenizers. Source: as `CHAT_TEMPLATE`."""
COMPANIONS = (CHAT_TEMPLATE, "chat_template.json", SPECIAL_TOKENS)
"""Text files that go with a tokenizer and change no token. Source: ``save_pretrained`` of transformers' tokenizers."""
SOURCES = (TOKENIZER, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
"""Files any of which makes a directory hold a tokenizer."""
HUB_WAIT_S = 10.0
"""Seconds for a sign of life of the hub."""
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A tokenizer as it is written to disk."""

    text: str
    """Contents of ``tokenizer.json``."""
    settings: dict[str, Any]
    """Contents of ``tokenizer_config.json``; transformers reads the end-of-text token from it."""
    companions: Mapping[str, str] = field(default_factory=dict)
    """Contents of those of `COMPANIONS` that exist, by name."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> TokenizerFiles:
    """Trains a byte-level BPE with GPT-2's splitting rule and an end-of-text token as entry 0.

    Args:
        texts: documents, or a sample of them.
        vocab_size: most entries; a small corpus may give fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # Special tokens come first, so end-of-text is id 0.
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TokenizerFiles(text=tokenizer.to_str(), settings=_default_settings(END_OF_TEXT))


def character_tokenizer(characters: Sequence[str], with_end_token: bool) -> TokenizerFiles:
    """Builds a tokenizer with one token a character; it drops characters outside the corpus.

    Args:
        characters: the distinct characters, sorted; their indices are the token ids.
        with_end_token: add an end-of-text token after them, for a corpus of more than one document.
    """
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    if with_end_token:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return TokenizerFiles(text=tokenizer.to_str(), settings=_default_settings(END_OF_TEXT if with_end_token else None))


def given_tokenizer(name: str) -> TokenizerFiles:
    """Reads a Hugging Face tokenizer: a directory, a ``tokenizer.json``, or a hub name (needs a network or its cache).

    Raises:
        DataError: when none can be read.
    """
    path = Path(os.path.expanduser(name))
    try:
        if path.is_file():
            return _read_tokenizer_json(path)
        if (path / TOKENIZER).is_file():
            return _read_tokenizer_json(path / TOKENIZER)
        if path.suffix == ".json" or (name.startswith(("/", ".", "~")) and not path.is_dir()):
            raise FileNotFoundError("no such file or directory")
        return _convert_with_transformers(name)
    except Exception as error:  # tokenizers raises bare Exception, transformers anything
        raise DataError(
            f"data.tokenizer = {name!r} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            "give 'bpe', 'chars', a directory with tokenizer.json, or a tokenizer.json"
        ) from error


def _read_tokenizer_json(path: Path) -> TokenizerFiles:
    """Reads a ``tokenizer.json`` with the files beside it that belong to it."""
    settings_path = path.with_name(SETTINGS)
    settings = parse_json(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
    companions = {name: path.with_name(name) for name in COMPANIONS}
    texts = {name: file.read_text(encoding="utf-8") for name, file in companions.items() if file.is_file()}
    if SPECIAL_TOKENS in texts:
        # Where older tokenizers have their special tokens.
        special_tokens = parse_json(texts[SPECIAL_TOKENS])
        settings = {**special_tokens, **settings} if isinstance(special_tokens, dict) else settings
    if named := _named_templates(path.parent):
        # Several templates are a list in the settings; the file of one would take their place.
        default = texts.pop(CHAT_TEMPLATE, "")
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in ({"default": default} | named).items()
        ]
    return _without_padding(Tokenizer.from_file(str(path)), settings, texts)


def _named_templates(folder: Path) -> dict[str, str]:
    """Returns the chat templates beside the default one, by name."""
    files = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _convert_with_transformers(name: str) -> TokenizerFiles:
    """Converts a tokenizer without a local tokenizer.json by transformers (sentencepiece, hub names)."""
    from transformers import AutoTokenizer

    silence = "" if Path(os.path.expanduser(name)).is_dir() else _hub_silence()
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(
            name, use_fast=True, trust_remote_code=False, local_files_only=bool(silence)
        )
    except Exception as error:  # of any kind, for a name that no cache holds
        if silence:
            raise ConnectionError(f"neither a directory nor in the hub's cache, and {silence}") from error
        raise
    if not hasattr(hf_tokenizer, "backend_tokenizer"):
        raise ValueError("it has no fast form")
    with tempfile.TemporaryDirectory() as folder:
        hf_tokenizer.save_pretrained(folder)
        return _read_tokenizer_json(Path(folder) / TOKENIZER)


def _hub_silence() -> str:
    """Returns why the hub doesn't answer; "" where it does. Its client tries a dead network again for minutes."""
    hub: Any = importlib.import_module("huggingface_hub")
    endpoint = importlib.import_module("huggingface_hub.constants").ENDPOINT
    try:
        hub.get_session().head(endpoint, timeout=HUB_WAIT_S)
    except Exception as error:  # of a client that differs between versions
        return f"{endpoint} doesn't answer: {error}"
    return ""


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a ``tokenizer.json``.

    Raises:
        DataError: when the file isn't one.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise DataError(f"{path} is no tokenizer: {str(error)[:200]}; make it again") from None


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a directory in Hugging Face format holds a tokenizer."""
    return any((folder / name).is_file() for name in SOURCES)


def same_tokenizer(name: str, other_name: str) -> bool:
    """Returns whether two tokenizers give the same ids for any text; names as for `given_tokenizer`.

    ``bpe`` and ``chars`` are trained on a corpus and equal no given one.
    """
    if name in TRAINED_TOKENIZERS:
        return False
    if tokenizer_digest(name) == tokenizer_digest(other_name):
        return True
    return given_tokenizer(name).text == given_tokenizer(other_name).text


def tokenizer_digest(name: str) -> str:
    """Returns a hash of a given tokenizer's files, or a hub name as it is.

    Args:
        name: a path or hub name, as for `given_tokenizer`.
    """
    path = Path(os.path.expanduser(name))
    if not path.exists():
        return name
    folder, own_name = (path, ()) if path.is_dir() else (path.parent, (path.name,))
    # Only files that change tokens or go with the tokenizer; weights beside them don't count.
    names = dict.fromkeys((*own_name, *SOURCES, "merges.txt", SETTINGS, *COMPANIONS))
    files = [folder / name for name in names if (folder / name).is_file()]
    files += sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    file_digests = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(file_digests).encode()).hexdigest()


def _without_padding(tokenizer: Tokenizer, settings: dict[str, Any], companions: dict[str, str]) -> TokenizerFiles:
    """Removes truncation and padding, which would cut or fill documents silently."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Without a declared end token, one of the well-known names in the vocabulary serves.
    if _end_token_of(settings) is None:
        end_tokens = [token for token in _END_TOKENS if tokenizer.token_to_id(token) is not None]
        settings = settings | _default_settings(end_tokens[0] if end_tokens else None)
    return TokenizerFiles(text=tokenizer.to_str(), settings=settings, companions=companions)


def _default_settings(end_token: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    return settings | ({"eos_token": end_token} if end_token else {})


def _end_token_of(settings: dict[str, Any]) -> str | None:
    token = settings.get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def end_id(tokenizer: Tokenizer, settings: dict[str, Any]) -> int | None:
    """Returns the id of the end-of-text token, or None when the tokenizer has none."""
    token = _end_token_of(settings)
    return None if token is None else tokenizer.token_to_id(token)


def begin_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer puts before every text, as a prompt is read; often one, or none."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)]) if plain else ()


def begin_text(files: TokenizerFiles) -> str:
    """Returns the text of what a tokenizer puts before every text, as ``<s>``; "" for nothing."""
    tokenizer = Tokenizer.from_str(files.text)
    return "".join(tokenizer.id_to_token(token) or "" for token in begin_ids(tokenizer))


def chat_template(files: TokenizerFiles | None, path: str) -> ChatTemplate | None:
    """Returns how conversations are written; None where neither a tokenizer nor the user says so.

    Args:
        files: of a given tokenizer; None for one that is trained on the text, whose end token no text is.
        path: of a template that takes the place of the tokenizer's own; empty for that one.

    Raises:
        ConfigError: when there is no such file.
    """
    tool_text = ""
    if path:
        text = read_chat_template(path)
    elif files is None:
        return None
    else:
        templates = _own_chat_templates(files)
        text, tool_text = templates.get("default", ""), templates.get("tool_use", "")
        if not text:
            return None
    if files is None:
        if names := sorted(set(re.findall(r"\b(?:bos|eos)_token\b", text))):
            raise ConfigError(
                f"data.chat_template = {path!r} writes {' and '.join(names)}, and a tokenizer that is trained on the "
                "text has no text for them; write marks of your own instead (the end token follows each conversation "
                "by itself), or give data.tokenizer one that has them"
            )
        return ChatTemplate(text=text, special_tokens={}, end_token="")
    special_tokens = {
        name: token for name in files.settings if name.endswith("_token") and (token := _token(files, name))
    }
    end_token = special_tokens.get("eos_token", "")
    return ChatTemplate(text=text, special_tokens=special_tokens, end_token=end_token, tool_text=tool_text)


def read_chat_template(path: str) -> str:
    """Reads a chat template.

    Raises:
        ConfigError: when there is no such file, or it isn't text.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template = {path!r} can't be read ({error}); give the path of a file of Jinja, as "
            f"{CHAT_TEMPLATE} beside a tokenizer"
        ) from None


def _own_chat_templates(files: TokenizerFiles) -> dict[str, str]:
    """Returns the templates that come with a tokenizer, by name: ``default``, and ``tool_use`` for tools."""
    if CHAT_TEMPLATE in files.companions:
        return {"default": files.companions[CHAT_TEMPLATE]}
    text: object = files.settings.get("chat_template")
    if "chat_template.json" in files.companions:
        text = parse_json(files.companions["chat_template.json"])
        text = text.get("chat_template") if isinstance(text, dict) else None
    if isinstance(text, list):
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        return {str(name): template for name, template in named.items() if isinstance(template, str)}
    return {"default": text} if isinstance(text, str) else {}


def _token(files: TokenizerFiles, name: str) -> str:
    """Returns the text of a special token of a tokenizer's settings; "" for none."""
    token = files.settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def end_text(files: TokenizerFiles) -> str:
    """Returns the text of the end token; "" where there is none."""
    return _token(files, "eos_token")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns the largest token id plus one: the least number of rows of a model's embedding."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def splits_at_newlines(text: str) -> bool:
    """Returns whether text may be split after a lone newline between visible characters without changing a token.

    True for a byte-level BPE with GPT-2's rule and no normaliser, where a newline is a separate pre-token.

    Args:
        text: contents of ``tokenizer.json``.
    """
    tokenizer_fields = parse_json(text)
    pre_tokenizer = tokenizer_fields.get("pre_tokenizer") or {}
    return (
        tokenizer_fields.get("normalizer") is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
        and not pre_tokenizer.get("add_prefix_space", True)
    )
