"""Starts ranks and ends them: a file per launcher; the only room that reads or writes the environment."""
