"""How values are shown: states by shape, word and colour; bytes, times and digests for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal

from django import template
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from deployments.models import Trial
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.generations import diff as core_diff
from mmadmin.core.generations.activation import MESSAGES, Phase
from mmadmin.core.generations.diff import DiffRow
from mmadmin.core.generations.trial import MESSAGES as TRIAL_MESSAGES
from mmadmin.core.generations.trial import Phase as TrialPhase

register = template.Library()

LOOKS: dict[str, tuple[str, str]] = {
    "planned": ("s-wait", "idle"),
    "queued": ("s-wait", "idle"),
    "waiting": ("s-wait", "idle"),
    "locking": ("s-busy", "busy"),
    "planning": ("s-busy", "busy"),
    "building": ("s-busy", "busy"),
    "running": ("s-busy", "busy"),
    "starting": ("s-busy", "busy"),
    "probing": ("s-busy", "busy"),
    "activating": ("s-busy", "busy"),
    "built": ("s-built", "ok"),
    "succeeded": ("s-done", "ok"),
    "ready": ("s-live", "ok"),
    "open": ("s-live", "ok"),
    "live": ("s-live", "ok"),
    "active": ("s-live", "ok"),
    "cached": ("s-cached", "ok"),
    "substituted": ("s-cached", "ok"),
    "draining": ("s-drain", "warn"),
    "ending": ("s-drain", "warn"),
    "suspended": ("s-drain", "warn"),
    "expired": ("s-past", "warn"),
    "retired": ("s-past", "idle"),
    "ended": ("s-past", "idle"),
    "stopped": ("s-off", "idle"),
    "cancelled": ("s-off", "idle"),
    "revoked": ("s-off", "bad"),
    "new": ("s-idle", "idle"),
    "allow": ("s-done", "ok"),
    "deny": ("s-off", "idle"),
    "granted": ("s-done", "ok"),
    "refused": ("s-off", "bad"),
    "ok": ("s-done", "ok"),
    "passed": ("s-done", "ok"),
    "skipped": ("s-past", "idle"),
    "warning": ("s-drain", "warn"),
    "warn": ("s-drain", "warn"),
    "bytes missing": ("s-bad", "bad"),
    "host away": ("s-bad", "bad"),
    "fail": ("s-bad", "bad"),
    "failed": ("s-bad", "bad"),
    "errored": ("s-bad", "bad"),
}
"""State → its shape in the sprite and its tone."""
PLAIN = ("s-idle", "idle")
NAMES = {"open": "running"}
"""States that people know by another name."""

NOTHING = "\u2013"
"""Shown where there is no value."""
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
SPANS: tuple[tuple[int, Callable[[float], str]], ...] = (
    (1, lambda s: f"{s * 1000:.0f} ms"),
    (10, lambda s: f"{s:.1f} s"),
    (MINUTE_S, lambda s: f"{s:.0f} s"),
    (HOUR_S, lambda s: _two(s, (MINUTE_S, "min"), (1, "s"))),
    (DAY_S, lambda s: _two(s, (HOUR_S, "h"), (MINUTE_S, "min"))),
)
SHORT = 12
MOST_CHIPS = 6
NEARLY, FULL = 80, 100

ANSI = re.compile(r"\x1b\[([0-9;]*)m")
OTHER_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*(?:\x07|$)|.)")


@cache
def _sheet() -> str:
    """The sprite's address, looked up once: a page has a hundred drawings."""
    return static("icons.svg")


@register.simple_tag
def icon(name: str, label: str = "") -> SafeString:
    """A drawing from the sprite; without a label it is decoration."""
    names = format_html('role="img" aria-label="{}"', label) if label else 'aria-hidden="true"'
    return format_html(
        '<svg class="icon" {}><use href="{}#{}"></use></svg>',
        mark_safe(names),  # noqa: S308 (built above)
        _sheet(),
        name,
    )


@register.filter
def doing(trial: Trial) -> str:
    """What a running trial is doing."""
    return (
        TRIAL_MESSAGES[TrialPhase(trial.phase)] if trial.phase else "waiting for the host's worker"
    )


@register.simple_tag
def sprite(name: str) -> SafeString:
    """A drawing from the sprite, for use inside another picture."""
    return format_html('<use href="{}#{}"></use>', _sheet(), name)


@register.simple_tag
def status(state: str, word: str = "", *, pill: bool = False, still: bool = False) -> SafeString:
    """A state: its shape, its word, its colour."""
    shape, tone = LOOKS.get(state, PLAIN)
    classes = " ".join(
        [
            "st",
            tone,
            *(["pill"] if pill else []),
            *(["spin"] if shape == "s-busy" and not still else []),
        ]
    )
    return format_html(
        '<span class="{}">{}<span>{}</span></span>',
        classes,
        icon(shape),
        word or NAMES.get(state, state),
    )


@register.filter
def shape(state: str) -> str:
    """The sprite's symbol of a state."""
    return LOOKS.get(state, PLAIN)[0]


@register.filter
def tone(state: str) -> str:
    """ok, busy, warn, bad or idle."""
    return LOOKS.get(state, PLAIN)[1]


@register.filter(name="bytes")
def size(value: float | Literal[""] | None) -> str:
    """Bytes with a binary unit: 98362432 → 93.8 MiB. What a host has not reported is a dash."""
    if value is None or value == "":
        return NOTHING
    return bytes_text(float(value))


@register.filter
def count(value: float | None) -> str:
    """A number with thin spaces between thousands."""
    return NOTHING if value is None else f"{int(value):,}".replace(",", "\u202f")


@register.filter
def brief(value: float | None) -> str:
    """A large number in few characters: 1 234 567 → 1.2M."""
    if value is None:
        return NOTHING
    number = float(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}".rstrip("0").rstrip(".") + unit
    return f"{number:.0f}"


@register.filter
def seconds(value: float | timedelta | None) -> str:
    """A length of time for people: 4 min 12 s."""
    if value is None:
        return NOTHING
    total = value.total_seconds() if isinstance(value, timedelta) else float(value)
    for below, form in SPANS:
        if total < below:
            return form(total)
    return _two(total, (DAY_S, "d"), (HOUR_S, "h"))


def _two(seconds: float, large: tuple[int, str], small: tuple[int, str]) -> str:
    """A large unit and a small one, which is left out when there is none of it."""
    rest = int(seconds % large[0] // small[0])
    return f"{int(seconds // large[0])} {large[1]}" + (f" {rest} {small[1]}" if rest else "")


@register.filter
def milliseconds(value: float | None) -> str:
    """Milliseconds for people."""
    return NOTHING if value is None else seconds(value / 1000)


@register.filter
def milli(value: float) -> str:
    """Thousandths as a number: 9100 → 9.1."""
    return f"{value / 1000:.1f}"


LEVELS = ("fail", "warn", "ok")


@register.filter
def worst_first(checks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The doctor's checks: what is wrong, then what may be, then what is well."""
    return sorted(checks, key=lambda check: LEVELS.index(check["level"]))


NOTABLE_PERMILLE = 50


@register.filter
def off_by(permille: int) -> SafeString:
    """How far a prediction was off: 12 → 1.2 % high."""
    words = f"{abs(permille) / 10:.1f} % {'high' if permille > 0 else 'low'}"
    if permille == 0:
        words = "exact"
    tone = "warn" if abs(permille) >= NOTABLE_PERMILLE else "ok"
    drawing = icon("warn") if tone == "warn" else icon("check")
    return format_html('<span class="st {}">{}<span>{}</span></span>', tone, drawing, words)


@register.simple_tag
def took(start: datetime | None, end: datetime | None) -> SafeString | str:
    """How long something took, or has been taking: the latter counts on in the browser."""
    if start is None:
        return ""
    if end is not None:
        return seconds(end - start)
    return format_html(
        '<time datetime="{}" data-ago="since">{}</time>',
        start.isoformat(),
        seconds(timezone.now() - start),
    )


@register.filter
def ago(moment: datetime | None) -> SafeString | str:
    """A moment as "3 min ago", with the exact time on hover; it goes on counting in the browser."""
    if moment is None:
        return "never"
    past = (timezone.now() - moment).total_seconds()
    for unit_s, unit in (
        (365 * DAY_S, "y"),
        (30 * DAY_S, "mo"),
        (DAY_S, "d"),
        (HOUR_S, "h"),
        (MINUTE_S, "min"),
        (1, "s"),
    ):
        if abs(past) >= unit_s:
            words = f"{int(abs(past) // unit_s)} {unit}"
            text = f"{words} ago" if past > 0 else f"in {words}"
            break
    else:
        text = "just now"
    return format_html(
        '<time datetime="{}" title="{}" data-ago>{}</time>', moment.isoformat(), exact(moment), text
    )


@register.filter
def unix(moment: float) -> datetime:
    """Unix seconds as a moment."""
    return datetime.fromtimestamp(moment, UTC)


@register.filter
def exact(moment: datetime | None) -> str:
    """A moment to the second, in UTC."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


@register.filter
def short(digest: str | None) -> str:
    """The first characters of a digest; of an object name, hash cut and name kept."""
    text = digest or ""
    head, dash, name = text.partition("-")
    if dash and len(head) > SHORT:
        return f"{head[:SHORT]}…-{name}"
    return f"{text[:SHORT]}…" if len(text) > SHORT + 1 else text


@register.filter
def less(whole: int, part: int) -> int:
    """A difference."""
    return whole - part


@register.filter
def percent(part: float | None, whole: float | None) -> int:
    """0 to 100."""
    if not part or not whole:
        return 0
    return max(0, min(100, round(100 * part / whole)))


@register.filter
def share(part: float | None, whole: float | None) -> str:
    """A part in per cent, with a digit where it is small."""
    if not whole:
        return NOTHING
    value = 100 * (part or 0) / whole
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"  # noqa: PLR2004


@register.filter
def used_disk(facts: dict[str, Any]) -> int:
    """Bytes of the store's disk in use."""
    return int(facts.get("disk_total_bytes") or 0) - int(facts.get("disk_free_bytes") or 0)


@register.simple_tag
def bar(part: float | None, whole: float | None, label: str, tone: str = "") -> SafeString:
    """A bar, filled by `part` of `whole`, with a label for screen readers."""
    return format_html(
        '<svg class="bar {}" role="img" aria-label="{}">'
        '<rect width="{}%" height="100%"></rect></svg>',
        tone,
        label,
        percent(part, whole),
    )


@register.simple_tag
def parts_bar(parts: Sequence[tuple[str, int, str]], total: int, label: str) -> SafeString:
    """A bar of (name, size, class) parts of `total`, one after the other."""
    pieces, at = [], 0.0
    for name, part, css in parts:
        width = 100 * part / total if total else 0
        pieces.append(
            format_html(
                '<rect class="{}" x="{}%" width="{}%" height="100%"><title>{}: {}</title></rect>',
                css,
                f"{at:.2f}",
                f"{width:.2f}",
                name,
                size(part),
            )
        )
        at += width
    return format_html(
        '<svg class="bar tall" role="img" aria-label="{}">{}</svg>',
        label,
        mark_safe("".join(pieces)),  # noqa: S308 (every piece was escaped)
    )


@register.filter
def ansi(text: str) -> SafeString:
    """Log text as HTML, a line an element: colours kept as classes, other escapes dropped.

    A carriage return restarts the line, as on a terminal: only the last text is shown.
    """
    shown = []
    for line in text.rstrip("\n").split("\n"):
        last = line.rstrip("\r").rsplit("\r", 1)[-1]
        shown.append(f"<div data-line>{_coloured(last) or ' '}</div>")
    return mark_safe("".join(shown))  # noqa: S308 (every piece was escaped)


def _coloured(line: str) -> str:
    pieces: list[str] = []
    classes: list[str] = []
    position = 0
    for match in ANSI.finditer(line):
        pieces.append(_span(line[position : match.start()], classes))
        position = match.end()
        for code in match[1].split(";"):
            if code in {"", "0"}:
                classes = []
            elif code.isdigit():
                classes = [*classes, f"a{int(code)}"]
    pieces.append(_span(line[position:], classes))
    return "".join(pieces)


def _span(text: str, classes: list[str]) -> str:
    clean = escape(OTHER_ESCAPES.sub("", text))
    return f'<span class="{" ".join(classes)}">{clean}</span>' if classes and clean else str(clean)


@register.filter
def udiff(row: DiffRow) -> SafeString:
    """A unified diff of a long value, a line an element."""
    return _signed(row.lines())


@register.filter
def diff_lines(text: str) -> SafeString:
    """A unified diff that was kept as text, without its two lines of names."""
    return _signed(text.splitlines()[2:])


def _signed(lines: Sequence[str]) -> SafeString:
    looks = {"+": "ins", "-": "del", "@": "at"}
    return format_html_join(
        "",
        '<div class="{}">{}</div>',
        ((looks.get(line[:1], ""), line or " ") for line in lines),
    )


@register.filter
def ticked(text: str) -> SafeString:
    """Help of the deployment file's fields: what stands between backticks is code."""
    shown = (
        format_html("<code>{}</code>", piece) if n % 2 else escape(piece)
        for n, piece in enumerate(text.split("`"))
    )
    return mark_safe("".join(shown))  # noqa: S308 (every piece was escaped)


@register.filter
def is_long(row: DiffRow) -> bool:
    """True when a difference is better shown as a diff of lines."""
    return row.is_long


@register.filter
def telling(changes: Sequence[DiffRow]) -> list[DiffRow]:
    """The few differences that say most: what a person wrote, else whatever there is."""
    return core_diff.telling(changes, MOST_CHIPS)


@register.filter
def budget_tone(spent: int, limit: int) -> str:
    """The tone of a budget's bar: calm, nearly used up, used up."""
    used = percent(spent, limit)
    return "bad" if used >= FULL else "warn" if used >= NEARLY else ""


@register.filter
def about(subject: str) -> dict[str, str]:
    """What an audit subject is, and where its page is: `generation:name/3`."""
    kind, _, name = subject.partition(":")
    deployment, _, number = name.rpartition("/")
    places = {
        "deployment": f"/deployments/{name}/",
        "generation": f"/deployments/{deployment}/generations/{number}/" if deployment else "",
        "key": f"/keys/{name}/",
        "host": "/hosts/",
    }
    return {"kind": kind, "name": name, "href": places.get(kind, "") if name else ""}


BROWSERS = (("Edg/", "Edge"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
SYSTEMS = ("Windows", "Android", "iPhone", "iPad", "Macintosh", "Linux")


@register.filter
def browser(agent: str) -> str:
    """A user agent in short: Firefox on Linux."""
    name = next((name for sign, name in BROWSERS if sign in agent), "")
    system = next((system for system in SYSTEMS if system in agent), "")
    if name and system:
        return f"{name} on {system.replace('Macintosh', 'a Mac')}"
    return name or agent[:60] or "unknown client"


@register.filter
def pretty(value: Any) -> str:
    """JSON for people."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)


@register.filter
def sentence(text: str) -> str:
    """A message as a sentence: a full stop at its end, a capital unless it begins with a name."""
    first, _, _ = text.partition(" ")
    if first.isalpha() and first.islower():
        text = f"{text[0].upper()}{text[1:]}"
    return text if not text or text.endswith((".", "?", "!", "…")) else f"{text}."


@register.filter
def phase_message(phase: str) -> str:
    """What happens in a phase of an activation."""
    return MESSAGES[Phase(phase)] if phase in set(Phase) else ""


@register.filter
def phase_took(phase: dict[str, Any]) -> str:
    """How long a phase of an activation took; its moments are ISO strings or Unix seconds."""
    start, end = (_moment(phase.get(name)) for name in ("started", "ended"))
    return seconds(end - start) if start is not None and end is not None else ""


def _moment(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None


@register.filter
def get(mapping: dict[str, Any] | None, name: str) -> Any:
    """A value of a mapping, or nothing."""
    return (mapping or {}).get(name)


@register.simple_tag(takes_context=True)
def here(context: template.RequestContext, **changes: Any) -> str:
    """The page's own address with some of its query changed."""
    query = context["request"].GET.copy()
    query.pop("part", None)
    for name, value in changes.items():
        if value in {None, ""}:
            query.pop(name, None)
        else:
            query[name] = str(value)
    return f"?{query.urlencode()}"


@register.simple_tag(takes_context=True)
def leaf(context: template.RequestContext, number: int, key: str = "") -> str:
    """The address of another page of a list; `key` where a page has several lists."""
    return here(context, **{key or "page": number})
