"""Entry point of `dse` and `python -m dse`: light, so that an interrupt while packages load ends quietly too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interrupt before it stands exits with 130."""
    try:
        from dse.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
