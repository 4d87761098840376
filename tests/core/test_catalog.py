"""The catalog finds recipes and engines by looking at the packages."""

from __future__ import annotations

import pytest

from mmadmin.core import catalog
from mmadmin.core.errors import InvalidDerivation, InvalidSpec


def test_every_kind_is_found_under_its_own_name() -> None:
    """What the catalog lists can be asked for, and is of the kind it is listed as."""
    for kind, recipe in catalog.recipes().items():
        assert catalog.recipe(kind) is recipe
        assert recipe.kind == kind
        assert recipe.version >= 1
    for kind, engine in catalog.engines().items():
        assert catalog.engine(kind) is engine
        assert engine.kind == kind


def test_unknown_kinds_are_refused_with_the_known_ones() -> None:
    """The message names what was asked and lists what there is."""
    with pytest.raises(InvalidDerivation, match=r"'bake'.*known recipes:"):
        catalog.recipe("bake")
    with pytest.raises(InvalidSpec, match=r"'steam'.*known engines:"):
        catalog.engine("steam")
