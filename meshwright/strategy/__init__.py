"""Runs layouts on custom models and loops: strategy, pipeline engine, layers, mesh and optimizer."""

from meshwright.strategy.hybrid import HybridParallelStrategy
from meshwright.strategy.layers import TensorParallelLinear, TensorParallelMultiheadAttention
from meshwright.strategy.mesh import device_mesh
from meshwright.strategy.pipeline import PipelineEngine
from meshwright.strategy.spec import PipelineStrategy, ShardingSpec
from meshwright.strategy.task_scheduler import DynamicTaskScheduler
from meshwright.strategy.zero import ZeroRedundancyOptimizer

__all__ = [
    "DynamicTaskScheduler",
    "HybridParallelStrategy",
    "PipelineEngine",
    "PipelineStrategy",
    "ShardingSpec",
    "TensorParallelLinear",
    "TensorParallelMultiheadAttention",
    "ZeroRedundancyOptimizer",
    "device_mesh",
]
