"""What makes a layout true on this rank: mesh, collectives, one file for each axis, the built program."""
