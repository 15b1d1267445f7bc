"""The outer server, and the sites that dial in: islands that are runs of their own (docs/islands.md)."""
