"""Entry of ``python -m meshwright`` and of the ``meshwright`` command."""

from __future__ import annotations

import gc
import sys

from meshwright.cli.main import main as run_command

_TRITON = "triton._C.libtriton"


def main() -> int:
    """Runs the command line and returns its exit status; the process ends with it."""
    try:
        return run_command(sys.argv[1:])
    finally:
        # The interpreter's shutdown would go through all objects of all libraries several times, a second of a core.
        # Triton 3.9 prints every object that such a shutdown passes over as leaked.
        if _TRITON in sys.modules:
            gc.unfreeze()
        else:
            gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
