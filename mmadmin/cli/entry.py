"""Where `mm` begins: an interrupt is quiet from the first moment, while the command is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Load `mm` and run it; ends with 130 when it is interrupted before that."""
    try:
        from mmadmin.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
