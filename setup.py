"""The one thing that pyproject.toml cannot say: the version is the newest one in CHANGELOG.md."""

import re
from pathlib import Path

from setuptools import setup

CHANGELOG = Path(__file__).with_name("CHANGELOG.md").read_text(encoding="utf-8")
VERSION = re.search(r"^## \[(\d+\.\d+\.\d+)\]", CHANGELOG, re.MULTILINE)
if VERSION is None:
    raise SystemExit("CHANGELOG.md names no version")

setup(version=VERSION[1])
