"""The machines: devices, nodes, the links between them, and what a collective over them takes."""
