"""Runs of llama-server for tests of memory and placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.llama_server.run_shape import RunShape


def run_shape(**changes: Any) -> RunShape:
    """The run of a deployment that sets nothing, with some values changed."""
    return replace(read_options({}).run_shape(), **changes)
