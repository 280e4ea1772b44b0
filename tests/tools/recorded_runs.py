"""Records what short runs compute, so that two versions of the code can be compared bit for bit.

    python -m tests.tools.recorded_runs record before.json [--checkout DIR] [--only NAME]…
    python -m tests.tools.recorded_runs compare before.json after.json

A record holds every step's loss and gradient norm, the validation losses, and the SHA-256 of each exported tensor.
The runs differ in architecture, TP, SP, ZeRO stage, recomputation, offload, dropout, accumulation and dtype. The
`deepspeed` launcher starts each with one thread a rank; it ends in the middle and is resumed. The file is written after
each run, and runs that it holds already are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.launched import ROOT, launch, metrics_of, run, script
from zero_tp.files import write_atomically

STEPS, VOCABULARY = 4, 512
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 8}
COMMON = {**SIZES, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "initializer_range": 0.05}
GROUPED = {**COMMON, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 64, "n_head": 8, "n_positions": 64, "vocab_size": VOCABULARY},
    "gpt_neox": {**COMMON, "rotary_pct": 0.5, "hidden_dropout": 0.0},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 24},
    "qwen2": {**GROUPED, "num_key_value_heads": 2},
    "qwen3": {**GROUPED, "head_dim": 16},
    "starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu"}
FULL = {"mode": "full"}
MODULES = {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]}

Run = tuple[str, int, int, int, dict[str, Any], dict[str, Any]]
"""model_type, ranks, tensor, ZeRO stage, keys of the zero_tp block (`model` is merged), keys of DeepSpeed's."""

RUNS: dict[str, Run] = {
    "gpt2 TP1 zero0": ("gpt2", 1, 1, 0, {}, {}),
    "gpt2 TP2 SP zero1 dropout": ("gpt2", 4, 2, 1, {}, {}),
    "gpt2 TP2 zero2 dropout eager selective": (
        *("gpt2", 4, 2, 2),
        *({"parallel": {"sequence": False}, "attention": "eager", "recompute": "selective"}, {}),
    ),
    "gpt2 TP2 SP zero3 full bf16 dropout": ("gpt2", 4, 2, 3, {"recompute": FULL}, BF16),
    "gpt2 TP4 SP zero1 modules bf16": ("gpt2", 4, 4, 1, {"model": PLAIN, "recompute": MODULES}, BF16),
    "gpt2 TP2 zero2 partitioned offload": (
        *("gpt2", 4, 2, 2, {"parallel": {"sequence": False}, "recompute": FULL}),
        {"activation_checkpointing": {"partition_activations": True}, "zero_optimization": {"offload_optimizer": CPU}},
    ),
    "gpt_neox TP2 SP zero2": ("gpt_neox", 4, 2, 2, {}, {}),
    "gpt_neox TP2 zero0 bf16": ("gpt_neox", 2, 2, 0, {"parallel": {"sequence": False}}, BF16),
    "llama TP2 SP zero3 accumulation": ("llama", 4, 2, 3, {"recompute": MODULES}, {"gradient_accumulation_steps": 2}),
    "llama TP4 zero1 reset": (
        *("llama", 4, 4, 1),
        *({"parallel": {"sequence": False}, "data": {"document_attention": "reset"}}, {}),
    ),
    "llama TP1 zero3 offload bf16": (
        *("llama", 2, 1, 3, {"recompute": {"mode": "full", "every": 2}}),
        {**BF16, "zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}},
    ),
    "mistral TP2 SP zero1": ("mistral", 2, 2, 1, {"recompute": "selective"}, {}),
    "qwen2 TP4 SP zero1 replicated": ("qwen2", 4, 4, 1, {"recompute": {"mode": "full", "layers": 2}}, {}),
    "qwen3 TP2 SP zero2 bf16": ("qwen3", 4, 2, 2, {}, BF16),
    "starcoder2 TP2 SP zero3": ("starcoder2", 2, 2, 3, {"attention": "eager"}, {}),
    "starcoder2 TP2 SP zero0 keep": (
        *("starcoder2", 2, 2, 0, {"recompute": {"mode": "full", "keep_micro_batches": 1}}),
        {"gradient_accumulation_steps": 2},
    ),
}


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`base` with `more` over it, objects merged."""
    merged = base | more
    for key in base.keys() & more.keys():
        if isinstance(base[key], dict) and isinstance(more[key], dict):
            merged[key] = _merged(base[key], more[key])
    return merged


def config(run: Run, corpus: Path) -> dict[str, Any]:
    """The JSON file of a run."""
    model_type, _, tensor, stage, block, deepspeed = run
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    adam = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if "offload_optimizer" not in deepspeed.get("zero_optimization", {}):
        adam |= {"torch_adam": True, "fused": False}
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
    }
    tp = {
        "model": {"model_type": model_type, **MODELS[model_type]},
        "parallel": {"tensor": tensor},
        "data": {"train": str(corpus / "train"), "validation": str(corpus / "validation"), "sequence_length": 64},
        "training": {"steps": STEPS, "guard_interval": 1},
        "checkpoint": {"interval": STEPS // 2},
        "evaluation": {"interval": STEPS, "batches": 2},
    }
    return {**_merged(base, deepspeed), "zero_tp": _merged(tp, block)}


def _succeeded(done: CompletedProcess[str]) -> None:
    if done.returncode:
        raise SystemExit(f"{done.args}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def record(checkout: Path, names: list[str], file: Path) -> None:
    """Write what the runs called `names` compute with the code of `checkout`; those that `file` holds stay."""
    records: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        corpus = directory / "corpus"
        source = str(checkout / "launch/corpus/sotu.jsonl.gz")
        words = ("--input", source, "--tokenizer", f"bpe:{VOCABULARY}", "--output", str(corpus))
        _succeeded(script("launch/prepare_data.py", directory, *words, checkout=checkout))
        for number, name in enumerate(name for name in names if name not in records):
            run_file, output, exported = (directory / f"{kind}{number}" for kind in ("config", "run", "export"))
            run_file.write_text(json.dumps(config(RUNS[name], corpus)))
            for steps in (STEPS // 2, STEPS):
                arguments = ["--deepspeed_config", str(run_file), "--output-dir", str(output)]
                arguments += ["--set", f"zero_tp.training.steps={steps}"]
                _succeeded(run([*launch(RUNS[name][1], checkout=checkout), *arguments], directory, 900, checkout))
            convert = ("launch/convert.py", directory, "to-hf", str(output), "--output", str(exported))
            _succeeded(script(*convert, checkout=checkout))
            fields = ("step", "loss", "grad_norm", "validation_loss")
            metrics = [{key: line[key] for key in fields if key in line} for line in metrics_of(output)]
            records[name] = {"metrics": metrics, "weights": _weights(exported)}
            write_atomically(file, json.dumps(records, indent=1) + "\n")
            print(f"{name}: {metrics[-2]}", flush=True)


def _weights(exported: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a model directory, its dtype and shape included."""
    hashes = {}
    for file in sorted(exported.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            content = tensor.contiguous().view(-1).view(dtype=torch.uint8).numpy().tobytes()
            hashes[name] = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content).hexdigest()
    return hashes


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each run that is not the same in both, or in one of them only."""
    lines = []
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            lines.append(f"{name}: recorded once only")
        elif before[name] != after[name]:
            parts = [part for part in before[name] if before[name][part] != after[name][part]]
            lines.append(f"{name}: other {' and '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--checkout", type=Path, default=ROOT)
    recording.add_argument("--only", action="append", choices=list(RUNS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.checkout.resolve(), options.only or list(RUNS), options.file)
        return
    before, after = (json.loads(file.read_text()) for file in (options.before, options.after))
    differences = compare(before, after)
    print("\n".join(differences) or f"{len(before)} runs are equal bit for bit")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
