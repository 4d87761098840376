"""Renders chat templates; run as a limited child, because a template can hang or eat memory.

`python -m mmadmin.core.chat_templates.render REQUEST ANSWER`: the request is
`{"templates": {name: text}, "rows": {row: variables}}`, the answer
`{"renders": {name: {row: {"output"} | {"error"}}}}`. The environment is the one that chat templates
are written for: blocks trimmed, `raise_exception`, `strftime_now` (at a fixed moment), loop
controls, `{% generation %}`, and the `tojson` of transformers, which by default neither sorts nor
escapes.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmadmin.core.build.recipe import Json

MOMENT = dt.datetime(2024, 7, 26, 12, 0, tzinfo=dt.UTC)
"""When `strftime_now` is: a rendering must not depend on the clock."""
LONGEST_OUTPUT = 1 << 20
BOS, EOS = "<s>", "</s>"


class Refused(Exception):
    """`raise_exception` of a template."""


def _raise_exception(message: str) -> str:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return MOMENT.strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (as transformers has it)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Generation(Extension):
    """`{% generation %}`, which marks what an assistant wrote for training: it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to the end tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.filters["tojson"] = _tojson
    return made


def render(template: str, rows: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Each row's output or error; a template that does not compile fails in every row."""
    try:
        compiled = environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        message = f"syntax error in line {error.lineno}: {error.message}"
        return {row: {"error": message} for row in rows}
    return {row: _row(compiled, variables) for row, variables in rows.items()}


def _row(compiled: jinja2.Template, variables: Mapping[str, Json]) -> dict[str, Json]:
    context: dict[str, Any] = {
        "bos_token": BOS,
        "eos_token": EOS,
        "add_generation_prompt": True,
        **variables,
    }
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(**context):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_OUTPUT:
                return {"error": f"it renders more than {LONGEST_OUTPUT} characters"}
    except Refused as error:
        return {"error": f"refused by the template: {error}"}
    except MemoryError:
        return {"error": "it needs more memory than a conversation may take"}
    except RecursionError:
        return {"error": "it calls itself without an end"}
    except Exception as error:  # noqa: BLE001 (Templates raise whatever they like.)
        return {"error": f"{type(error).__name__}: {error}"}
    return {"output": "".join(pieces)}


def main() -> None:
    """Read the request file, write the answer file."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    renders = {name: render(text, request["rows"]) for name, text in request["templates"].items()}
    Path(sys.argv[2]).write_text(json.dumps({"renders": renders}), encoding="utf-8")


if __name__ == "__main__":
    main()
