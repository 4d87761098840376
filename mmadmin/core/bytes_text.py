"""Numbers of bytes as people read them: one way for commands, pages, messages and logs."""

from __future__ import annotations

STEP = 1024
TENTHS_BELOW = 100
"""From here on a tenth says nothing."""


def bytes_text(size: float) -> str:
    """`0 B`, `93.8 MiB`, `304 MiB`, `71.4 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= STEP and len(units) > 1:
        size /= STEP
        del units[0]
    digits = 0 if units[0] == "B" or abs(size) >= TENTHS_BELOW else 1
    return f"{size:.{digits}f} {units[0]}"
