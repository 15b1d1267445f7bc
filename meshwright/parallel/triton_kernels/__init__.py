"""Kernels in Triton, an optional package: each is imported where there is a GPU, and has a way without it."""
