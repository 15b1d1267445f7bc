"""A process group that stands for NCCL's where several ranks share one GPU, which NCCL refuses.

A collective copies its CUDA tensors to the host, exchanges bytes through gloo, and copies back. It is ordered as NCCL
orders its own: it begins after what the calling stream had queued, it runs on a side stream of the group, and `wait`
makes the waiting stream wait for that side stream. Results come late on purpose (`DELAY_S`): a stream that reads them
without having waited sees what was there before, and a buffer that is written while a collective still reads it spoils
what the others get. `install` puts the class in the place of `ProcessGroupNCCL`, so that everything else, names
included, is as under NCCL.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from meshwright.launch import devices

DELAY_S = float(os.environ.get("STAGED_DELAY_S", "0.0005"))
"""By which reads and results are late."""
SYNCHRONOUS = False
"""Whether results are there when a collective returns: a fault that this cures is a wait that is missing."""
CLOCK_HZ = 1.7e9
"""Of the GPU, roughly: what a delay on the device is counted in."""
COLLECTIVES, SINGLES = 0, 1
"""Tags of gloo's messages: of grouped sends and receives, and of those that stand alone."""

Hosts = list[torch.Tensor]
"""Contiguous tensors in host memory."""


class StagedWork(dist.Work):  # type: ignore[misc]
    """A collective under way; as NCCL's, `wait` blocks the current stream and holds the tensors until then."""

    def __init__(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        super().__init__()
        self.tensors: Sequence[torch.Tensor] = tensors
        self.issued = threading.Event()
        self.done: torch.cuda.Event | None = None
        self.failure: BaseException | None = None
        self._limit_s = limit_s

    def wait(self, timeout: object = None) -> bool:
        """Makes the current stream wait; the host only until the last copy is queued."""
        if not self.issued.wait(self._limit_s):
            raise RuntimeError(f"a staged collective is not done after {self._limit_s:g} s")
        if self.failure is not None:
            raise RuntimeError(f"a staged collective failed: {self.failure}") from self.failure
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.tensors = ()
        return True

    def is_completed(self) -> bool:
        """Returns whether the results are there."""
        return self.issued.is_set() and (self.done is None or self.done.query())


class Lane:
    """Runs jobs in order, in a thread and on a side stream of its own.

    Args:
        device: of the tensors.
        limit_s: for one job.
        delay_s: by which reads and results are late.
    """

    def __init__(self, device: torch.device, limit_s: float, delay_s: float) -> None:
        self._device, self._limit_s, self._delay_s = device, limit_s, delay_s
        self._on_cuda = device.type == "cuda"
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unwaited: deque[StagedWork] = deque()
        threading.Thread(target=self._serve, daemon=True, name="staged lane").start()

    def submit(
        self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], exchange: Callable[[Hosts], Hosts]
    ) -> StagedWork:
        """Queues a job behind what the calling stream has queued.

        Args:
            reads: tensors of any shape that are sent.
            writes: tensors of any shape that are received.
            exchange: makes the contents of ``writes``, of any shape with as many elements, of those of ``reads``.
        """
        work, ready = StagedWork([*reads, *writes], self._limit_s), None
        if self._on_cuda:
            # Blocking: many ranks on one device would otherwise spin on more cores than there are.
            ready = torch.cuda.Event(blocking=True)
            ready.record(torch.cuda.current_stream(self._device))
        # By their data: as under NCCL, a result that comes late is no later write for autograd.
        self._jobs.put((work, ready, [item.data for item in reads], [item.data for item in writes], exchange))
        return work

    def _serve(self) -> None:
        if self._on_cuda:
            torch.cuda.set_device(self._device)
        # A priority that nothing else has: the streams of a pool are handed out in turns, and one would be shared.
        side = torch.cuda.Stream(self._device, priority=-3) if self._on_cuda else None
        while True:
            work, ready, reads, writes, exchange = self._jobs.get()
            try:
                with torch.no_grad(), torch.cuda.stream(side):
                    self._run(work, ready, reads, writes, exchange, side)
            except BaseException as error:
                work.failure = error
            # As NCCL's watchdog: tensors that nobody waits for live until the device is done with them.
            self._unwaited.append(work)
            while self._unwaited and (self._unwaited[0].done is None or self._unwaited[0].done.query()):
                self._unwaited.popleft().tensors = ()
            work.issued.set()
            del work, ready, reads, writes, exchange

    def _run(
        self,
        work: StagedWork,
        ready: torch.cuda.Event | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        exchange: Callable[[Hosts], Hosts],
        side: torch.cuda.Stream | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        time.sleep(self._delay_s)
        received = exchange([item.to("cpu", copy=True).contiguous() for item in reads])
        if side is None:
            time.sleep(self._delay_s)
        else:
            received = [item.pin_memory() for item in received]
            torch.cuda._sleep(int(self._delay_s * CLOCK_HZ))
        for target, host in zip(writes, received, strict=True):
            target.copy_(host.view(target.shape), non_blocking=True)
        if side is not None:
            work.done = torch.cuda.Event()
            work.done.record(side)


class StagedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Stands for a whole process group: CUDA tensors are staged, CPU tensors go through gloo.

    Args:
        store: of this group.
        rank: in the group.
        size: of the group.
        options: of `ProcessGroupNCCL`; its time limit counts.
        stage_cpu: stage CPU tensors too, to try the class without a GPU.
    """

    class Options:
        """Stands for `ProcessGroupNCCL.Options`."""

        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self._timeout = timedelta(seconds=600)

    supports_splitting = supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options, stage_cpu: bool = False) -> None:
        super().__init__(rank, size)
        limit = options._timeout
        self._rank, self._size, self._limit_s, self._stage_cpu = rank, size, limit.total_seconds(), stage_cpu
        self._plain = dist.ProcessGroupGloo(dist.PrefixStore("plain", store), rank, size, timeout=limit)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged", store), rank, size, timeout=limit)
        self._lanes: dict[object, Lane] = {}
        self._batch = threading.local()

    def name(self) -> str:
        """Returns what NCCL's group is called."""
        return "nccl"

    getBackendName = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._stage_cpu else [torch.device("cuda"), torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> StagedGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        """Returns the name by which torch's functional collectives find the group."""
        return self._group_name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def shutdown(self) -> None:
        """Leaves the lanes to the end of the process."""

    abort = shutdown

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._stage_cpu

    def _submit(
        self,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        exchange: Callable[[Hosts], Hosts],
        lane: object = "",
    ) -> StagedWork:
        device = next((item.device for item in (*reads, *writes)), torch.device("cpu"))
        if (device, lane) not in self._lanes:
            self._lanes[device, lane] = Lane(device, self._limit_s, DELAY_S)
        work = self._lanes[device, lane].submit(reads, writes, exchange)
        # A single message may have to be received before it is sent: nothing here may wait for it.
        if SYNCHRONOUS and not lane:
            work.wait()
            if work.done is not None:
                work.done.synchronize()
        return work

    def _gathered(self, host: torch.Tensor) -> Hosts:
        """Returns what each rank holds of a tensor's shape, (n,) each, in rank order."""
        flat = host.reshape(-1)
        if not flat.numel():
            return [flat] * self._size
        sent = flat.view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._size)]
        self._gloo.allgather([received], [sent]).wait()
        return [item.view(host.dtype) for item in received]

    def _exchanged(self, chunks: Sequence[torch.Tensor], counts: Sequence[int]) -> Hosts:
        """Sends ``chunks[p]`` to rank p; returns what came from each, (counts[p],)."""
        dtype, size = chunks[0].dtype, chunks[0].element_size()
        sent = torch.cat([chunk.reshape(-1) for chunk in chunks]).view(torch.uint8)
        received = torch.empty(sum(counts) * size, dtype=torch.uint8)
        sizes = [[count * size for count in sequence] for sequence in (counts, [chunk.numel() for chunk in chunks])]
        self._gloo.alltoall_base(received, sent, *sizes, dist.AllToAllOptions()).wait()
        return [item.view(dtype) for item in received.split(sizes[0])]

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Sums, or as ``opts`` says, in rank order."""
        opts = opts or dist.AllreduceOptions()
        if self._is_plain(tensors[0]):
            return self._plain.allreduce(list(tensors), opts)
        reduction = opts.reduceOp
        return self._submit(
            tensors, tensors, lambda hosts: [reduced(self._gathered(host), reduction, self._size) for host in hosts]
        )

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gathers into a tensor for each rank."""
        if self._is_plain(inputs[0]):
            return self._plain.allgather(outputs, inputs)
        return self._submit(inputs, outputs[0], lambda hosts: self._gathered(hosts[0]))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gathers into one tensor each."""
        return self._submit(inputs, outputs, lambda hosts: [torch.cat(self._gathered(host)) for host in hosts])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        if self._is_plain(tensor):
            return self._plain._allgather_base(output, tensor)
        return self.allgather_into_tensor_coalesced([output], [tensor])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Sums in rank order and leaves each rank its run."""
        reduction = opts.reduceOp if opts else dist.ReduceOp.SUM

        def exchange(hosts: Hosts) -> Hosts:
            chunked = [host.reshape(self._size, -1) for host in hosts]
            return [
                reduced(self._exchanged(list(chunks), [chunks.shape[1]] * self._size), reduction, self._size)
                for chunks in chunked
            ]

        return self._submit(inputs, outputs, exchange)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        if self._is_plain(tensor):
            return self._plain._reduce_scatter_base(output, tensor, opts)
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    # As newer torch calls them.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Sums a tensor for each rank."""
        reduction = opts.reduceOp if opts else dist.ReduceOp.SUM
        return self._submit(
            inputs[0],
            outputs,
            lambda hosts: [reduced(self._exchanged(hosts, [hosts[0].numel()] * self._size), reduction, self._size)],
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Exchanges a tensor with each rank."""
        if self._is_plain(inputs[0]):
            return self._plain.alltoall(outputs, inputs)
        counts = [output.numel() for output in outputs]
        return self._submit(inputs, outputs, lambda hosts: self._exchanged(hosts, counts))

    def alltoall_base(self, output: Any, tensor: Any, received: Any, sent: Any, opts: Any = None) -> dist.Work:
        """Exchanges rows with each rank; equal shares where none are named."""
        if self._is_plain(tensor):
            return self._plain.alltoall_base(output, tensor, received, sent, opts or dist.AllToAllOptions())
        split = [list(sizes) or [item.shape[0] // self._size] * self._size for item, sizes in
                 ((output, received), (tensor, sent))]  # fmt: skip
        row = output[:1].numel() if output.shape[0] else 0
        counts = [count * row for count in split[0]]
        return self._submit(
            [tensor], [output], lambda hosts: [torch.cat(self._exchanged(hosts[0].split(split[1]), counts))]
        )

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """Sends one rank's tensors to all."""
        if self._is_plain(tensors[0]):
            return self._plain.broadcast(tensors, opts)
        root = opts.rootRank
        return self._submit(tensors, tensors, lambda hosts: [self._gathered(host)[root] for host in hosts])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """Gathers CPU tensors; meshwright gathers no others at one rank."""
        return self._plain.gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """Scatters CPU tensors; meshwright scatters no others from one rank."""
        return self._plain.scatter(outputs, inputs, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """Reduces CPU tensors; meshwright reduces no others at one rank."""
        return self._plain.reduce(tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Waits for all ranks on the host, and before that for what the current stream has queued."""
        if not self._stage_cpu and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._plain.barrier(dist.BarrierOptions())

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Sends to a rank, alone or as one of a batch."""
        return self._single("send", tensors[0], peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Receives from a rank, alone or as one of a batch."""
        return self._single("recv", tensors[0], peer, tag)

    def _single(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
        if self._is_plain(tensor):
            return getattr(self._plain, kind)([tensor], peer, tag)
        batch = getattr(self._batch, "messages", None)
        if batch is not None:
            batch.append((kind, tensor, peer))
            return None
        # As NCCL has a communicator for each pair: messages with other ranks don't wait for this one.
        return self._messages([(kind, tensor, peer)], SINGLES, lane=(kind, peer))

    def _messages(self, messages: Any, tag: int, lane: object = "") -> StagedWork:
        sent = [(tensor, peer) for kind, tensor, peer in messages if kind == "send"]
        received = [(tensor, peer) for kind, tensor, peer in messages if kind == "recv"]

        def exchange(hosts: Hosts) -> Hosts:
            targets = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor, _ in received]
            works = [
                self._gloo.recv([target.reshape(-1).view(torch.uint8)], peer, tag)
                for target, (_, peer) in zip(targets, received)
                if target.numel()
            ]
            works += [
                self._gloo.send([host.reshape(-1).view(torch.uint8)], peer, tag)
                for host, (_, peer) in zip(hosts, sent)
                if host.numel()
            ]
            for work in works:
                work.wait()
            return targets

        return self._submit([tensor for tensor, _ in sent], [tensor for tensor, _ in received], exchange, lane)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Takes the longer limit that torch's functional collectives give to what is compiled; jobs have their own."""

    def start_batch(self) -> None:
        """Begins a batch of sends and receives, which go at once."""
        self._batch.messages = []

    def end_batch(self) -> dist.Work | None:
        """Starts the batch; None where gloo has taken all of it already."""
        messages, self._batch.messages = self._batch.messages, None
        return self._messages(messages, COLLECTIVES) if messages else None


def reduced(parts: Hosts, operation: Any, size: int) -> torch.Tensor:
    """Returns the ranks' tensors, (n,) each, reduced in rank order in their own type."""
    kinds = dist.ReduceOp
    function = {kinds.MAX: torch.maximum, kinds.MIN: torch.minimum, kinds.PRODUCT: torch.mul}
    chosen = next((value for key, value in function.items() if operation == key), torch.add)
    result = parts[0].clone()
    for part in parts[1:]:
        result = chosen(result, part)
    if operation == kinds.AVG:
        result /= size
    elif chosen is torch.add and operation != kinds.SUM:
        raise NotImplementedError(f"a staged reduction by {operation}")
    return result


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Starts sends and receives as one, as NCCL's groups do; torch's own looks for NCCL's class."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, StagedGroup):
        return _torch_batch(operations)
    group.start_batch()
    works = [operation.op(operation.tensor, operation.peer, group) for operation in operations]
    works.append(group.end_batch())
    return [work for work in works if work is not None]


_torch_batch = c10d.batch_isend_irecv


def _create_for_cpu(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    options = StagedGroup.Options()
    options._timeout = timeout
    return StagedGroup(store, rank, size, options, stage_cpu=True)


def install() -> None:
    """Puts the group in NCCL's place; on the CPU it goes by the name of ``cpu:staged``."""
    c10d.ProcessGroupNCCL = StagedGroup
    c10d.is_nccl_available = lambda: True
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
    dist.Backend.register_backend("staged", _create_for_cpu, devices=["cpu"])


def share_device(on_cpu: bool, delay_s: float = DELAY_S) -> None:
    """Puts all ranks of a forked process on the first GPU with the staged group.

    Args:
        on_cpu: use the CPU, where the ranks' collectives are staged too.
        delay_s: by which reads and results are late.
    """
    global DELAY_S
    DELAY_S = delay_s
    warnings.simplefilter("ignore")
    install()
    devices.count_gpus = lambda: 0 if on_cpu else 16
    devices.Devices.slot = lambda self, local_rank: 0
    devices.Devices.threads = lambda self, ranks: 1
    if on_cpu:
        start = dist.init_process_group
        dist.init_process_group = lambda _backend, **more: start("cpu:staged", **more)
