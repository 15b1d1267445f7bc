"""A compiler for tests that makes no kernels: what Dynamo and AOTAutograd trace runs as it is.

Forward and backward are cut by torch's own partitioner, and rewritten as the options of ``torch.compile`` ask.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

Look = Callable[[Any], None]


def install(of_layer: Look = lambda graph: None, of_backward: Look = lambda graph: None, whole: bool = False) -> None:
    """Lets torch.compile trace without making kernels, in this process.

    Args:
        of_layer: gets each graph that Dynamo has traced.
        of_backward: gets each backward's graph.
        whole: Dynamo raises where it would break a graph.
    """
    warnings.simplefilter("ignore")  # the compiler warns of its own deprecated parts
    dynamo: Any = importlib.import_module("torch._dynamo.backends.common")
    functorch: Any = importlib.import_module("functorch.compile")

    def backend(graph: Any, inputs: Any, options: Any) -> Any:
        def rewritten(part: Any, _inputs: Any) -> Any:
            options["post_grad_custom_pre_pass"](part.graph)
            part.recompile()
            return functorch.make_boxed_func(part.forward)

        def cut(joint: Any, joint_inputs: Any, **more: Any) -> Any:
            options["joint_custom_pre_pass"](joint.graph)
            forward, backward = functorch.min_cut_rematerialization_partition(joint, joint_inputs, **more)
            of_backward(backward.graph)
            return forward, backward

        of_layer(graph.graph)
        return dynamo.aot_autograd(fw_compiler=rewritten, bw_compiler=rewritten, partition_fn=cut)(graph, inputs)

    torch.compile = functools.partial(torch.compile, backend=backend, fullgraph=whole)


def made_bytes(backward: Any) -> int:
    """Returns the bytes that a backward's graph gets from its forward's operators, without what forward was given."""
    kept = [node for node in backward.find_nodes(op="placeholder") if not node.name.startswith(("primals", "tangents"))]
    storages = [node.meta["val"].untyped_storage() for node in kept if isinstance(node.meta["val"], torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
