"""Prints text that a Hugging Face model continues a prompt with. Uses transformers only: nothing of zero_tp."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=80, metavar="N", help="new tokens at most (default: 80)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        print(f"sample: {arguments.model} is no Hugging Face model directory: it has no config.json", file=sys.stderr)
        return 2
    if not any(arguments.model.glob("*.safetensors")):
        print(f"sample: {arguments.model} holds no safetensors, and pickled weights are not read", file=sys.stderr)
        return 2
    if not arguments.prompt:
        print("sample: --prompt is empty: give the text some words to begin with", file=sys.stderr)
        return 2

    from transformers import AutoModelForCausalLM, AutoTokenizer, logging, set_seed

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, use_safetensors=True)
    set_seed(arguments.seed)
    sampling = {"temperature": arguments.temperature, "top_k": arguments.top_k} if arguments.temperature > 0 else {}
    output = model.generate(
        **tokenizer(arguments.prompt, return_tensors="pt"),
        max_new_tokens=arguments.tokens,
        do_sample=bool(sampling),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
