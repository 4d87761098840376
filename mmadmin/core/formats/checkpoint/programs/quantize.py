"""Quantise a checkpoint with llm-compressor, or load one and say what did not fit.

`quantize.py REQUEST ANSWER`, in the quantizer's environment, without network. The
request is what `mmadmin.core.formats.checkpoint.recipes.quantize_checkpoint` writes; from lines
such as `layer 3 of 88: …` it takes the progress. What came out is judged by that recipe, not here.

Every choice that changes bytes is in the request, and the digest of this file is a parameter of the
step.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from loguru import logger
from torch.utils.data import DataLoader

SHARD_SIZE = "5GB"
CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
    # the default observer keeps no history: scales come out up to 25 % too low, and differ by run
    "observer": "static_minmax",
}
GPTQ_ERROR = re.compile(r"error\s+([\d.eE+-]+)")


class Refused(Exception):
    """The request cannot be carried out; its text is for people."""


def say(line: str) -> None:
    """A line for the log."""
    print(line, flush=True)  # noqa: T201


def peak_bytes() -> int:
    """The most main memory that this process has held, and on a GPU the most of its memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Progress:
    """Counts the layers that are done; the part before the first one counts as none."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began, self.loss = total, -1, time.monotonic(), ""

    def step(self) -> None:
        """One more part is done."""
        self.done += 1
        if not 0 < self.done <= self.total:
            self.began = time.monotonic()
            return
        each_s = (time.monotonic() - self.began) / self.done
        left_s = round(each_s * (self.total - self.done))
        say(
            f"layer {self.done} of {self.total}: loss {self.loss or 'not known'}, "
            f"at most {peak_bytes() / 2**30:.1f} GiB held, {left_s // 3600} h "
            f"{left_s // 60 % 60} min {left_s % 60} s left"
        )

    def watch(self) -> None:
        """Follow llm-compressor from layer to layer."""
        ended = LifecycleCallbacks.sequential_epoch_end

        def and_count(*args: Any, **kwargs: Any) -> Any:
            result = ended(*args, **kwargs)
            self.step()
            return result

        LifecycleCallbacks.sequential_epoch_end = and_count
        logger.add(self.listen, level=0, format="{message}")

    def listen(self, message: Any) -> None:
        """Keep the last loss that GPTQ logs."""
        if found := GPTQ_ERROR.search(str(message)):
            self.loss = found[1]


# -- the model


def load(request: Mapping[str, Any]) -> Any:
    """The model in main memory, in BF16 where the source is FP8."""
    source = request["source"]
    config = transformers.AutoConfig.from_pretrained(source)
    cls = getattr(transformers, config.architectures[0], None)
    if cls is None:
        raise Refused(f"transformers {transformers.__version__} has no {config.architectures[0]}")
    if not request["dequantize"]:
        return cls.from_pretrained(source, dtype="auto")
    fp8 = transformers.FineGrainedFP8Config(dequantize=True)
    model = cls.from_pretrained(source, dtype=torch.bfloat16, quantization_config=fp8)
    keep_dequantized(model)
    return model


def keep_dequantized(model: Any) -> None:
    """Forget how the source was stored.

    transformers 5 applies the conversions of loading backwards when it saves: without this, what is
    not quantised here (lm_head, embeddings, the vision tower) would silently become FP8.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: PLC0415

    found = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [  # noqa: SLF001
        one
        for one in found
        if not any(
            isinstance(step, Fp8Dequantize) for step in getattr(one, "operations", None) or []
        )
    ] or None


def text_model(model: Any) -> tuple[str, Any]:
    """The part with the text layers, and its name in the model."""
    for name in ("model.language_model", "language_model.model", "model"):
        found = model
        for part in name.split("."):
            found = getattr(found, part, None)
        if hasattr(found, "layers"):
            return name, found
    raise Refused(f"{type(model).__name__} has no text layers where they are looked for")


def plain_name(name: str) -> str:
    """A name without what loaders add or move; as `mmadmin.core.formats.checkpoint.quantized`."""
    return ".".join(part for part in name.split(".") if part != "model")


def linears_of(module: Any) -> dict[str, Any]:
    """The linear modules by name, of whatever class."""
    return {name: one for name, one in module.named_modules() if isinstance(one, torch.nn.Linear)}


def left_alone(model: Any, name: str, text: Any, wanted: Sequence[str]) -> list[str]:
    """Linear modules of the text model that are not to be quantised.

    Refuses when the model does not have exactly the modules that its headers promised.
    """
    every, inside = linears_of(model), linears_of(text)
    expected = {plain_name(one) for one in wanted}
    chosen = {one for one in inside if plain_name(f"{name}.{one}") in expected}
    classes = Counter(type(one).__name__ for one in inside.values())
    say(f"classes of linear modules: {dict(sorted(classes.items()))}")
    say(f"target: {name} ({type(text).__name__}), {len(chosen)} of {len(every)} linear modules")
    if len(chosen) != len(expected):
        missing = sorted(expected - {plain_name(f"{name}.{one}") for one in chosen})
        raise Refused(
            f"{len(expected)} linear modules were expected in {name}, it has {len(chosen)} of "
            f"them; missing: {', '.join(missing[:5])}"
        )
    return sorted(set(inside) - chosen)


# -- calibration


def rows_of(path: Path, column: str) -> Iterator[tuple[Any, str | None]]:
    """Texts (or lists of messages) of a file, each with the language that the file says."""
    if path.suffix == ".txt":
        for text in path.read_text(encoding="utf-8").split("\n\n"):
            if text.strip():
                yield text, None
        return
    if path.suffix == ".parquet":
        from pyarrow import parquet  # noqa: PLC0415

        file = parquet.ParquetFile(path)
        names = [n for n in (column, "language", "lang") if n in file.schema_arrow.names]
        batches = file.iter_batches(columns=names)
        rows: Iterator[Mapping[str, Any]] = (row for one in batches for row in one.to_pylist())
    else:
        rows = (json.loads(line) for line in path.open(encoding="utf-8") if line.strip())
    for row in rows:
        if column not in row:
            raise Refused(f"{path.name} has no column {column}: it has {', '.join(sorted(row))}")
        yield row[column], row.get("language", row.get("lang"))


def calibration(request: Mapping[str, Any], tokenizer: Any) -> DataLoader[Any]:
    """The texts to calibrate with, as tokens, in one order. Refuses when there are too few."""
    wanted = request["calibration"]
    rows = [row for file in request["files"] for row in rows_of(Path(file), wanted["column"])]
    if wanted["language"]:
        if rows and all(language is None for _text, language in rows):
            raise Refused(
                "the data has no column `language` or `lang`: remove calibration_language"
            )
        rows = [row for row in rows if row[1] == wanted["language"]]
    random.Random(wanted["seed"]).shuffle(rows)  # noqa: S311
    least = wanted["tokens"] if wanted["length"] == "full" else 2
    found: list[list[int]] = []
    looked = 0
    for content, _language in rows:
        if len(found) == wanted["samples"]:
            break
        looked += 1
        tokens = tokens_of(content, tokenizer)[: wanted["tokens"]]
        if len(tokens) >= least:
            found.append(tokens)
    say(f"calibration: {len(found)} texts of {looked} looked at, {sum(map(len, found))} tokens")
    if len(found) < wanted["samples"]:
        raise Refused(
            f"the calibration data has {len(found)} texts of at least {least} tokens, "
            f"{wanted['samples']} are wanted"
        )
    batches = [{"input_ids": [one], "attention_mask": [[1] * len(one)]} for one in found]
    return DataLoader(batches, batch_size=None, collate_fn=as_tensors)


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """One text as a batch."""
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def tokens_of(content: Any, tokenizer: Any) -> list[int]:
    """A text, or a conversation by the model's own template, as tokens."""
    if isinstance(content, str):
        return list(tokenizer(content, add_special_tokens=True)["input_ids"])
    text = tokenizer.apply_chat_template(content, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# -- quantising


def modifier_of(request: Mapping[str, Any], ignore: Sequence[str]) -> Any:
    """llm-compressor's recipe."""
    options: dict[str, Any] = {"ignore": list(ignore)}
    if request["cache_scales"]:
        options["kv_cache_scheme"] = CACHE_SCHEME
    if request["scheme"] != "W4A16":
        return QuantizationModifier(targets=["Linear"], scheme=request["scheme"], **options)
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=request["group_size"],
        symmetric=True,
        dynamic=False,
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    return GPTQModifier(config_groups=groups, dampening_frac=float(request["dampening"]), **options)


def quantize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Quantise and save; the answer says how long each part took."""
    torch.manual_seed(request["seed"])
    began = time.monotonic()
    model = load(request)
    model.eval()
    loaded = time.monotonic()
    name, text = text_model(model)
    ignore = left_alone(model, name, text, request["targets"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["source"])
    data: dict[str, Any] = {}
    if request["calibration"]:
        # a loader: given texts, llm-compressor shuffles them without a seed
        data = {"dataset": calibration(request, tokenizer)}
        Progress(len(text.layers)).watch()
    modifier = modifier_of(request, ignore)
    say(f"starting {type(modifier).__name__} on {type(text).__name__}: {request['scheme']}")
    oneshot(model=text, tokenizer=tokenizer, recipe=modifier, **data)
    remove_dispatch(text)  # back from the GPU, if any, to where the rest of the model is
    quantized = time.monotonic()
    modify_save_pretrained(model)
    if not getattr(model.save_pretrained, "_overridden", False):
        raise Refused("saving would write uncompressed weights: the model's save is not patched")
    model.save_pretrained(
        request["output"],
        save_compressed=True,
        save_original_format=False,
        max_shard_size=SHARD_SIZE,
    )
    saved = time.monotonic()
    return {
        "load_s": round(loaded - began, 1),
        "quantize_s": round(quantized - loaded, 1),
        "save_s": round(saved - quantized, 1),
        "peak_bytes": peak_bytes(),
    }


def reload(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint; the answer names what was missing, left over or of another shape."""
    config = transformers.AutoConfig.from_pretrained(request["source"])
    cls = getattr(transformers, config.architectures[0])
    _model, info = cls.from_pretrained(request["source"], dtype="auto", output_loading_info=True)
    return {key: sorted(map(str, info.get(key) or [])) for key in PROBLEMS}


PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")
TASKS = {"quantize": quantize, "reload": reload}


def main() -> None:
    """Read the request, carry it out, write the answer."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        answer = TASKS[request["task"]](request)
    except Refused as error:
        answer = {"refused": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
