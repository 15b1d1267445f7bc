"""The ranks of a site at the outer server: a join is a dial-in, a push, a commit, a wait and a pull, all bounded.

The first rank speaks with the coordinator, and every rank with the shards about its own boxes. After each part the
ranks agree on its outcome, and where it failed they begin again with a new session, until `outer.wait_s` is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.errors import RankError
from meshwright.parallel.block_codec import BlockCodec
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.records import parse_json
from meshwright.sites.client import Backoff, RankSession, RefusedError, ServerAddress, SiteClient, pull, push
from meshwright.sites.decode import RAW
from meshwright.sites.messages import SEED_ROUND, Commit
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, count_blocks
from meshwright.train.site_boxes import SiteBoxes

SLICE_S = 1.0
"""Length of a wait, after which all ranks stamp that they are alive."""
_DIAL_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFigures:
    """What a site tells of a round when it commits it."""

    tokens: float
    loss: float
    steps: int
    leaves: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRelease:
    """What became of a round, the same on every rank but for the seconds."""

    version: int
    staleness: int
    sites: int
    wait_s: float
    refused: str = ""
    """Why the server didn't take the round, which is lost then."""


class SiteLink:
    """All ranks of a site call each method together.

    Args:
        boxes: of the site.
        address: of the server.
        client: the first rank's; None on the others.
        site: number of this site.
        compress: as `outer.compress` has it.
        wait_s: longest wait for the server.
        stamp: says that this rank is alive.
    """

    def __init__(
        self,
        boxes: SiteBoxes,
        *,
        address: ServerAddress,
        client: SiteClient | None,
        site: int,
        compress: str,
        wait_s: float,
        stamp: Callable[[], None],
    ) -> None:
        self._boxes, self._address, self._client, self._site = boxes, address, client, site
        self._format = RAW if compress == "none" else compress
        self.raw_bytes, self.sent_bytes = boxes.movement_bytes(RAW), boxes.movement_bytes(self._format)
        """Bytes of this site's movement in the type of its weights, and as it travels."""
        self._wait_s, self._stamp = wait_s, stamp
        self._session: RankSession | None = None
        self._base, self._round = SEED_ROUND, SEED_ROUND
        self._committed = False

    def start(self, views: Sequence[torch.Tensor]) -> int:
        """Dials in and fetches the present version; where the server has none, hands over these as its first.

        Args:
            views: CPU tensor for each weight of this rank, of its local part's shape, which the version overwrites.

        Returns:
            The version.
        """
        deadline, backoff = time.monotonic() + self._wait_s, Backoff()
        while True:
            welcome = self._dial(deadline, backoff, claims=False)
            if welcome >= 0:
                self._base = welcome
            elif self._push(views) and self._commit(SEED_ROUND, RoundFigures(tokens=0.0, loss=0.0, steps=0)):
                release = self._wait(deadline, backoff)
                if release is None or release.refused:
                    self._pause(deadline, backoff)
                    continue
                self._base = release.version
            else:
                self._pause(deadline, backoff)
                continue
            if self._pull(views):
                self._boxes.spread(views)
                self._round = 0
                return self._base
            self._pause(deadline, backoff)

    def join(
        self, movements: Sequence[torch.Tensor], views: Sequence[torch.Tensor], figures: RoundFigures, wait_s: float
    ) -> ServerRelease | None:
        """Hands over a round's movement and fetches the version to go on from.

        Args:
            movements: CPU tensor for each weight of this rank, of its local part's shape.
            views: the same, overwritten by the version.
            figures: of the round.
            wait_s: longest wait, at most `outer.wait_s`.

        Returns:
            What became of the round; None where the site leaves and fetches nothing.
        """
        started = time.monotonic()
        deadline, backoff = started + min(self._wait_s, wait_s), Backoff()
        committed, release = False, None
        while True:
            if not self._is_connected() or committed:
                # After a commit whose answer was lost, the server says whether it has the round.
                present = self._dial(deadline, backoff, claims=committed)
                if committed and not self._committed:
                    committed = False
                    self._base = min(self._base, present)
            if not committed:
                if not (self._push(movements) and self._commit(self._round, figures)):
                    self._pause(deadline, backoff)
                    continue
                committed = True
            if figures.leaves:
                return None
            release = self._wait(deadline, backoff)
            if release is None:
                self._pause(deadline, backoff, "the connection ended")
                continue
            if release.refused:
                # The round is lost; the present version comes with a new session.
                self._base = self._dial(deadline, backoff, claims=False)
            else:
                self._base = release.version
            if self._pull(views):
                break
            self._pause(deadline, backoff)
        self._boxes.spread(views)
        self._round += 1
        return ServerRelease(
            version=self._base,
            staleness=release.staleness,
            sites=release.sites,
            wait_s=time.monotonic() - started,
            refused=release.refused,
        )

    def leave(self) -> None:
        """Says goodbye to the server."""
        if self._client is not None:
            self._client.leave()

    def close(self) -> None:
        """Ends the connection without a word: the site may dial in again."""
        if self._client is not None:
            self._client.close()

    def _agree(self, act: Callable[[SiteClient], dict[str, object]]) -> dict[str, object]:
        """Has the first rank do something; returns on all ranks what came of it, ``failed`` where it didn't succeed."""
        self._stamp()
        values: dict[str, object] = {}
        if self._client is not None:
            try:
                values = act(self._client)
            except RefusedError as error:
                values = {"failed": str(error), "refused": True, "final": error.final}
            except OSError as error:
                values = {"failed": str(error) or type(error).__name__}
        result: dict[str, object] = parse_json(broadcast_bytes(json.dumps(values).encode()))
        self._stamp()
        return result

    def _all_succeed(self, act: Callable[[], None]) -> bool:
        """Has every rank do something; returns on all whether none failed."""
        self._stamp()
        failed = 0
        try:
            act()
        except (OSError, RefusedError):
            failed = 1
        count = torch.tensor([failed], dtype=torch.int64)
        dist.all_reduce(count)
        self._stamp()
        if int(count) and self._client is not None:
            # A new session: the shards forget what was staged in this one.
            self._client.hang_up()
        return not int(count)

    def _is_connected(self) -> bool:
        return self._session is not None and bool(self._agree(lambda client: {"on": client.connected})["on"])

    def _dial(self, deadline: float, backoff: Backoff, claims: bool) -> int:
        """Begins a session; returns the server's version."""

        def dial(client: SiteClient) -> dict[str, object]:
            welcome = client.dial(max(0.1, min(_DIAL_S, deadline - time.monotonic())), claims)
            return {
                "session": welcome.session,
                "version": welcome.version,
                "ports": list(welcome.ports),
                "committed": welcome.committed,
            }

        while True:
            values = self._agree(dial)
            if "failed" not in values:
                ports = tuple(int(port) for port in values["ports"])  # type: ignore[attr-defined]
                self._session = RankSession(self._address, self._site, int(values["session"]), ports)  # type: ignore[call-overload]
                self._committed = bool(values["committed"])
                return int(values["version"])  # type: ignore[call-overload]
            if values.get("final"):
                raise RankError(f"the outer server refuses this site: {values['failed']}")
            self._pause(deadline, backoff, str(values["failed"]))

    def _pause(self, deadline: float, backoff: Backoff, why: str = "it didn't take or give a round whole") -> None:
        """Waits before the next attempt.

        Raises:
            RankError: on all ranks, when the time is over.
        """

        def wait(client: SiteClient) -> dict[str, object]:
            time.sleep(min(backoff.next_pause_s(), max(0.0, deadline - time.monotonic())))
            return {"over": time.monotonic() >= deadline}

        if self._agree(wait)["over"]:
            address = f"{self._address.host}:{self._address.port}"
            raise RankError(
                f"the outer server at {address} gave no version within outer.wait_s = {self._wait_s:g}: {why}; look "
                "whether it runs and whether a quorum of sites is there; the same command goes on"
            )

    def _push(self, values: Sequence[torch.Tensor]) -> bool:
        """Stages this round's values on all shards."""
        session, seeds = self._session, self._round == SEED_ROUND
        assert session is not None

        def send() -> None:
            number_format = RAW if seeds else self._format
            for shard, parts in self._boxes.owned_by_shard(len(session.ports)):
                encoded = [(named, _encode(held.cut(values, named.box), number_format)) for named, held in parts]
                push(session, shard, self._round, number_format, encoded)

        return self._all_succeed(send)

    def _pull(self, views: Sequence[torch.Tensor]) -> bool:
        """Fetches this rank's own boxes of the version."""
        session = self._session
        assert session is not None

        def fetch() -> None:
            for shard, parts in self._boxes.owned_by_shard(len(session.ports)):
                targets = [held.cut(views, named.box) for named, held in parts]
                buffers = [torch.empty(target.shape, dtype=target.dtype) for target in targets]
                pull(
                    session,
                    shard,
                    self._base,
                    [(named, _memory(buffer)) for (named, _), buffer in zip(parts, buffers)],
                )
                for target, buffer in zip(targets, buffers):
                    target.copy_(buffer)

        return self._all_succeed(fetch)

    def _commit(self, round_number: int, figures: RoundFigures) -> bool:
        session = self._session
        assert session is not None
        commit = Commit(
            session=session.session,
            round=round_number,
            base=self._base,
            tokens=figures.tokens,
            loss=figures.loss,
            steps=figures.steps,
            raw_bytes=self.raw_bytes,
            sent_bytes=self.sent_bytes,
            leaves=figures.leaves,
        )

        def send(client: SiteClient) -> dict[str, object]:
            client.commit(commit)
            return {}

        return "failed" not in self._agree(send)

    def _wait(self, deadline: float, backoff: Backoff) -> ServerRelease | None:
        """Waits for the version of the committed round; None where the connection was lost meanwhile."""
        while True:

            def wait(client: SiteClient) -> dict[str, object]:
                released = client.wait(SLICE_S)
                if released is None:
                    return {"over": time.monotonic() >= deadline}
                return {"version": released.version, "staleness": released.staleness, "sites": released.sites}

            values = self._agree(wait)
            if values.get("refused"):
                return ServerRelease(version=-1, staleness=0, sites=0, wait_s=0.0, refused=str(values["failed"]))
            if "failed" in values:
                return None
            if "version" in values:
                version, staleness, sites = (int(values[name]) for name in ("version", "staleness", "sites"))  # type: ignore[call-overload]
                return ServerRelease(version=version, staleness=staleness, sites=sites, wait_s=0.0)
            if values["over"]:
                self._pause(deadline, backoff, "no quorum of sites came, or this one is too far ahead")


def _memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _encode(values: torch.Tensor, number_format: str) -> memoryview:
    """Returns the bytes of a box, any shape, in a format."""
    flat = values.contiguous().reshape(-1)
    if number_format == RAW:
        return _memory(flat)
    blocks = flat.new_zeros((count_blocks(flat.numel()), BLOCK_VALUES))
    blocks.view(-1)[: flat.numel()] = flat
    return _memory(BlockCodec(number_format, FORMATS[number_format]).encode(blocks, None))
