#!/usr/bin/env bash
# lm-eval 0.4.13 with transformers 5.24.0: a perplexity scores a second beginning-of-sequence token if the tokenizer adds one.
#
# `loglikelihood_rolling` encodes the text with special tokens and puts the same token in front as context. For "a b c" the
# model reads <s> <s> a b and is scored on <s> a b c: the log-likelihood of <s> after <s> is part of the text's.
#
# Seen: input ids of the one forward: [0, 0, 2, 3] (0 is <s>, 2 3 4 are a b c).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 lm-eval==0.4.13 datasets==5.2.0
cd "$folder"
HOME="$folder" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="<s>", eos_token="<s>", unk_token="<unk>", pad_token="<s>"
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=5, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
)
model = LlamaForCausalLM(config).eval()
inputs = []
model.register_forward_pre_hook(lambda _, args, kwargs: inputs.extend((kwargs.get("input_ids", *args)).tolist()), with_kwargs=True)
scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
(score,) = scorer.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a b c",), 0)])


def log_likelihood(ids: list[int]) -> float:
    with torch.no_grad():
        rows = model(torch.tensor([ids[:-1]])).logits.log_softmax(-1)[0]
    return float(rows[range(len(ids) - 1), ids[1:]].sum())


ids = inputs[0]
print("the model read", ids, "score", round(score, 4))
assert ids == [0, 0, 2, 3], ids
assert abs(score - log_likelihood([0, 0, 2, 3, 4])) < 1e-4
assert abs(score - log_likelihood([0, 2, 3, 4])) > 1
PY
