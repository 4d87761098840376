"""What a model file says about itself, as data; run as a limited child for hostile files.

`python -m mmadmin.core.formats.gguf.report REQUEST ANSWER`: the request names the files of one
model (`{"files": [absolute paths]}`, shards in order) and whether the template's text is wanted
(`"template": true`); the answer is `{"report": …}` or `{"error": {"message", "remedy"}}`. Whatever
goes wrong in here means that the file is not valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.child import answer_requests, answered
from mmadmin.core.formats.gguf.header import (
    GgufArray,
    GgufHeader,
    Value,
    check_is_model,
    read_header,
)
from mmadmin.core.formats.gguf.shards import Shard, check_set

TEMPLATE = "tokenizer.chat_template"
LONGEST_STRING = 1024
"""Characters of a metadata string that a report repeats."""
LONGEST_NUMBERS = 512
"""Items of a numeric array that a report repeats."""
EXACT = 1 << 53

NUMBERS = {
    "layers": "block_count",
    "context_length": "context_length",
    "embedding_length": "embedding_length",
    "feed_forward_length": "feed_forward_length",
    "head_count": "attention.head_count",
    "head_count_kv": "attention.head_count_kv",
    "key_length": "attention.key_length",
    "value_length": "attention.value_length",
    "vocab_size": "vocab_size",
}
"""Report field → key below the architecture's name."""


def read_model(files: Sequence[Path]) -> list[GgufHeader]:
    """The checked headers of a model's files, shards in order. Raises `InvalidModel`."""
    shards = [Shard(path, read_header(path)) for path in files]
    check_set(shards)
    return [shard.header for shard in shards]


def report(headers: Sequence[GgufHeader], name: str) -> dict[str, Json]:
    """The report of a model, from the headers of all its files. Raises `InvalidModel`."""
    first = headers[0]
    architecture = check_is_model(first.metadata, name)
    if not any(header.tensors for header in headers):
        raise InvalidModel(
            f"{name} holds no tensors", remedy="it is a vocabulary alone: take the model's file"
        )
    arrays = {k: v for k, v in first.metadata.items() if isinstance(v, GgufArray)}
    template = first.string(TEMPLATE)
    tokens = arrays.get("tokenizer.ggml.tokens")
    numbers: dict[str, Json] = {
        field: _number(first, f"{architecture}.{key}") for field, key in NUMBERS.items()
    }
    if numbers["vocab_size"] is None and tokens is not None:
        numbers["vocab_size"] = tokens.count
    types: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            types[tensor.type] = types.get(tensor.type, 0) + tensor.size
    return {
        "architecture": architecture,
        "name": first.string("general.name"),
        "file_type": first.integer("general.file_type"),
        "files": len(headers),
        "size_bytes": sum(header.file_size for header in headers),
        "tensor_count": sum(len(header.tensors) for header in headers),
        "tensor_bytes": sum(header.tensor_bytes for header in headers),
        "tensor_types": {name: types[name] for name in sorted(types)},
        **numbers,
        "arrays": {key: array.count for key, array in sorted(arrays.items())},
        "array_digests": {key: array.sha256 for key, array in sorted(arrays.items())},
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "metadata": _scalars(first.metadata),
    }


def _number(header: GgufHeader, key: str) -> int | None:
    """A whole number, or the largest of a per-layer array."""
    value = header.metadata.get(key)
    if isinstance(value, GgufArray):
        whole = [item for item in value.values if isinstance(item, int)]
        return max(whole, default=None)
    return header.integer(key)


def _scalars(metadata: Mapping[str, Value]) -> dict[str, Json]:
    """Metadata as canonical JSON can hold it: floats and huge integers as text."""
    found: dict[str, Json] = {}
    for key, value in sorted(metadata.items()):
        if isinstance(value, GgufArray):
            if value.values and len(value.values) <= LONGEST_NUMBERS:
                found[key] = [_plain(item) for item in value.values]
        elif not isinstance(value, str) or len(value) <= LONGEST_STRING:
            found[key] = _plain(value)
    return found


def _plain(value: float | bool | str) -> Json:  # noqa: FBT001
    if isinstance(value, float) or (isinstance(value, int) and abs(value) > EXACT):
        return repr(value)
    return value


def read(request: Mapping[str, Json]) -> dict[str, Json]:
    """What the child answers."""
    files = request["files"]
    if not isinstance(files, list):
        raise TypeError("files")
    headers = read_model([Path(str(file)) for file in files])
    found: dict[str, Json] = {"report": report(headers, Path(str(files[0])).name)}
    if request.get("template"):
        found["template"] = headers[0].string(TEMPLATE)
    return found


def answer(request: Mapping[str, Json]) -> dict[str, Json]:
    """The child's answer; every exception means that the file is not valid."""
    return answered(read, request)


if __name__ == "__main__":
    answer_requests(read)
