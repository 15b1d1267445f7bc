"""`python -m tests.ghost [COMMAND...]`: runs a command, or the tests of this folder, with a GPU that isn't there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.ghost.build import build


def main(argv: list[str]) -> None:
    """Builds the simulated GPU and replaces this process by the command under it.

    Args:
        argv: the command; pytest over this folder when it is empty or begins with an option of pytest.
    """
    folder = build()
    environment = dict(os.environ)
    environment["LD_PRELOAD"] = str(folder / "libghost.so")
    for name, first in (("LD_LIBRARY_PATH", folder), ("PATH", folder), ("PYTHONPATH", Path.cwd())):
        environment[name] = os.pathsep.join(filter(None, [str(first), environment.get(name)]))
    environment.setdefault("GHOST_GPUS", "2")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A rank compiles by itself: with workers, each rank starts Python and torch for every one of them.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Without torch's cache each tensor gets fresh memory, which is zero: losses stay finite, and no step looks broken.
    environment.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    if not argv or argv[0].startswith("-"):
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).parent), *argv]
    os.execvpe(argv[0], argv, environment)


main(sys.argv[1:])
