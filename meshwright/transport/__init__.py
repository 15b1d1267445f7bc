"""The wires between processes of a run on different nodes: authenticated connections, and nothing else listens."""
