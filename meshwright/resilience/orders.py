"""The leader's orders, composed from the nodes' reports: which node runs which ranks, and which state they restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from meshwright.checkpoint.remote import complete_steps
from meshwright.resilience.generation_ranks import steps_between
from meshwright.resilience.host_memory_budget import nodes_have_room, state_bytes
from meshwright.resilience.peers import Message
from meshwright.spec.plan import Plan
from meshwright.train.config import RecoveryConfig

LINK_BYTES_S = 1.25e9
"""Assumed rate of a network interface that reports none: 10 Gbit/s."""
Reports = Mapping[int, Message]
"""The last report of each node (`LocalNode.report`), by node."""


def compose(reports: Reports, devices: Sequence[tuple[int, int]]) -> Message:
    """Returns the fields of an order that place the ranks and name the nodes' addresses.

    Args:
        reports: of the connected nodes.
        devices: node and device of each rank.
    """
    nodes: dict[str, Message] = {}
    for rank, (node, slot) in enumerate(devices):
        report = reports[node]
        ports = {"host": report["host"]} | {name: report["ports"][name] for name in ("courier", "disk")}
        nodes.setdefault(str(node), {"first": rank, "slots": []} | ports)["slots"].append(slot)
    # Rank 0's node serves the store.
    head = reports[devices[0][0]]
    return {
        "world": len(devices),
        "nodes": nodes,
        "members": sorted(reports),
        "store": [head["host"], head["ports"]["store"]],
        "shelves": shelves(reports),
    }


def held_after(reports: Reports, step: int) -> tuple[set[tuple[int, int]], bool]:
    """Returns (step, generation) of each held state after ``step``, and whether any older state is held."""
    held_states = {(row[1], row[0]) for report in reports.values() for row in report["held"]}
    later = {pair for pair in held_states if pair[0] > step}
    return later, held_states > later


def copies(plan: Plan, nodes: Mapping[str, Message], reports: Reports, config: RecoveryConfig) -> Message:
    """Returns the fields of an order that set the copies of the state, the same on all nodes.

    Args:
        plan: of the run.
        nodes: of an order.
        reports: of the connected nodes.
        config: steps between snapshots (None chooses by cost) and the number of copies on other nodes.

    Returns:
        ``every``, the steps between snapshots, 0 where a node lacks memory for them; ``disk``, whether every node has
        memory for a further copy, from which checkpoints are written beside the training; ``peers``, the number of
        other nodes that hold each snapshot, at most ``config.copies``, limited by nodes and memory.
    """
    nodes_in_ring = sorted(map(int, nodes))
    ranks = [len(nodes[str(node)]["slots"]) for node in nodes_in_ring]
    available = [reports[node]["available"] for node in nodes_in_ring]
    link = min(reports[node]["link"] or LINK_BYTES_S for node in nodes_in_ring)
    wanted_peers = min(config.copies, len(nodes_in_ring) - 1)
    # Prefer as many copies as configured, then fewer, before giving up snapshots.
    peers = next(
        (number for number in range(wanted_peers, 0, -1) if nodes_have_room(plan, ranks, available, 0, number)), 0
    )
    # Over several nodes a snapshot that no other node holds would be lost with its node.
    fits = peers > 0 or (wanted_peers == 0 and nodes_have_room(plan, ranks, available))
    every = steps_between(plan, config.snapshot_every, peers * state_bytes(plan, max(ranks)) / link) if fits else 0
    disk = nodes_have_room(plan, ranks, available, 1, max(1, peers))
    return {"every": every, "disk": disk, "peers": peers}


def shortage(order: Message, config: RecoveryConfig) -> Message | None:
    """Returns the event that reports snapshots or copies left out for lack of memory; None when all fit.

    Args:
        order: with the fields of `copies`.
        config: the run's settings, as for `copies`.
    """
    nodes = sorted(map(int, order["nodes"]))
    if not order["every"]:
        return {"kind": "snapshots_off", "nodes": nodes, "from_disk_only": True} if config.snapshot_every != 0 else None
    if order["peers"] < min(config.copies, len(nodes) - 1):
        return {"kind": "copies_reduced", "nodes": nodes, "copies": order["peers"], "wanted": config.copies}
    return None


def shelves(reports: Reports) -> dict[str, list]:
    """Returns the address of each node's shelf, [host, port] by node."""
    return {str(node): [report["host"], report["ports"]["shelf"]] for node, report in reports.items()}


def choose(
    reports: Reports, refused: Collection[tuple[int, int]], on_disk: int, floor: int = -1
) -> tuple[Message | None, float | None]:
    """Returns the newest complete state in the nodes' memory, and a device's measured rate.

    Args:
        reports: of the connected nodes.
        refused: (step, generation) of states that turned out damaged.
        on_disk: step of the newest checkpoint, which is preferred when it is newer.
        floor: newest generation whose states don't count, because the run was rewound from them.

    Returns:
        The state as `messages.StatePlaces`, None when the disk is newer; and the FLOP/s of a device, None if unknown.
    """
    rows = [row for entry in reports.values() for row in entry["held"]]
    peak = next((entry["peak"] for entry in reports.values() if entry["peak"]), None)
    complete = [entry for entry in complete_steps(rows) if entry not in refused and entry[1] > floor]
    if not complete or on_disk > complete[0][0]:
        return None, peak
    step, generation = complete[0]
    holders_by_rank: dict[str, int] = {}
    local_ranks: set[int] = set()
    holders: Counter[int] = Counter()
    for node in sorted(reports):
        for row in reports[node]["held"]:
            if (row[1], row[0]) == complete[0]:
                holders_by_rank.setdefault(str(row[2]), node)
                holders[row[2]] += 1
                local_ranks |= {row[2]} if row[4] else set()
    # Event detail: every snapshot by its own node's ranks, or some from peers' copies.
    tier = "memory" if len(local_ranks) == len(holders_by_rank) else "peer"
    alone = sorted(rank for rank, count in holders.items() if count == 1)
    return {"step": step, "generation": generation, "places": holders_by_rank, "tier": tier, "alone": alone}, peak


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
