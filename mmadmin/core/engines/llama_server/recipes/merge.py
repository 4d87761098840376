"""`merge`: shards → one GGUF, by `llama-gguf-split --merge`, proven.

inputs: `shards` (an object with the whole set under its own names), `engine` (with
`bin/llama-gguf-split`). params: `{"first": "dir/name-00001-of-0000N.gguf", "output": "name.gguf"}`.

Before: the set is complete, each shard whole (its tensors lie inside it), in its place
(`split.no`), of one model (`split.tensors.count`, metadata); there is room. Meanwhile: the digest
that the file must have is computed from the shards. After: every metadata key and array equal,
every tensor equal byte for byte. The tool writes to a scratch name and never deletes a shard. A
merge that does not pass does not become an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mmadmin.core.build.params import (
    at_path,
    fields,
    input_file,
    input_folder,
    refuse,
    relative_path,
    text,
)
from mmadmin.core.build.recipe import Determinism, FixedFile, Growing, Params, Recipe, Toolbox
from mmadmin.core.errors import InvalidDerivation, InvalidModel, StepFailed
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.expected_merge import DigestAhead, expect_merge
from mmadmin.core.formats.gguf.merged import check_merged
from mmadmin.core.formats.gguf.shards import Shard, find_set, parse_name, read_set

PROGRAM = "bin/llama-gguf-split"
HEADER_ROOM = 1 << 20
"""Bytes on top of the shards' sum: keys move and padding changes, nothing grows."""


def engine_program(inputs: Mapping[str, Path], path: str) -> Path:
    """A program of the engine object; raises `InvalidDerivation` when it was built without."""
    program = input_folder(inputs, "engine") / path
    if not program.is_file():
        raise InvalidDerivation(
            f"the engine object has no {path}",
            remedy=f"build the engine with the target {program.name}",
        )
    return program


class Merge:
    """Shards in, one file out."""

    kind = "merge"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ("shards",)

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, required=("first", "output"))
        first = relative_path(text(params, "first", self.kind), "merge.first")
        output = relative_path(text(params, "output", self.kind), "merge.output")
        try:
            if parse_name(Path(first).name) is None:
                refuse("merge.first", first, "a shard's name, such as m-00001-of-00003.gguf")
            merged = parse_name(Path(output).name)
        except InvalidModel as error:
            raise InvalidDerivation(error.message, remedy=error.remedy) from error
        if merged is not None or not output.endswith(".gguf"):
            refuse("merge.output", output, "a .gguf name without a shard suffix")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Check, merge, check."""
        first = input_file(inputs, "shards", text(params, "first", self.kind))
        program = engine_program(inputs, PROGRAM)
        ask(find_set(first), tools)
        shards = read_set(first)
        size = sum(shard.header.file_size for shard in shards)
        tools.log(f"{len(shards)} shards, {size} bytes: complete and of one model")
        tools.reserve(size + HEADER_ROOM)
        scratch = tools.scratch / "merged.gguf"
        with ExitStack() as stack:
            expected = expect_merge(shards)
            ahead = stack.enter_context(DigestAhead(expected)) if expected else None
            self._run(program, shards, Growing(scratch, size), tools)
            tools.log("comparing every key, array and tensor with the shards")
            digest = check_merged(
                scratch, shards, lambda done, total: tools.progress(done, total, "bytes"), ahead
            )
        merged = at_path(out, text(params, "output", self.kind))
        scratch.rename(merged)
        tools.hashed(merged, digest)
        tools.log(f"merged and proven: sha256 {digest}")

    def _run(self, program: Path, shards: Sequence[Shard], grows: Growing, tools: Toolbox) -> None:
        try:
            tools.run([str(program), "--merge", str(shards[0].path), str(grows.path)], grows=grows)
        except StepFailed as error:
            raise StepFailed(
                f"{error.message} (its errors always name the first shard; all shards passed "
                "our checks, so suspect this host's disk or memory)",
                remedy=error.remedy,
                **error.details,
            ) from error


RECIPE: Recipe = Merge()
