"""Entry of ``python -m meshwright`` and of the ``meshwright`` command."""

from __future__ import annotations

import sys

from meshwright.cli.main import main as run_command


def main() -> int:
    """Runs the command line and returns its exit status."""
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
