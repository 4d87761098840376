"""The long options of llama-server, builds b11401 to b11434, by name.

One line an option: its long names (a name that begins with `--no-` switches it off), then `=` when
it takes a value, with the values it may have where they are few. The names are those of the
server's own help text, and a built engine is asked for its own before it is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TABLE = """
--help --usage
--version
--cache-list
--completion-bash
--threads =
--threads-batch =
--cpu-mask =
--cpu-range =
--cpu-strict =0|1
--prio =
--poll =
--cpu-mask-batch =
--cpu-range-batch =
--cpu-strict-batch =0|1
--prio-batch =
--poll-batch =0|1
--ctx-size =
--predict --n-predict =
--batch-size =
--ubatch-size =
--keep =
--swa-full
--flash-attn =on|off|auto
--perf --no-perf
--escape --no-escape
--rope-scaling =none|linear|yarn
--rope-scale =
--rope-freq-base =
--rope-freq-scale =
--yarn-orig-ctx =
--yarn-ext-factor =
--yarn-attn-factor =
--yarn-beta-slow =
--yarn-beta-fast =
--kv-offload --no-kv-offload
--repack --no-repack
--no-host
--cache-type-k =
--cache-type-v =
--defrag-thold =
--rpc =
--load-mode =
--lazy-mode =
--numa =
--device =
--list-devices
--override-tensor =
--cpu-moe
--n-cpu-moe =
--n-cpu-ffn =
--gpu-layers --n-gpu-layers =
--split-mode =none|layer|row|tensor
--tensor-split =
--main-gpu =
--fit =on|off
--fit-target =
--fit-ctx =
--check-tensors
--override-kv =
--op-offload --no-op-offload
--lora =
--lora-scaled =
--control-vector =
--control-vector-scaled =
--control-vector-layer-range =
--model =
--model-url =
--docker-repo =
--hf-repo =
--hf-file =
--hf-token =
--log-disable
--log-file =
--log-jsonl --no-log-jsonl
--log-colors =on|off|auto
--verbose --log-verbose
--offline
--verbosity --log-verbosity =
--log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps
--spec-draft-type-k --cache-type-k-draft =
--spec-draft-type-v --cache-type-v-draft =
--samplers =
--seed =
--sampler-seq --sampling-seq =
--ignore-eos
--temp --temperature =
--top-k =
--top-p =
--min-p =
--top-nsigma --top-n-sigma =
--xtc-probability =
--xtc-threshold =
--typical --typical-p =
--repeat-last-n =
--repeat-penalty =
--presence-penalty =
--frequency-penalty =
--dry-multiplier =
--dry-base =
--dry-allowed-length =
--dry-penalty-last-n =
--dry-sequence-breaker =
--adaptive-target =
--adaptive-decay =
--dynatemp-range =
--dynatemp-exp =
--mirostat =
--mirostat-lr =
--mirostat-ent =
--logit-bias =
--grammar =
--grammar-file =
--json-schema =
--json-schema-file =
--backend-sampling
--lookup-cache-static =
--lookup-cache-dynamic =
--kv-unified-per-slot =
--ctx-checkpoints --swa-checkpoints =
--checkpoint-min-step =
--cache-ram =
--kv-unified --no-kv-unified
--cache-idle-slots --no-cache-idle-slots
--context-shift --no-context-shift
--reverse-prompt =
--special
--warmup --no-warmup
--spm-infill
--pooling =none|mean|cls|last|rank
--parallel =
--cont-batching --no-cont-batching
--mmproj =
--mmproj-url =
--mmproj-auto --no-mmproj --no-mmproj-auto
--mmproj-offload --no-mmproj-offload
--mmproj-device =
--image-min-tokens =
--image-max-tokens =
--mtmd-batch-max-tokens =
--video-fps =
--video-timestamp-interval =
--video-ffmpeg-dir =
--alias =
--tags =
--embd-normalize =
--host =
--port =
--reuse-port
--path =
--cors-origins =
--cors-methods =
--cors-headers =
--cors-credentials --no-cors-credentials
--api-prefix =
--ui-config --webui-config =
--ui-config-file --webui-config-file =
--ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy
--tools =
--tools-runtime =
--mcp-servers-config =
--mcp-servers-json =
--agent --no-agent
--ui --webui --no-ui --no-webui
--embedding --embeddings
--rerank --reranking
--api-key =
--api-key-file =
--ssl-key-file =
--ssl-cert-file =
--chat-template-kwargs =
--timeout =
--sse-ping-interval =
--threads-http =
--cache-prompt --no-cache-prompt
--cache-reuse =
--metrics
--props
--slots --no-slots
--slot-save-path =
--media-path =
--models-dir =
--models-preset =
--models-max =
--models-autoload --no-models-autoload
--jinja --no-jinja
--reasoning-format =
--reasoning =on|off|auto
--reasoning-effort =
--reasoning-budget =
--reasoning-budget-message =
--reasoning-preserve --no-reasoning-preserve
--chat-template =
--chat-template-file =
--skip-chat-parsing --no-skip-chat-parsing
--prefill-assistant --no-prefill-assistant
--slot-prompt-similarity =
--lora-init-without-apply
--sleep-idle-seconds =
--log-prompts-dir =
--spec-draft-hf --hf-repo-draft =
--spec-draft-threads --threads-draft =
--spec-draft-threads-batch --threads-batch-draft =
--spec-draft-cpu-mask --cpu-mask-draft =
--spec-draft-cpu-range --cpu-range-draft =
--spec-draft-cpu-strict --cpu-strict-draft =0|1
--spec-draft-prio --prio-draft =
--spec-draft-poll --poll-draft =0|1
--spec-draft-cpu-mask-batch --cpu-mask-batch-draft =
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft =0|1
--spec-draft-prio-batch --prio-batch-draft =
--spec-draft-poll-batch --poll-batch-draft =0|1
--spec-draft-override-tensor --override-tensor-draft =
--spec-draft-cpu-moe --cpu-moe-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe --n-cpu-moe-draft =
--spec-draft-n-max =
--spec-draft-n-min =
--spec-synth-len =
--spec-synth-rates =
--spec-draft-p-split --draft-p-split =
--spec-draft-p-min --draft-p-min =
--spec-draft-backend-sampling --no-spec-draft-backend-sampling
--spec-draft-sampling =greedy|probabilistic
--spec-draft-device --device-draft =
--spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft =
--spec-draft-model --model-draft =
--spec-type =
--spec-ngram-mod-n-min =
--spec-ngram-mod-n-max =
--spec-ngram-mod-n-match =
--spec-ngram-simple-size-n =
--spec-ngram-simple-size-m =
--spec-ngram-simple-min-hits =
--spec-ngram-map-k-size-n =
--spec-ngram-map-k-size-m =
--spec-ngram-map-k-min-hits =
--spec-ngram-map-k4v-size-n =
--spec-ngram-map-k4v-size-m =
--spec-ngram-map-k4v-min-hits =
--draft --draft-n --draft-max =
--draft-min --draft-n-min =
--spec-ngram-size-n =
--spec-ngram-size-m =
--spec-ngram-min-hits =
--embd-gemma-default
--fim-qwen-1.5b-default
--fim-qwen-3b-default
--fim-qwen-7b-default
--fim-qwen-7b-spec
--fim-qwen-14b-spec
--fim-qwen-30b-default
--gpt-oss-20b-default
--gpt-oss-120b-default
--vision-gemma-4b-default
--vision-gemma-12b-default
--spec-default
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option."""

    name: str
    """Its first long name, without dashes."""
    names: tuple[str, ...]
    """All long names that switch it on or set it, without dashes."""
    off: str
    """The name that switches it off, without dashes; empty = none."""
    takes_value: bool
    values: tuple[str, ...]
    """The values that it may have; empty = any."""


def _read(line: str) -> Flag:
    words = line.split()
    value = words.pop() if words[-1].startswith("=") else None
    names = [word.removeprefix("--") for word in words]
    negative = [name for name in names if name.startswith("no-")] if len(names) > 1 else []
    positive = [name for name in names if name not in negative]
    return Flag(
        name=positive[0],
        names=tuple(positive),
        off=negative[0] if negative else "",
        takes_value=value is not None,
        values=tuple(value[1:].split("|")) if value and len(value) > 1 else (),
    )


FLAGS: tuple[Flag, ...] = tuple(_read(line) for line in _TABLE.strip().splitlines())
BY_NAME: Mapping[str, Flag] = {
    name: flag for flag in FLAGS for name in (*flag.names, *((flag.off,) if flag.off else ()))
}

OURS: Mapping[str, str] = {
    "model": "[model] names the model",
    "model-url": "[model] names the model",
    "docker-repo": "[model] names the model",
    "hf-repo": "[model] names the model",
    "hf-file": "[model] names the model",
    "hf-token": "a token belongs to the host's settings, never to a command line",
    "mmproj": "use model.mmproj",
    "mmproj-url": "use model.mmproj",
    "mmproj-auto": "use model.mmproj",
    "chat-template": "use [template]",
    "chat-template-file": "use [template]",
    "alias": "use public_name",
    "host": "the host's seat decides it; engines listen on loopback",
    "port": "the host's seat decides it",
    "reuse-port": "a port that two engines share cannot be proved",
    "path": "the engine serves no files",
    "media-path": "the engine serves no files",
    "api-prefix": "the gate knows the engine's paths",
    "api-key": "the gate holds the keys; the engine has one generated secret",
    "api-key-file": "the gate holds the keys; the engine has one generated secret",
    "ssl-key-file": "the engine listens on loopback; put TLS before the gate",
    "ssl-cert-file": "the engine listens on loopback; put TLS before the gate",
    "device": "the host's seat decides it; use gpu_layers = 0 for the CPU",
    "rpc": "an engine of one host serves a deployment",
    "tools": "it gives clients hands on the host",
    "tools-runtime": "it gives clients hands on the host",
    "agent": "it gives clients hands on the host",
    "mcp-servers-config": "it gives clients hands on the host",
    "mcp-servers-json": "it gives clients hands on the host",
    "ui-mcp-proxy": "it gives clients hands on the host",
    "models-dir": "one engine serves one model",
    "models-preset": "one engine serves one model",
    "models-max": "one engine serves one model",
    "models-autoload": "one engine serves one model",
    "log-file": "the supervisor keeps and rotates the log",
    "log-disable": "the log says why an engine failed",
    "log-prompts-dir": "prompts are never stored",
    "help": "it ends the program",
    "version": "it ends the program",
    "cache-list": "it ends the program",
    "completion-bash": "it ends the program",
    "list-devices": "it ends the program",
}
"""Options that a deployment file may not set, and why or what instead."""

FILES: frozenset[str] = frozenset(
    {
        "lora",
        "lora-scaled",
        "control-vector",
        "control-vector-scaled",
        "grammar-file",
        "json-schema-file",
        "lookup-cache-static",
        "lookup-cache-dynamic",
        "slot-save-path",
        "ui-config-file",
        "video-ffmpeg-dir",
        "spec-draft-model",
        "spec-draft-hf",
    }
)
"""Options that name files, whose bytes no lock would pin; and presets that download a model."""


def is_preset(name: str) -> bool:
    """True for options like `--fim-qwen-7b-default`, which download a model of their own."""
    return name.endswith(("-default", "-spec")) and not BY_NAME[name].takes_value
