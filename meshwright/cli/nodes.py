"""Flags of a run over several nodes: ``--nodes 2 --node 1 --meet HOST`` beside what one node takes."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.arguments import take_value
from meshwright.errors import ConfigError
from meshwright.jobs.nodes import NodeOptions


def take_nodes(args: list[str]) -> NodeOptions | None:
    """Removes the flags of a multi-node run from a command; returns None when it has none.

    Raises:
        ConfigError: for numbers out of range, or a flag without the others.
    """
    flags = {name: take_value(args, f"--{name}") for name in ("nodes", "node", "meet", "slots", "key-file")}
    # A flag of several nodes on a run of one would be ignored in silence.
    if flags["nodes"] is None:
        if stray_flags := [f"--{name}" for name, value in flags.items() if value is not None]:
            raise ConfigError(f"{', '.join(stray_flags)} without --nodes; say how many nodes there are")
        return None
    if flags["node"] is None or flags["meet"] is None:
        raise ConfigError("--nodes needs --node, this one's number from 0, and --meet, the address of node 0")
    try:
        nodes, node = int(flags["nodes"]), int(flags["node"])
        slots = int(flags["slots"]) if flags["slots"] is not None else None
        int(flags["meet"].partition(":")[2] or 0)
    except ValueError:
        raise ConfigError("--nodes, --node, --slots and the port of --meet are whole numbers") from None
    if not 0 <= node < nodes or (slots is not None and slots < 1):
        raise ConfigError(f"--nodes {nodes} --node {node}: nodes are numbered from 0, and have a slot at least")
    key = Path(flags["key-file"]).expanduser() if flags["key-file"] is not None else None
    return NodeOptions(nodes=nodes, node=node, slots=slots, meet=flags["meet"], key_file=key)
