"""Hugging Face model directories are damaged at random, and evaluated, sampled from and read by training.

    python -m tests.tools.fuzz models --count 1000

What a command makes of a directory whose weights, index or header are damaged equals what it makes of the whole one, or
it refuses. What a config or a tokenizer says may be another model: there evaluation and training have to agree on its
loss where both accept it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz.commands import Ended, broken_promise, run
from tests.tools.fuzz.fuzzing import in_a_child, scratch

TEXT = "some words of a text, and more of them, for the state of our union. " * 4
TRAINING = """
import sys
from pathlib import Path
from zero_tp import cli
from zero_tp.data.tokenizer import open_tokenizer
from zero_tp.evaluation.perplexity import perplexity
from zero_tp.evaluation.model_directory import check_tokenizer
from zero_tp.evaluation.eval_model import ParallelScorer, EvalModel
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.process.quiet import quiet_libraries

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
"""
CONSUMERS: dict[str, list[str]] = {
    "eval/zero_shot.py": [
        *("--model", "model", "--tasks", "perplexity", "--data", "perplexity=text.txt", "--device", "cpu"),
        *("--batch-size", "1", "--output", "report.json"),
    ],
    "launch/sample.py": ["--model", "model", "--prompt", "some words", "--tokens", "6", "--temperature", "0"],
    "training.py": [],
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "llama": {
        **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"intermediate_size": 24, "max_position_embeddings": 32, "tie_word_embeddings": False},
    },
}


def make(directory: Path) -> None:
    """Write the whole models, each in one file and in shards."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zero_tp.data.tokenizer_training import train_bpe

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
def base() -> tuple[Path, dict[tuple[str, str], Any]]:
    """A directory with whole models, and what each consumer makes of each."""
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import zero_tp.evaluation.zero_shot  # noqa: F401

    directory = scratch()
    in_a_child(lambda: make(directory))
    return directory, {}


def furnish(workplace: Path, name: str) -> Path:
    directory, _ = base()
    workplace.mkdir(exist_ok=True)
    shutil.copytree(directory / name, workplace / "model")
    (workplace / "text.txt").write_text(TEXT)
    (workplace / "training.py").write_text(TRAINING)
    return workplace / "model"


def begun(consumer: str, workplace: Path) -> Ended:
    script = str(workplace / consumer) if consumer == "training.py" else consumer
    return run(script, CONSUMERS[consumer], workplace, limit=60)


def outcome(consumer: str, ended: Ended, workplace: Path) -> Any:
    """What a command that ended with status 0 computed."""
    if consumer == "eval/zero_shot.py":
        return json.loads((workplace / "report.json").read_text())["tasks"]["perplexity"]["nll"]
    return float(ended.out) if consumer == "training.py" else ended.out


def expected(consumer: str, name: str) -> Any:
    _, known = base()
    if (consumer, name) not in known:
        with tempfile.TemporaryDirectory(prefix="zero_tp-fuzz-whole-") as folder:
            furnish(Path(folder), name)
            ended = begun(consumer, Path(folder))
            assert ended.status == 0, f"{consumer} of a whole model: {ended.err}"
            known[consumer, name] = outcome(consumer, ended, Path(folder))
    return known[consumer, name]


# --- damage -----------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    2**31 - 1,
    2**53,
    10**90,
    1e300,
    -0.5,
    "",
    "x",
    "../x",
    "\x1b[31m",
    [],
    {},
    [1],
)


def weights_of(model: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(model.glob("*.safetensors")))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def flip_header(model: Path, chance: random.Random) -> str:
    file = weights_of(model, chance)
    content = bytearray(file.read_bytes())
    place = chance.randrange(8 + int.from_bytes(content[:8], "little"))
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"bit flipped at {place} of {file.name}"


def edit_header(model: Path, chance: random.Random) -> str:
    file = weights_of(model, chance)
    header, data = header_of(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    how = chance.choice(("shape", "dtype", "offsets", "rename", "drop", "twice", "field", "extra"))
    if how == "shape":
        entry["shape"] = chance.choice(([], [1], [*entry["shape"][::-1], 2], [2**62, 4], [-1], [0], "x"))
    elif how == "dtype":
        entry["dtype"] = chance.choice(("F16", "I32", "F8_E4M3", "BOOL", "x", None, 5))
    elif how == "offsets":
        first, last = entry["data_offsets"]
        entry["data_offsets"] = chance.choice(([first, last + 4], [last, first], [first], [0, 2**63], [-4, last]))
    elif how == "rename":
        header[f"{name}\x1b"] = header.pop(name)
    elif how == "drop":
        del header[name]
    elif how == "field":
        del entry[chance.choice(sorted(entry))]
    elif how == "extra":
        header["extra.weight"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += b"\0\0\x80?"
    text = json.dumps(header)
    if how == "twice":
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
    with_header(file, text.encode(), data)
    return f"{how} of {name}"


def not_finite(model: Path, chance: random.Random) -> str:
    import struct

    file = weights_of(model, chance)
    header, data = header_of(file)
    value = chance.choice((math.nan, math.inf, -math.inf))
    place = 4 * chance.randrange(len(data) // 4)
    changed = data[:place] + struct.pack("<f", value) + data[place + 4 :]
    with_header(file, json.dumps(header).encode(), changed)
    return f"{value} at {place} of {file.name}"


def cut(model: Path, chance: random.Random) -> str:
    file = chance.choice(sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json")))
    if file.name.startswith(("tokenizer", "special", "generation")):
        file = weights_of(model, chance)
    size = file.stat().st_size
    keep = chance.choice((0, size - 3, chance.randrange(size - 2)))
    os.truncate(file, keep)
    return f"{file.name} cut after {keep} of {size} bytes"


def replaced(model: Path, chance: random.Random) -> str:
    file = chance.choice(sorted(model.iterdir()))
    file.unlink()
    kind = chance.choice(("pipe", "directory", "link to a device", "dangling link"))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "link to a device" else "nowhere")
    return f"{file.name} replaced by a {kind}"


def edit_index(model: Path, chance: random.Random) -> str:
    path = model / "model.safetensors.index.json"
    single = weights_of(model, chance)
    if not path.exists():
        names = [name for name in header_of(single)[0] if name != "__metadata__"]
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}))
        if chance.random() < 0.7:
            shutil.copy(single, model / "model-1.safetensors")
        return "an index beside one file"
    index = json.loads(path.read_text())
    places, name = index["weight_map"], chance.choice(sorted(index["weight_map"]))
    how = chance.choice(("place", "drop", "add", "whole", "single", "garbage"))
    if how == "place":
        elsewhere = ("../model/" + single.name, str(single.absolute()), "none.safetensors", "", ".", "a\0b", 5, None)
        places[name] = chance.choice((*elsewhere, single.name, "x" * 5000))
    elif how == "drop":
        del places[name]
    elif how == "add":
        places["extra\x1b[31m"] = single.name
    elif how == "whole":
        index["weight_map"] = chance.choice(ODD)
    elif how == "single":
        shutil.copy(single, model / "model.safetensors")
    path.write_text("[1" if how == "garbage" else json.dumps(index))
    return f"index: {how} of {name}: {str(places.get(name))[:40]!r}"


def edit_config(model: Path, chance: random.Random) -> str:
    path = model / "config.json"
    config = json.loads(path.read_text())
    odd = ("quantization_config", "auto_map", "transformers_weights", "attn_implementation", "tie_word_embeddings", "x")
    key = chance.choice(chance.choice((sorted(config), sorted(config), odd)))
    before = config.get(key)
    numbers = isinstance(before, (int, float)) and not isinstance(before, bool)
    options: tuple[Any, ...] = (before + 1, before * 2, -before, before / 2) if numbers else ({"a": "b.c"}, "llama")
    config[key] = chance.choice((*ODD, *options, *options))
    if chance.random() < 0.2:
        del config[key]
    text = json.dumps(config)
    if chance.random() < 0.1:
        text = text[:-1] + f', "{key}": 1}}'
    path.write_text(text)
    return f"config.json: {key}: {before!r} → {str(config.get(key, 'gone'))[:60]!r}"


def edit_other(model: Path, chance: random.Random) -> str:
    """A file of the tokenizer, or the settings of generation."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    path = model / chance.choice(names)
    how = chance.choice(("flip", "cut", "edit", "edit", "edit", "delete"))
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return f"{path.name} deleted"
    if how == "flip":
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return f"{path.name}: bit flipped at {place}"
    if how == "cut":
        path.write_bytes(content[: chance.randrange(len(content))])
        return f"{path.name} cut"
    value = json.loads(content)
    block, key = value, chance.choice(sorted(value))
    while isinstance(block[key], (dict, list)) and block[key] and chance.random() < 0.7:
        block = block[key]
        key = chance.choice(sorted(block)) if isinstance(block, dict) else chance.randrange(len(block))
    before = block[key]
    block[key] = chance.choice(ODD)
    path.write_text(json.dumps(value))
    return f"{path.name}: {key!r}: {str(before)[:40]!r} → {str(block[key])[:40]!r}"


Damage = Callable[[Path, random.Random], str]
SAME: tuple[Damage, ...] = (flip_header, flip_header, edit_header, edit_header, not_finite, cut, edit_index, edit_index)
"""What is accepted after these is the whole model."""
OTHERS: tuple[Damage, ...] = (edit_config, edit_config, edit_config, edit_other, edit_other, replaced)


def judged(consumer: str, workplace: Path, what: str) -> Any:
    """What the command computed; None where it refused."""
    ended = begun(consumer, workplace)
    broken = broken_promise(ended)
    assert broken is None, f"{what}: {consumer} {broken}"
    return outcome(consumer, ended, workplace) if ended.status == 0 else None


def case(chance: random.Random, directory: Path) -> str:
    name = chance.choice([kind + form for kind in SIZES for form in ("", "-shards")])
    model = furnish(directory, name)
    if chance.random() < 0.5:
        what = f"{name}: {chance.choice(SAME)(model, chance)}"
        consumer = chance.choice(tuple(CONSUMERS))
        found = judged(consumer, directory, what)
        whole = expected(consumer, name)
        assert found is None or found == whole, f"{what}: {consumer}: {found!r}, of the whole model {whole!r}"
        return "refused" if found is None else "the same"
    what = f"{name}: {chance.choice(OTHERS)(model, chance)}"
    if chance.random() < 0.3:
        return "refused" if judged("launch/sample.py", directory, what) is None else "sampled"
    evaluated, trained = (judged(consumer, directory, what) for consumer in ("eval/zero_shot.py", "training.py"))
    if evaluated is None or trained is None:
        return "refused" if evaluated is None and trained is None else "refused by one"
    same = math.isclose(evaluated, trained, rel_tol=1e-4)
    assert same, f"{what}: evaluation computes {evaluated}, training {trained}"
    return "evaluated as trained"
