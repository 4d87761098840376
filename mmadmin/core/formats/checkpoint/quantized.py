"""What quantising a checkpoint must come out as, from its headers alone.

It refuses what would fail, or give another model than asked for, hours later: a source that is
quantised already, a pattern that matches no module, a group size that a module cannot have. The
finished checkpoint must have exactly the tensors that are expected here
(`mmadmin.core.formats.checkpoint.proof`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mmadmin.core.errors import InvalidSpec
from mmadmin.core.formats.checkpoint.config import Quantization
from mmadmin.core.formats.checkpoint.header import BITS, Tensor
from mmadmin.core.formats.checkpoint.schemes import Form, Scheme
from mmadmin.core.formats.checkpoint.shape import SCALES, CheckpointShape, module_of
from mmadmin.core.spec.fields import refuse

LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
NOT_TEXT = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|image\w*|audio\w*|speech\w*|multi_modal_projector|mm_projector)\."
)
NOT_LINEAR = re.compile(r"embed|norm|lm_head|(?:^|\.)wte|conv|(?:^|\.)(?:gate|router)$")
"""Modules with a matrix that is not a linear layer, or one that is never quantised."""
DEQUANTIZED = ("fp8",)
"""Methods of sources that can be converted to BF16 first."""


class Wanted(Protocol):
    """What the deployment asks for; `CheckpointModel` and a step's parameters both say it."""

    @property
    def scheme(self) -> Scheme:
        """How to quantise."""
        ...

    @property
    def dequantize(self) -> bool:
        """The source is FP8."""
        ...

    @property
    def ignore(self) -> Sequence[str]:
        """Patterns."""
        ...

    @property
    def cache_scales(self) -> bool:
        """K/V scales are asked for."""
        ...

    @property
    def group_size(self) -> int:
        """For schemes that take one."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Linear modules of a checkpoint, and which of them are quantised."""

    chosen: tuple[str, ...]
    linears: int
    """Of the whole checkpoint."""
    matched: Mapping[str, int]
    """Pattern → modules that it keeps as they are."""

    @property
    def message(self) -> str:
        """For the log."""
        return f"{len(self.chosen)} of {self.linears} linear modules are quantised"


def targets_of(shape: CheckpointShape, ignore: Sequence[str]) -> Targets:
    """The linear modules of the text model's layers, without those that a pattern keeps."""
    modules = [module_of(one.name) for one in shape.weights if _is_matrix(one)]
    linears = [name for name in modules if not re.search(r"embed|(?:^|\.)wte$", name)]
    matched = {pattern: sum(matches(pattern, name) for name in modules) for pattern in ignore}
    chosen = tuple(
        name
        for name in linears
        if is_text_linear(name) and not any(matches(pattern, name) for pattern in ignore)
    )
    return Targets(chosen, len(linears), matched)


def is_text_linear(module: str) -> bool:
    """True for a linear module of a text layer, by its name."""
    inside = LAYER.search(f"{module}.")
    return bool(inside) and not NOT_TEXT.search(f"{module}.") and not NOT_LINEAR.search(module)


def matches(pattern: str, module: str) -> bool:
    """True when a pattern means a module, under the name that it has in the file or in memory.

    Loaders rename modules: `language_model.model.layers` in files is `model.language_model.layers`
    in memory. Raises `InvalidSpec` for a pattern that is not a regular expression.
    """
    names = (module, f"model.{module}", plain_name(module))
    if not pattern.startswith("re:"):
        return pattern in names
    try:
        return any(re.match(pattern[3:], name) for name in names)
    except re.error as error:
        raise InvalidSpec(
            f'model.ignore: "{pattern}" is not a regular expression ({error})',
            remedy="escape special characters with a backslash",
            field="model.ignore",
        ) from error


def plain_name(name: str) -> str:
    """A name without what loaders add, move or drop."""
    parts = [part for part in name.split(".") if part != "model"]
    if "lm_head" in parts:
        parts = parts[parts.index("lm_head") :]
    return ".".join(parts)


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.name.endswith(".weight") and len(tensor.shape) == 2  # noqa: PLR2004 (a matrix)


def quantized(shape: CheckpointShape, wanted: Wanted) -> CheckpointShape:
    """The checkpoint that quantising makes of one. Raises `InvalidSpec`."""
    check_source(shape, dequantize=wanted.dequantize)
    targets = targets_of(shape, wanted.ignore)
    _check_targets(targets, wanted)
    scheme, group = wanted.scheme, wanted.scheme.group_of(wanted.group_size)
    chosen = frozenset(targets.chosen)
    weights: list[Tensor] = []
    for one in shape.weights:
        module, _, last = one.name.rpartition(".")
        if last in SCALES:
            continue
        if module not in chosen or last != "weight":
            weights.append(_tensor(one.name, ("BF16" if is_fp8(one) else one.dtype, one.shape)))
            continue
        rows, columns = one.shape
        if group and columns % group:
            refuse(
                "model.group_size" if scheme.takes_group_size else "model.quantize",
                f"{one.name} has {columns} columns, not a multiple of {group}",
                remedy=f'name it in model.ignore: "{module}"'
                + (", or choose another group size" if scheme.takes_group_size else ""),
            )
        made = scheme.tensors(rows, columns, group)
        weights += [_tensor(f"{module}.{name}", form) for name, form in made.items()]
    if wanted.cache_scales:
        for attention in sorted({module_of(m) for m in targets.chosen if m.endswith(".k_proj")}):
            weights += [_tensor(f"{attention}.{w}_scale", ("BF16", (1,))) for w in "kv"]
    quantization = Quantization(
        method="compressed-tensors",
        scheme=scheme.label,
        group_size=group,
        cache_type="fp8" if wanted.cache_scales else "",
        ignored=tuple(wanted.ignore),
        static_activations=scheme.static_activations,
    )
    config = replace(shape.config, quantization=quantization)
    return CheckpointShape(config, tuple(weights), shape.files)


def check_source(shape: CheckpointShape, *, dequantize: bool) -> None:
    """Refuse a source that is quantised, unless it is one that can be converted first."""
    found = shape.quantization
    fp8 = any(is_fp8(one) for one in shape.weights)
    if dequantize and not fp8:
        refuse(
            "model.dequantize",
            f"the source is not in FP8 but in {', '.join(shape.types)}",
            remedy="remove it",
        )
    if found is None or (dequantize and found.method in DEQUANTIZED):
        return
    refuse(
        "model.quantize",
        f"the source is quantised already ({found.label})",
        remedy="set model.dequantize = true; one more rounding is added to that of the source"
        if found.method in DEQUANTIZED
        else "choose the repository with the original weights, or remove model.quantize",
    )


def is_fp8(tensor: Tensor) -> bool:
    """True for weights in 8-bit floats."""
    return tensor.dtype.startswith("F8_E4M3") or tensor.dtype.startswith("F8_E5M2")


def _check_targets(targets: Targets, wanted: Wanted) -> None:
    idle = [pattern for pattern, count in targets.matched.items() if not count]
    if idle:
        counts = ", ".join(f"{pattern}: {count}" for pattern, count in targets.matched.items())
        refuse(
            "model.ignore",
            f'"{idle[0]}" matches no module of the checkpoint ({counts})',
            remedy="patterns begin with re: and match from a name's start, such as re:.*lm_head",
        )
    if not targets.chosen:
        refuse(
            "model.quantize",
            f"no linear module of the text model is left to quantise in {wanted.scheme.name}",
            remedy="check model.ignore; a model with fused experts cannot be quantised here",
        )


def _tensor(name: str, form: Form) -> Tensor:
    """A tensor that has no place yet."""
    dtype, shape = form
    return Tensor(name, dtype, shape, 0, math.prod(shape) * BITS[dtype] // 8)


def working_bytes(shape: CheckpointShape) -> int:
    """Main memory that holds the source in BF16, with room for the step's own data."""
    return sum(2 * one.elements for one in _weights(shape)) * 105 // 100 + (2 << 30)


def _weights(shape: CheckpointShape) -> Iterator[Tensor]:
    return (one for one in shape.weights if one.name.rpartition(".")[2] not in SCALES)
