"""meshwright plans, proves, runs and recovers distributed training of language models on PyTorch.

Example::

    import meshwright

    model = meshwright.ModelConfig(name="gpt2", layers=2, width=64, heads=2)
    print(meshwright.plan(model=model, cluster="8xh100", batch=64, sequence=512).layout)
    assert meshwright.verify(model=model, layout="shard=2,zero=3", steps=1).passed
    result = meshwright.train(meshwright.RunConfig(model=model, layout="shard=2,zero=3"))
    print(result.validation_loss, result.run)

A name loads what it needs, torch included, when it is used first; ``import meshwright`` alone loads neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checkpoint.config import CheckpointConfig as CheckpointConfig
    from meshwright.cluster.cluster import Cluster as Cluster
    from meshwright.data.config import DataConfig as DataConfig
    from meshwright.data.filters import FilterConfig as FilterConfig
    from meshwright.errors import CheckpointError as CheckpointError
    from meshwright.errors import ClusterError as ClusterError
    from meshwright.errors import ConfigError as ConfigError
    from meshwright.errors import DataError as DataError
    from meshwright.errors import LaunchError as LaunchError
    from meshwright.errors import MeshwrightError as MeshwrightError
    from meshwright.errors import PlanError as PlanError
    from meshwright.errors import RankError as RankError
    from meshwright.jobs.calibrate import CalibrationResult as CalibrationResult
    from meshwright.jobs.calibrate import calibrate as calibrate
    from meshwright.jobs.early_model import check_model as check_model
    from meshwright.jobs.export import ExportResult as ExportResult
    from meshwright.jobs.export import export as export
    from meshwright.jobs.generate import GenerateResult as GenerateResult
    from meshwright.jobs.generate import generate as generate
    from meshwright.jobs.inspect import InspectResult as InspectResult
    from meshwright.jobs.inspect import inspect as inspect
    from meshwright.jobs.nodes import NodeOptions as NodeOptions
    from meshwright.jobs.plan import ask as ask
    from meshwright.jobs.plan import plan as plan
    from meshwright.jobs.plan import plannable_model as plannable_model
    from meshwright.jobs.plan import scaling as scaling
    from meshwright.jobs.plan_model import PlannableModel as PlannableModel
    from meshwright.jobs.plan_model import PlanResult as PlanResult
    from meshwright.jobs.plan_model import ScalingResult as ScalingResult
    from meshwright.jobs.plan_model import model_of_sizes as model_of_sizes
    from meshwright.jobs.prepare import prepare as prepare
    from meshwright.jobs.prepare_engines import PrepareConfig as PrepareConfig
    from meshwright.jobs.proof_reports import JobReport as JobReport
    from meshwright.jobs.proof_reports import LoopReport as LoopReport
    from meshwright.jobs.proof_reports import VerifyReport as VerifyReport
    from meshwright.jobs.ranks import launch_ranks as launch_ranks
    from meshwright.jobs.recipe import RecipeResult as RecipeResult
    from meshwright.jobs.recipe import run_recipe as run_recipe
    from meshwright.jobs.requests import CalibrateConfig as CalibrateConfig
    from meshwright.jobs.requests import InspectConfig as InspectConfig
    from meshwright.jobs.requests import LoopConfig as LoopConfig
    from meshwright.jobs.requests import PlanConfig as PlanConfig
    from meshwright.jobs.requests import VerifyConfig as VerifyConfig
    from meshwright.jobs.train import train as train
    from meshwright.jobs.train import trials as trials
    from meshwright.jobs.train_result import TrainResult as TrainResult
    from meshwright.jobs.trials import Trial as Trial
    from meshwright.jobs.verify import verify as verify
    from meshwright.jobs.verify_job import verify_job as verify_job
    from meshwright.jobs.verify_loop import verify_loop as verify_loop
    from meshwright.launch.config import LaunchConfig as LaunchConfig
    from meshwright.launch.config import RayTasksConfig as RayTasksConfig
    from meshwright.launch.config import SlurmArrayConfig as SlurmArrayConfig
    from meshwright.models.config import ModelConfig as ModelConfig
    from meshwright.monitor.config import MonitorConfig as MonitorConfig
    from meshwright.monitor.loop_meter import meter as meter
    from meshwright.spec.layout import Layout as Layout
    from meshwright.spec.plan import Plan as Plan
    from meshwright.strategy import DynamicTaskScheduler as DynamicTaskScheduler
    from meshwright.strategy import HybridParallelStrategy as HybridParallelStrategy
    from meshwright.strategy import PipelineEngine as PipelineEngine
    from meshwright.strategy import PipelineStrategy as PipelineStrategy
    from meshwright.strategy import ShardingSpec as ShardingSpec
    from meshwright.strategy import TensorParallelLinear as TensorParallelLinear
    from meshwright.strategy import TensorParallelMultiheadAttention as TensorParallelMultiheadAttention
    from meshwright.strategy import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from meshwright.strategy import device_mesh as device_mesh
    from meshwright.train.config import EvaluationConfig as EvaluationConfig
    from meshwright.train.config import OptimizerConfig as OptimizerConfig
    from meshwright.train.config import RecoveryConfig as RecoveryConfig
    from meshwright.train.config import ScheduleConfig as ScheduleConfig
    from meshwright.train.config import TrainConfig as TrainConfig
    from meshwright.train.hooks import Hook as Hook
    from meshwright.train.hooks import Request as Request
    from meshwright.train.hooks import StepInfo as StepInfo
    from meshwright.train.run_config import RunConfig as RunConfig

__version__ = "0.1.0"

_MODULES = {
    "CheckpointConfig": "meshwright.checkpoint.config",
    "Cluster": "meshwright.cluster.cluster",
    "DataConfig": "meshwright.data.config",
    "FilterConfig": "meshwright.data.filters",
    "CheckpointError": "meshwright.errors",
    "ClusterError": "meshwright.errors",
    "ConfigError": "meshwright.errors",
    "DataError": "meshwright.errors",
    "LaunchError": "meshwright.errors",
    "MeshwrightError": "meshwright.errors",
    "PlanError": "meshwright.errors",
    "RankError": "meshwright.errors",
    "CalibrationResult": "meshwright.jobs.calibrate",
    "calibrate": "meshwright.jobs.calibrate",
    "check_model": "meshwright.jobs.early_model",
    "ExportResult": "meshwright.jobs.export",
    "export": "meshwright.jobs.export",
    "GenerateResult": "meshwright.jobs.generate",
    "generate": "meshwright.jobs.generate",
    "InspectResult": "meshwright.jobs.inspect",
    "inspect": "meshwright.jobs.inspect",
    "NodeOptions": "meshwright.jobs.nodes",
    "ask": "meshwright.jobs.plan",
    "plan": "meshwright.jobs.plan",
    "plannable_model": "meshwright.jobs.plan",
    "scaling": "meshwright.jobs.plan",
    "PlanResult": "meshwright.jobs.plan_model",
    "PlannableModel": "meshwright.jobs.plan_model",
    "ScalingResult": "meshwright.jobs.plan_model",
    "model_of_sizes": "meshwright.jobs.plan_model",
    "prepare": "meshwright.jobs.prepare",
    "PrepareConfig": "meshwright.jobs.prepare_engines",
    "JobReport": "meshwright.jobs.proof_reports",
    "LoopReport": "meshwright.jobs.proof_reports",
    "VerifyReport": "meshwright.jobs.proof_reports",
    "launch_ranks": "meshwright.jobs.ranks",
    "RecipeResult": "meshwright.jobs.recipe",
    "run_recipe": "meshwright.jobs.recipe",
    "CalibrateConfig": "meshwright.jobs.requests",
    "InspectConfig": "meshwright.jobs.requests",
    "LoopConfig": "meshwright.jobs.requests",
    "PlanConfig": "meshwright.jobs.requests",
    "VerifyConfig": "meshwright.jobs.requests",
    "train": "meshwright.jobs.train",
    "trials": "meshwright.jobs.train",
    "TrainResult": "meshwright.jobs.train_result",
    "Trial": "meshwright.jobs.trials",
    "verify": "meshwright.jobs.verify",
    "verify_job": "meshwright.jobs.verify_job",
    "verify_loop": "meshwright.jobs.verify_loop",
    "LaunchConfig": "meshwright.launch.config",
    "RayTasksConfig": "meshwright.launch.config",
    "SlurmArrayConfig": "meshwright.launch.config",
    "ModelConfig": "meshwright.models.config",
    "MonitorConfig": "meshwright.monitor.config",
    "meter": "meshwright.monitor.loop_meter",
    "Layout": "meshwright.spec.layout",
    "Plan": "meshwright.spec.plan",
    "DynamicTaskScheduler": "meshwright.strategy",
    "HybridParallelStrategy": "meshwright.strategy",
    "PipelineEngine": "meshwright.strategy",
    "PipelineStrategy": "meshwright.strategy",
    "ShardingSpec": "meshwright.strategy",
    "TensorParallelLinear": "meshwright.strategy",
    "TensorParallelMultiheadAttention": "meshwright.strategy",
    "ZeroRedundancyOptimizer": "meshwright.strategy",
    "device_mesh": "meshwright.strategy",
    "EvaluationConfig": "meshwright.train.config",
    "OptimizerConfig": "meshwright.train.config",
    "RecoveryConfig": "meshwright.train.config",
    "ScheduleConfig": "meshwright.train.config",
    "TrainConfig": "meshwright.train.config",
    "Hook": "meshwright.train.hooks",
    "Request": "meshwright.train.hooks",
    "StepInfo": "meshwright.train.hooks",
    "RunConfig": "meshwright.train.run_config",
}
"""Where each public name is defined."""

__all__ = ["__version__", *_MODULES]

# Two rooms are named as jobs are. They are loaded first, since loading one later would put it in its job's place.
for _room in ("calibrate", "train"):
    importlib.import_module(f"{__name__}.{_room}")
    del globals()[_room]

# Of a script that imports this first: what transformers imports afterwards must leave the GPUs to the ranks.
importlib.import_module(f"{__name__}.torch_compat.torchao_finder").watch_torchao()


def __getattr__(name: str) -> Any:
    """Loads a public name when it is used first; `meshwright.monitor.meter` has a second one."""
    if name == "monitor":
        return importlib.import_module("meshwright.monitor")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names beside what is loaded."""
    return sorted({*globals(), *__all__})
