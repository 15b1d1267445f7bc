"""Asks an outer server, before a rank starts, whether this run may dial in."""

from __future__ import annotations

import time

import torch

from meshwright.errors import ConfigError, LaunchError
from meshwright.jobs.model_reading import ReadModel
from meshwright.parallel.weights import named_weights
from meshwright.sites.client import Backoff, RefusedError
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig
from meshwright.train.site_optimizer import declare, make_client

_ATTEMPTS_S = 20.0
"""Time for a server that is just starting."""


def probe_server(config: RunConfig, model: ReadModel, layout: Layout) -> None:
    """Refuses a run that its outer server would refuse.

    Args:
        config: of the run.
        model: its model, on meta.
        layout: of the run.

    Raises:
        ConfigError: with the server's reason.
        LaunchError: when nothing answers there.
    """
    module = model.built.module
    shapes = {weight.name: tuple(weight.shape) for weight in named_weights(module, {}, 1)}
    dtype = torch.float64 if layout.precision == "float64" else torch.float32
    client = make_client(config, declare(config, model.fingerprint, shapes, dtype))
    deadline, backoff = time.monotonic() + _ATTEMPTS_S, Backoff()
    while True:
        try:
            # The pause before the last attempt may end after the deadline.
            client.probe(max(1.0, deadline - time.monotonic()))
            return
        except RefusedError as error:
            # Another run may have this site's number for a while: its ranks ask again.
            if not error.final:
                return
            raise ConfigError(f"the outer server at {config.outer.meet} refuses this site: {error}") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"no outer server answers at outer.meet = {config.outer.meet}: {error}; start one there with "
                    "meshwright serve-outer, and give its key as outer.key_file"
                ) from None
            time.sleep(backoff.next_pause_s())
