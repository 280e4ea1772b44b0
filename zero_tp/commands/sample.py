"""Continue a prompt with a Hugging Face model or a run's model."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from zero_tp.base.errors import UserError, first_line, show, show_text

TOKENS = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="RUN|DIR",
        help="a run, a Hugging Face directory or its hub name",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the beginning of the text")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"most new tokens (default: {TOKENS}, or as many as fit the model)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="sample from the K likeliest (default: 50)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")


def check(options: argparse.Namespace) -> None:
    for name, value, least in (
        ("tokens", options.tokens, 1),
        ("top-k", options.top_k, 1),
        ("seed", options.seed, 0),
    ):
        if value is not None and not least <= value < 2**32:
            raise UserError(
                f"--{name} {value}: is out of range; give a number from {least} to {2**32 - 1}"
            )
    if not 0 <= options.temperature < math.inf:
        raise UserError(
            f"--temperature {options.temperature}: give 0 or a positive number, such as 0.8"
        )
    # Bytes of the command line that are not UTF-8 become surrogates, which no tokenizer encodes.
    if not options.prompt or options.prompt != options.prompt.encode(errors="ignore").decode():
        raise UserError("--prompt: is empty or no valid UTF-8; give some words")


def continue_prompt(options: argparse.Namespace) -> str:
    """Return the prompt and its continuation."""
    from zero_tp.parallel.topology import Topology
    from zero_tp.tools.evaluation.model_directory import open_directory

    directory = open_directory(options.model)  # before torch and transformers are imported
    if directory.note:
        show(directory.note, file=sys.stderr)
    from transformers import set_seed

    tokenizer = directory.tokenizer
    prompt = tokenizer(options.prompt, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    if not length:
        raise UserError(
            f"{options.model}: its tokenizer finds no token in the prompt; give another prompt"
        )
    # With learned positions, a longer text would be an index outside their table.
    positions = getattr(directory.config.get_text_config(), "max_position_embeddings", None)
    room = positions - length if isinstance(positions, int) else 2**32
    tokens = min(TOKENS, room) if options.tokens is None else options.tokens
    if room < 1:
        raise UserError(
            f"--prompt: {length:,} tokens fill the model's {positions:,} positions; shorten it"
        )
    if tokens > room:
        raise UserError(
            f"--tokens {tokens}: the prompt has {length:,} tokens, and the model {positions:,} "
            "positions"
        )
    model = directory.load_module("auto", "cpu", Topology()).eval()
    set_seed(options.seed)
    sampling = (
        {"temperature": options.temperature, "top_k": options.top_k}
        if options.temperature > 0
        else {}
    )
    try:
        output = model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=tokens,
            do_sample=bool(sampling),
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
            **sampling,
        )
    except Exception as error:  # transformers fails on some configs and generation settings
        raise UserError(
            f"{options.model}: transformers can't continue the prompt: {first_line(error)}"
        ) from error
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def main(options: argparse.Namespace) -> None:
    check(options)
    show_text(continue_prompt(options))
