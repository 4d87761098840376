"""What `vllm serve` takes, by its own argument parser: `python options.py OUTPUT`.

Run in the environment of the very version. Writes a JSON table: `options`, each with its long names
and what it takes, and the names of its tool and reasoning parsers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBERS = {"int": "integer", "float": "number", "human_readable_int": "size"}
TYPES = ("loads", "_parse_type", "parse_dataclass", "union_dict_and_str")
"""Names of functions that read JSON."""
WHERE = {
    "argparse": ("vllm.utils.argparse_utils", "vllm.utils"),
    "tools": ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
    "reasoning": ("vllm.reasoning",),
}
"""Modules that have moved between versions, the newest place first."""


def found(kind: str, name: str) -> Any:
    """A name of whichever module this version has."""
    for module in WHERE[kind]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"this version of vLLM has no {name} where it was looked for")


def on_a_host_without_gpus() -> None:
    """Let the parser be made where the build sees no GPU."""
    platforms: Any = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_unspecified():
        cpu = importlib.import_module("vllm.platforms.cpu")
        platforms.current_platform = cpu.CpuPlatform()


def parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, made as the command makes it."""
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    whole = found("argparse", "FlexibleArgumentParser")()
    (command,) = (one for one in serve.cmd_init() if one.name == "serve")
    made: argparse.ArgumentParser = command.subparser_init(whole.add_subparsers(dest="subparser"))
    return made


def actions_of(made: argparse.ArgumentParser) -> list[argparse.Action]:
    """All options of a parser, which argparse gives no public way to list."""
    return made._actions  # noqa: SLF001


def option(action: argparse.Action) -> Mapping[str, Any] | None:
    """One option as data; None for what has no long name."""
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    if not names or names == ["help"]:
        return None
    if action.nargs == 0:
        takes = "switch"
    elif action.nargs in ("+", "*"):
        takes = "values"
    else:
        takes = NUMBERS.get(
            kind_of(action.type), "json" if kind_of(action.type) in TYPES else "text"
        )
    choices = [str(one) for one in action.choices or () if one is not None]
    return {"names": names, "takes": takes, "choices": choices}


def kind_of(reader: object) -> str:
    """The name of the function that reads a value."""
    return getattr(reader, "__name__", "")


def registered(kind: str, manager: str) -> list[str]:
    """The names that a manager of parsers knows."""
    return sorted(found(kind, manager).list_registered())


def main() -> None:
    """Write it down."""
    on_a_host_without_gpus()
    options = [one for action in actions_of(parser()) if (one := option(action))]
    table = {
        "options": sorted(options, key=lambda one: one["names"]),
        "tool_parsers": registered("tools", "ToolParserManager"),
        "reasoning_parsers": registered("reasoning", "ReasoningParserManager"),
    }
    Path(sys.argv[1]).write_text(json.dumps(table, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    main()
