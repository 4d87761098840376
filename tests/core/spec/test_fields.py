"""Tables of fields: what they take, and how they refuse."""

from __future__ import annotations

from decimal import Decimal

import pytest

from mmadmin.core.errors import InvalidSpec
from mmadmin.core.spec.fields import Field, decimal_text, read_table

SOURCE = Field("source", "choice", "Which.", choices=("hub", "url"), default="hub")
TABLE = (
    SOURCE,
    Field("repo", "string", "The repo.", required=True, only_for=("hub",), example="a/b"),
    Field("url", "string", "The url.", required=True, only_for=("url",), example="https://x"),
    Field("count", "integer", "How many.", minimum=1, maximum=8, example=4),
    Field("share", "decimal", "A share.", minimum=0, maximum=1, example="0.5"),
    Field("shares", "decimals", "Shares.", minimum=0),
    Field("free", "mapping", "Anything."),
)


def read(**values):
    """The table read with the repo given, unless the test gives a source of its own."""
    values = values if "source" in values else {"repo": "a/b", **values}
    return read_table(TABLE, values, "model", selector="source")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0.70", "0.7"), ("1.0", "1"), ("0", "0"), ("-0.5", "-0.5"), ("1e3", "1000"), ("40", "40")],
)
def test_decimals_are_kept_as_their_shortest_text(text, wanted):
    """0.7 and 0.70 are the same value, so they are the same text."""
    assert decimal_text(Decimal(text)) == wanted


def test_values_keep_the_order_of_the_fields():
    """The order in the file does not matter for what comes out."""
    assert list(read(share=Decimal("0.70"), count=2)) == ["repo", "count", "share"]
    assert read(share=Decimal("0.70"))["share"] == "0.7"


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"cuont": 3}, "model.cuont", 'did you mean "count"?'),
        ({"zzz": 3}, "model.zzz", "known here:"),
        ({"count": 0}, "model.count", "use 1 or more"),
        ({"count": 9}, "model.count", "use 8 or less"),
        ({"count": True}, "model.count", "for example count = 4"),
        ({"count": "4"}, "model.count", "for example count = 4"),
        ({"count": Decimal("1.5")}, "model.count", "not a whole number"),
        ({"share": Decimal("NaN")}, "model.share", "finite"),
        ({"shares": 1}, "model.shares", "must be a list"),
        ({"shares": [1, "x"]}, "model.shares[1]", "must be a number"),
        ({"free": {"deep": {"er": 1}}}, "model.free.deep", "not allowed"),
        ({"source": "hup"}, "model.source", 'did you mean "hub"?'),
        ({"source": "url", "repo": "a/b", "url": "https://x"}, "model.repo", "makes no sense"),
        ({"source": "url"}, "model.url", "needs it"),
        ({"repo": "a\tb"}, "model.repo", "control characters"),
    ],
)
def test_a_refusal_names_the_field_and_the_remedy(values, field, words):
    """Whoever reads it knows which line to change and to what."""
    with pytest.raises(InvalidSpec) as refused:
        read(**values)
    assert refused.value.details["field"] == field
    assert words in str(refused.value)
    assert refused.value.remedy
