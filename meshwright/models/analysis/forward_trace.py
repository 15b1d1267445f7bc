"""Follows targets and logits through the operators of a forward, to the loss that it returns.

A trial on a few hundred targets doesn't show what a loss does with one target in fifty thousand. The operators of one
forward do, on the meta device too, where a model of any size costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from meshwright.control_groups import allowed_memory_bytes
from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import duplicate_module
from meshwright.models.analysis.objective import nothing_dropped
from meshwright.models.analysis.outside_reads import OutsideRead, ReadWatch
from meshwright.models.build import BuiltModel
from meshwright.models.forward import IGNORED, author_output
from meshwright.models.structure import ModelStructure
from meshwright.torch_compat.tensors import LOG_SOFTMAX, TYPE_COPY, TorchDispatchMode, tree_leaves
from meshwright.units import format_bytes

ROWS = 2
"""Rows of the batch that is followed."""
TRIAL_BYTES = 32
"""Host memory of a trial for each weight: float64 of the weights, of two of their gradients, and of a copy."""
_COPIES = (torch.ops.aten.clone, TYPE_COPY)
"""Operators that copy a tensor; of another type at most. Views share the memory of what they show."""
_ENTROPIES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_FEW = 16
"""Numbers in a tensor up to which they are single words."""
_COMPARISONS = {getattr(torch.ops.aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "isin")}
_MEAN = 1
"""Reduction of a cross-entropy to its mean. Source: ATen/core/Reduction.h."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTrace:
    """What one forward did, with targets where it takes them."""

    entropy_alone: bool = False
    """Whether its loss is torch's cross-entropy of its logits with its targets, and nothing else."""
    changes_targets: bool = False
    """Whether it writes into its targets."""
    trained_scalars: bool = False
    """Whether it gives a scalar with a gradient, its loss included."""
    moved_buffers: tuple[str, ...] = ()
    """Buffers that it changes."""
    outside: tuple[OutsideRead, ...] = ()
    """Weights of layers that it reads outside of a call of their layer, each once."""
    compared: tuple[int, ...] = ()
    """Numbers that whole numbers, as those of words, are compared with, and their neighbours."""


def trace_forward(module: nn.Module, structure: ModelStructure, length: int) -> ForwardTrace:
    """Runs a copy of a module as its author calls it and returns what its operators were.

    Args:
        module: of any size on the meta device, else small; it stays unchanged.
        structure: of the module.
        length: tokens of a row.

    Raises:
        Exception: whatever forward raises; on the meta device one that reads a tensor's numbers does.
    """
    module = duplicate_module(module)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    tokens, targets = (torch.zeros((ROWS, length), dtype=torch.int64, device=device) for _ in range(2))
    versions = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    watch = _LossWatch(targets)
    labels = "aligned" if structure.target_argument else ""
    outside: dict[str, OutsideRead] = {}

    def seen(_: torch.Tensor, read: OutsideRead | None) -> None:
        if read is not None:
            outside.setdefault(read.weight, read)

    with torch.enable_grad(), nothing_dropped(), ReadWatch(module, structure.layers, _memory, seen), watch:
        output = author_output(module, structure, tokens, targets, labels)
    moved = tuple(
        name
        for name, buffer in module.named_buffers()
        if name not in versions or versions[name][0] is not buffer or versions[name][1] != buffer._version
    )
    scalars = [*output.scalars.values(), *([output.loss] if output.loss is not None else [])]
    return ForwardTrace(
        entropy_alone=output.logits is not None
        and output.loss is not None
        and watch.is_entropy(output.loss, output.logits)
        and _keeps_gradient(output.loss, output.logits),
        changes_targets=watch.changes_targets,
        trained_scalars=any(scalar.requires_grad for scalar in scalars),
        moved_buffers=moved,
        outside=tuple(outside.values()),
        compared=tuple(sorted(watch.compared)),
    )


def settling_trace(built: BuiltModel, length: int) -> ForwardTrace | None:
    """Returns a forward's trace on the meta device where it does for a trial; None where only a trial shows the loss.

    It does where the loss is the cross-entropy of the logits alone, or none is given, and no buffer moves.

    Args:
        built: a model of any size, on meta; it stays unchanged.
        length: tokens of a row.
    """
    try:
        trace = trace_forward(built.module, built.structure, length)
    except Exception:
        # Its code reads numbers, or makes tensors on a device of its own.
        return None
    is_plain = trace.entropy_alone or not trace.trained_scalars
    return trace if is_plain and not trace.changes_targets and not trace.moved_buffers else None


def check_trial_memory(built: BuiltModel, elements: int) -> None:
    """Refuses a trial of a model as it is for which this machine hasn't the memory.

    Args:
        built: the model.
        elements: its weights.

    Raises:
        ConfigError: with the bytes, and what makes the trial unnecessary.
    """
    needed, memory = TRIAL_BYTES * elements, allowed_memory_bytes()
    if 2 * needed > memory:
        raise ConfigError(
            f"model '{built.config.name}': its operators don't show that its loss is the cross-entropy of its logits "
            f"and that no buffer changes, and a trial of its {elements / 1e9:.2f} G weights takes "
            f"{format_bytes(needed)}, more than half of the {format_bytes(memory)} that may be used here; nearest that "
            "works: torch.nn.functional.cross_entropy(logits, targets) as its whole loss, a forward that takes no "
            "targets and gives logits, or smaller sizes"
        )


@dataclass(frozen=True, slots=True)
class _Entropy:
    """A cross-entropy that was computed, by the memories that it read."""

    logits: int
    targets: int
    whole: bool
    """Whether each target is in it once, or each but the first of a row."""


class _LossWatch(TorchDispatchMode):
    """Follows copies of memory to the cross-entropies that are computed of them.

    Args:
        targets: (B, S) int64.
    """

    def __init__(self, targets: torch.Tensor) -> None:
        super().__init__()
        self._shape, self._targets = targets.shape, _memory(targets)
        self._origins: dict[int, int] = {}
        self._softmaxes: dict[int, int] = {}
        self._entropies: dict[int, _Entropy] = {}
        self._first_tokens: dict[int, set[int]] = {}
        # Memories of which a copy, a softmax or a loss was noted; and those of them that were written into afterwards.
        self._noted: set[int] = set()
        self._rewritten: set[int] = set()
        # A memory's number is used again once nobody holds it.
        self._held: list[torch.Tensor] = [targets]
        self.changes_targets = False
        self.compared: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        out = func(*args, **(kwargs or {}))
        self._held += [leaf for leaf in tree_leaves((args, kwargs or {}, out)) if isinstance(leaf, torch.Tensor)]
        written = [
            argument
            for argument, described in zip(args, func._schema.arguments)
            if described.alias_info is not None and described.alias_info.is_write
        ]
        memories = {_memory(leaf) for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)}
        self.changes_targets |= self._targets in memories
        self._rewritten |= memories & self._noted
        if func.overloadpacket in _COPIES:
            self._origins[_memory(out)] = _memory(args[0])
            self._noted |= {_memory(out), _memory(args[0])}
        elif func is torch.ops.aten.slice.Tensor and args[0].shape[:2] == self._shape and args[1] == 1:
            self._first_tokens.setdefault(self._origin(args[0]), set()).add(args[2] or 0)
        elif func.overloadpacket is LOG_SOFTMAX:
            self._softmaxes[_memory(out)] = self._origin(args[0])
            self._noted |= {_memory(out), _memory(args[0])}
        elif func.overloadpacket in _COMPARISONS and _is_whole(args[0]):
            self.compared |= {number + near for number in _numbers(args[1]) for near in (-1, 0, 1)}
        elif func in _ENTROPIES:
            self.compared.add(args[4])
            self._note_entropy(out[0], *args[:5])
        return out

    def is_entropy(self, loss: torch.Tensor, logits: torch.Tensor) -> bool:
        """Returns whether a scalar is the mean cross-entropy of ``logits: (B, S, V)`` with all targets.

        Not where anything between the two was written into after it was read, as by ``loss += penalty``.
        """
        entropy = self._entropies.get(self._origin(loss))
        return not self._rewritten and entropy is not None and entropy.whole and entropy.logits == self._origin(logits)

    def _note_entropy(
        self,
        out: torch.Tensor,
        log_shares: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
    ) -> None:
        """Notes the cross-entropy of logits whose log-softmax is ``log_shares``, with ``targets`` of any shape."""
        logits, origin = self._softmaxes.get(_memory(log_shares)), self._origin(targets)
        if logits is None or origin != self._targets:
            return
        rows, tokens = self._shape
        # Shifted by its own code: logits of all tokens but the last, with targets of all but the first.
        shifted = self._first_tokens.get(origin) == {1} and self._first_tokens.get(logits) == {0}
        whole = targets.numel() == (rows * (tokens - 1) if shifted else rows * tokens)
        usual = weight is None and reduction == _MEAN and ignored == IGNORED
        self._entropies[_memory(out)] = _Entropy(logits, origin, whole and usual)
        self._noted.add(_memory(out))

    def _origin(self, tensor: torch.Tensor) -> int:
        """Returns the memory that a tensor is a view or copy of."""
        memory = _memory(tensor)
        while memory in self._origins:
            memory = self._origins[memory]
        return memory


def _keeps_gradient(loss: torch.Tensor, logits: torch.Tensor) -> bool:
    """Returns whether torch alone makes the gradient between a loss and its logits: no function or hook of the code."""
    if loss._backward_hooks or logits._backward_hooks:
        return False
    node = loss.grad_fn
    while node is not None and node is not logits.grad_fn:
        if isinstance(node, BackwardCFunction):
            return False
        sources = [source for source, _ in node.next_functions if source is not None]
        # The logits' own product has several, where others are returned than the loss is of: copies of one memory.
        node = sources[0] if len(sources) == 1 else None
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _numbers(value: Any) -> list[int]:
    """Returns a whole number, or those of a few, that something is compared with; none on the meta device."""
    if isinstance(value, torch.Tensor):
        is_known = _is_whole(value) and value.numel() <= _FEW and value.device.type != "meta"
        return [int(number) for number in value.flatten().tolist()] if is_known else []
    return [int(value)] if isinstance(value, int) and not isinstance(value, bool) else []


def _memory(tensor: torch.Tensor) -> int:
    """Returns what identifies a tensor's memory while it is held, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)
