"""What an output may not mention: the attempt that made it, and inputs that it does not keep alive.

A path of the staging folder is gone when the object is sealed; an input's store path may be
collected one day. A program that carries one works today and not tomorrow, so the step fails.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from pathlib import Path

from mmadmin.core.errors import StepFailed


def check_mentions(out: Path, forbidden: Mapping[bytes, str], *, skip: Collection[str]) -> None:
    """Refuse an output in which a forbidden text occurs; `forbidden` maps it to what it is.

    `skip` names files (relative paths) whose content is known to be someone else's, such as pinned
    downloads and models that were compared byte for byte. Raises `StepFailed` with the file's name.
    """
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name in skip or path.is_symlink() or not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for text, what in forbidden.items():
                if data.find(text) >= 0:
                    raise StepFailed(
                        f"the output {name} mentions {what}",
                        remedy="what it names will be gone; this is a fault of the recipe",
                        file=name,
                        exit_code=None,
                        log_tail=[],
                    )
