"""Settings of the data room: which text, how it becomes tokens, and how rows are cut from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.config import Config
from meshwright.data.filters import FilterConfig
from meshwright.errors import ConfigError

DEFAULT_VOCABULARY = 4096
"""Entries of a trained byte-level BPE where nothing else is asked for."""

TRAINED_TOKENIZERS = ("bpe", "chars")
"""Tokenizers that are made of the text itself; any other is given."""

PREPARED_FIELDS = (
    "tokenizer",
    "vocab_size",
    "text_field",
    "validation_share",
    "split",
    "normalise",
    "dedup",
    "limit_bytes",
)
"""Fields that change the prepared files; the others are read when rows are cut, or say where and with what to work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Config):
    """What to read, how to tokenise it, and how rows are cut."""

    paths: tuple[str, ...] = ()
    """Files (txt, jsonl, parquet; txt and jsonl also .gz or .zst), directories, globs, and URLs that fsspec knows; none
    means the Python source text of the running interpreter."""
    tokenizer: str = "auto"
    """``bpe`` trains a byte-level BPE, ``chars`` takes the characters of the corpus, anything else is a Hugging Face
    tokenizer: a directory, a ``tokenizer.json`` or a hub name. ``auto`` is the model's own where the model is a
    directory, else ``bpe``."""
    foreign_tokenizer: bool = False
    """Train a directory's weights on the ids of another tokenizer than its own, which mean other text to it."""
    vocab_size: int = DEFAULT_VOCABULARY
    """Entries of the trained BPE, end-of-text token included."""
    text_field: str = "text"
    """Field of a jsonl line, or column of a parquet file, that holds the text. Records without it may hold
    conversations: ``messages``, ``conversations``, or ``prompt`` and ``completion``."""
    targets: Literal["all", "answers"] = "all"
    """``all``: every token is learned; ``answers``: of conversations those that the assistant says, of a prompt and its
    completion those of the completion, with the end token behind it."""
    packing: Literal["auto", "stream", "whole", "single"] = "auto"
    """``stream``: rows are cut from all documents, one after the other; ``whole``: a row holds documents from their
    start, as many as fit, and is filled up with targets that nobody learns; ``single``: one document a row, for models
    that can't keep several apart. ``auto`` is ``whole`` where targets = answers."""
    add_bos: bool = True
    """Begin each document that no chat template writes with what a given tokenizer puts before every text, as ``<s>``
    or ``<bos>``, unless it begins so; many tokenizers have nothing to put there."""
    chat_template: str = ""
    """File of Jinja that writes conversations, instead of the tokenizer's own."""
    validation_share: float = 0.05
    """Share held out for validation: of the documents (split = hash), or of the one document's end (split = tail)."""
    split: Literal["hash", "tail"] = "hash"
    """``hash``: whole documents, chosen by their hash; ``tail``: the end of the only document. A corpus of one document
    has no other one to hold out, so its tail is held out in either case."""
    normalise: Literal["NFC", "NFKC", "none"] = "NFC"
    """Unicode normal form that the text is brought to first."""
    dedup: bool = True
    """Drop documents that are equal, after normalisation, to an earlier one."""
    limit_bytes: int | None = None
    """Take documents in the order of their hashes as long as they fit into this many bytes; none takes them all."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Which documents stay, by language, quality and likeness; none is asked for unless named."""
    sequence: int = 256
    """Tokens a row (S)."""
    mask_documents: bool = True
    """Ignore targets across a document's end, and start positions anew with each document."""
    workers: int = 0
    """Processes that prepare; 0 means one a core."""
    cache: str = ""
    """Directory under which prepared sets are kept; empty leaves the choice to the command."""

    def resolved(self, directory: str = "") -> DataConfig:
        """Returns the config with the tokenizer that ``auto`` stands for.

        Args:
            directory: of a model that has a tokenizer of its own; empty where there is none.
        """
        if self.tokenizer != "auto":
            return self
        return dataclasses.replace(self, tokenizer=directory or "bpe")

    @property
    def resolved_packing(self) -> Literal["stream", "whole", "single"]:
        """How documents are put into rows, with what ``auto`` stands for."""
        if self.packing != "auto":
            return self.packing
        return "whole" if self.targets == "answers" else "stream"

    @property
    def separates_documents(self) -> bool:
        """Whether the model must keep documents of a row apart."""
        return self.mask_documents and self.resolved_packing != "single"

    def prepared_settings(self) -> dict[str, Any]:
        """Returns the settings that change the prepared files; those that came later only where they are asked for."""
        settings = {name: getattr(self, name) for name in PREPARED_FIELDS}
        settings |= {"targets": self.targets} if self.targets != "all" else {}
        settings |= {"chat_template": self.chat_template} if self.chat_template else {}
        # Of a trained tokenizer nothing precedes a text.
        settings |= {} if self.tokenizer in TRAINED_TOKENIZERS else {"add_bos": self.add_bos}
        return settings | ({"filters": self.filters.to_dict()} if self.filters.is_active else {})

    def check(self) -> None:
        """Raises `ConfigError` for a size out of range or a setting that would have no effect."""
        if self.tokenizer in ("auto", "bpe") and self.vocab_size < 257:
            raise ConfigError(
                f"data.vocab_size = {self.vocab_size}: a byte-level BPE needs 256 bytes and an end-of-text token, "
                "so 257 at least; raise it, or use data.tokenizer = 'chars'"
            )
        if self.tokenizer not in ("auto", "bpe") and self.vocab_size != DEFAULT_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size = {self.vocab_size} has no effect with data.tokenizer = {self.tokenizer!r}: "
                "only 'bpe' is trained to a size; leave it out"
            )
        if not 0.0 <= self.validation_share < 1.0:
            raise ConfigError(f"data.validation_share = {self.validation_share} must be at least 0 and below 1")
        if self.split == "tail" and self.validation_share == 0.0:
            raise ConfigError("data.split = 'tail' has no effect with data.validation_share = 0; leave it out")
        if self.split == "tail" and self.targets == "answers":
            raise ConfigError(
                "data.split = 'tail' cuts one document, and data.targets = 'answers' keeps conversations whole; leave "
                "split out: some conversations are held out (data.validation_share)"
            )
        if self.targets == "answers" and self.filters.changing:
            raise ConfigError(
                f"data.filters.{self.filters.changing} changes texts, and data.targets = 'answers' knows answers by "
                "their places in them; filter the set first, or leave one of both out"
            )
        if self.resolved_packing == "whole" and not self.mask_documents:
            raise ConfigError(
                "data.mask_documents = false lets the documents of a row see each other, and data.packing = 'whole' "
                "keeps them apart; leave one of both out, or write data.packing = 'single', which puts one in a row"
            )
        if not self.add_bos and self.tokenizer in TRAINED_TOKENIZERS:
            raise ConfigError(
                f"data.add_bos = false has no effect with data.tokenizer = {self.tokenizer!r}, which puts nothing "
                "before a text; leave it out"
            )
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(f"data.limit_bytes = {self.limit_bytes} must be 1 or more; leave it out for no limit")
        if self.sequence < 1:
            raise ConfigError(f"data.sequence = {self.sequence} must be 1 or more tokens")
        if self.workers < 0:
            raise ConfigError(f"data.workers = {self.workers} must be 1 or more, or 0 for one a core")
        if not self.tokenizer:
            raise ConfigError("data.tokenizer is empty; use 'auto', 'bpe', 'chars' or the path of a tokenizer")
        if "" in self.paths:
            raise ConfigError("data.paths holds an empty path; name files, directories or globs")
