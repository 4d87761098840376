"""Small wheels made by hand, and locks of them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from mmadmin.core.build.recipe import PathSource
from mmadmin.core.environments import interpreter
from mmadmin.core.spec.lock import Lock, LockedFile


def wheel(
    folder: Path,
    name: str,
    files: Mapping[str, bytes],
    *,
    version: str = "1.0",
    metadata: str = "",
    record: str | None = None,
    executable: tuple[str, ...] = (),
) -> Path:
    """A wheel with these files; `record` replaces the digests that it lists."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
    content = {**files, f"{info}/METADATA": header.encode()}
    rows = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in content.items())
    content[f"{info}/RECORD"] = (rows if record is None else record).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for member, data in content.items():
            entry = zipfile.ZipInfo(member, (2024, 5, 17, 1, 2, 4))
            entry.external_attr = (0o100755 if member in executable else 0o100644) << 16
            made.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def locked(*wheels: Path, name: str = "engine") -> Lock:
    """A lock whose environment `name` consists of these wheels, found by their paths."""
    pins = tuple(
        LockedFile(
            path.name,
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_size,
            PathSource(str(path)),
        )
        for path in wheels
    )
    return Lock({name: pins}, {}, {name: interpreter()})
