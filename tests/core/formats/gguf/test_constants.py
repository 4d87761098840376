"""Our tables of GGUF's numbers against those of the library of the pinned engine's project.

The library needs numpy, which takes longer to import than most commands take to run.
"""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES, LlamaFileType

from mmadmin.core.formats.gguf.format import FILE_TYPES
from mmadmin.core.formats.gguf.header import TENSOR_TYPES

NEWER_TENSOR_TYPES = {42: ("Q2_0", 64, 18)}
NEWER_FILE_TYPES = {"41": "Q2_0"}
"""What the engine's own headers have and the library's release lacks."""


def test_tensor_types_are_the_librarys():
    """Number, name, elements and bytes a block of every type."""
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert theirs | NEWER_TENSOR_TYPES == TENSOR_TYPES


def test_file_types_are_the_librarys():
    """What most tensors of a file are, by its number."""
    theirs = {
        str(int(kind)): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        for kind in LlamaFileType
        if kind is not LlamaFileType.GUESSED
    }
    assert theirs | NEWER_FILE_TYPES == FILE_TYPES
