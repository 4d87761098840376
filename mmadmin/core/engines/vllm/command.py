"""The options of `vllm serve`: from the `[serve]` table, checked against a version's own parser.

Which options there are, and what each takes, differs between versions: the parser of the pinned one
is written down at build (`recipes.vllm_options`), and the command is checked against that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, cast

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.vllm.fields import FIELDS
from mmadmin.core.engines.vllm.options import VllmOptions, read_options
from mmadmin.core.errors import InvalidInput
from mmadmin.core.spec.fields import Field, Refusals, decimal_text, refuse, suggestion

NAMED: Mapping[str, Field] = {field.name: field for field in FIELDS if field.flag}
_BY_OPTION = {field.flag[2:]: field for field in NAMED.values()}
OURS: Mapping[str, str] = {
    **dict.fromkeys(("model", "served-model-name"), "the file says it in [model] and public_name"),
    **dict.fromkeys(("host", "port", "uds", "root-path"), "the engine listens on a socket"),
    **dict.fromkeys(("api-key", "hf-token", "allow-credentials"), "mmadmin keeps the secrets"),
    "chat-template": "write a [template] table",
    "trust-request-chat-template": "clients do not choose the template",
    **dict.fromkeys(
        (
            *("pipeline-parallel-size", "data-parallel-size", "data-parallel-size-local"),
            *("prefill-context-parallel-size", "device-ids", "nnodes", "node-rank", "headless"),
            *("master-addr", "master-port", "distributed-executor-backend"),
        ),
        "use serve.tensor_parallel_size: an engine sits on the GPUs of one host",
    ),
    **dict.fromkeys(("grpc", "grpc-port"), "clients reach the engine by HTTP through the gate"),
    **dict.fromkeys(
        ("revision", "code-revision", "tokenizer-revision", "tokenizer", "hf-config-path"),
        "the lock pins the checkpoint with its tokenizer and configuration",
    ),
    **dict.fromkeys(
        (
            *("trust-remote-code", "middleware", "logits-processors", "io-processor-plugin"),
            *("tool-parser-plugin", "reasoning-parser-plugin", "worker-cls", "scheduler-cls"),
            *("worker-extension-cls", "model-class-overrides"),
        ),
        "it runs code that nothing pins",
    ),
    **dict.fromkeys(
        (
            *("config", "download-dir", "allowed-local-media-path", "log-config-file"),
            *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "tool-server"),
            *("mm-encoder-fp8-scale-path", "mm-encoder-fp8-scale-save-path", "load-format"),
        ),
        "it names files that nothing pins",
    ),
}
"""Options that `[serve.flags]` may not hold, and what to do instead."""
_PARSERS = {
    "tool-call-parser": ("tool_parsers", "tool"),
    "reasoning-parser": ("reasoning_parsers", "reasoning"),
}

Takes = Literal["switch", "values", "json", "text", "integer", "number", "size"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a version."""

    names: Sequence[str]
    """Without dashes; a switch has its --no- form among them."""
    takes: Takes
    choices: Sequence[str]


@dataclass(frozen=True, slots=True)
class Parser:
    """What a version of `vllm serve` takes."""

    options: Mapping[str, Option]
    """By every name."""
    parsers: Mapping[str, Sequence[str]]
    """The option that takes one → the names that it takes."""


def read_parser(table: Any) -> Parser:
    """The parser that was written down at build. Raises `InvalidInput`."""
    try:
        rows = [Option(r["names"], r["takes"], r["choices"]) for r in table["options"]]
        return Parser(
            {name: row for row in rows for name in row.names},
            {option: table[key] for option, (key, _) in _PARSERS.items()},
        )
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f"the list of vLLM's options cannot be read: {error!r}", remedy="build it again"
        ) from error


def check_flags(options: VllmOptions) -> None:
    """Refuse what no version takes from a deployment file. Raises `InvalidSpec`."""
    refusals = Refusals()
    for name, value in options.flags.items():
        with refusals.gathering():
            _check_flag(name, value)
    refusals.raise_found()


def _check_flag(name: str, value: Json) -> None:
    dotted = f"serve.flags.{name}"
    bare = name.removeprefix("--").replace("_", "-")
    if bare != name:
        refuse(dotted, "an option is written as in --help, no dashes before it", remedy=f'"{bare}"')
    positive = name.removeprefix("no-")
    if field := _BY_OPTION.get(positive):
        refuse(dotted, "this option has a field", remedy=f"use serve.{field.name}")
    if reason := OURS.get(positive):
        refuse(dotted, "a deployment file may not set this option", remedy=reason)
    if value is None or isinstance(value, dict):
        refuse(dotted, "this cannot be a value", remedy="write text, a number, true or false")


def check_command(table: Mapping[str, Json], parser: Parser) -> None:
    """Check a `[serve]` table by the parser of the pinned version. Raises `InvalidSpec`."""
    options, refusals = read_options(table), Refusals()
    for name, field in NAMED.items():
        value = getattr(options, name)
        if value is not None and value != {}:
            with refusals.gathering():
                _check(f"serve.{name}", field.flag[2:], _plain(value), parser)
    for name, flag in options.flags.items():
        with refusals.gathering():
            _check(f"serve.flags.{name}", name, flag, parser)
    refusals.raise_found()


def _plain(value: object) -> Json:
    return decimal_text(value) if isinstance(value, Decimal) else cast("Json", value)


def _check(dotted: str, name: str, value: Json, parser: Parser) -> None:
    option = parser.options.get(name)
    if option is None:
        refuse(
            dotted,
            "the pinned version of vLLM has no such option",
            remedy=suggestion(name, parser.options),
        )
    if name not in option.names[:1] and name.startswith("no-"):
        refuse(dotted, "a switch has its positive name", remedy=f"write {option.names[0]} = false")
    if option.takes == "switch":
        if not isinstance(value, bool):
            refuse(dotted, "this is a switch", remedy="write true or false")
        if value is False and f"no-{option.names[0]}" not in option.names:
            refuse(dotted, "this switch has no off form", remedy="remove it")
        return
    if isinstance(value, bool):
        refuse(dotted, "this option takes a value", remedy="write text or a number")
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and option.takes != "values":
        refuse(dotted, "this option takes one value", remedy="write text or a number")
    for one in values:
        _check_value(dotted, one, option)
    known = parser.parsers.get(name, ())
    if known and value not in known:
        refuse(dotted, f'"{value}" is not a parser', remedy=suggestion(str(value), known))


def _check_value(dotted: str, value: Json, option: Option) -> None:
    text = option_text(value)
    if option.choices and text not in option.choices:
        refuse(
            dotted, f'"{text}" is not one of its values', remedy=suggestion(text, option.choices)
        )
    if option.takes in ("integer", "number"):
        try:
            int(text) if option.takes == "integer" else float(text)
        except ValueError:
            refuse(dotted, f'"{text}" is not a number', remedy="write a number")
    if option.takes == "json" and not isinstance(value, dict):
        try:
            json.loads(text)
        except ValueError:
            refuse(dotted, "this is not JSON", remedy="""write for example '{"image": 4}'""")


def option_text(value: object) -> str:
    """An option's value as a word of the command."""
    if isinstance(value, dict):
        return json.dumps(value)
    return decimal_text(value) if isinstance(value, Decimal) else str(value)


def arguments(options: VllmOptions, ranks: int) -> list[str]:
    """The `[serve]` table as words of the command; `ranks` are the GPUs that share each layer."""
    words: list[str] = []
    for name, field in NAMED.items():
        value = getattr(options, name)
        if name == "tensor_parallel_size":
            value = ranks if ranks > 1 or value else None
        words += _argument(field.flag[2:], value)
    for name, flag in sorted(options.flags.items()):
        words += _argument(name, flag)
    return words


def _argument(name: str, value: object) -> list[str]:
    if value is None or value == {}:
        return []
    if isinstance(value, bool):
        return [f"--{name}"] if value else [f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(option_text, value)]
    return [f"--{name}", option_text(value)]
