"""What one rank of the real program holds and sends, seen from below: at the methods of torch's process groups.

One process is one rank: torch's fake process group answers for the others, and every collective that reaches a
`ProcessGroup` is written down with its kind, its global ranks and its bytes. Nothing of the runtime's own account is
read. Outputs get values that equal ranks would have sent, so that the step can go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.models.build import BuiltModel
from meshwright.parallel import schedule_run
from meshwright.parallel.program import Program
from meshwright.parallel.stage import copy_module
from meshwright.parallel.token_dispatch import Dispatch
from meshwright.parallel.transform import DTYPES
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.session import build_program

Bytes = dict[tuple[str, tuple[int, ...]], int]
"""(kind, global ranks) to bytes."""


class Recorder:
    """Adds up the bytes of collectives while `patched` is entered."""

    def __init__(self, rank: int) -> None:
        self.bytes: Bytes = {}
        self._rank = rank

    @contextlib.contextmanager
    def patched(self) -> Iterator[Recorder]:
        """Replaces the methods of process groups; every method that isn't known fails."""
        with pytest.MonkeyPatch.context() as patch:
            methods = {name: method for name, method in self._methods().items() if hasattr(dist.ProcessGroup, name)}
            for name, method in methods.items():
                patch.setattr(dist.ProcessGroup, name, self._recorded(getattr(dist.ProcessGroup, name), method))
            for name in ("allgather", "reduce_scatter", "reduce", "gather", "scatter", "allreduce_coalesced"):
                patch.setattr(dist.ProcessGroup, name, self._unknown(name))
            yield self

    def _methods(self) -> dict[str, Callable[..., None]]:
        return {
            "allreduce": self._all_reduce,
            "_allgather_base": self._all_gather,
            "all_gather_single": self._all_gather,
            "_reduce_scatter_base": self._reduce_scatter,
            "reduce_scatter_single": self._reduce_scatter,
            "alltoall": self._all_to_all,
            "alltoall_base": self._all_to_all_single,
            "all_to_all_single": self._all_to_all_single,
            "send": self._send,
            "recv": self._receive,
        }

    @staticmethod
    def _recorded(plain: Any, method: Callable[..., None]) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = plain(group, *args, **kwargs)
            method(group, *args)
            return work

        return call

    @staticmethod
    def _unknown(name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name}: the recorder doesn't know this collective")

        return call

    def _add(self, kind: str, ranks: list[int], size: int) -> None:
        if size and len(ranks) > 1:
            key = kind, tuple(sorted(ranks))
            self.bytes[key] = self.bytes.get(key, 0) + size

    def _all_reduce(self, group: Any, tensors: Any, *_: Any) -> None:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._add("all_reduce", dist.get_process_group_ranks(group), sum(item.nbytes for item in tensors))

    def _all_gather(self, group: Any, output: torch.Tensor, part: torch.Tensor, *_: Any) -> None:
        self._add("all_gather", dist.get_process_group_ranks(group), part.nbytes)
        output.view(group.size(), -1).copy_(part.clone().reshape(-1))

    def _reduce_scatter(self, group: Any, output: torch.Tensor, tensor: torch.Tensor, *_: Any) -> None:
        self._add("reduce_scatter", dist.get_process_group_ranks(group), output.nbytes)
        output.view(-1).copy_(tensor.reshape(group.size(), -1)[group.rank()].clone())

    def _all_to_all(self, group: Any, outputs: Any, parts: Any, *_: Any) -> None:
        sent = sum(part.nbytes for peer, part in enumerate(parts) if peer != group.rank())
        self._add("all_to_all", dist.get_process_group_ranks(group), sent)
        for output in outputs:
            output.zero_()

    def _all_to_all_single(self, group: Any, output: Any, tensor: Any, received: Any, sent: Any, *_: Any) -> None:
        row = tensor.nbytes // max(1, len(tensor))
        self._add("all_to_all", dist.get_process_group_ranks(group), row * (sum(sent) - sent[group.rank()]))
        own = tensor.split(list(sent))[group.rank()]
        for part in output.split(list(received)):
            part.copy_(own) if part.shape == own.shape else part.zero_()

    def _send(self, group: Any, tensors: Any, peer: int, *_: Any) -> None:
        other = dist.get_process_group_ranks(group)[peer]
        self._add("send", [self._rank, other], sum(item.nbytes for item in tensors))

    def _receive(self, group: Any, tensors: Any, *_: Any) -> None:
        for item in tensors:
            item.detach().fill_(0 if item.is_floating_point() else 1)  # torch's stages vote by a 1


@contextlib.contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Makes this process one rank of a world of fake ones."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def even_routing() -> Iterator[None]:
    """Makes routers choose every expert as often, on every rank."""
    plain = Dispatch._route

    def even(self: Any, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return plain(self, tokens, torch.arange(index.numel()).view(index.shape) % self._rows.experts, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatch, "_route", even)
        yield


@contextlib.contextmanager
def known_boundary(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[None]:
    """Lets a stage know what the one before would send it when shapes are tried out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_run, "_receive", lambda line, index: (torch.zeros(shape, dtype=dtype),))
        yield


def build_rank(built: BuiltModel, layout: Layout, facts: ModelAnalysis) -> Program:
    """Builds this rank's program on a copy of the model."""
    own = dataclasses.replace(built, module=copy_module(built.module))
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="")
    return build_program(own, plan, torch.device("cpu"), facts=facts)


def step_of(program: Program, layout: Layout, rank: int, sizes: tuple[int, int, int, int]) -> Bytes:
    """Runs the second step of a rank (the first of a pipeline tries shapes out) and returns what it sent.

    Args:
        program: of this rank.
        layout: its layout.
        rank: which rank it is.
        sizes: rows of the global batch, tokens of a row, vocabulary, width of the hidden state.
    """
    rows, sequence, vocab, width = sizes
    (batch,) = random_batches(1, rows, sequence, vocab, documents=False)
    first, last = layout.span(rank, rows)
    pairs = zip(*(item[first:last].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
    micro = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
    parts = layout.degree("cp") * (layout.degree("tp") if layout.sequence else 1)
    shape = (len(micro[0].tokens), sequence // parts, width)
    recorder = Recorder(rank)
    with even_routing(), known_boundary(shape, DTYPES[layout.precision]), recorder.patched():
        for _ in range(2):
            program.clear_gradients()
            recorder.bytes.clear()
            program.forward_backward(micro, 1.0, (0, 0))
    return recorder.bytes
