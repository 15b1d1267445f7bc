"""Reads and builds models: a config becomes a module on meta, with its structure, sizes, sharding table and weights."""
