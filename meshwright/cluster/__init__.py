"""The machines of a job: devices, nodes, links between them, and times of collectives over them."""
