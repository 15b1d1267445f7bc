"""Copies tensors into shared memory: from host memory synchronously, from a GPU on a side stream during training."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.tensor_shards import TensorShard, collect_local_shards, view_within
from meshwright.errors import CheckpointError
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.torch_compat.tensors import foreach_copy_


class Copier:
    """Copies a rank's saved shards of the state, again and again.

    From host memory the copy is done when `copy` returns. From a GPU it runs on a side stream, straight into the
    target, which is registered with the driver so that the device writes it by DMA. Forward and backward of the next
    step run meanwhile; the next update waits for `copy_event` on the device. Buffers, which a forward may change, are
    copied on the compute stream, in order with it.

    Args:
        local_shards: this rank's shards, in the order of `tensor_shards.collect_local_shards`.
        saved_shards: (index into ``local_shards``, shard) of those that it saves (`tensor_shards.assign_saved_shards`).
        changing: name prefix of the tensors that a forward may change (buffers); empty for none.
    """

    def __init__(
        self, local_shards: Sequence[TensorShard], saved_shards: Sequence[tuple[int, TensorShard]], changing: str = ""
    ) -> None:
        self._local_table, self._saved = list(local_shards), list(saved_shards)
        self._changing = [bool(changing) and shard.name.startswith(changing) for _, shard in saved_shards]
        self._sources: list[Tensor] | None = None
        self._registered: dict[int, bool] = {}
        self._stream: torch.cuda.Stream | None = None
        self.copy_event: torch.cuda.Event | None = None
        """CUDA event at the end of the last copy; None where the copy was synchronous."""

    def aim(self, tensors: Mapping[str, StateTensor]) -> None:
        """Resolves the views of the saved shards, which costs more than copying a small state.

        Args:
            tensors: name to tensor, as for `tensor_shards.collect_local_shards`; later copies read the same memory.

        Raises:
            CheckpointError: when the state's shards aren't those of the constructor.
        """
        local_shards = collect_local_shards(tensors)
        # The snapshot's table was written for these shards; other ones would be stored under wrong names.
        if [shard for shard, _ in local_shards] != self._local_table:
            raise CheckpointError("the state has other parts than those that snapshots were planned for")
        self._sources = [
            view_within(local_shards[index][1], local_shards[index][0].box, shard.box) for index, shard in self._saved
        ]

    def copy(self, targets: Sequence[Tensor], memory: mmap.mmap) -> None:
        """Starts to copy each saved shard to its target.

        Args:
            targets: CPU views of ``memory``, of the saved shards' shapes and dtypes.
            memory: shared memory behind the targets.

        Raises:
            CheckpointError: when it hasn't been aimed.
        """
        sources = self._sources
        if sources is None:
            raise CheckpointError("the first snapshot of a state needs its tensors")
        self.copy_event = None
        pairs = list(zip(targets, sources, self._changing))
        host_pairs = [(target, source) for target, source, _ in pairs if not source.is_cuda]
        if len(host_pairs) < len(pairs):
            device = next(source.device for source in sources if source.is_cuda)
            registered = self.register(memory, device)
            compute_stream_pairs = [
                (target, source) for target, source, changing in pairs if source.is_cuda and changing
            ]
            side_stream_pairs = [
                (target, source) for target, source, changing in pairs if source.is_cuda and not changing
            ]
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            # Buffers: the next forward, queued behind on this stream, must not change them under the copy.
            _copy_each(compute_stream_pairs, registered)
            # The side stream starts once the update that produced this state is done.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy_each(side_stream_pairs, registered)
                self.copy_event = torch.cuda.Event()
                self.copy_event.record(self._stream)
        _copy_each(host_pairs, False)

    def wait(self) -> None:
        """Waits until the last copy is done."""
        copy_event = self.copy_event
        if copy_event is not None:
            copy_event.synchronize()

    def register(self, memory: mmap.mmap, device: torch.device, pieces: Sequence[slice] = (slice(None),)) -> bool:
        """Registers memory for DMA by a GPU, once; returns False where that fails, so that copies are synchronous.

        Meanwhile the driver lets no other thread launch anything: a second for 15 GB, much longer where the process has
        not touched the pages. So a thread does it before the first copy, in pieces, with as long a pause between two.

        Args:
            memory: a segment's.
            device: the GPU.
            pieces: bytes that are registered one after the other; no tensor may lie in two.
        """
        if id(memory) not in self._registered:
            memory_tensor = torch.frombuffer(memory, dtype=torch.uint8)
            # A thread begins on the first GPU, where a call would make a context.
            with torch.cuda.device(device):
                self._registered[id(memory)] = _register_pieces([memory_tensor[piece] for piece in pieces])
        return self._registered[id(memory)]


def _register_pieces(pieces: Sequence[Tensor]) -> bool:
    """Registers bytes of host memory, (n,) uint8 each, with the current GPU; returns whether the driver took them."""
    took_s = 0.0
    for piece in pieces:
        # Meanwhile other threads launch what they have.
        time.sleep(took_s)
        started = time.perf_counter()
        error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        took_s = time.perf_counter() - started
        if error:
            # The runtime keeps the error for whoever asks next, which is the check behind the next launch.
            with contextlib.suppress(RuntimeError):
                torch.ones((), device="cuda")
            return False
    return True


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]], non_blocking: bool) -> None:
    """Copies (target, source) pairs of equal shapes in one call, without Python between tensors."""
    if pairs:
        foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking)
