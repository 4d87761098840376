"""Tests of the panel."""

import re

from django.http import HttpResponse

PASSWORD = "a long enough password"
"""Of everybody in the seeded team."""


def markup(response: HttpResponse) -> str:
    """The page without the line breaks and indentation of its templates."""
    text = re.sub(r"\s+", " ", response.content.decode()).replace(" >", ">")
    return re.sub(r"(<\w[^>]*>) | (?=</)", r"\1", text)
