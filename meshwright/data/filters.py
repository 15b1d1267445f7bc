"""Filters of documents: language, quality and personal data, by datatrove's blocks; an optional package."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.config import Config
from meshwright.data.conversations import Document
from meshwright.errors import ConfigError

Quality = Literal["gopher-quality", "gopher-repetition", "c4", "fineweb"]
LANGUAGE_MODELS = ("ft176", "glotlid")
"""fastText models that datatrove downloads by itself: lid.176 of fastText, and GlotLID v3."""
_SAMPLE = "The weather was fine that day, and the ships left the harbour with the tide. " * 20
"""A text that goes through every block once, so that what a block lacks is seen before the first document."""
_ORIGINAL = "document"
"""Key of datatrove's metadata under which a document goes through the blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig(Config):
    """Which documents stay, and what of them; needs datatrove: ``pip install 'meshwright[text]'``."""

    languages: tuple[str, ...] = ()
    """Keep documents in these languages, by the labels of the language model: ``en de`` (ft176), ``eng deu``
    (glotlid). Empty keeps all."""
    language_model: str = "ft176"
    """fastText model that tells the language: ``ft176`` or ``glotlid``, which datatrove downloads once, or the path of
    a model's ``.bin`` file."""
    language_threshold: float = 0.65
    """Probability that one of ``languages`` must exceed."""
    quality: tuple[Quality, ...] = ()
    """Rules of quality, in this order, with datatrove's thresholds: ``gopher-quality`` and ``gopher-repetition`` (Rae
    et al. 2021), ``c4`` (Raffel et al. 2020; it removes lines too), ``fineweb`` (Penedo et al. 2024)."""
    mask_personal: bool = False
    """Replace e-mail addresses, and the IP addresses of public networks."""
    near_duplicates: bool = False
    """Drop documents nearly equal to an earlier one, by MinHash: 5-grams of words, 14 buckets of 8 hashes, so that
    pairs above a Jaccard similarity of about 0.8 are found."""
    word_language: str = "eng"
    """Language whose words ``quality`` and ``near_duplicates`` count, by ISO 639-3; spaCy splits most of them."""

    @property
    def changes_documents(self) -> bool:
        """Whether reading a file needs a filter at all."""
        return bool(self.languages or self.quality or self.mask_personal)

    @property
    def changing(self) -> str:
        """The setting by which documents that stay may change; "" for none."""
        if self.mask_personal:
            return "mask_personal"
        return "quality = 'c4'" if "c4" in self.quality else ""

    @property
    def is_active(self) -> bool:
        """Whether any filter is asked for."""
        return self.changes_documents or self.near_duplicates

    def check(self) -> None:
        """Raises `ConfigError` for a threshold out of range or a setting that would have no effect."""
        if not 0.0 <= self.language_threshold < 1.0:
            raise ConfigError(
                f"data.filters.language_threshold = {self.language_threshold} must be at least 0 and below 1"
            )
        default = FilterConfig.__dataclass_fields__
        for name, needed_by, is_needed in (
            ("language_model", "languages", bool(self.languages)),
            ("language_threshold", "languages", bool(self.languages)),
            ("word_language", "quality or near_duplicates", bool(self.quality) or self.near_duplicates),
        ):
            if not is_needed and getattr(self, name) != default[name].default:
                raise ConfigError(f"data.filters.{name} has no effect without data.filters.{needed_by}; leave it out")
        if len(set(self.quality)) < len(self.quality):
            raise ConfigError("data.filters.quality names a rule twice; name each once")


class DocumentFilters:
    """datatrove's blocks in the order language, quality, personal data, as one pass over documents.

    Args:
        config: which of them.
    """

    def __init__(self, config: FilterConfig) -> None:
        # Fresh blocks for each task: the addresses that replace others go round within it.
        self._blocks = [*_language_block(config), *_quality_blocks(config), *_personal_block(config)]

    def apply(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents that stay, as they stay; one whose text was changed has no answers."""
        if not self._blocks:
            yield from documents
            return
        from datatrove.data import Document as Filtered

        stream: Any = (
            Filtered(text=document.text, id=str(number), metadata={_ORIGINAL: document})
            for number, document in enumerate(documents)
        )
        for block in self._blocks:
            stream = block(stream)
        for filtered in stream:
            original: Document = filtered.metadata[_ORIGINAL]
            if filtered.text == original.text:
                yield original
            elif filtered.text:  # a rule may have removed every line
                yield dataclasses.replace(original, text=filtered.text)

    def dropped(self) -> dict[str, int]:
        """Returns how many documents each rule has dropped so far, by datatrove's names."""
        counts: Counter[str] = Counter()
        for block in self._blocks:
            totals = {name: int(value.total) for name, value in block.stats.stats.items()}
            reasons = {name: count for name, count in totals.items() if name.startswith("dropped_")}
            # Not every rule gives a reason.
            unnamed = totals.get("dropped", 0) - sum(reasons.values())
            counts.update({name.removeprefix("dropped_"): count for name, count in reasons.items()})
            counts.update({type(block).__name__: unnamed} if unnamed else {})
        return dict(counts)


def check_filters(config: FilterConfig) -> None:
    """Tries every filter that is asked for on one text, so that what lacks is said before any file is read.

    Raises:
        ConfigError: without datatrove or a package that a filter needs, a model file, or words of the language.
    """
    if not config.is_active:
        return
    if importlib.util.find_spec("datatrove") is None:
        raise ConfigError("data.filters need datatrove, which isn't here: pip install 'meshwright[text]'")
    try:
        list(DocumentFilters(config).apply([Document(text=_SAMPLE)]))
        if config.near_duplicates or config.quality:
            word_tokenizer(config.word_language).word_tokenize(_SAMPLE)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"data.filters need a package that isn't here: {str(error).strip()}") from error
    except Exception as error:  # spaCy and the others raise anything
        raise ConfigError(f"data.filters can't be set up ({type(error).__name__}: {str(error)[:200]})") from error


def word_tokenizer(language: str) -> Any:
    """Returns datatrove's splitter of words for a language.

    Raises:
        ConfigError: when it has none.
    """
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    try:
        return load_word_tokenizer(language)
    except ValueError:
        raise ConfigError(
            f"data.filters.word_language = {language!r}: datatrove has no words for it; give an ISO 639-3 code, as eng"
        ) from None


def _language_block(config: FilterConfig) -> Iterator[Any]:
    if not config.languages:
        return
    from datatrove.pipeline.filters import LanguageFilter

    backend = "glotlid" if config.language_model == "glotlid" else "ft176"
    block = LanguageFilter(list(config.languages), config.language_threshold, backend=backend)
    try:
        if config.language_model not in LANGUAGE_MODELS:
            _give_model(block, Path(os.path.expanduser(config.language_model)))
        labels = _labels(block.model.model)
    except Exception as error:  # the download, its lock and fastText raise anything
        raise ConfigError(
            f"data.filters.language_model = {config.language_model!r} can't be loaded ({type(error).__name__}: "
            f"{str(error)[:160]}); give the path of a fastText model, as lid.176.bin fetched from fasttext.cc on a "
            "machine with a network"
        ) from error
    if unknown := [language for language in config.languages if language not in labels]:
        raise ConfigError(
            f"data.filters.languages: the model has no label {', '.join(unknown)}; it has "
            f"{', '.join(sorted(labels)[:12])}{' ...' if len(labels) > 12 else ''}"
        )
    yield block


def _give_model(block: Any, path: Path) -> None:
    """Loads a model file into a language filter, in the stead of the one that it would download."""
    if not path.is_file():
        raise FileNotFoundError("no such file")
    from datatrove.utils.lid import FT176LID
    from fasttext.FastText import _FastText

    # The base class downloads in this property; its way of asking the model stays.
    kind = type("GivenModel", (FT176LID,), {"model": _FastText(str(path))})
    block.model = kind(block.languages)


def _labels(model: Any) -> set[str]:
    return {str(label).removeprefix("__label__") for label in model.labels}


def _quality_blocks(config: FilterConfig) -> Iterator[Any]:
    if not config.quality:
        return
    from datatrove.pipeline import filters

    word_tokenizer(config.word_language)
    kinds = {
        "gopher-quality": filters.GopherQualityFilter,
        "gopher-repetition": filters.GopherRepetitionFilter,
        "c4": filters.C4QualityFilter,
        "fineweb": filters.FineWebQualityFilter,
    }
    yield from (kinds[name](language=config.word_language) for name in config.quality)


def _personal_block(config: FilterConfig) -> Iterator[Any]:
    if config.mask_personal:
        from datatrove.pipeline.formatters import PIIFormatter

        yield PIIFormatter()
