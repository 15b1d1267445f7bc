"""Flags of a run over several nodes: ``--nodes 2 --node 1 --meet HOST`` beside what one node takes."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.arguments import take_value
from meshwright.errors import ConfigError
from meshwright.jobs.nodes import NodeWords


def take_nodes(words: list[str]) -> NodeWords | None:
    """Removes the words of nodes from a command; None when it has none.

    Raises:
        ConfigError: for numbers that can't be, or a word without the others.
    """
    found = {name: take_value(words, f"--{name}") for name in ("nodes", "node", "meet", "slots", "key-file")}
    if found["nodes"] is None:
        if given := [f"--{name}" for name, value in found.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)} without --nodes; say how many nodes there are")
        return None
    if found["node"] is None or found["meet"] is None:
        raise ConfigError("--nodes needs --node, this one's number from 0, and --meet, the address of node 0")
    try:
        nodes, node = int(found["nodes"]), int(found["node"])
        slots = int(found["slots"]) if found["slots"] is not None else None
        int(found["meet"].partition(":")[2] or 0)
    except ValueError:
        raise ConfigError("--nodes, --node, --slots and the port of --meet are whole numbers") from None
    if not 0 <= node < nodes or (slots is not None and slots < 1):
        raise ConfigError(f"--nodes {nodes} --node {node}: nodes are numbered from 0, and have a slot at least")
    key = Path(found["key-file"]).expanduser() if found["key-file"] is not None else None
    return NodeWords(nodes=nodes, node=node, slots=slots, meet=found["meet"], key_file=key)
