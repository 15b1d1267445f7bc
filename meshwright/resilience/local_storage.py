"""The state of a run on one node beyond its ranks: checkpoints written beside the training, and the keeper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from meshwright.checkpoint.remote import Shelf
from meshwright.checkpoint.snapshot import Snapshot, State, find_complete_states, read_snapshots
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError
from meshwright.events import Event
from meshwright.launch.contract import NodeRanks
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink
from meshwright.resilience.disk import DiskWriter, save_newest_state
from meshwright.resilience.generation_ranks import Fence, GenerationRanks, Watch, job_origin
from meshwright.resilience.keeper import Keeper
from meshwright.resilience.messages import Address, Order, Ports
from meshwright.spec.layout import Layout
from meshwright.train.faults import parse_faults
from meshwright.train.memory import PeerCopies
from meshwright.train.session import TrainJob


class LocalStorage:
    """Writes the state of a run on one node to disk, also when the supervisor is killed.

    `PeerStorage` has the same methods.

    Args:
        job: of the run.
        event: records an event: its kind, and its fields by keyword.
    """

    host = ""
    link_bytes_s: float | None = None

    def __init__(self, job: TrainJob, event: Callable[..., None]) -> None:
        self._run_dir, self._config = job.run_dir, job.config.checkpoint
        self._root, self._origin = job.run_dir / "checkpoints", job_origin(job)
        faults = parse_faults(job.config.recovery.faults)
        self._disk = DiskWriter(self._root, self._config, self._origin, event, faults)
        self._layout = job.plan.layout
        self._keeper: Keeper | None = None

    def open_ports(self, snapshots: list[Snapshot]) -> Ports | None:
        """Returns None: nobody reads this node's snapshots."""
        return None

    def connect_snapshot_servers(self, addresses: Mapping[int, Address]) -> dict[int, Shelf]:
        """Returns none: all snapshots are in this node's memory."""
        return {}

    def place_ranks(self, order: Order) -> NodeRanks | None:
        """Returns None: all ranks are on this node."""
        return None

    def start(
        self, order: Order, job: TrainJob, ranks: GenerationRanks, state: State | None, fence: Fence | None
    ) -> PeerCopies | None:
        """Starts a process that writes these ranks' newest state to disk if this process is killed."""
        segments, layout, old_layout = ranks.all_segments(), ranks.layout, self._layout

        def save() -> None:
            states = find_complete_states(read_snapshots(segments))
            newest = states[0] if states else state
            if newest is not None:
                self._save_orphaned(newest, layout if states else old_layout)

        keeper = Keeper(self._run_dir, save, self._config.wait_s)
        # The one before stays until now: at no moment is the state without a keeper.
        self._drop_keeper()
        self._keeper = keeper
        return None

    def _save_orphaned(self, state: State, layout: Layout) -> None:
        """Writes a state to disk after the supervisor's end; runs in the keeper."""
        origin = dataclasses.replace(self._origin, layout=layout)
        event_fields = save_newest_state(CheckpointStore(self._root, self._config), state, origin)
        sink = JsonlSink(self._run_dir, metrics=False)
        sink.event(Event(kind="supervisor_lost", rank=SUPERVISOR, data={"step": state.step}))
        if event_fields is not None:
            sink.event(Event(rank=SUPERVISOR, kind=event_fields.pop("kind"), data=event_fields))
        sink.close()

    def poll(self, ranks: GenerationRanks) -> None:
        """Collects a finished checkpoint, and starts the next one."""
        self._disk.poll(ranks.disk, ranks.layout, ranks.control)

    def await_checkpoint(self, ranks: GenerationRanks, watch: Watch) -> None:
        """Does nothing: a checkpoint under way goes on beside the next generation."""

    def stop(self, ranks: GenerationRanks, in_order: bool) -> list[Snapshot]:
        """Starts the checkpoint that ended ranks left; one under way goes on beside the next generation.

        Raises:
            CheckpointError: when the one under way takes too long, and the ranks ended in order.
        """
        if in_order:
            self._disk.finish(self._config.wait_s)
        self._disk.poll(ranks.disk, ranks.layout, None)
        self._layout = ranks.layout
        return []

    def settle(self, rewinds: bool = False) -> None:
        """Waits for the checkpoint under way; before a rewind ends the keeper, whose state may be wrong."""
        if rewinds:
            self._drop_keeper()
        self._disk.finish(self._config.wait_s)

    def clear_disk(self, limit_s: float) -> None:
        """Waits for the checkpoint under way, and gives it up where it takes longer than ``limit_s`` seconds."""
        try:
            self._disk.finish(limit_s)
        except CheckpointError:
            self._disk.give_up()

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            CheckpointError: when it couldn't be written.
        """
        self.settle()
        if self._disk.failed is not None:
            raise CheckpointError(self._disk.failed)

    def close(self) -> None:
        """Ends keeper and writer."""
        self._drop_keeper()
        self._disk.close()

    def _drop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
