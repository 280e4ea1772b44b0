"""Hugging Face model directories are damaged at random, and evaluated, sampled from and read by
training.

    python -m tests.tools.fuzz models --count 1000

If weights, index or header are damaged, a command computes what it computes of the undamaged
directory, or refuses. A damaged config or tokenizer may describe another model: then evaluation and
training must agree on its loss if both accept it.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz.commands import PERPLEXITY, attempt, in_a_child, scratch
from tests.tools.fuzz.damage import (
    ODD,
    damage,
    damage_bytes,
    edit_json,
    edit_json_file,
    replace_file,
)

TEXT = "some words of a text, and more of them, for the state of our union. " * 4
TRAINING = """
import sys
from pathlib import Path
from zero_tp.base import cli
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.tools.evaluation.perplexity import perplexity
from zero_tp.tools.evaluation.model_directory import check_tokenizer
from zero_tp.tools.evaluation.eval_model import ParallelScorer, EvalModel
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.run.process.quiet import quiet_libraries

def main():
    import torch
    directory = Path("model")
    model = ZeroTPForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = open_tokenizer(directory)
    check_tokenizer(tokenizer, model.config, directory)
    positions = model.config.max_position_embeddings
    eval_model = EvalModel(ParallelScorer(model), model, tokenizer, model.config, positions, batch_size=1)
    print(perplexity([Path("text.txt").read_text()], eval_model)["nll"])

quiet_libraries(False)
cli.run(main)
"""  # noqa: E501
CONSUMERS: dict[str, list[str]] = {
    "eval/zero_shot.py": ["--model", "model", *PERPLEXITY],
    "launch/sample.py": [
        "--model",
        "model",
        "--prompt",
        "some words",
        "--tokens",
        "6",
        "--temperature",
        "0",
    ],
    "run.py": [],
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "llama": {
        **{
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        **{"intermediate_size": 24, "max_position_embeddings": 32, "tie_word_embeddings": False},
    },
}


def make(directory: Path) -> None:
    """Write the undamaged models, each in one file and in shards."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zero_tp.tools.corpus.tokenizer_training import train_bpe

    torch.set_num_threads(1)
    tokenizer = train_bpe(iter([TEXT]), 290)
    for kind, sizes in SIZES.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(
            kind, vocab_size=300, bos_token_id=0, eos_token_id=0, initializer_range=0.3, **sizes
        )
        model: Any = AutoModelForCausalLM.from_config(config)
        for name, size in ((kind, "5GB"), (f"{kind}-shards", "20KB")):
            model.save_pretrained(directory / name, max_shard_size=size)
            tokenizer.save_pretrained(str(directory / name))


@cache
def base() -> Path:
    """Make a directory with undamaged models."""
    directory = scratch()
    in_a_child(lambda: make(directory))
    return directory


def make_workplace(workplace: Path, name: str) -> Path:
    shutil.copytree(base() / name, workplace / "model")
    (workplace / "text.txt").write_text(TEXT)
    (workplace / "run.py").write_text(TRAINING)
    return workplace / "model"


def compute(consumer: str, workplace: Path, description: str) -> Any:
    """Return what a command computes of the model: a loss, or a sample; None where it refuses."""
    script = str(workplace / consumer) if consumer == "run.py" else consumer
    ended = attempt(description, script, CONSUMERS[consumer], workplace, limit=60)
    if ended is None or consumer == "launch/sample.py":
        return ended and ended.out
    if consumer == "run.py":
        return float(ended.out)
    return json.loads((workplace / "report.json").read_text())["tasks"]["perplexity"]["nll"]


@cache
def expected(consumer: str, name: str) -> Any:
    workplace = scratch()
    make_workplace(workplace, name)
    computed = compute(consumer, workplace, "an undamaged model")
    assert computed is not None, f"{consumer} refuses an undamaged model"
    return computed


# --- damage to weights, headers and the index: an accepted directory is the undamaged model -------


def weights_file(model: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(model.glob("*.safetensors")))


def split_file(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join_file(file: Path, header: str, data: bytes) -> None:
    file.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def damage_header(model: Path, draw: random.Random) -> str:
    file = weights_file(model, draw)
    content = file.read_bytes()
    damaged, change = damage_bytes(content, draw, limit=8 + int.from_bytes(content[:8], "little"))
    file.write_bytes(damaged)
    return f"{file.name}: {change}"


def edit_header(model: Path, draw: random.Random) -> str:
    file = weights_file(model, draw)
    header, data = split_file(file)
    name = draw.choice([name for name in header if name != "__metadata__"])
    how = draw.choice(("twice", "extra", "edit", "edit", "edit", "edit"))
    if how == "extra":
        header["extra.weight"] = {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [len(data), len(data) + 4],
        }
        data += b"\0\0\x80?"
    elif how == "edit":
        odd = ("F16", "I32", "F8_E4M3", "BOOL", [2**62, 4], [-1], [0, 2**63], [0], *ODD)
        how = edit_json(draw.choice((header, header[name], header[name])), draw, odd)
    text = json.dumps(header)
    if how == "twice":
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    join_file(file, text, data)
    return f"{file.name}: {how} ({name})"


def not_finite(model: Path, draw: random.Random) -> str:
    file = weights_file(model, draw)
    header, data = split_file(file)
    value, place = draw.choice((math.nan, math.inf, -math.inf)), 4 * draw.randrange(len(data) // 4)
    join_file(file, json.dumps(header), data[:place] + struct.pack("<f", value) + data[place + 4 :])
    return f"{value} at {place} of {file.name}"


def cut(model: Path, draw: random.Random) -> str:
    file = draw.choice([*model.glob("*.safetensors"), model / "config.json"])
    content = file.read_bytes()
    keep = draw.choice((0, len(content) - 3, draw.randrange(len(content) - 2)))
    file.write_bytes(content[:keep])
    return f"{file.name} cut after {keep} of {len(content)} bytes"


def edit_index(model: Path, draw: random.Random) -> str:
    path, single = model / "model.safetensors.index.json", weights_file(model, draw)
    if not path.exists():
        names = [name for name in split_file(single)[0] if name != "__metadata__"]
        path.write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")})
        )
        if draw.random() < 0.7:
            shutil.copy(single, model / "model-1.safetensors")
        return "an index beside one file"
    if draw.random() < 0.2:
        shutil.copy(single, model / "model.safetensors")
        return "one file beside the index"
    elsewhere = (
        f"../model/{single.name}",
        str(single.absolute()),
        "none.safetensors",
        ".",
        single.name,
        "x" * 5000,
    )
    return f"index: {edit_json_file(path, draw, (*elsewhere, *elsewhere, *ODD))}"


# --- damage that may make another model -----------------------------------------------------------


def edit_config(model: Path, draw: random.Random) -> str:
    path = model / "config.json"
    config = json.loads(path.read_text())
    if draw.random() < 0.4:
        odd = (
            "quantization_config",
            "auto_map",
            "transformers_weights",
            "attn_implementation",
            "tie_word_embeddings",
        )
        key, value = draw.choice((*odd, "x")), draw.choice((*ODD, {"a": "b.c"}, "llama"))
        config[key] = value
        change = f"{key}: {value!r:.60}"
    else:
        key, change = "vocab_size", edit_json(config, draw)
    text = json.dumps(config)
    if draw.random() < 0.1:
        text = text[:-1] + f', "{key}": 1}}'
    path.write_text(text)
    return f"config.json: {change}"


def edit_other(model: Path, draw: random.Random) -> str:
    """A file of the tokenizer, or the settings of generation."""
    return damage(
        model / draw.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json")),
        draw,
    )


def replace(model: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(model.iterdir()))
    return f"{path.name} {replace_file(path, draw)}"


SAME = (
    damage_header,
    damage_header,
    edit_header,
    edit_header,
    not_finite,
    cut,
    edit_index,
    edit_index,
)
OTHERS = (edit_config, edit_config, edit_config, edit_other, edit_other, replace)


def case(draw: random.Random, directory: Path) -> str:
    name = draw.choice([kind + form for kind in SIZES for form in ("", "-shards")])
    model = make_workplace(directory, name)
    if draw.random() < 0.5:
        description = f"{name}: {draw.choice(SAME)(model, draw)}"
        consumer = draw.choice(tuple(CONSUMERS))
        computed, undamaged = compute(consumer, directory, description), expected(consumer, name)
        assert computed in (None, undamaged), (
            f"{description}: {consumer}: {computed!r}, of the undamaged model {undamaged!r}"
        )
        return "refused" if computed is None else "the same"
    description = f"{name}: {draw.choice(OTHERS)(model, draw)}"
    if draw.random() < 0.3:
        return (
            "refused" if compute("launch/sample.py", directory, description) is None else "sampled"
        )
    evaluated, trained = (
        compute(consumer, directory, description) for consumer in ("eval/zero_shot.py", "run.py")
    )
    if evaluated is None or trained is None:
        return "refused" if evaluated is None and trained is None else "refused by one"
    same = math.isclose(evaluated, trained, rel_tol=1e-4)
    assert same, f"{description}: evaluation computes {evaluated}, training {trained}"
    return "evaluated as trained"
