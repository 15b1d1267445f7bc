"""Fault tolerance of a run: detects dead and hung ranks, replans for the rest, and keeps the state in memory.

- **generation**: the life of one set of ranks, from their fork until all of them are gone; torchelastic's restart of a
  worker group. Two never run at once.
- **order** (`messages.Order`): what a generation runs: ranks of each node, plan, state to restore, copies to make.
- **report** (`messages.NodeReport`): what a node has between generations, and how the last one ended there.
- **fence**: the proof that no rank of a generation writes any more, needed before the next one starts.
- **rewind**: going back to a state older than the newest, because the newest is anomalous or damaged.
- **claim** (`claims`): the file by which a node leads a generation over several nodes, as torchft's quorum and epoch.
"""
