"""Reads how a model computes off its code: how its weights split, how its layers connect, what its loss is."""
