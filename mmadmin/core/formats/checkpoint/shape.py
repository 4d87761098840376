"""What a checkpoint's config and headers say: dimensions, tensors, files. Sizes are bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmadmin.core.formats.checkpoint.config import Config, Quantization
from mmadmin.core.formats.checkpoint.header import Tensor

TOWER = re.compile(r"(?:^|\.)(?:vision_tower|vision_model|visual|vision_encoder|image_encoder)\.")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SCALES = (
    *("weight_scale", "weight_scale_inv", "weight_global_scale", "input_scale"),
    *(
        "input_global_scale",
        "activation_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ),
    *("k_scale", "v_scale", "q_scale", "scales", "qzeros", "g_idx"),
)
"""Last parts of names of tensors that belong to a quantisation, and hold no weights."""
PACKED_BITS = {"U8": 4, "I32": 4}
"""Bits of a weight by the type of words that hold several of them."""
PACKED = ("weight_packed", "qweight")


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """A checkpoint, as far as it is known without its weights."""

    config: Config
    weights: tuple[Tensor, ...]
    files: frozenset[str]
    """Names of all its files."""

    @property
    def architecture(self) -> str:
        """The class that loads it: `Mistral3ForConditionalGeneration`."""
        return self.config.architecture or self.config.model_type

    @property
    def model_type(self) -> str:
        """Its family: `mistral3`."""
        return self.config.model_type

    @property
    def context_train(self) -> int:
        """Tokens that it was trained with."""
        return self.config.numbers["context"]

    @property
    def layers(self) -> int:
        """Of the text model."""
        return self.config.numbers["layers"]

    @property
    def quantization(self) -> Quantization | None:
        """How it is quantised; None = it is not."""
        return self.config.quantization

    @property
    def parameters(self) -> int:
        """Elements of all weights; packed ones are counted singly."""
        return sum(elements_of(one) for one in self.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.size for one in self.weights)

    @property
    def tower_bytes(self) -> int:
        """Of these, the vision tower's."""
        return sum(one.size for one in self.weights if TOWER.search(one.name))

    @property
    def types(self) -> Mapping[str, int]:
        """Bytes by type."""
        found: dict[str, int] = {}
        for one in self.weights:
            found[one.dtype] = found.get(one.dtype, 0) + one.size
        return dict(sorted(found.items()))

    def scaled(self, wanted_bytes: int, read_bytes: int) -> CheckpointShape:
        """The same model with weights of other sizes."""
        weights = tuple(
            replace(one, size=one.size * wanted_bytes // max(read_bytes, 1)) for one in self.weights
        )
        return replace(self, weights=weights)


def elements_of(tensor: Tensor) -> int:
    """Weights that a tensor holds; 0 for scales."""
    last = tensor.name.rpartition(".")[2]
    if last in SCALES:
        return 0
    if last in PACKED and tensor.dtype in PACKED_BITS:
        return tensor.size * 8 // PACKED_BITS[tensor.dtype]
    return tensor.elements


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]


def pattern_of(name: str) -> str:
    """A module's name with `*` for the numbers of layers."""
    return NUMBER.sub("*", f"{name}.")[:-1]
