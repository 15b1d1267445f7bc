"""trackio: a project in the package's own folder (``TRACKIO_DIR``), shown by ``trackio show``.

Source: https://github.com/gradio-app/trackio, trackio.init and Run.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping

from meshwright.monitor.trackers.contract import TrackedRun

PACKAGE = "trackio"


class TrackioTracker:
    """Logs to a run of trackio, whose name is this run's and a number: it resumes by name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.id = run.id or f"{run.name}-{uuid.uuid4().hex[:8]}"
        # It prints on standard output, where a command's result stands; a resumed run without settings would lose them.
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=run.project, name=self.id, resume="allow", embed=False,
                config=dict(run.config), auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queues the scalars of a step."""
        self._run.log(dict(scalars), step=step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Queues a text."""
        self._run.log({f"text/{tag}": text}, step=step)

    def close(self, finished: bool) -> None:
        """Writes what is queued."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
