"""The one home of settings: `MM_HOME/settings.env`, and a file each for secrets.

Only `mm up`, `mm init`, `mm set` and `mm unset` write it, after everything was checked. A wrong
line is a problem with a name and a remedy; the other lines hold all the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Home, Ports
from mmadmin.core.private_file import write_private
from mmadmin.core.variables import GONE, REMEMBERED, VARIABLES

SECRET_VARIABLES = tuple(name for name, variable in REMEMBERED.items() if variable.secret)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the settings that cannot be used."""

    message: str
    remedy: str
    name: str = ""
    """The setting; empty = it concerns the whole file."""
    line: str = ""
    """As it stands in the file."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The settings of an installation, and what is wrong in their file."""

    values: Mapping[str, str]
    problems: tuple[Problem, ...] = ()


def settings_file(home: Home) -> Path:
    """Where the settings are kept (0600: a database address may hold a password)."""
    return home.root / "settings.env"


def read_settings(home: Home) -> Kept:
    """What is kept, secrets included; a line that cannot be used is left out and named."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    path = settings_file(home)
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        lines = []
        problems.append(
            Problem(f"{path} cannot be read: {error}", "make it a text file that you can read")
        )
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, text = (part.strip() for part in line.partition("="))
        if name in GONE:
            continue
        value, wrong, remedy = _value(name, text, has_value="=" in line)
        if wrong:
            problems.append(Problem(f"{path}, line {number}: {wrong}", remedy, name, line))
        else:
            values[name] = value
    for name in SECRET_VARIABLES:
        if value := _secret(home.secret_file(name)):
            values[name] = value
    return Kept(values, tuple(problems))


def _value(name: str, text: str, *, has_value: bool) -> tuple[str, str, str]:
    """The value of a line; else what is wrong with it, and the remedy."""
    variable = REMEMBERED.get(name)
    if variable is None and name in VARIABLES:
        return "", f"`{name}` is not kept in this file", "remove the line; set it where it is used"
    if variable is None or not has_value:
        return (
            "",
            f"`{name}` is not a setting",
            "correct its name or remove the line; `mm set` lists the settings",
        )
    try:
        value = variable.clean(" ".join(shlex.split(text)))
    except ValueError as error:
        return "", f"{name}: {error}", "fix the quotation marks, or remove the line"
    if value and (problem := variable.problem(value)):
        return "", f"{name}: {problem}", f"`mm set {name}=…`, or `mm unset {name}`"
    return value, "", ""


def _secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def check_settings(values: Mapping[str, str]) -> None:
    """Refuse values that cannot be, alone or together. Raises `InvalidInput`."""
    for name, variable in REMEMBERED.items():
        if (value := values.get(name)) and (problem := variable.problem(value)):
            raise InvalidInput(f"{name}: {problem}", remedy=f"set {name} to another value")
    check_distinct(Ports.from_env(values))


def check_distinct(ports: Ports) -> None:
    """Refuse one port for two services: each would take it from the other."""
    if len({ports.panel, ports.gate, ports.metrics}) < 3:  # noqa: PLR2004 (of three)
        raise InvalidInput(
            f"panel ({ports.panel}), gate ({ports.gate}) and metrics ({ports.metrics}) need a port"
            " each",
            remedy="set MM_PANEL_PORT, MM_GATE_PORT or MM_METRICS_PORT to another number",
        )


def write_settings(
    home: Home, values: Mapping[str, str], *, unusable: Sequence[Problem] = ()
) -> None:
    """Keep these settings and no others: 0600, each file replaced as a whole.

    Lines that could not be used stay until somebody corrects them.
    """
    lines = ["# Written by `mm up` and `mm set`; the environment goes before it.\n"]
    for name, variable in REMEMBERED.items():
        value = values.get(name, "")
        if variable.secret:
            _write_secret(home.secret_file(name), value)
        elif value:
            lines.append(f"# {variable.meaning}\n{name}={shlex.quote(value)}\n")
    lines += [f"{problem.line}\n" for problem in unusable]
    write_private(settings_file(home), "".join(lines))


def _write_secret(path: Path, value: str) -> None:
    if not value:
        path.unlink(missing_ok=True)
    elif _secret(path) != value:  # its time says when it changed
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, value + "\n")
