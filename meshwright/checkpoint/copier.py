"""Copies tensors into memory that other processes hold too: from host memory at once, from a GPU beside training."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.tensor_shards import TensorShard, parts_of, within
from meshwright.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class Copier:
    """Copies a rank's kept parts of the state, again and again.

    From host memory the copy is done when `copy` returns. From a GPU it runs on a stream of its own, straight into the
    target, which is registered with the driver so that the device writes it by itself: forward and backward of the next
    step run meanwhile, and `done` is what the next update has to wait for, on the device. Tensors that a forward
    may change are copied on the stream that computes, in order with it.

    Args:
        held: this rank's parts, in the order of `parts.parts_of`.
        kept: which of them it keeps (`parts.keepers`).
        changing: how the names of tensors begin that a forward may change, not updates alone; empty for none.
    """

    def __init__(
        self, held: Sequence[TensorShard], kept: Sequence[tuple[int, TensorShard]], changing: str = ""
    ) -> None:
        self._held, self._kept = list(held), list(kept)
        self._changing = [bool(changing) and part.name.startswith(changing) for _, part in kept]
        self._sources: list[Tensor] | None = None
        self._registered: dict[int, bool] = {}
        self._stream: Any = None
        self.done: Any = None
        """CUDA event of the last copy's end; None when it is done."""

    def aim(self, tensors: Mapping[str, Any]) -> None:
        """Looks up where the kept parts lie, which takes longer than to copy a small state.

        Raises:
            CheckpointError: when the state has other parts than it is made for.
        """
        held = parts_of(tensors)
        if [part for part, _ in held] != self._held:
            raise CheckpointError("the state has other parts than those that snapshots were planned for")
        self._sources = [within(held[index][1], held[index][0].box, part.box) for index, part in self._kept]

    def copy(self, targets: Sequence[Tensor], memory: mmap.mmap) -> None:
        """Begins to copy each kept part to its target.

        Args:
            targets: views of ``memory``, of the kept parts' shapes and types.
            memory: what the targets lie in.

        Raises:
            CheckpointError: when it hasn't been aimed.
        """
        import torch

        sources = self._sources
        if sources is None:
            raise CheckpointError("the first snapshot of a state needs its tensors")
        self.done = None
        pairs = list(zip(targets, sources, self._changing))
        near = [(target, source) for target, source, _ in pairs if not source.is_cuda]
        if len(near) < len(pairs):
            direct = self._register(memory)
            here = [(target, source) for target, source, changing in pairs if source.is_cuda and changing]
            beside = [(target, source) for target, source, changing in pairs if source.is_cuda and not changing]
            device = next(source.device for source in sources if source.is_cuda)
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            _copy_each(here, direct)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy_each(beside, direct)
                self.done = torch.cuda.Event()
                self.done.record(self._stream)
        _copy_each(near, False)

    def wait(self) -> None:
        """Waits until the last copy is done."""
        done = self.done
        if done is not None:
            done.synchronize()

    def _register(self, memory: mmap.mmap) -> bool:
        """Lets the GPU write to some memory, once; returns False where it can't, so that copies go through buffers."""
        import torch

        if id(memory) not in self._registered:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
            self._registered[id(memory)] = int(error) == 0
        return self._registered[id(memory)]


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]], non_blocking: bool) -> None:
    """Copies in one call, without Python between tensors."""
    import torch

    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking)
