"""Readers draw the micro-batches of a step from one queue: faster ones compute more, the gradient is the same."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.strategy.hybrid import HybridParallelStrategy
from meshwright.strategy.target_loss import TargetLoss

_SCHEDULERS = itertools.count()
"""Numbers of this process's schedulers, by which their keys differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderStatistics:
    """What a reader has done so far."""

    reader: int
    """Its index among those that read other rows."""
    tasks: int
    """Micro-batches that it has drawn."""
    seconds_per_task: float
    """Mean over those but each step's last, which waits for the other readers; NaN where it has had no other."""


@dataclass(slots=True)
class MicroBatchTask:
    """A micro-batch that this rank's reader has drawn; run its forward and backward inside ``with task:``."""

    index: int
    """Number of the micro-batch in the global batch."""
    is_last: bool
    """Whether it is this reader's last of the step: its backward sums the gradients over the readers."""
    weight: float
    """Factor on the micro-batch's mean loss before backward: the gradient is then that of the mean over all of them."""
    on_cuda: bool = False
    """Whether to wait for the GPU at its end: the host runs ahead of it, and says nothing of its speed."""
    seconds: float = 0.0
    """Time inside of ``with``."""
    is_done: bool = False
    """Whether it was run without an error."""
    target_loss: TargetLoss | None = None
    """Of the strategy: it is told that other readers run other micro-batches."""
    _accumulation: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    _started: float = 0.0

    def __enter__(self) -> Self:
        self._accumulation.__enter__()
        if self.target_loss is not None:
            self.target_loss.drawn_alone = True
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
        self.seconds, self.is_done = time.perf_counter() - self._started, kind is None
        if self.target_loss is not None:
            self.target_loss.drawn_alone = False
        self._accumulation.__exit__(kind, error, trace)


class DynamicTaskScheduler:
    """Deals out a step's micro-batches to whichever reader is free, for devices of unequal or changing speed.

    ::

        scheduler = DynamicTaskScheduler(strategy)
        for x, y in global_batches:                       # the same on every rank, or read by index
            for task in scheduler.tasks(16):
                with task:
                    rows = slice(task.index * 4, task.index * 4 + 4)
                    (mean_loss(model(x[rows]), y[rows]) * task.weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Where micro-batches have unequal numbers of targets, the loss of each is
    ``strategy.loss(model(x[rows]), y[rows], total=(y != -100).sum())``, without `MicroBatchTask.weight`.

    Every micro-batch is drawn by one reader, so the sum of their gradients doesn't depend on who drew which, up to the
    order of the sum. A reader draws one ahead, to know which backward is its last. Dropout differs with the reader.

    Args:
        strategy: that has sharded the model, with ``replicate`` or ZeRO-1 ``shard`` beside ``tp``.
        timeout_s: longest wait for the queue, seconds.

    Raises:
        ConfigError: for a layout whose readers must run equally many micro-batches.
    """

    def __init__(self, strategy: HybridParallelStrategy, timeout_s: float = 600.0) -> None:
        _refuse_lockstep(strategy.layout)
        self._strategy, self._timeout = strategy, timedelta(seconds=timeout_s)
        # All ranks make their schedulers in one order, as they make groups.
        prefix = f"meshwright/tasks/{next(_SCHEDULERS)}"
        self._store = dist.PrefixStore(prefix, dist.group.WORLD.get_group_store())
        self._reader, self._readers = strategy.reader
        layout, rank = strategy.layout, dist.get_rank()
        # The ranks of one reader (tp) run the same micro-batches: the first of them draws for all.
        self._leads = min(other for other in range(layout.world) if layout.reader(other)[0] == self._reader) == rank
        self._on_cuda = any(weight.local.is_cuda for weight in strategy.weights)
        self._step = self._draws = self._tasks = self._timed_tasks = 0
        self._seconds = 0.0

    def tasks(self, count: int) -> Iterator[MicroBatchTask]:
        """Yields this reader's micro-batches of a step; every rank goes through all of its own.

        Args:
            count: micro-batches of the global batch, at least one for each reader; the same on every rank.

        Raises:
            ConfigError: there are fewer than readers, or a task was passed over.
        """
        if count < self._readers:
            raise ConfigError(
                f"{count} micro-batches for {self._readers} readers: each needs one, since all take part in the sum of "
                f"gradients; cut the batch into {self._readers} or more"
            )
        self._begin_step()
        index: int | None = self._reader
        while index is not None:
            following = self._draw(count)
            accumulation = contextlib.nullcontext() if following is None else self._strategy.accumulate()
            # Strategies that average divide the sum by the readers.
            weight = (self._readers if self._strategy.average else 1) / count
            task = MicroBatchTask(
                index,
                following is None,
                weight,
                self._on_cuda,
                target_loss=self._strategy.target_loss,
                _accumulation=accumulation,
            )
            self._tasks += 1
            if task.is_last and self._leads:
                # Before the backward in which all readers meet: after it, every reader's line is there.
                self._store.set(f"statistics/{self._reader}", f"{self._tasks} {self._timed_tasks} {self._seconds!r}")
            yield task
            if not task.is_done:
                raise ConfigError(f"micro-batch {task.index} was drawn and not run: put its backward into `with task:`")
            if not task.is_last:
                self._timed_tasks += 1
                self._seconds += task.seconds
            index = following

    def statistics(self) -> list[ReaderStatistics]:
        """Returns what each reader has done in the steps so far, in their order; after the first step, on any rank."""
        if not self._step:
            raise ConfigError("statistics() says what readers have done: go through the tasks of a step first")
        rows = []
        self._store.wait([f"statistics/{reader}" for reader in range(self._readers)], self._timeout)
        for reader in range(self._readers):
            tasks, timed, seconds = self._store.get(f"statistics/{reader}").decode("ascii").split()
            mean_s = float(seconds) / int(timed) if int(timed) else float("nan")
            rows.append(ReaderStatistics(reader=reader, tasks=int(tasks), seconds_per_task=mean_s))
        return rows

    def _begin_step(self) -> None:
        # The last task of a step ends when the sum of gradients has, to which every rank has come by then: nobody reads
        # the step's keys any more.
        if self._leads:
            for draw in range(self._draws):
                self._store.delete_key(f"{self._step}/{self._reader}/{draw}")
        if dist.get_rank() == 0:
            self._store.delete_key(f"{self._step}/next")
        self._step += 1
        self._draws = 0

    def _draw(self, count: int) -> int | None:
        """Returns the next micro-batch that nobody has, or None when all are dealt out."""
        key = f"{self._step}/{self._reader}/{self._draws}"
        self._draws += 1
        if self._leads:
            # The first of each reader is that of its own number: the queue begins behind them.
            index = self._readers - 1 + int(self._store.add(f"{self._step}/next", 1))
            self._store.set(key, str(index))
        else:
            self._store.wait([key], self._timeout)
            index = int(self._store.get(key))
        return index if index < count else None


def _refuse_lockstep(layout: Layout) -> None:
    """Refuses layouts in which the readers meet in every forward, and would wait for one that has fewer of them."""
    if layout.degree(Mechanics.STAGES) > 1:
        raise ConfigError(
            f"{layout.format_degree(Mechanics.STAGES)}: a schedule runs the same micro-batches on all readers; use "
            "replicate with tp, or `train --train.rebalance`, which moves rows"
        )
    if layout.zero > 1:
        raise ConfigError(
            f"zero={layout.zero}: readers meet in every backward, so all must run equally many micro-batches; use "
            "zero=1, or `train --train.rebalance`, which moves rows"
        )
    if layout.degree(Mechanics.EXPERTS) > 1:
        raise ConfigError(
            f"{layout.format_degree(Mechanics.EXPERTS)}: readers exchange tokens in every layer, so all must run "
            "equally many micro-batches; use `train --train.rebalance`, which moves rows"
        )
