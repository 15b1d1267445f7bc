"""``train.epochs`` becomes ``train.steps`` once the text is there, before a plan or a rank asks for steps."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from meshwright.data.loader import Loader
from meshwright.data.tokens import TokenSet
from meshwright.jobs.progress import Say
from meshwright.train.run_config import RunConfig


def with_counted_steps(config: RunConfig, token_set: TokenSet, say: Say | None = None) -> RunConfig:
    """Returns the config whose ``train.steps`` read the text ``train.epochs`` times, the last step whole.

    Where sites share the rows of a step, all of theirs count.

    Args:
        config: of the run; one without epochs is returned as it is.
        token_set: the prepared text.
        say: takes the line that says how many steps these are; None for none.

    Raises:
        DataError: for text that is shorter than a row.
        ConfigError: when so few steps leave none behind the warm-up.
    """
    train, data = config.train, config.data
    if not train.epochs:
        return config
    loader = Loader(
        token_set.train, rows=train.batch, sequence=data.sequence, seed=train.seed, packing=data.resolved_packing
    )
    rows_a_step = train.batch * config.outer.sites
    # As it is written: 0.07 of 100 rows are 7, and in floats a little more, which would be another step.
    steps = math.ceil(Fraction(str(train.epochs)) * loader.epoch_rows / rows_a_step)
    counted = dataclasses.replace(config, train=dataclasses.replace(train, steps=steps, epochs=0.0))
    counted.check()
    if say is not None:
        say(f"train.epochs = {train.epochs:g}: {steps} steps of {rows_a_step} rows, {loader.epoch_rows} rows an epoch")
    return counted
