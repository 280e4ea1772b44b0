#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer opens the tokenizer.json of a `qwen2` directory with Qwen2's own pre-tokenizer,
# although tokenizer_config.json names PreTrainedTokenizerFast. For `qwen2_moe`, `qwen3`, `llama` and `gpt2` it obeys the file.
#
# A byte-level BPE that was trained with GPT-2's splitting keeps "1984" in one token. Qwen2's splitting cuts numbers into
# digits, so the same file gives other ids. Nothing is logged.
#
# Seen: tokenizers 5 ids for "In 1984, 12345 people"; AutoTokenizer 14 for qwen2 (Qwen2Tokenizer), 5 for the others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
HOME="$folder" HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
import json
import os

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEXT = "In 1984, 12345 people"
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
)
tokenizer.train_from_iterator(["In 1984 there were 12345 people, and 2026 more. " * 3], trainer)
expected = tokenizer.encode(TEXT).ids
lengths = {}
for kind in ("gpt2", "llama", "qwen3", "qwen2", "qwen2_moe"):
    os.mkdir(kind)
    tokenizer.save(f"{kind}/tokenizer.json")
    with open(f"{kind}/config.json", "w") as file:
        json.dump({"model_type": kind}, file)
    with open(f"{kind}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}, file)
    opened = AutoTokenizer.from_pretrained(kind)
    ids = opened(TEXT).input_ids
    lengths[kind] = len(ids)
    print(kind, type(opened).__name__, "the file's ids" if ids == expected else f"{len(ids)} ids instead of {len(expected)}")
assert len(expected) == 5, expected
assert lengths == {"gpt2": 5, "llama": 5, "qwen3": 5, "qwen2": 14, "qwen2_moe": 5}, lengths
PY
