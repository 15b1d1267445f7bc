"""Entry of ``python -m meshwright`` and of the ``meshwright`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line and returns its exit status."""
    from meshwright.cli.main import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
