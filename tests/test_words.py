"""The project speaks the field's standard words: retired names and phrases stay out.

CONTRIBUTING.md has the glossary. Names are checked word by word (`turn_queue`, `TurnQueue`), in Python
and in file names; phrases in every text that people read, comments and docstrings included.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RETIRED_NAMES = {
    "asker": "resolver",
    "books": "usage records",
    "care": "maintenance task",
    "cares": "maintenance tasks",
    "depot": "binary cache",
    "depots": "binary caches",
    "flight": "request, exchange",
    "flights": "requests, exchanges",
    "foresee": "preview",
    "foresight": "preview",
    "foretell": "predict",
    "foretold": "expected, predicted",
    "hands": "host adapter",
    "incarnation": "process identity",
    "keeper": "watchdog",
    "ledger": "usage, totals",
    "pulse": "heartbeat",
    "standing": "status",
    "stile": "queue",
    "turnstile": "queue",
    "walker": "run",
}
"""Word in a name → what to call it."""
RETIRED_PHRASES = {
    r"\bturnstiles?\b": "queue",
    r"(?<!\")\bdepots?\b": "binary cache",
    r"\bforetold\b|\bforetells?\b": "expected, predicted",
    r"\bforesight\b|\bforesees?\b": "preview",
    r"\bincarnations?\b": "process identity",
    r"(?<!in[-\s])\bflights?\b": "request",
    r"\bthe books\b": "usage records",
    r"\bfound wanting\b": "failed",
    r"\bfor ever\b": "permanently",
    r"\bis no (?:valid|longer a|GGUF|file|archive|template|directory|folder|JSON|TOML)\b": "is not a",
    r"\b(?:said|told|refused|shown|explained) in words\b": "with a message",
    r"\breckon(?:s|ed)?\b": "compute, expect",
    r"\bbe it that\b": "",
}
"""Pattern → what to write."""
TEXTS = (".py", ".md", ".html", ".js", ".css", ".toml", ".in", ".yml")
LEFT_OUT = (
    "static/vendor/",
    "requirements/",
    "deployments/migrations/",
    "tests/test_words.py",
    "CHANGELOG.md",
)
"""Other people's files, and what tells of earlier names."""


@cache
def files() -> tuple[Path, ...]:
    """Every text file of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(
        ROOT / name
        for name in listed
        if name.endswith(TEXTS) and not name.startswith(LEFT_OUT) and (ROOT / name).exists()
    )


def words_of(name: str) -> list[str]:
    """The words of an identifier: `make_turnQueue` → make, turn, queue."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_retired_words_stay_out(path: Path) -> None:
    """No name is made of a retired word, and no text has a retired phrase."""
    text = path.read_text(encoding="utf-8")
    names = {path.stem}
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names |= {token.string for token in tokens if token.type == tokenize.NAME}
    found = [
        f"{name}: say {RETIRED_NAMES[word]}"
        for name in sorted(names)
        for word in words_of(name)
        if word in RETIRED_NAMES
    ]
    for pattern, instead in RETIRED_PHRASES.items():
        found += [
            f"line {text[: match.start()].count(chr(10)) + 1}: {match[0]!r}: say {instead}"
            for match in re.finditer(pattern, text, re.IGNORECASE)
        ]
    assert not found
