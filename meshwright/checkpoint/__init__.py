"""Checkpoints: written beside and renamed, checksummed, loaded under any layout, one file per backend."""
