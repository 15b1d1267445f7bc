"""What the leader of several nodes tells them: who does what, from which state on; made of what they told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from meshwright.checkpoint.remote import whole_steps
from meshwright.resilience.generation_ranks import steps_between
from meshwright.resilience.host_memory_budget import nodes_have_room, state_bytes
from meshwright.resilience.peers import Message
from meshwright.spec.plan import Plan
from meshwright.train.config import RecoveryConfig

LINK_BYTES_S = 1.25e9
"""Of a network that doesn't say how fast it is: 10 Gbit/s."""
Reports = Mapping[int, Message]
"""What each node told last (`LocalNode.report`)."""


def compose(reports: Reports, places: Sequence[tuple[int, int]]) -> Message:
    """Returns the part of an order that says where ranks are, and where nodes listen.

    Args:
        reports: of the nodes that are there.
        places: node and device of each rank.
    """
    nodes: dict[str, Message] = {}
    for rank, (node, slot) in enumerate(places):
        report = reports[node]
        ports = {"host": report["host"]} | {name: report["ports"][name] for name in ("courier", "disk")}
        nodes.setdefault(str(node), {"first": rank, "slots": []} | ports)["slots"].append(slot)
    head = reports[places[0][0]]
    return {
        "world": len(places),
        "nodes": nodes,
        "members": sorted(reports),
        "store": [head["host"], head["ports"]["store"]],
        "shelves": shelves(reports),
    }


def held_after(reports: Reports, step: int) -> tuple[set[tuple[int, int]], bool]:
    """Returns (step, generation) of what is held of later steps, and whether anything is held of others."""
    held = {(row[1], row[0]) for report in reports.values() for row in report["held"]}
    later = {pair for pair in held if pair[0] > step}
    return later, held > later


def copies(plan: Plan, nodes: Mapping[str, Message], reports: Reports, config: RecoveryConfig) -> Message:
    """Returns the part of an order that says which copies there are, the same on all nodes.

    Args:
        plan: of the run.
        nodes: of an order.
        reports: of the nodes that are there.
        config: how often snapshots are wanted (by themselves as often as costs 1 % of a step, and as they arrive), and
            on how many other nodes.

    Returns:
        ``every``, the steps between snapshots: 0 where a node has no memory for them; ``disk``, whether all have some
        for one copy more, from which checkpoints are written beside the training; ``peers``, the other nodes that hold
        them: fewer than asked for where fewer are there, or one of them has no memory for more.
    """
    ring = sorted(map(int, nodes))
    ranks = [len(nodes[str(node)]["slots"]) for node in ring]
    available = [reports[node]["available"] for node in ring]
    link = min(reports[node]["link"] or LINK_BYTES_S for node in ring)
    most = min(config.copies, len(ring) - 1)
    held = next((number for number in range(most, 0, -1) if nodes_have_room(plan, ranks, available, 0, number)), 0)
    fits = held > 0 or (most == 0 and nodes_have_room(plan, ranks, available))
    every = steps_between(plan, config.snapshot_every, held * state_bytes(plan, max(ranks)) / link) if fits else 0
    disk = nodes_have_room(plan, ranks, available, 1, max(1, held))
    return {"every": every, "disk": disk, "peers": held}


def shortage(order: Message, config: RecoveryConfig) -> Message | None:
    """Returns the event that tells of snapshots, or copies of them, for which there is no memory; None where all fit.

    Args:
        order: with what `copies` returned.
        config: as `copies` took it.
    """
    nodes = sorted(map(int, order["nodes"]))
    if not order["every"]:
        return {"kind": "snapshots_off", "nodes": nodes, "from_disk_only": True} if config.snapshot_every != 0 else None
    if order["peers"] < min(config.copies, len(nodes) - 1):
        return {"kind": "copies_reduced", "nodes": nodes, "copies": order["peers"], "wanted": config.copies}
    return None


def shelves(reports: Reports) -> dict[str, list]:
    """Returns where the snapshots of each node can be read."""
    return {str(node): [one["host"], one["ports"]["shelf"]] for node, one in reports.items()}


def choose(
    reports: Reports, refused: Collection[tuple[int, int]], on_disk: int, floor: int = -1
) -> tuple[Message | None, float | None]:
    """Returns the newest whole state that nodes hold, and the rate of a device as it was measured before.

    Args:
        reports: of the nodes that are there.
        refused: steps and generations of states that turned out damaged.
        on_disk: step of the newest checkpoint; a newer one is better than what is held.
        floor: newest generation whose states don't count, since the run turned back from them.

    Returns:
        Step, generation, tier, for each rank a node that holds its snapshot, and the ranks whose snapshot no other node
        holds; None when the disk is better.
    """
    rows = [row for one in reports.values() for row in one["held"]]
    peak = next((one["peak"] for one in reports.values() if one["peak"]), None)
    whole = [one for one in whole_steps(rows) if one not in refused and one[1] > floor]
    if not whole or on_disk > whole[0][0]:
        return None, peak
    step, generation = whole[0]
    places: dict[str, int] = {}
    own: set[int] = set()
    holders: Counter[int] = Counter()
    for node in sorted(reports):
        for found in reports[node]["held"]:
            if (found[1], found[0]) == whole[0]:
                places.setdefault(str(found[2]), node)
                holders[found[2]] += 1
                own |= {found[2]} if found[4] else set()
    tier = "memory" if len(own) == len(places) else "peer"
    alone = sorted(rank for rank, count in holders.items() if count == 1)
    return {"step": step, "generation": generation, "places": places, "tier": tier, "alone": alone}, peak


def root_failure(failures: Sequence[Message], nodes_lost: bool) -> Message | None:
    """Returns the failure that caused the others; None without any, or where the loss of a node caused them.

    Args:
        failures: as `messages.Failure` describes them.
        nodes_lost: whether nodes were lost in the same generation.
    """
    # An echo is the error of a rank whose peer had failed, a hang often that of one that waits for such a peer.
    earliest = min(failures, key=lambda failure: (failure["echo"], failure["hang"], failure["at"]), default=None)
    if earliest is not None and nodes_lost and (earliest["echo"] or earliest["hang"]):
        return None
    return earliest
