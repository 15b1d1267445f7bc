"""Private names of torch.compile.

The compiler's modules are imported where they are called: that takes a second, and few runs compile layers.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName(
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "what the compiler's options take for a rewrite of its graphs, with a key for its cache on disk",
    ),
    PrivateName(
        "torch._functorch.config:view_replay_for_aliased_outputs",
        "whether a view that a graph returns is made by its recorded views, which may read freed sizes",
    ),
    PrivateName(
        "torch._functorch._aot_autograd.functional_utils:ViewMetaSequence",
        "those records, which are written to disk beside a graph",
    ),
    PrivateName("torch._dynamo.exc:Unsupported", "what tracing a whole function raises where it would break the graph"),
    PrivateName("torch._dynamo.exc:UserError", "what it raises where the graph would depend on values"),
    PrivateName("torch._dynamo.exc:FailOnRecompileLimitHit", "what it raises where it was traced too often"),
)
Rewrite = Callable[[torch.fx.Graph], None]
Policy = Callable[[object, Sequence[Any]], CheckpointPolicy]
"""Says of an operator and its arguments whether what it returns is kept or computed again."""


def can_compile() -> bool:
    """Returns whether torch.compile finds what it needs for a GPU: Triton, and a C compiler for its launchers."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


def graph_options(of_both: Rewrite, of_each: Rewrite, key: str) -> dict[str, Any]:
    """Returns options of ``torch.compile`` that rewrite its graphs.

    Args:
        of_both: rewrites forward and backward while they are one graph, before it is decided what is kept between them.
        of_each: rewrites each of the two, or the only one where nothing needs a gradient.
        key: names what the two do: graphs are found again on disk by it.
    """
    _forget_recorded_views()
    base: Any = importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass

    class GraphPass(base):  # type: ignore[misc]
        def __init__(self, rewrite: Rewrite) -> None:
            self._rewrite = rewrite

        def __call__(self, graph: torch.fx.Graph) -> None:
            self._rewrite(graph)

        def uuid(self) -> str:
            return key

    return {"joint_custom_pre_pass": GraphPass(of_both), "post_grad_custom_pre_pass": GraphPass(of_each)}


def _forget_recorded_views() -> None:
    """Has graphs make the views that they return from strides.

    The record of a view of a linear layer's product points at sizes that are freed by then: a graph found again on
    disk returned views of any shape, or the process that wrote it there died (torch 2.11 and 2.13).
    """
    settings: Any = importlib.import_module("torch._functorch.config")
    settings.view_replay_for_aliased_outputs = False
    records: Any = importlib.import_module("torch._functorch._aot_autograd.functional_utils").ViewMetaSequence
    records.__getstate__ = lambda record: record.__dict__ | {"sequence": []}


def tracing_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of a function that can't be traced as one graph, or not as often as its arguments ask for."""
    errors: Any = importlib.import_module("torch._dynamo.exc")
    return errors.Unsupported, errors.UserError, errors.FailOnRecompileLimitHit


def mark_recompute(graph: torch.fx.Graph, policy: Policy) -> None:
    """Marks each operator of forward in a graph of both passes as a checkpoint around it would mark it.

    Operators of higher order are left to the compiler.
    """
    for node in graph.nodes:
        # The tracer notes which operators backward added, and which belong to one of the two whatever is kept.
        if node.op != "call_function" or node.meta.get("partitioner_tag", "is_forward") != "is_forward":
            continue
        made_by = node.args[0] if node.target is operator.getitem else node
        if isinstance(made_by.target, torch._ops.OpOverload):
            arguments = [getattr(item, "meta", {}).get("val", item) for item in made_by.args]
            node.meta |= {"recompute": policy(made_by.target, arguments), "ac_graph_id": 0}


def keep_before_changes(graph: torch.fx.Graph) -> None:
    """Marks what forward makes of inputs that it changes, as kept: backward would make it of what they have become."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    changed = [node.args[0] for node in writes]
    for node in changed:
        for reader in node.users:
            if reader in writes or reader.meta.get("partitioner_tag") == "is_backward":
                continue
            if getattr(reader.target, "is_view", False):
                changed.append(reader)
                continue
            parts = (item for item in reader.users if item.target is operator.getitem)
            for made in (reader, *parts):
                made.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def mark_returned(graph: torch.fx.Graph) -> None:
    """Marks what forward returns to its caller, in a graph of both passes, for `keep_own_copies`."""
    (output,) = graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if node.op == "call_function" and node.meta.get("partitioner_tag", "is_forward") != "is_backward":
            node.meta["is_returned"] = True


def keep_own_copies(graph: torch.fx.Graph) -> None:
    """Has forward keep copies of what it returns: its caller may write into that, which torch doesn't see in a view."""
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    nodes = [(place, node) for place, node in enumerate(results) if isinstance(node, torch.fx.Node)]
    returned: dict[torch.fx.Node, int] = {}
    for place, node in nodes:
        if node.meta.get("is_returned"):
            returned.setdefault(node, place)
    # Of what is a view of an input torch knows when it was written into.
    made = {_viewed(node) for node in returned if _viewed(node).op == "call_function"}
    for place, node in nodes:
        if _viewed(node) in made and returned.get(node) != place:
            with graph.inserting_before(output):
                results[place] = graph.call_function(torch.ops.aten.clone.default, (node,))
            results[place].meta["val"] = node.meta["val"].clone()
    output.args = (type(output.args[0])(results),)


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Returns what a node of a graph is a view of, itself where it is none."""
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node
