"""Text: prepared to token files, and the loader that cuts rows from them; knows its (index, count), not the mesh."""
