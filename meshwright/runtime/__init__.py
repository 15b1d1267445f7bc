"""Makes a layout true on this rank."""
