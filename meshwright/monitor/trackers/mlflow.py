"""MLflow: the store is the one that ``MLFLOW_TRACKING_URI`` names, or the package's default.

Source: https://mlflow.org/docs/latest/api_reference, mlflow.client.MlflowClient; limits of mlflow.utils.validation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from meshwright.monitor.trackers.contract import TrackedRun, flatten_config

PACKAGE = "mlflow"
_MOST_PARAMETERS = 100
"""Parameters of a request."""
_MOST_TEXT = 500
"""Characters of a parameter that every store takes."""
_REFUSED_SIGNS = re.compile(r"[^\w\-. /:]")
"""Signs that a metric's name may not have."""


class MlflowTracker:
    """Logs to an experiment of the project's name, in requests of a step each."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self.id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        parameters = [Param(key, value[:_MOST_TEXT]) for key, value in flatten_config(run.config).items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self.id, params=parameters[start : start + _MOST_PARAMETERS])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs the scalars of a step in one request."""
        now_ms = int(time.time() * 1e3)
        metrics = [self._metric(_REFUSED_SIGNS.sub("_", tag), value, now_ms, step) for tag, value in scalars.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text as a file of the run."""
        self._client.log_text(self.id, text, f"{tag}/{step:08d}.txt")

    def close(self, finished: bool) -> None:
        """Marks the run as ended where it is."""
        if finished:
            self._client.set_terminated(self.id)
