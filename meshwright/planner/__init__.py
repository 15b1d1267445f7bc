"""From model, layout and devices to a plan."""
