"""How two safetensors files differ: which tensors, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmadmin.core.formats.checkpoint.header import Tensor, read_header, tensor_digests

CHUNK_BYTES = 16 << 20


def difference(before: Path, after: Path) -> tuple[str, Sequence[str]]:
    """One sentence, and the names of the tensors that are not equal. Raises `InvalidModel`."""
    was, now = read_header(before), read_header(after)
    old, new = tensor_digests(before, was), tensor_digests(after, now)
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    if not names:
        return "only metadata differs", ()
    here = {tensor.name: tensor for tensor in was.tensors}
    there = {tensor.name: tensor for tensor in now.tensors}
    same_form = [
        name
        for name in names
        if name in here
        and name in there
        and (here[name].dtype, here[name].shape) == (there[name].dtype, there[name].shape)
    ]
    most = max((_largest(before, here[n], after, there[n]) for n in same_form), default=0.0)
    amount = f", by at most {most:.4g}" if same_form else ""
    return f"{len(names)} of {len(old)} tensors differ{amount}", tuple(names)


def _largest(one: Path, tensor: Tensor, other: Path, twin: Tensor) -> float:
    """The largest difference of two tensors of one form; of packed words, of their bytes."""
    most = 0.0
    for a, b in zip(numbers(one, tensor), numbers(other, twin), strict=True):
        if a.size:
            most = max(most, float(np.max(np.abs(a - b))))
    return most


def numbers(path: Path, tensor: Tensor) -> Iterator[NDArray[np.float64]]:
    """A tensor's numbers in pieces; bytes where its type is packed or not known to numpy."""
    with path.open("rb") as stream:
        stream.seek(tensor.offset)
        left = tensor.size
        while left:
            data = stream.read(min(left, CHUNK_BYTES))
            left -= len(data)
            yield _decode(data, tensor.dtype)


def _decode(data: bytes, dtype: str) -> NDArray[np.float64]:
    plain = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I64": "<i8"}
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").astype(np.float64)
    if dtype == "F8_E4M3":
        return np.take(E4M3, np.frombuffer(data, "u1"))
    return np.frombuffer(data, plain.get(dtype, "u1")).astype(np.float64)


def _e4m3() -> NDArray[np.float64]:
    """Every value of the type: one sign, four exponent bits (bias 7), three of the fraction."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size[[127, 255]] = np.nan
    return np.where(code >> 7, -size, size)


E4M3 = _e4m3()
