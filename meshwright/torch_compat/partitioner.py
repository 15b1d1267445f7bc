"""Private names of the compiler's partitioner, which decides what a compiled layer keeps and what it computes again.

They are imported where they are called: torch's compiler takes a second to import, and few runs plan compiled layers.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.torch_compat import PrivateName
from meshwright.torch_compat.compiler import Policy, mark_recompute

PRIVATE_NAMES = (
    PrivateName(
        "torch._functorch.aot_autograd:aot_function",
        "forward and backward of a function as one graph, as torch.compile has them; public for no version",
    ),
    PrivateName(
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "the partition that torch.compile makes of such a graph",
    ),
    PrivateName(
        "torch._functorch.partitioners:get_default_op_list", "which operators that partition takes for fusible"
    ),
    PrivateName(
        "torch._inductor.decomposition:select_decomp_table", "the operators in which torch.compile writes a graph"
    ),
)
Partition = tuple[Any, Any]
"""Graph modules of forward, which returns its outputs and what is kept, and of backward."""


def partitions(
    function: Callable[..., Any], arguments: Sequence[torch.Tensor], parameters: int, policies: Sequence[Policy | None]
) -> list[Partition]:
    """Returns forward and backward of a function as torch.compile would run them, for each way to recompute.

    Args:
        function: of tensors, to a tensor from which gradients start.
        arguments: fake tensors of any shape; gradients flow to those that require them.
        parameters: how many of the first arguments are.
        policies: of `torch.utils.checkpoint` around the whole function; None for none.
    """
    aot: Any = importlib.import_module("torch._functorch.aot_autograd")
    inductor: Any = importlib.import_module("torch._inductor.decomposition")
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    results: list[Partition] = []

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Partition:
        for policy in policies:
            results.append(
                partitioners.min_cut_rematerialization_partition(
                    _tagged(joint, policy),
                    joint_inputs,
                    num_fwd_outputs=num_fwd_outputs,
                    static_lifetime_input_indices=list(range(parameters)),
                )
            )
        return results[0]

    traced = aot.aot_function(
        function,
        fw_compiler=lambda graph, _inputs: graph,
        partition_fn=partition,
        decompositions=inductor.select_decomp_table(),
        num_params_buffers=parameters,
    )
    with warnings.catch_warnings():
        # torch 2.13 warns of a name of its own when it copies a graph.
        warnings.simplefilter("ignore")
        traced(*arguments)
    return results


def _tagged(joint: Any, policy: Policy | None) -> Any:
    """Returns a copy of a joint graph, marked by a policy."""
    graph = copy.deepcopy(joint.graph)
    if policy is not None:
        mark_recompute(graph, policy)
    return torch.fx.GraphModule(joint, graph)


def operator_types() -> Any:
    """Returns the partitioner's kinds of operators: its ``is_fusible`` and ``is_view`` take a node of a graph."""
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    return partitioners.get_default_op_list()
