"""A small stand-in of Mistral Medium 3.5, made where torch and transformers are: run as a program.

`python standin.py FOLDER TEKKEN`: text and vision layers with random weights, a truncated tokenizer,
chat template and processor in `FOLDER/bf16`, and the same with FP8 text layers (one scale a tensor,
static activation scales, as the original is published) in `FOLDER/fp8`. TEKKEN is a tekken.json of
any Mistral tokenizer (mistral_common has some). `FOLDER/text.jsonl` has prose to calibrate with.
"""

from __future__ import annotations

import base64
import json
import pydoc_data.topics
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.mistral import MistralConverter

RANKS, SPECIAL = 3096, 1000
VOCABULARY = RANKS + SPECIAL
NAMES = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    32: "[ARGS]",
    33: "[CALL_ID]",
    34: "[THINK]",
    35: "[/THINK]",
    36: "[MODEL_SETTINGS]",
    37: "[/MODEL_SETTINGS]",
}
TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
PROCESSOR = {
    "processor_class": "PixtralProcessor",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "image_processor": {
        "image_processor_type": "PixtralImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": {"height": 14, "width": 14},
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 112},
    },
}


def tekken(source: Path, to: Path) -> PreTrainedTokenizerFast:
    """The first ranks of a tokenizer, with the special tokens of version 15, in both forms."""
    table = json.loads(source.read_text())
    table["vocab"] = table["vocab"][:RANKS]
    table["special_tokens"] = [
        {"rank": i, "token_str": NAMES.get(i, f"<SPECIAL_{i}>"), "is_control": True}
        for i in range(SPECIAL)
    ]
    table["config"].update(
        num_vocab_tokens=RANKS,
        default_vocab_size=VOCABULARY,
        default_num_special_tokens=SPECIAL,
        version="v15",
    )
    table["image"] = {"image_patch_size": 14, "max_image_size": 112, "spatial_merge_size": 2}
    effort = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
    table["model_settings_builder"] = {"reasoning_effort": effort}
    to.write_text(json.dumps(table))
    special = [row["token_str"] for row in table["special_tokens"]]
    vocabulary = {name: rank for rank, name in enumerate(special)}
    vocabulary |= {
        base64.b64decode(row["token_bytes"]): SPECIAL + row["rank"] for row in table["vocab"]
    }
    converter = MistralConverter(
        vocab=vocabulary,
        additional_special_tokens=special,
        pattern=table["config"]["pattern"],
    )
    made = PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    made.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    )
    made.chat_template = TEMPLATE
    made.model_max_length = 4096
    return made


def model() -> Mistral3ForConditionalGeneration:
    """Four text layers, two vision layers: 28 of 46 linear modules are the text's."""
    torch.manual_seed(0)
    rope = {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    config = Mistral3Config(
        text_config=Ministral3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            rope_parameters=rope,
            tie_word_embeddings=False,
        ),
        vision_config=PixtralVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=32,
            image_size=112,
            patch_size=14,
            hidden_act="silu",
        ),
        image_token_index=10,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.architectures = ["Mistral3ForConditionalGeneration"]
    return Mistral3ForConditionalGeneration(config).to(torch.bfloat16).eval()


def fp8(source: Path, to: Path) -> None:
    """The text layers in FP8, as the original is published."""
    found, made = load_file(source / "model.safetensors"), {}
    for name, value in found.items():
        if "language_model" not in name or not name.endswith("_proj.weight"):
            made[name] = value
            continue
        scale = value.float().abs().max() / 448.0
        made[name] = (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        stem = name.removesuffix("weight")
        made[f"{stem}weight_scale_inv"] = scale.to(torch.bfloat16).reshape(())
        made[f"{stem}activation_scale"] = torch.tensor(0.01, dtype=torch.bfloat16)
    save_file(made, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    (to / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    """Make both, and the prose."""
    out, source = Path(sys.argv[1]), Path(sys.argv[2])
    plain, small = out / "bf16", out / "fp8"
    for folder in (plain, small):
        folder.mkdir(parents=True)
    made = model()
    made.generation_config.pad_token_id = 11
    made.generation_config.bos_token_id = 1
    made.generation_config.eos_token_id = 2
    made.save_pretrained(plain)
    tekken(source, plain / "tekken.json").save_pretrained(plain)
    (plain / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    fp8(plain, small)
    for file in plain.iterdir():
        if not (small / file.name).exists():
            shutil.copyfile(file, small / file.name)
    topics = pydoc_data.topics.topics
    rows = [json.dumps({"text": topics[key]}) for key in sorted(topics)]
    (out / "text.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
