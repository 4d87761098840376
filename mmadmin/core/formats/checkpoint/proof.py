"""That a quantised checkpoint is what was asked for, before it becomes an object.

Quantising tools end well with outputs that are wrong: weights that were never compressed, modules
that nobody named, a K/V cache without scales, parts of the source written back in another type.
Each of these is found here, from the files alone: the tensors must be exactly the expected ones
(`mmadmin.core.formats.checkpoint.quantized`), all others the source's bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.config import parse_json
from mmadmin.core.formats.checkpoint.header import Tensor, read_header, tensor_digests
from mmadmin.core.formats.checkpoint.quantized import (
    Targets,
    Wanted,
    is_fp8,
    is_text_linear,
    plain_name,
)
from mmadmin.core.formats.checkpoint.scales import read_scales
from mmadmin.core.formats.checkpoint.sets import CONFIG, CheckpointSet
from mmadmin.core.formats.checkpoint.shape import CheckpointShape, module_of

METHOD, STATUS = "compressed-tensors", "compressed"
AGAIN = "the object is not made; build again, or with another version of the quantizer"
SHOWN = 3
"""Tensors that a message names."""


def prove(
    made: Path,
    source: Path,
    wanted: Wanted,
    expected: CheckpointShape,
    report: Callable[[str], None],
) -> None:
    """Check the quantised checkpoint in the folder `made`. Raises `InvalidModel`.

    Reads all of the source's and the output's bytes that must be equal; the rest by headers.
    """
    files = sorted(made.glob("*.safetensors"))
    _check_config(parse_json((made / CONFIG).read_bytes(), CONFIG), wanted)
    found = _tensors(files)
    _check_tensors(found, expected)
    report(f"{len(found)} tensors have the expected types and shapes")
    _check_scales(files, wanted)
    same = _check_same(files, source, expected)
    report(f"{same} tensors that are not quantised are equal to the source, bit for bit")


def _fail(problem: str, **details: Any) -> NoReturn:
    raise InvalidModel(f"the quantised checkpoint is wrong: {problem}", remedy=AGAIN, **details)


def _check_config(config: Mapping[str, Any], wanted: Wanted) -> None:
    table = config.get("quantization_config")
    if not isinstance(table, dict):
        _fail(f"{CONFIG} has no quantization_config: the weights were saved uncompressed")
    for key, value in (
        ("quant_method", METHOD),
        ("quantization_status", STATUS),
        ("format", wanted.scheme.format),
    ):
        if table.get(key) != value:
            _fail(f"{key} in {CONFIG} is {table.get(key)!r}, not {value!r}")
    cache = table.get("kv_cache_scheme")
    if wanted.cache_scales and not cache:
        _fail(f"kv_cache_scheme in {CONFIG} is empty: the K/V scales were dropped")
    if cache and not wanted.cache_scales:
        _fail(f"{CONFIG} has a kv_cache_scheme that nobody asked for")


def _tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Every tensor by its plain name."""
    found: dict[str, Tensor] = {}
    for path in files:
        for tensor in read_header(path).tensors:
            if plain_name(tensor.name) in found:
                _fail(f"the tensor {tensor.name} is there twice", tensor=tensor.name)
            found[plain_name(tensor.name)] = tensor
    return found


def _check_tensors(found: Mapping[str, Tensor], expected: CheckpointShape) -> None:
    wanted = {plain_name(one.name): one for one in expected.weights}
    for name in sorted(found.keys() & wanted.keys()):
        got, want = found[name], wanted[name]
        if got.dtype != want.dtype:
            _fail(f"{name} is in {got.dtype}, not in {want.dtype}{_why(got, want)}", tensor=name)
        if got.shape != want.shape:
            _fail(f"{name} has the shape {got.shape}, not {want.shape}", tensor=name)
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    strangers = sorted({module_of(one) for one in extra if not is_text_linear(module_of(one))})
    if strangers and not all(one.endswith("attn") for one in strangers):
        _fail(
            f"{len(strangers)} modules outside the text layers were quantised: "
            f"{', '.join(strangers[:SHOWN])}",
            tensors=extra[:100],
        )
    if missing:
        modules = len({module_of(one) for one in missing})
        _fail(
            f"{len(missing)} tensors of {modules} modules are missing: "
            f"{', '.join(missing[:SHOWN])}",
            tensors=missing[:100],
        )
    if extra:
        _fail(f"{len(extra)} tensors too many: {', '.join(extra[:SHOWN])}", tensors=extra[:100])


def _why(got: Tensor, want: Tensor) -> str:
    if is_fp8(got) and not is_fp8(want):
        return ": it was written back in the source's type"
    if is_fp8(want):
        return ": it was saved uncompressed"
    return ""


def _check_scales(files: Sequence[Path], wanted: Wanted) -> None:
    scales = read_scales(list(files))
    if wanted.cache_scales and scales.problem:
        _fail(f"the K/V scales are unsound: {scales.problem}")


def _check_same(files: Sequence[Path], source: Path, expected: CheckpointShape) -> int:
    """How many tensors are the source's, compared by their bytes."""
    kept = {plain_name(one.name): one for one in expected.weights}
    before: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        header = read_header(path)
        names = {
            one.name
            for one in header.tensors
            if (twin := kept.get(plain_name(one.name)))
            and (twin.dtype, twin.shape) == (one.dtype, one.shape)
            and not is_fp8(one)
        }
        for name, digest in tensor_digests(path, header, names).items():
            before[plain_name(name)] = digest
    after: dict[str, str] = {}
    for path in files:
        header = read_header(path)
        names = {one.name for one in header.tensors if plain_name(one.name) in before}
        for name, digest in tensor_digests(path, header, names).items():
            after[plain_name(name)] = digest
    changed = [name for name in sorted(before) if before[name] != after.get(name)]
    if changed:
        _fail(
            f"{len(changed)} tensors that are not quantised are not those of the source: "
            f"{', '.join(changed[:SHOWN])}",
            tensors=changed[:100],
        )
    return len(before)


# -- what the object's config says


def final_config(
    source: Mapping[str, Any], made: Mapping[str, Any], shape: CheckpointShape, targets: Targets
) -> dict[str, Any]:
    """The source's configuration with the quantisation that was made.

    The modules that are left alone are named by patterns: loaders rename modules, and exact names
    then match nothing.
    """
    table = dict(made.get("quantization_config") or {})
    table["ignore"] = patterns_of(shape, targets)
    return {**source, "quantization_config": table}


def patterns_of(shape: CheckpointShape, targets: Targets) -> list[str]:
    """Patterns of the linear modules that are not quantised."""
    chosen = {plain_name(one) for one in targets.chosen}
    rows = {_numbered(one) for one in chosen}
    found: set[str] = set()
    for tensor in shape.weights:
        name = plain_name(module_of(tensor.name))
        if name in chosen or not tensor.name.endswith(".weight"):
            continue
        if is_text_linear(module_of(tensor.name)):
            at = name[name.index("layers.") :]
            exact = re.escape(at) if _numbered(name) in rows else _numbered(re.escape(at))
            found.add(f"re:.*{exact}$")
        elif len(tensor.shape) > 1 and "embed" not in name:
            found.add(f"re:.*{name.partition('.')[0]}.*")
    return sorted(found)


def _numbered(name: str) -> str:
    return re.sub(r"\d+", r"\\d+", name)


def tokenizer_files(chosen: CheckpointSet) -> tuple[str, ...]:
    """Files of a checkpoint that its quantised form has too, byte for byte."""
    return tuple(
        name
        for name in sorted(chosen.beside)
        if name != CONFIG and not name.endswith(".index.json")
    )
