"""Files with secrets: for this user alone, and whole or absent at any moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Replace a file as a whole, 0600, on the disk when this returns."""
    fresh = path.with_name(f"{path.name}.{threading.get_native_id()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
