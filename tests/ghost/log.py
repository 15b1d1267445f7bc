"""What the simulated NCCL saw, per process; and whether the ranks of every group asked for the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

Calls = list[tuple[str, ...]]


def disagreements(folder: Path) -> list[str]:
    """Compares the collectives and transfers of a finished run, as a real device would by hanging.

    Args:
        folder: GHOST_LOG of the run; a file per process, named by its id.

    Returns:
        A line per group whose members called different collectives, or in another order, and per pair of ranks
        whose sends and receives don't match; empty for a run that agrees.
    """
    members: dict[str, dict[int, Calls]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    transfers: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: {"send": [], "receive": []})
    for path in sorted(folder.iterdir()):
        own: dict[str, int] = {}
        for line in path.read_text(encoding="ascii").splitlines():
            kind, group, *rest = line.split()
            if kind == "group":
                own[group] = int(rest[0])
                sizes[group] = int(rest[1])
                members[group][own[group]] = []
            elif kind == "collective":
                members[group][own[group]].append(tuple(rest))
            else:
                rank, peer, size = rest
                pair = (rank, peer) if kind == "send" else (peer, rank)
                transfers[group, *pair][kind].append(size)
    found = []
    for group, calls in members.items():
        if len(calls) != sizes[group]:
            found.append(f"group {group} has {len(calls)} of {sizes[group]} members")
        first = calls[min(calls)]
        for rank, others in sorted(calls.items()):
            if others != first:
                place = next((i for i, (a, b) in enumerate(zip(first, others)) if a != b), min(len(first), len(others)))
                found.append(
                    f"group {group}: call {place} is {first[place : place + 1]} of member {min(calls)} and "
                    f"{others[place : place + 1]} of member {rank} ({len(first)} and {len(others)} calls)"
                )
    for (group, sender, receiver), sizes_by_kind in transfers.items():
        if sizes_by_kind["send"] != sizes_by_kind["receive"]:
            counts = {kind: len(sizes_of) for kind, sizes_of in sizes_by_kind.items()}
            found.append(f"group {group}: transfers from {sender} to {receiver} don't match: {counts}")
    return found


def collectives(folder: Path) -> int:
    """Returns how many collectives and transfers all processes called together."""
    return sum(
        line.split(maxsplit=1)[0] != "group"
        for path in folder.iterdir()
        for line in path.read_text(encoding="ascii").splitlines()
    )
