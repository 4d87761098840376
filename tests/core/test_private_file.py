"""Files with secrets are whole, private, and leave nothing beside them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmadmin.core.private_file import write_private


def test_is_private_and_replaced_whole(tmp_path: Path) -> None:
    """0600, the new text, and no other file in the folder."""
    path = tmp_path / "token"
    for text in ("first", "second"):
        write_private(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_once_leave_one_whole_text(tmp_path: Path) -> None:
    """Each writes a file of its own first, so none is read half."""
    path = tmp_path / "launch.json"
    texts = [str(number) * 20_000 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            list(pool.map(lambda text: write_private(path, text), texts))
            assert path.read_text(encoding="utf-8") in texts
    assert list(tmp_path.iterdir()) == [path]
