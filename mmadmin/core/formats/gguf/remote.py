"""Headers of a set that is not on this disk, read through streams that fetch what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmadmin.core.formats.gguf.header import GgufHeader, Tensor, Value, read_dimensions, read_stream
from mmadmin.core.formats.gguf.sets import GgufSet
from mmadmin.core.formats.gguf.shape import ModelShape, shape_of
from mmadmin.core.formats.protocol import Open, RepoFile

TEMPLATE_KEY = "tokenizer.chat_template"


def read_remote(chosen: GgufSet, open_file: Open) -> ModelShape:
    """Dimensions and tensor table of a set.

    A set whose first shard holds only metadata (and a vocabulary of many megabytes) is read up to
    that vocabulary; its other shards have small headers. Raises `InvalidModel`, and what the
    streams raise.
    """
    file = chosen.files[0]
    if chosen.shards == 1:
        header = _header(file, open_file)
        return shape_of(header.metadata, [header.tensors])
    first = open_file(file)
    metadata: Mapping[str, Value] = read_dimensions(first, file.size_bytes, file.path)
    rest = [_header(one, open_file) for one in chosen.files[1:]]
    total = rest[0].integer("split.tensors.count")
    tables: list[Sequence[Tensor]] = [(), *(header.tensors for header in rest)]
    if total is None or sum(len(table) for table in tables) < total:
        first.seek(0)  # the first shard holds tensors too: their table follows the vocabulary
        header = read_stream(first, file.size_bytes, file.path)
        metadata, tables[0] = header.metadata, header.tensors
    return shape_of(metadata, tables)


def read_remote_template(chosen: GgufSet, open_file: Open) -> str | None:
    """The chat template, which follows the vocabulary; None when the model has none."""
    template = _header(chosen.files[0], open_file).metadata.get(TEMPLATE_KEY)
    return template if isinstance(template, str) else None


def _header(file: RepoFile, open_file: Open) -> GgufHeader:
    return read_stream(open_file(file), file.size_bytes, file.path)
