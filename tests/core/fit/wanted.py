"""What the tests of `fit` place: a GGUF model under llama-server's options."""

from __future__ import annotations

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.memory_model import MEMORY
from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.fit.placement import Wanted
from mmadmin.core.formats.gguf.shape import ModelShape


def wanted_for(shape: ModelShape, *, devices: tuple[int, ...] = (), **serve: Json) -> Wanted:
    """A model and what its `[serve]` table sets."""
    options = read_options(serve)
    return Wanted(
        MEMORY,
        shape,
        options,
        MEMORY.case(shape, options),
        devices=devices,
    )
