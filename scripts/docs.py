"""Write the docs that are read out of the code: commands, settings, the deployment file.

.venv/bin/python scripts/docs.py            write them (`make docs`)
.venv/bin/python scripts/docs.py --check    say which are stale; exit 1 then
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from mmadmin.cli.main import app
from mmadmin.core.catalog import engines
from mmadmin.core.spec.json_schema import json_schema
from mmadmin.core.spec.spec import describe_spec
from mmadmin.core.variables import BY_FILE, SECTIONS, Variable

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by `make docs` from the code. -->\n"


def cell(text: Any) -> str:
    """Text for one cell of a table."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()


def setting_row(variable: Variable) -> str:
    """One variable as a row."""
    mark = ("◦" if variable.secret else "•") if variable.remembered else ""
    meaning, default = cell(variable.meaning), cell(variable.default)
    return f"| `{variable.name}` | {mark} | {meaning} | {default} |"


def settings() -> str:
    """docs/settings.md."""
    lines = ["# Settings", "", NOTE]
    lines += ["All settings are variables of the environment. `mm up` and `mm set NAME=VALUE`"]
    lines += ["keep those marked • in `MM_HOME/settings.env` and those marked ◦ (secrets) in"]
    lines += ["a file each in `MM_HOME/secrets`, where commands and services find them. `mm set`"]
    lines += ["lists them, `mm unset NAME` takes one away, `mm up` restarts the services that read"]
    lines += ["a changed one. A variable that is set in the environment of a command goes before"]
    lines += ["what is kept; one that is set to nothing counts as not set."]
    lines += [BY_FILE, ""]
    for section, variables in SECTIONS.items():
        lines += [f"## {section}", "", "| variable | | what | without it |", "|---|---|---|---|"]
        lines += [setting_row(variable) for variable in variables]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def default(option: Any) -> str:
    """What holds without an option, where its help does not say so."""
    value = option.default
    if value is None or value is False or value in ("", [], ()) or "0 = " in (option.help or ""):
        return ""
    if value is True:
        return f" (default: `{option.opts[0]}`)"
    return f" (default: {value})"


def command_lines(command: Any, words: str) -> Iterator[str]:
    """One command's heading, help, arguments and options; then its sub-commands'."""
    if hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield from command_lines(sub, f"{words} {name}")
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = " ".join(
        (p.metavar or p.name.upper()) if p.required else f"[{p.metavar or p.name.upper()}]"
        for p in arguments
    )
    yield from (f"## {words} {shown}".rstrip(), "", (command.help or "").strip(), "")
    options = [p for p in command.params if p.param_type_name == "option"]
    rows = [
        f"| `{', '.join([*p.opts, *p.secondary_opts])}` | {cell(p.help or '')}{default(p)} |"
        for p in options
        if p.name not in {"help"} and not p.hidden
    ]
    if rows:
        yield from ("| option | |", "|---|---|", *rows, "")


EXIT_CODES = {
    0: "done",
    1: "failed; also when a check fails (`mm fit`, `mm doctor`, `mm store verify`, …)",
    2: "invalid usage",
    130: "interrupted; what a worker does goes on",
}


def commands() -> str:
    """docs/commands.md."""
    root = typer.main.get_command(app)
    lines = ["# Commands", "", NOTE]
    lines += ["`mm --as USER COMMAND` acts as that user. `mm --install-completion` installs shell"]
    lines += ["completion of commands, options and names of deployments.", ""]
    lines += ["Results go to standard output; errors and progress go to standard error. With"]
    lines += ["`--json`, a command prints one JSON document, and an error is"]
    lines += ['`{"error": {code, message, remedy, details}}`. On a terminal, tables fit its width;']
    lines += ["elsewhere, every value is whole and each row is one line. `NO_COLOR` works.", ""]
    lines += ["| exit code | |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    lines += [""]
    return "\n".join([*lines, *command_lines(root, "mm")]).rstrip() + "\n"


def field_rows(fields: list[Any]) -> Iterator[str]:
    """A table of fields."""
    yield from ("| field | kind | without it | what |", "|---|---|---|---|")
    for field in fields:
        kind = field["kind"]
        if field.get("choices"):
            kind = ", ".join(f"`{choice}`" for choice in field["choices"])
        default = "**required**" if field["required"] else field.get("default")
        shown = "" if default in (None, "", [], {}) else cell(default)
        extra = f" Flag `{field['flag']}`." if field.get("flag") else ""
        unit = f" ({field['unit']})" if field.get("unit") else ""
        only = f" Only for {', '.join(field['only_for'])}." if field.get("only_for") else ""
        words = cell(field["help"]) + unit + only + extra
        yield f"| `{field['name']}` | {kind} | {shown} | {words} |"


OF_ENGINES = ("engine", "model", "serve")
"""Tables whose fields are an engine's own."""


def deployment_file() -> str:
    """docs/deployment-file.md."""
    lines = ["# The deployment file", "", NOTE]
    lines += [
        "A TOML document. A field that is not here is refused, with the name that was meant.",
        "",
        "Editors that know TOML schemas (Even Better TOML, taplo) complete and check it by",
        "[deployment-file.schema.json](deployment-file.schema.json), which the panel serves, too:",
        "write `#:schema http://127.0.0.1:8000/api/v1/deployment-file.schema.json` as the first",
        "line, with your panel's address. It knows each field's rules; `mm plan` checks the rest.",
        "",
    ]
    for kind in sorted(engines()):
        description: Any = describe_spec(kind)
        for section in description["sections"]:
            name = section["name"]
            if kind != sorted(engines())[0] and name not in OF_ENGINES:
                continue
            title = f"`[{name}]`" if name else "At the top"
            title += f" of {kind}" if name in OF_ENGINES else ""
            lines += [f"## {title}", "", section["help"], "", *field_rows(section["fields"]), ""]
    lines += ["## Template patches", ""]
    for kind, fields in describe_spec()["patches"].items():  # type: ignore[union-attr]
        lines += [f"### `{kind}`", ""]
        lines += [*field_rows(fields), ""] if fields else ["No fields.", ""]
    return "\n".join(lines).rstrip() + "\n"


def schema() -> str:
    """docs/deployment-file.schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


PAGES = {
    "docs/settings.md": settings,
    "docs/commands.md": commands,
    "docs/deployment-file.md": deployment_file,
    "docs/deployment-file.schema.json": schema,
}


def main() -> None:
    """Write or compare."""
    stale = []
    for name, write in PAGES.items():
        path, text = ROOT / name, write()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if stale and "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(stale)}; run `make docs`")


if __name__ == "__main__":
    main()
