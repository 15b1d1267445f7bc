"""What islands can't do, refused before a rank starts."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.parallel.sync import find_exchange
from meshwright.spec.layout import Layout
from meshwright.train.config import OuterConfig
from meshwright.train.run_config import RunConfig
from meshwright.train.site_optimizer import check_site

_SITE_SETTINGS = (
    *("key_file", "site", "sites", "mode", "quorum"),
    *("grace_s", "staleness", "momentum_every", "wait_s"),
)
"""Settings of `OuterConfig` for sites and their server alone."""


def check_islands(config: RunConfig, layout: Layout, resumes: bool = False) -> None:
    """Refuses settings of the outer step that a layout can't obey.

    Args:
        config: of the run.
        layout: of the run.
        resumes: whether the run has been started before, whose settings stay though its islands may go.

    Raises:
        ConfigError: with what to write instead.
    """
    if config.outer.meet:
        check_site(config, layout)
        return
    named = [name for name in _SITE_SETTINGS if getattr(config.outer, name) != getattr(OuterConfig(), name)]
    if named:
        raise ConfigError(
            f"outer.{named[0]} = {getattr(config.outer, named[0])} is of sites that dial in at an outer server, and "
            "none is named; leave it out, or write --outer.meet HOST:PORT"
        )
    if layout.islands == 1:
        # Islands that the planner may take come with settings for them, whether or not it takes some.
        is_optional = config.layout == "auto" and "islands" in config.allow
        if config.outer != OuterConfig() and not resumes and not is_optional:
            raise ConfigError(f"outer.* says how islands join, and {layout} has one; write islands=2, or leave it out")
        return
    exchange, outer = find_exchange(config.outer.topology), config.outer
    exchange.check(layout.islands)
    if not exchange.global_mean and (outer.kind != "local_sgd" or outer.number_format != "none"):
        raise ConfigError(
            f"outer.topology = {exchange.name} averages the weights of a few islands, so that there is no movement of "
            "all to step along or to round; write --outer local_sgd and leave outer.compress out, or --outer.topology "
            "all_reduce"
        )
    if not exchange.global_mean and (outer.fragment_count, outer.delay_steps) != (1, 0):
        raise ConfigError(
            f"outer.fragments = {outer.fragment_count} and outer.delay = {outer.delay_steps} stream a movement from "
            f"outer weights that all islands share, which outer.topology = {exchange.name} has none of; write "
            "--outer.topology all_reduce, or leave both out"
        )
    if outer.warmup >= config.train.steps:
        raise ConfigError(
            f"outer.warmup = {outer.warmup} leaves none of train.steps = {config.train.steps} in which islands train "
            "by themselves; take fewer, or replicate in place of islands"
        )
    if config.train.rebalance:
        raise ConfigError(
            f"train.rebalance = {config.train.rebalance} moves rows between ranks of all islands, which agree on "
            "nothing within a round; leave it out, or take replicate in place of islands"
        )
    if config.recovery.on_sick == "rewind":
        raise ConfigError(
            "recovery.on_sick = rewind goes back with all ranks at once, and under islands a sick step is known to one "
            "island alone; write recovery.on_sick = skip or stop"
        )
