"""Makes a checkpoint with layers as wide as Mistral Medium 3.5's, where torch and transformers are.

`python wide_checkpoint.py FOLDER LAYERS`: random BF16 weights (2.9 GB a layer), a vocabulary of
4096 words and a small vision tower in `FOLDER/model`, texts of 8192 words in `FOLDER/data`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)

WORDS = 4096
TEXTS, LONG = 512, 8192


def config(layers: int) -> Mistral3Config:
    """The published width; a vision tower only for the names."""
    made = Mistral3Config(
        text_config=Ministral3Config(
            vocab_size=WORDS,
            hidden_size=12288,
            intermediate_size=28672,
            num_hidden_layers=layers,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=2 * LONG,
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
        ),
        image_token_index=10,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    made.architectures = ["Mistral3ForConditionalGeneration"]
    return made


def main() -> None:
    """Make the model, its tokenizer and the texts."""
    out, layers = Path(sys.argv[1]), int(sys.argv[2])
    (out / "data").mkdir(parents=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Mistral3ForConditionalGeneration(config(layers))
    model.to("cpu").save_pretrained(out / "model")
    words = {f"w{n}": n for n in range(WORDS)}
    plain = Tokenizer(WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="w1", eos_token="w2")
    fast.save_pretrained(out / "model")
    chance = random.Random(0)
    names = list(words)
    with (out / "data" / "text.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(TEXTS):
            file.write(json.dumps({"text": " ".join(chance.choices(names, k=LONG))}) + "\n")


if __name__ == "__main__":
    main()
