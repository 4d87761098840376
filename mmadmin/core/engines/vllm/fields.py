"""The `[serve]` table of vLLM, field by field: parser, docs and forms read it.

Fields have vLLM's own names, so that its documentation applies to them.
"""

from __future__ import annotations

from decimal import Decimal

from mmadmin.core.spec.fields import Field

PARSER = r"[A-Za-z0-9_.-]{1,100}"

FIELDS: tuple[Field, ...] = (
    Field(
        "max_model_len",
        "integer",
        "Maximum tokens per request, prompt and output together. If empty: what the model was "
        "trained with.",
        minimum=1,
        maximum=16_777_216,
        unit="tokens",
        example=65536,
        flag="--max-model-len",
        label="Context",
        often=True,
    ),
    Field(
        "tensor_parallel_size",
        "integer",
        "GPUs that share each layer. If empty: all that the deployment is given.",
        minimum=1,
        maximum=64,
        example=4,
        flag="--tensor-parallel-size",
        often=True,
    ),
    Field(
        "gpu_memory_utilization",
        "decimal",
        "Share of each GPU's memory that the engine takes: weights first, the rest becomes the "
        "K/V pool.",
        minimum=Decimal("0.01"),
        maximum=1,
        example="0.85",
        flag="--gpu-memory-utilization",
        label="GPU memory share",
        often=True,
    ),
    Field(
        "limit_mm_per_prompt",
        "mapping",
        "Most images, videos or audio clips in one request. 0 rejects them and saves their memory.",
        default={},
        example={"image": 4},
        flag="--limit-mm-per-prompt",
        label="Media per request",
        often=True,
    ),
    Field(
        "tokenizer_mode",
        "string",
        '"mistral" uses tekken.json and the chat format of mistral_common, "hf" tokenizer.json.',
        pattern=PARSER,
        example="mistral",
        flag="--tokenizer-mode",
        often=True,
    ),
    Field(
        "tool_call_parser",
        "string",
        "How tool calls are read from the model's text.",
        pattern=PARSER,
        example="mistral",
        flag="--tool-call-parser",
        often=True,
    ),
    Field(
        "reasoning_parser",
        "string",
        "How reasoning is separated from the answer. If empty: it stays in the text.",
        pattern=PARSER,
        example="mistral",
        flag="--reasoning-parser",
        often=True,
    ),
    Field(
        "enable_auto_tool_choice",
        "boolean",
        "Let the model decide whether to call a tool. Requires tool_call_parser.",
        flag="--enable-auto-tool-choice",
        often=True,
    ),
    Field(
        "dtype",
        "choice",
        "Type of unquantized weights and of arithmetic.",
        choices=("auto", "bfloat16", "float16", "float32"),
        flag="--dtype",
    ),
    Field(
        "kv_cache_dtype",
        "string",
        '"auto" keeps the cache in FP8 if the checkpoint has K/V scales, else in 16 bits.',
        pattern=r"[a-z0-9_]{1,40}",
        example="fp8",
        flag="--kv-cache-dtype",
        label="K/V cache type",
        often=True,
    ),
    Field(
        "max_num_seqs",
        "integer",
        "Concurrent requests. Further ones wait.",
        minimum=1,
        maximum=65536,
        example=64,
        flag="--max-num-seqs",
        label="Concurrent requests",
    ),
    Field(
        "max_num_batched_tokens",
        "integer",
        "Tokens computed in one step. A larger step needs more memory beside the K/V pool.",
        minimum=1,
        maximum=16_777_216,
        unit="tokens",
        flag="--max-num-batched-tokens",
    ),
    Field(
        "enforce_eager",
        "boolean",
        "Do without CUDA graphs and compilation: starts faster, generates slower.",
        flag="--enforce-eager",
    ),
    Field(
        "enable_prefix_caching",
        "boolean",
        "Reuse the K/V cache of prompts that begin alike.",
        flag="--enable-prefix-caching",
    ),
    Field(
        "generation_config",
        "choice",
        '"auto" takes default sampling values from the checkpoint, "vllm" uses vLLM\'s own.',
        choices=("auto", "vllm"),
        flag="--generation-config",
    ),
    Field(
        "cpu_cache_gib",
        "integer",
        "Main memory for the K/V pool of a build for CPUs.",
        default=4,
        minimum=1,
        maximum=65536,
        unit="GiB",
        label="K/V pool on a CPU",
    ),
    Field(
        "flags",
        "mapping",
        "Other options of `vllm serve`, by long name without leading dashes: true for a switch, "
        "false for its --no- form, a list for several values, text for JSON.",
        default={},
        example={"max-logprobs": 5, "async-scheduling": True},
    ),
)
