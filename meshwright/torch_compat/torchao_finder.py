"""Has a user's own import of torchao, or that by transformers, see no GPUs, as `torch_compat.torchao_import` does.

Loads neither torch nor torchao: it waits until somebody imports torchao.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PRIVATE_NAMES = ()
TORCHAO = "torchao"


class TorchaoFinder(MetaPathFinder):
    """Finds torchao's modules where they are, and has each run without GPUs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where a module of torchao is; None for any other."""
        if fullname.partition(".")[0] != TORCHAO:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_without_gpus(module: ModuleType) -> None:
                torchao_import = importlib.import_module("meshwright.torch_compat.torchao_import")
                with torchao_import.without_gpus():
                    execute(module)

            spec.loader.exec_module = execute_without_gpus  # type: ignore[method-assign]
        return spec


def watch_torchao() -> None:
    """Makes later imports of torchao leave the GPUs alone."""
    if not any(isinstance(finder, TorchaoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchaoFinder())
