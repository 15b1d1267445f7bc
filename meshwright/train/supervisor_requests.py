"""What a supervisor asks of its ranks while they run, and what it hears back: words in shared memory."""

from __future__ import annotations

import struct

from meshwright.checkpoint.snapshot import Segment

_INT64 = struct.Struct("<q")
_FLOAT64 = struct.Struct("<d")


class SupervisorRequests:
    """Shared words between a supervisor and its ranks.

    The supervisor writes three int64: reconfiguration requested, written step, write succeeded. Rank 0 writes one
    float64: the time of the supervisor's newest event that its display has shown.
    """

    def __init__(self) -> None:
        self._segment = Segment()
        self._map = self._segment.map(3 * _INT64.size + _FLOAT64.size)

    def request_reconfiguration(self) -> None:
        """Requests that all ranks end after a step that they agree on, with a snapshot of its state."""
        _INT64.pack_into(self._map, 0, 1)

    @property
    def reconfiguration_requested(self) -> bool:
        """Whether a reconfiguration was requested."""
        return _INT64.unpack_from(self._map, 0)[0] != 0

    def publish_written(self, step: int, good: bool) -> None:
        """Publishes whether the checkpoint of a step was written."""
        # The step is stored last: a rank that reads the new step also reads its outcome.
        _INT64.pack_into(self._map, 2 * _INT64.size, int(good))
        _INT64.pack_into(self._map, _INT64.size, step)

    @property
    def written(self) -> tuple[int, bool]:
        """The step of the last checkpoint, 0 before the first, and whether it was written."""
        return _INT64.unpack_from(self._map, _INT64.size)[0], _INT64.unpack_from(self._map, 2 * _INT64.size)[0] != 0

    def publish_shown(self, event_time: float) -> None:
        """Publishes the time of the supervisor's newest event that rank 0's display has shown."""
        _FLOAT64.pack_into(self._map, 3 * _INT64.size, event_time)

    @property
    def shown_until(self) -> float:
        """Time of the supervisor's newest event that rank 0's display has shown; 0 before the first."""
        return float(_FLOAT64.unpack_from(self._map, 3 * _INT64.size)[0])

    def close(self) -> None:
        """Lets go of the memory."""
        self._map.close()
        self._segment.close()
