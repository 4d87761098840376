"""Loads the panel's templates without their indentation, which is a quarter of a page's bytes."""

import re

from django.template import Origin
from django.template.loaders.filesystem import Loader as FilesystemLoader

_KEPT_OR_INDENT = re.compile(r"(<(pre|textarea)\b.*?</\2>)|\n\s+", re.DOTALL)
"""An element whose white space is shown, or a line break and the white space after it."""


class Loader(FilesystemLoader):
    """Django's loader of the template folders, with each run of white space at a line's start cut.

    The line break stays, so that words on two lines do not join. What stands between ``<pre>`` or
    ``<textarea>`` and its end is left as it is.
    """

    def get_contents(self, origin: Origin) -> str:
        """The template's source, compact."""
        return _KEPT_OR_INDENT.sub(lambda m: m[1] or "\n", super().get_contents(origin))
