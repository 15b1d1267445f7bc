"""Configurations of other frameworks, turned into recipes."""
