"""Reads and builds models: a config becomes a module on meta, with its structure, sizes, sharding table and weights.

torchao is imported here, before any module of the room imports transformers, which would have it touch the GPUs.
"""

from meshwright.torch_compat.torchao_import import import_before_transformers

import_before_transformers()
