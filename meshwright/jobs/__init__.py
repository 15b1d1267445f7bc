"""Jobs are what a person asks for, as functions with typed results; a job neither parses words nor prints results.

The environment that torch needs is set here: every job's module is imported after it, and torch with that module.
"""

from meshwright.launch.preload import prepare_environment

prepare_environment()
