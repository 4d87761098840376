"""The `[model]` table of engines that load checkpoints: its source, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmadmin.core.build.recipe import Json
from mmadmin.core.formats.checkpoint.schemes import SCHEMES, Scheme
from mmadmin.core.spec.fields import Field, refuse, tuples
from mmadmin.core.spec.origin import DEFAULT_REVISION, Origin, Wording, origin_fields

DATASET = r"(?:[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|/[^\x00]+)?"
_SOURCE = origin_fields(
    ("hub", "path"),
    {
        "source": Wording(
            'Where the checkpoint comes from: "hub" (a model hub repository) or "path" (a folder '
            "of the host).",
            "hub",
        ),
        "repo": Wording("The repository on the model hub.", "mistralai/Mistral-Medium-3.5-128B"),
        "revision": Wording(
            "Branch, tag or commit. It is resolved once; the lock keeps the commit.", "main"
        ),
        "path": Wording(
            "Absolute path of the checkpoint's config.json. The files beside it are taken with it.",
            "/srv/models/medium/config.json",
            pattern=r"/[^\x00]+/config\.json",
            remedy="write the absolute path of a config.json",
        ),
    },
)

MODEL_FIELDS: tuple[Field, ...] = (
    *_SOURCE.values(),
    Field(
        "folder",
        "string",
        "Folder of the checkpoint in the repository, where it holds several.",
        default="",
        only_for=("hub",),
        pattern=r"(?:(?!/)(?!.*(?:^|/)\.\.?(?:/|$))(?!.*//)[^\\\x00]+)?",
        remedy="write a folder of the repository, without '..'",
        example="fp8",
    ),
    Field(
        "leave_out",
        "strings",
        "Files of the checkpoint that are not taken. Without tekken.json, vLLM uses "
        "tokenizer.json.",
        default=[],
        pattern=r"[^/\\\x00]+",
        remedy="write names of files, without folders",
        example=["tekken.json"],
    ),
    Field(
        "quantize",
        "choice",
        "Quantize the layers of the text model with llm-compressor. If empty: no quantization.",
        default="",
        choices=("", *SCHEMES),
        example="W4A16",
    ),
    Field(
        "dequantize",
        "boolean",
        "The source is in FP8: convert it to BF16 first. Its rounding stays in the values.",
        default=False,
    ),
    Field(
        "ignore",
        "strings",
        "Modules that are not quantized: names, or patterns after `re:`. Modules outside the text "
        "model's layers never are. Each must match a module.",
        default=[],
        pattern=r".{1,200}",
        example=["re:.*lm_head"],
    ),
    Field(
        "cache_scales",
        "boolean",
        "Calibrate one static FP8 scale for keys and one for values in each layer, for a K/V cache "
        "in FP8.",
        default=False,
        label="K/V scales",
    ),
    Field(
        "group_size",
        "integer",
        "Weights that share a scale in W4A16.",
        default=128,
        minimum=16,
        maximum=1024,
    ),
    Field(
        "dampening",
        "decimal",
        "GPTQ: damping of the Hessian's diagonal. Raise it after a Cholesky error.",
        default="0.01",
        minimum=0,
        maximum=1,
        example="0.05",
    ),
    Field(
        "calibration",
        "string",
        "Data to calibrate with: a data set of the hub (owner/name), or the absolute path of a "
        "file on the host (.txt, .jsonl, .parquet).",
        default="",
        pattern=DATASET,
        remedy="write owner/name or an absolute path",
        example="wikimedia/wikipedia",
    ),
    Field(
        "calibration_revision",
        "string",
        "Branch, tag or commit of the data set. The lock keeps the commit.",
        default=DEFAULT_REVISION,
        pattern=r"[\w./-]{1,255}",
    ),
    Field(
        "calibration_files",
        "strings",
        "Files of the data set; `*` stands for any characters.",
        default=[],
        pattern=r"(?!/)(?!.*(?:^|/)\.\.?(?:/|$))[^\\\x00]+",
        remedy="write paths inside the data set, without '..'",
        example=["20231101.de/train-00000-of-00020.parquet"],
    ),
    Field(
        "calibration_column",
        "string",
        "Column with the text. A list of chat messages is rendered with the model's template.",
        default="text",
        pattern=r"\w{1,100}",
        example="messages",
    ),
    Field(
        "calibration_language",
        "string",
        "Take only rows whose column `language` (or `lang`) has this value. If empty: all.",
        default="",
        pattern=r"[\w-]{0,20}",
        example="de",
    ),
    Field(
        "calibration_length",
        "choice",
        '"full": only texts that fill calibration_tokens. "any": shorter ones too.',
        default="any",
        choices=("any", "full"),
    ),
    Field(
        "calibration_samples",
        "integer",
        "Texts to calibrate with. Below about 128, GPTQ degrades.",
        default=256,
        minimum=1,
        maximum=100_000,
    ),
    Field(
        "calibration_tokens",
        "integer",
        "Tokens of each text.",
        default=2048,
        minimum=1,
        maximum=1_000_000,
    ),
    Field(
        "calibration_seed",
        "integer",
        "Decides which texts are taken, and in which order.",
        default=42,
        minimum=0,
    ),
    Field(
        "smoke",
        "boolean",
        "Try the whole way with a few short texts first. The result is a different object.",
        default=False,
    ),
)
OF_SOURCE = frozenset({*_SOURCE, "folder", "leave_out", "quantize"})
"""Fields that make sense without quantizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel(Origin):
    """`[model]`: which checkpoint, from where, and what is made of it."""

    folder: str = ""
    leave_out: tuple[str, ...] = ()
    quantize: str = ""
    dequantize: bool = False
    ignore: tuple[str, ...] = ()
    cache_scales: bool = False
    group_size: int = 128
    dampening: str = "0.01"
    calibration: str = ""
    calibration_revision: str = DEFAULT_REVISION
    calibration_files: tuple[str, ...] = ()
    calibration_column: str = "text"
    calibration_language: str = ""
    calibration_length: str = "any"
    calibration_samples: int = 256
    calibration_tokens: int = 2048
    calibration_seed: int = 42
    smoke: bool = False

    @property
    def scheme(self) -> Scheme:
        """How it is quantised; only where it is."""
        return SCHEMES[self.quantize]

    @property
    def calibrates(self) -> bool:
        """True when quantising needs data."""
        return bool(self.quantize) and (self.scheme.needs_data or self.cache_scales)


def read_model(values: Mapping[str, Json]) -> CheckpointModel:
    """The `[model]` table, whose values were checked one by one. Raises `InvalidSpec`."""
    model = CheckpointModel(**tuples(values))
    if not model.quantize:
        for name in values:
            if name not in OF_SOURCE:
                refuse(
                    f"model.{name}",
                    "this makes no sense without model.quantize",
                    remedy="remove it, or set model.quantize",
                )
        return model
    if "group_size" in values and not model.scheme.takes_group_size:
        refuse("model.group_size", f"{model.quantize} has none", remedy="remove it")
    if "dampening" in values and not model.scheme.gptq:
        refuse("model.dampening", f"{model.quantize} does not use GPTQ", remedy="remove it")
    _check_calibration(model, values)
    return model


def _check_calibration(model: CheckpointModel, values: Mapping[str, Json]) -> None:
    if not model.calibrates:
        for name in values:
            if name.startswith("calibration") or name == "smoke":
                refuse(
                    f"model.{name}",
                    f"{model.quantize} without K/V scales needs no data",
                    remedy="remove it, or set model.cache_scales = true",
                )
        return
    if not model.calibration:
        refuse(
            "model.calibration",
            f"{model.quantize}{' with K/V scales' if model.cache_scales else ''} needs data",
            remedy='for example calibration = "HuggingFaceH4/ultrachat_200k"',
        )
    on_host = model.calibration.startswith("/")
    if on_host and (model.calibration_files or "calibration_revision" in values):
        refuse(
            "model.calibration_files" if model.calibration_files else "model.calibration_revision",
            "this makes no sense with a file of the host",
            remedy="remove it",
        )
    if not on_host and not model.calibration_files:
        refuse(
            "model.calibration_files",
            "a data set of the hub needs them",
            remedy='for example calibration_files = ["data/train-*.parquet"]',
        )
