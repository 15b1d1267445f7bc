"""What a model alone refuses, found before its text is prepared, which may take hours."""

from __future__ import annotations

from meshwright.data.config import DataConfig
from meshwright.data.sources import list_sources
from meshwright.errors import ConfigError
from meshwright.jobs.model_reading import ReadModel, read_model
from meshwright.models.analysis.document_masks import check_positions
from meshwright.models.build import check_function
from meshwright.train.run_config import RunConfig


def check_model(config: RunConfig) -> None:
    """Refuses a wrong name or size of a model, without any text.

    Args:
        config: of the run that would train it; its model alone is read.

    Raises:
        ConfigError: with the rule and the nearest that works.
    """
    if config.model.kind == "function":
        check_function(config.model)
    else:
        read_model(config, None, None)


def read_early(config: RunConfig, text: DataConfig) -> ReadModel | None:
    """Refuses a wrong name or size, and a function's model that can't keep documents apart, before text is prepared.

    Args:
        config: of the run.
        text: its data, with the tokenizer resolved.

    Returns:
        A function's model for the vocabulary that the config asks for; None where the text says more than the config.

    Raises:
        ConfigError: with the rule and the nearest that works.
        DataError: for text that isn't there.
    """
    if config.model.kind == "type":
        read_model(config, None, None)
    if config.model.kind != "function":
        return None
    check_function(config.model)
    try:
        model = read_model(config, text.vocab_size, config.data.sequence)
    except ConfigError:
        # The vocabulary of the text may be one that the function takes.
        return None
    if config.data.separates_documents and _has_documents(text):
        check_positions(model.built)
    return model


def _has_documents(text: DataConfig) -> bool:
    """Returns whether a text may have several documents: all but one file of plain text, which is one."""
    sources = list_sources(text.paths)
    return len(sources) > 1 or sources[0].kind in ("jsonl", "parquet")
