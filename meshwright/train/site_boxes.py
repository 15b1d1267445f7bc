"""Which rank of a site sends and fetches which box of which weight, and how the ranks with copies get it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.parallel.byte_collectives import all_gather_bytes
from meshwright.parallel.weights import Weight, view_box
from meshwright.records import RecordCodec
from meshwright.sites.boxes import Box, NamedBox, cut_for_shard
from meshwright.sites.decode import encoded_bytes
from meshwright.spec.placement import Box as LocalBox

_CODEC = RecordCodec()


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box that this rank has."""

    named: NamedBox
    weight_index: int
    local_box: LocalBox
    holders: tuple[int, ...]
    """Ranks that have it."""
    owner: int
    """The rank of them that speaks with the server about it."""

    def view(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns this box of the views, one for each weight of this rank and of its local part's shape."""
        return view_box(views[self.weight_index], self.local_box)

    def cut(self, views: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        """Returns some rows of this box, ``box`` of the whole weight; views have the local parts' shapes."""
        view = self.view(views)
        if not box:
            return view
        first = self.named.box[0][0]
        return view[box[0][0] - first : box[0][1] - first]


class SiteBoxes:
    """The boxes of all ranks of a site; made by all ranks together.

    Args:
        weights: of this rank.

    Raises:
        ConfigError: when boxes of ranks overlap without being equal, or don't make up a weight.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        own = [(weight.name, tuple(weight.shape), _plain(box.global_box)) for weight in weights for box in weight.boxes]
        tables = [_CODEC.loads(data) for data in all_gather_bytes(_CODEC.dumps(own))]
        self.shapes: dict[str, tuple[int, ...]] = {name: shape for table in tables for name, shape, _ in table}
        """Shape of each trained weight of the model, by name."""
        holders: dict[NamedBox, list[int]] = {}
        for rank, table in enumerate(tables):
            for name, _, box in table:
                holders.setdefault(NamedBox(name, box), []).append(rank)
        _check_cover(self.shapes, holders)
        # Dealt over the ranks that have it, so that each sends its share.
        self._owners = {named: ranks[index % len(ranks)] for index, (named, ranks) in enumerate(holders.items())}
        self.held = [
            HeldBox(named, index, box.local_box, tuple(holders[named]), self._owners[named])
            for index, weight in enumerate(weights)
            for box in weight.boxes
            for named in [NamedBox(weight.name, _plain(box.global_box))]
        ]
        self._value_bytes = weights[0].local.element_size() if weights else 4
        self._order = {named: index for index, named in enumerate(holders)}

    def movement_bytes(self, number_format: str) -> int:
        """Returns the bytes of all boxes of this site in a format, each once."""
        return sum(encoded_bytes(named.elements, number_format, self._value_bytes) for named in self._owners)

    def owned_by_shard(self, shards: int) -> Iterator[tuple[int, list[tuple[NamedBox, HeldBox]]]]:
        """Yields each shard, and the parts of this rank's own boxes that lie on it."""
        for shard in range(shards):
            parts = []
            for held in self.held:
                if held.owner != self.rank:
                    continue
                box = cut_for_shard(held.named.box, self.shapes[held.named.name], shard, shards)
                if box is not None:
                    parts.append((NamedBox(held.named.name, box), held))
            if parts:
                yield shard, parts

    def spread(self, views: Sequence[torch.Tensor]) -> None:
        """Copies each box from its owner to the other ranks that have it.

        Args:
            views: a CPU tensor for each weight of this rank, of its local part's shape.
        """
        ordered = sorted(self.held, key=lambda held: self._order[held.named])
        received = {
            peer: [held for held in ordered if held.owner == peer] for peer in range(self._world) if peer != self.rank
        }
        sent = {
            peer: [held for held in ordered if held.owner == self.rank and peer in held.holders]
            for peer in range(self._world)
            if peer != self.rank
        }
        buffers = {
            peer: torch.empty(sum(held.named.elements for held in boxes), dtype=views[0].dtype)
            for peer, boxes in received.items()
            if boxes
        }
        works = [dist.irecv(buffer, peer) for peer, buffer in buffers.items()]
        flats = {
            peer: torch.cat([held.view(views).reshape(-1) for held in boxes]) for peer, boxes in sent.items() if boxes
        }
        works += [dist.isend(flat, peer) for peer, flat in flats.items()]
        for work in works:
            work.wait()
        for peer, buffer in buffers.items():
            offset = 0
            for held in received[peer]:
                view = held.view(views)
                view.copy_(buffer[offset : offset + view.numel()].view(view.shape))
                offset += view.numel()


def _plain(box: LocalBox) -> Box:
    """Returns a box as plain tuples of whole numbers."""
    return tuple((int(start), int(stop)) for start, stop in box)


def _check_cover(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[NamedBox, Sequence[int]]) -> None:
    """Refuses boxes that don't add up to their weights."""
    elements = dict.fromkeys(shapes, 0)
    for named in boxes:
        elements[named.name] += named.elements
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            raise ConfigError(
                f"the ranks of this site hold {elements[name]} elements of {name} in different boxes, which has "
                f"{math.prod(shape)}: a site can't share it with others under this layout; take another --layout"
            )
