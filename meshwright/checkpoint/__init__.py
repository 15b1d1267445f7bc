"""Checkpoints: written atomically, checksummed, loaded under any layout; one file per backend."""
