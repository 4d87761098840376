"""GGUF headers, read strictly: every length is checked against the file before it is believed.

For files that nobody vouches for. Anything that is not a little-endian GGUF of version 2 or 3 whose
tensors lie inside the file, aligned and apart from each other, is `InvalidModel`, whatever is wrong
with it. Format: ggml's `docs/gguf.md`; tensor types: ggml's type traits.

Large arrays (tokenizer merges: half a million strings) are kept as count and digest of their
encoded bytes; two files have the same array if and only if those agree.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

from mmadmin.core.errors import InvalidModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_STRING = 64 << 20
"""Bytes; the longest honest strings are chat templates, far below."""
MAX_KEY = 65_535
MAX_NAME = 63
"""Bytes of a tensor's name: ggml's GGML_MAX_NAME less the end mark."""
MAX_DIMS = 4
MAX_KEPT = 4096
"""Numbers of an array that are kept by value."""
LEAST_KV_BYTES = 8 + 1 + 4 + 1
LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
CHUNK = 1 << 20

SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("u8", "<B"),
    1: ("i8", "<b"),
    2: ("u16", "<H"),
    3: ("i16", "<h"),
    4: ("u32", "<I"),
    5: ("i32", "<i"),
    6: ("f32", "<f"),
    7: ("bool", "<?"),
    10: ("u64", "<Q"),
    11: ("i64", "<q"),
    12: ("f64", "<d"),
}
STRING, ARRAY = 8, 9

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""ggml type → (name, elements a block, bytes a block)."""
ARCHITECTURE = "general.architecture"
OTHERS: Mapping[str, str] = {
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "mmproj": "a multimodal projector",
    "clip": "a multimodal projector",
    "controlvector": "a control vector",
}
"""What a file is when it is not a model, by its `general.type` or its architecture."""
TYPE_NUMBERS: Mapping[str, int] = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of metadata."""

    item_type: str
    count: int
    sha256: str
    """Over its encoded bytes: the items as they lie in the file."""
    values: tuple[int | float | bool, ...] = ()
    """The numbers, where there are at most `MAX_KEPT`."""


Value = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place and form."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    version: int
    metadata: Mapping[str, Value]
    """In the file's order."""
    types: Mapping[str, str]
    """Each key's type: "u32", "string", "array[string]"."""
    tensors: tuple[Tensor, ...]
    """In the file's order."""
    alignment: int
    header_size: int
    """Bytes up to where the tensor data begins."""
    file_size: int
    by_name: Mapping[str, Tensor] = field(compare=False)
    places: Mapping[str, tuple[int, int]] = field(compare=False)
    """Where each metadata entry lies: its first byte, and the one after its last."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.size for tensor in self.tensors)

    def integer(self, key: str) -> int | None:
        """A whole number of the metadata; None when absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def string(self, key: str) -> str | None:
        """A string of the metadata; None when absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None


def check_is_model(metadata: Mapping[str, Value], name: str) -> str:
    """The model's architecture. Raises `InvalidModel` for what an engine loads beside a model."""
    architecture = metadata.get(ARCHITECTURE)
    what = OTHERS.get(str(metadata.get("general.type"))) or OTHERS.get(str(architecture))
    if what:
        raise InvalidModel(
            f"{name} is {what}, not a model",
            remedy="name the file of the model itself",
            file=name,
        )
    if not isinstance(architecture, str) or not architecture:
        raise InvalidModel(
            f"{name} names no architecture ({ARCHITECTURE})",
            remedy="take another file: no engine can load this one",
            file=name,
        )
    return architecture


class _Reader:
    """A stream with an end that is known and believed."""

    def __init__(self, stream: BinaryIO, size: int, name: str) -> None:
        self.stream, self.size, self.name = stream, size, name
        self.offset = 0

    def refuse(
        self, what: str, remedy: str = "fetch the file again; do not use this one"
    ) -> NoReturn:
        raise InvalidModel(
            f"{self.name} is not a valid GGUF: {what}", remedy=remedy, file=self.name
        )

    @property
    def left(self) -> int:
        return self.size - self.offset

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            self.refuse(f"{what} wants {count} bytes where {self.left} are left")
        data = self.stream.read(count)
        if len(data) != count:
            self.refuse(f"it ends within {what}")
        self.offset += count
        return data

    def piece(self) -> bytes:
        """What comes next, at most `CHUNK` bytes; fewer at the end."""
        data = self.stream.read(min(CHUNK, self.left))
        self.offset += len(data)
        return data

    def rewind(self, count: int) -> None:
        """Go back by that many bytes."""
        self.stream.seek(-count, os.SEEK_CUR)
        self.offset -= count

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, limit: int) -> str:
        length = self.u64(what)
        if length > min(limit, self.left):
            self.refuse(f"{what} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")


def read_header(path: Path) -> GgufHeader:
    """Read and check a file's header. Raises `InvalidModel`, `OSError`."""
    with path.open("rb") as stream:
        return read_stream(stream, path.stat().st_size, path.name)


def read_stream(stream: BinaryIO, file_size: int, name: str) -> GgufHeader:
    """As `read_header`, from a stream at its start that belongs to a file of `file_size` bytes."""
    reader = _Reader(stream, file_size, name)
    version, tensor_count, kv_count = _counts(reader)
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for _ in range(kv_count):
        begin = reader.offset
        key = reader.text("a metadata key", MAX_KEY)
        if not key or key in metadata:
            reader.refuse(f"the metadata key {key!r} is empty or there twice")
        types[key], metadata[key] = _value(reader, key)
        places[key] = begin, reader.offset
    if tensor_count > reader.left // LEAST_TENSOR_BYTES:
        reader.refuse(f"it claims {tensor_count} tensors")
    alignment = _alignment(reader, metadata)
    infos = [_tensor_info(reader) for _ in range(tensor_count)]
    start = -(-reader.offset // alignment) * alignment
    tensors = tuple(
        Tensor(one.name, one.shape, one.type, start + one.offset, one.size) for one in infos
    )
    _check_tensors(reader, tensors, alignment)
    by_name = {tensor.name: tensor for tensor in tensors}
    return GgufHeader(
        version=version,
        metadata=metadata,
        types=types,
        tensors=tensors,
        alignment=alignment,
        header_size=min(start, file_size),
        file_size=file_size,
        by_name=by_name,
        places=places,
    )


def read_dimensions(stream: BinaryIO, file_size: int, name: str) -> Mapping[str, Value]:
    """The metadata up to the first array of strings: dimensions come before the vocabulary.

    For a look at a file that is not here: the vocabulary is nearly all of a header's bytes.
    Raises as `read_stream`.
    """
    reader = _Reader(stream, file_size, name)
    _, _, kv_count = _counts(reader)
    metadata: dict[str, Value] = {}
    for _ in range(kv_count):
        key = reader.text("a metadata key", MAX_KEY)
        kind = reader.u32(f"the type of {key}")
        if kind == ARRAY and reader.u32(f"the item type of {key}") == STRING:
            break
        reader.rewind(8 if kind == ARRAY else 4)
        _, metadata[key] = _value(reader, key)
    return metadata


def _counts(reader: _Reader) -> tuple[int, int, int]:
    """Version, tensor count and metadata count."""
    _check_start(reader)
    version = reader.u32("the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            reader.refuse("it is big-endian", "use a little-endian build of the model")
        reader.refuse(f"its version is {version}", f"versions {VERSIONS} can be read")
    tensor_count = reader.u64("the tensor count")
    kv_count = reader.u64("the metadata count")
    if kv_count > reader.left // LEAST_KV_BYTES:
        reader.refuse(f"it claims {kv_count} metadata entries")
    return version, tensor_count, kv_count


def _check_start(reader: _Reader) -> None:
    magic = reader.stream.read(4)
    reader.offset = 4
    if magic == MAGIC:
        return
    start = (magic + reader.stream.read(508)).lstrip()
    if start.startswith(b"version https://git-lfs"):
        reader.refuse(
            "it is a Git-LFS pointer, not the file itself",
            "fetch the file by its LFS digest; the pointer says which it is",
        )
    if start[:9].lower().startswith((b"<!doctype", b"<html")):
        reader.refuse("it is a web page saved under this name", "fetch the file again")
    if not magic:
        reader.refuse("it is empty", "fetch the file again")
    reader.refuse(f"it starts with {magic!r} where {MAGIC!r} is expected")


def _value(reader: _Reader, key: str) -> tuple[str, Value]:
    kind = reader.u32(f"the type of {key}")
    if kind in SCALARS:
        name, form = SCALARS[kind]
        value: Value = struct.unpack(form, reader.take(struct.calcsize(form), key))[0]
        return name, value
    if kind == STRING:
        return "string", reader.text(key, MAX_STRING)
    if kind != ARRAY:
        reader.refuse(f"{key} has the unknown type {kind}")
    array = _array(reader, key)
    return f"array[{array.item_type}]", array


def _array(reader: _Reader, key: str) -> GgufArray:
    kind = reader.u32(f"the item type of {key}")
    count = reader.u64(f"the length of {key}")
    digest = hashlib.sha256()
    if kind == STRING:
        if count > reader.left // 8:
            reader.refuse(f"{key} claims {count} strings")
        for piece in _strings(reader, count, key):
            digest.update(piece)
        return GgufArray("string", count, digest.hexdigest())
    if kind not in SCALARS:
        reader.refuse(f"{key} is an array of the type {kind}, which arrays do not have")
    name, form = SCALARS[kind]
    size = struct.calcsize(form)
    if count > reader.left // size:
        reader.refuse(f"{key} claims {count} items")
    kept = b""
    left = count * size
    while left:
        piece = reader.take(min(left, CHUNK), key)
        digest.update(piece)
        if count <= MAX_KEPT:
            kept += piece
        left -= len(piece)
    values = tuple(item[0] for item in struct.iter_unpack(form, kept))
    return GgufArray(name, count, digest.hexdigest(), values)


def _strings(reader: _Reader, count: int, key: str) -> Iterator[bytes]:
    """So many strings as they lie in the file, in pieces: a vocabulary has half a million."""
    length_at = struct.Struct("<Q").unpack_from
    while count:
        piece = reader.piece()
        end = last = len(piece)
        at = 0
        while count and at + 8 <= end:
            last = at + 8 + length_at(piece, at)[0]
            if last > end:
                break
            at = last
            count -= 1
        reader.rewind(end - at)
        yield piece[:at]
        if at == 0:  # one that is longer than a piece, or than the file
            yield reader.take(8, key)
            yield reader.take(last - 8, key)
            count -= 1


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 8 or value & (value - 1) or value > CHUNK:  # noqa: PLR2004
        reader.refuse(f"general.alignment is {value!r}")
    return value


def _tensor_info(reader: _Reader) -> Tensor:
    name = reader.text("a tensor name", MAX_NAME)
    dims = reader.u32(f"the dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        reader.refuse(f"the tensor {name} has {dims} dimensions")
    shape = tuple(reader.u64(f"the shape of {name}") for _ in range(dims))
    kind = reader.u32(f"the type of {name}")
    offset = reader.u64(f"the offset of {name}")
    if kind > max(TENSOR_TYPES):
        raise InvalidModel(
            f"{reader.name} holds the tensor {name} in the type {kind}, which this mmadmin does not"
            " know",
            remedy="update mmadmin, or take another quant of the model",
            file=reader.name,
        )
    if kind not in TENSOR_TYPES:
        reader.refuse(f"the tensor {name} has the unknown type {kind}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    elements = 1
    for length in shape:
        elements *= length
        if not length > 0 or elements > reader.size * block:
            reader.refuse(f"the tensor {name} has the shape {shape}")
    if shape[0] % block:
        reader.refuse(f"rows of {name} are {shape[0]} long, {type_name} needs multiples of {block}")
    return Tensor(name, shape, type_name, offset, elements // block * block_bytes)


def _check_tensors(reader: _Reader, tensors: tuple[Tensor, ...], alignment: int) -> None:
    seen: set[str] = set()
    end = 0
    for tensor in sorted(tensors, key=lambda one: one.offset):
        if tensor.name in seen:
            reader.refuse(f"the tensor {tensor.name} is there twice")
        seen.add(tensor.name)
        if tensor.offset % alignment:
            reader.refuse(f"the tensor {tensor.name} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            reader.refuse(f"the tensor {tensor.name} overlaps the one before it")
        end = tensor.offset + tensor.size
    if end > reader.size:
        last = max(tensors, key=lambda one: one.offset)
        reader.refuse(
            f"it is cut short: its tensors end at byte {end} ({last.name}), "
            f"the file has {reader.size}"
        )


def pieces(stream: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    """The bytes from `offset` on, `size` of them, in pieces. Raises `InvalidModel` when short."""
    stream.seek(offset)
    while size:
        piece = stream.read(min(size, CHUNK))
        if not piece:
            raise InvalidModel("the file ends within a tensor", remedy="fetch the file again")
        yield piece
        size -= len(piece)


def tensor_digests(
    path: Path, header: GgufHeader, on_bytes: Callable[[int], None] | None = None
) -> dict[str, str]:
    """sha256 of each tensor's bytes, by name."""
    digests = {}
    with path.open("rb") as stream:
        for tensor in header.tensors:
            digest = hashlib.sha256()
            for piece in pieces(stream, tensor.offset, tensor.size):
                digest.update(piece)
                if on_bytes is not None:
                    on_bytes(len(piece))
            digests[tensor.name] = digest.hexdigest()
    return digests
