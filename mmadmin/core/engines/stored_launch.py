"""A launch as JSON: the record of what a replica was started with.

The record is read back instead of computed again, so that an engine is compared with the command it
was started with, whatever a later version of mmadmin would make of its generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import Capabilities, Expectation, LaunchSpec


def launch_as_json(launch: LaunchSpec) -> dict[str, Json]:
    """All of a launch but the questions, which belong to the kind of engine, and the GPUs."""
    return {
        "engine_kind": launch.engine_kind,
        "argv": list(launch.argv),
        "env": dict(launch.env),
        "secret_env": launch.secret_env,
        "expect": asdict(launch.expect),
        "load_deadline_s": launch.load_deadline_s,
        "socket": launch.socket,
        "help_argv": list(launch.help_argv),
        "readable": list(launch.readable),
    }


def launch_from_json(record: Mapping[str, Any]) -> LaunchSpec:
    """The launch of a record that `is_stored`.

    Raises `InvalidSpec` when this installation does not have the kind of engine.
    """
    expect = dict(record["expect"])
    capabilities = Capabilities(**expect.pop("capabilities"))
    return LaunchSpec(
        **{name: value for name, value in record.items() if name != "expect"},
        expect=Expectation(**expect, capabilities=capabilities),
        questions=catalog.engine(record["engine_kind"]).questions,
    )


def is_stored(record: Mapping[str, Any]) -> bool:
    """False for a replica that was never started, or on a TCP port by an earlier version."""
    return "socket" in record
