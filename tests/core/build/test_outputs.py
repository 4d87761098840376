"""Outputs mention neither the attempt that made them nor inputs that may be collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.outputs import check_mentions
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Toolbox
from mmadmin.core.errors import StepFailed
from mmadmin.core.store import Staging, Store
from tests.core.workshop import Watch
from tests.support.tools import NoTools


class Writes:
    """A recipe that writes what a test tells it, with {out} and {input} filled in."""

    kind = "writes"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Anything goes."""

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known."""
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Write the one file, in a second folder below."""
        (out / "sub").mkdir()
        known = {"out": out, "input": inputs.get("one", "")}
        (out / "sub/file").write_text(str(params["text"]).format(**known))


class Referring(Writes):
    """The same, for a recipe that keeps its inputs alive."""

    refers_to_inputs = True
    copies: Sequence[str] = ()


class Tools(NoTools):
    """Tools with what the builder asks of them."""

    sandbox_level = "none"
    known: Mapping[str, str] = {}


def realised(store: Store, recipe: Writes, text: str) -> str:
    """Build a file from an input object; the object's name."""

    def tools(derivation: Derivation, staging: Staging, log: Path) -> Tools:
        return Tools(staging.scratch)

    below = Derivation("below", "writes", 1, {"text": "plain"}, {})
    above = Derivation("above", "writes", 1, {"text": text}, {"one": below})
    return realise(above, store, tools, Watch(), recipe_of=lambda _kind: recipe).object


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("made in {out}/bin", "sub/file mentions the folder that it was built in"),
        ("linked to {input}/lib", "sub/file mentions the store path of its input one"),
    ],
)
def test_mentions_of_what_will_be_gone_fail_the_step(text: str, words: str, tmp_path: Path) -> None:
    """Nothing is sealed, and the file is named."""
    store = Store(tmp_path / "store")
    with pytest.raises(StepFailed, match=words):
        realised(store, Writes(), text)
    assert [found.name for found in store.objects() if found.name.endswith("above")] == []


def test_a_recipe_that_refers_to_its_inputs_may_name_them(tmp_path: Path) -> None:
    """A system's manifest does; the store keeps what it names."""
    store = Store(tmp_path / "store")
    assert store.object(realised(store, Referring(), "uses {input}")) is not None


def test_known_files_and_links_are_not_read(tmp_path: Path) -> None:
    """Downloads and proven models are not searched; a link has no bytes of its own."""
    (tmp_path / "model").write_text("SECRET")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "empty").touch()
    check_mentions(tmp_path, {b"SECRET": "it"}, skip={"model"})
    with pytest.raises(StepFailed, match="model mentions it"):
        check_mentions(tmp_path, {b"SECRET": "it"}, skip=())
