"""Data: text is prepared as token files, from which a loader makes batches by (index, count), without a mesh."""
