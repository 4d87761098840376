"""Tables at every width: what must stay whole does, nothing is lost without being said."""

import io

import pytest
from rich.console import Console

from mmadmin.cli import tables
from mmadmin.cli.store_names import object_column, short_name
from mmadmin.cli.tables import Column, Layout, layout, table

NAME = f"{'3f1c09ab47d2' + 'e' * 52}-smollm2-135m"
KEYS = [
    Column("key", whole=True),
    Column("state", whole=True),
    Column("owner"),
    Column("note", drop=2),
    Column("may use", drop=1),
    Column("last used", whole=True, drop=3),
]
ROWS = [
    ["sk-mm-abcdefghjkmn", "[green]active[/]", "Ada", "the coding agent of the team", "all", "never"],
    ["sk-mm-nmkjhgfedcba", "revoked", "Bob", "a [longer] note " * 4, "one, two", "2026-11-30 12:00"],
]  # fmt: skip


def text_of(found: Layout) -> list[str]:
    """The lines without colours."""
    return [line.plain for line in found.lines]


@pytest.mark.parametrize("width", range(20, 200, 7))
def test_what_is_whole_stays_whole(width: int) -> None:
    """At any width each key stands on one line, and no line is longer than need be."""
    found = layout(KEYS, ROWS, width)
    lines = text_of(found)
    assert sum("sk-mm-abcdefghjkmn" in line for line in lines) == 1
    assert sum("sk-mm-nmkjhgfedcba" in line for line in lines) == 1
    assert all(line == line.rstrip() for line in lines)
    kept = [c.heading for c in KEYS if c.heading not in found.left_out]
    assert [word for word in kept if word not in lines[0]] == []
    if width >= 60:
        assert max(map(len, lines)) <= width


def test_the_least_useful_goes_first_and_is_named() -> None:
    """Columns go in the order that is theirs; what must stay is never left out."""
    assert layout(KEYS, ROWS, 120).left_out == ()
    assert layout(KEYS, ROWS, 66).left_out == ("last used",)
    assert layout(KEYS, ROWS, 48).left_out == ("last used", "note")
    assert layout(KEYS, ROWS, 20).left_out == ("last used", "note", "may use")


def test_a_column_that_says_nothing_makes_room() -> None:
    """Where there is no room an empty column goes before any other, and nobody misses it."""
    rows = [[*row[:4], "", row[5]] for row in ROWS]
    assert "may use" in text_of(layout(KEYS, rows, 120))[0]
    narrow = layout(KEYS, rows, 72)
    assert "may use" not in text_of(narrow)[0]
    assert narrow.left_out == ()


def test_names_of_objects_are_shortened_before_anything_is_left_out() -> None:
    """Twelve digits and the own name, which the commands take as well; whole where they fit."""
    columns = [Column("size", whole=True, right=True), object_column(), Column("why", drop=1)]
    rows = [["1.0 GiB", NAME, "kept"], ["8 B", NAME, "kept by hand"]]
    assert text_of(layout(columns, rows, 60)) == [
        "   size  object                      why",
        "1.0 GiB  3f1c09ab47d2…-smollm2-135m  kept",
        "    8 B  3f1c09ab47d2…-smollm2-135m  kept by hand",
    ]
    assert text_of(layout(columns, rows, 200))[1].split() == ["1.0", "GiB", NAME, "kept"]
    assert short_name("smollm2/1") == "smollm2/1", "what is no object stays as it is"


def test_elsewhere_every_row_is_one_line() -> None:
    """A pipe gets whole values, whatever their length, and lines that can be counted."""
    rows = [["1", "word " * 100 + "\nand more"], ["2", ""]]
    lines = text_of(layout([Column("", whole=True), Column("reason")], rows, None))
    assert len(lines) == 3
    assert lines[1].startswith("1  word word")
    assert lines[1].endswith("; and more")
    assert lines[2] == "2"


def test_a_terminal_hears_what_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line below the table; and colours that are forced make no terminal of a pipe."""
    out = io.StringIO()
    monkeypatch.setattr(tables, "console", Console(file=out, force_terminal=True, width=80))
    assert tables.terminal_width() is None
    monkeypatch.setattr(tables, "terminal_width", lambda: 48)
    table(KEYS, ROWS, empty="none")
    assert "no room for: last used, note" in out.getvalue()
    table(KEYS, [], empty="none at all")
    assert "none at all" in out.getvalue()
