"""Usage records as the gate writes them."""

from __future__ import annotations

import json
from dataclasses import asdict

from mmadmin.core.snapshot import Usage


def usage_to_json(usage: Usage) -> str:
    """One record, as it lies in the spool and travels in the stream."""
    return json.dumps(asdict(usage), separators=(",", ":"), ensure_ascii=False)
