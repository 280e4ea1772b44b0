"""Fine-tune an exported model or a run on a task, beside the same model from random weights, and print both figures."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zero_tp.cli import check_writable
from zero_tp.errors import UserError
from zero_tp.process.environment import free_port

EPILOG = """\
examples:
  %(prog)s --model exports/bert --task mnli --train train.tsv --validation dev_matched.tsv
  %(prog)s --model runs/bert_336m --task squad --train train-v1.1.json --validation dev-v1.1.json

tasks
  classification  .jsonl, .tsv or .csv with the fields first, second (may be missing) and label
  mnli, qqp       the published tables (sentence1, sentence2, gold_label; question1, question2, is_duplicate)
  squad           the published JSON, of either version: the answer is a span of the context
  race            the published directories of passages: one answer of four

Training is transformers.Trainer's under DeepSpeed ZeRO, data parallel over --ranks. Heads that the model lacks are
drawn from the seed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from zero_tp.evaluation.finetuning import TASKS

    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--model", type=Path, required=True, metavar="DIR", help="a Hugging Face directory or name on its hub, or a run"
    )
    add("--task", choices=TASKS, required=True)
    add("--train", type=Path, required=True, metavar="FILE")
    add("--validation", type=Path, required=True, metavar="FILE")
    add("--epochs", type=float, default=3.0, metavar="N", help="passes over the training file (default: 3)")
    add(
        "--lr",
        type=float,
        default=5e-5,
        help="learning rate, after 10 %% of warm-up, decaying linearly (default: 5e-5)",
    )
    add("--batch-size", type=int, default=16, metavar="N", help="examples of a step on a rank (default: 16)")
    add("--length", type=int, default=128, metavar="N", help="tokens of the longest row (default: 128)")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), default=2, help="of DeepSpeed (default: 2)")
    add("--ranks", type=int, default=2, metavar="N", help="data-parallel ranks (default: 2)")
    add("--seed", type=int, default=1234, help="of the order and of what is drawn (default: 1234)")
    add("--save", type=Path, metavar="DIR", help="save the fine-tuned model here")
    add("--variant", choices=("pretrained", "random"), help=argparse.SUPPRESS)  # what a rank trains
    add("--result", type=Path, help=argparse.SUPPRESS)


def check(options: argparse.Namespace) -> None:
    """Raise a UserError for a number that can't be."""
    for name in ("ranks", "batch_size", "length"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    for name in ("epochs", "lr"):
        if not 0 < getattr(options, name) < math.inf:
            raise UserError(f"--{name} {getattr(options, name)}: a positive number")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed {options.seed}: from 0 to {2**32 - 1}")


def rank(options: argparse.Namespace) -> None:
    """Fine-tune one variant on this rank; the first writes the figures."""
    import transformers
    from transformers import AutoConfig, Trainer, TrainingArguments, set_seed

    from zero_tp.data.tokenizer import open_tokenizer
    from zero_tp.evaluation.finetuning import TASKS, read_task

    task = TASKS[options.task]
    tokenizer = open_tokenizer(options.model)
    train, validation, labels = read_task(task, options.train, options.validation, tokenizer, options.length)
    set_seed(options.seed)
    named: dict[str, Any] = {"label2id": labels, "id2label": {i: name for name, i in labels.items()}} if labels else {}
    config = AutoConfig.from_pretrained(options.model, **named)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id  # by which a decoder finds a row's last token
    auto = getattr(transformers, task.kind.auto_class)
    pretrained = options.variant == "pretrained"
    model = auto.from_pretrained(options.model, config=config) if pretrained else auto.from_config(config)
    settings = TrainingArguments(
        output_dir=str(options.result.parent / "trainer"),
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        warmup_steps=0.1,  # of all
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        seed=options.seed,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "torch_adam": True}},
            "zero_optimization": {
                "stage": options.zero_stage,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        average_tokens_across_devices=False,  # the loss is a mean over examples
        label_names=["start_positions", "end_positions"] if "start_positions" in train.features[0] else ["labels"],
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    collator = getattr(transformers, task.kind.collator)(tokenizer)
    seen: Any = train.inputs()
    held_out: Any = validation.inputs()
    trainer = Trainer(model, settings, train_dataset=seen, eval_dataset=held_out, data_collator=collator)
    trainer.train()
    outputs = trainer.predict(held_out).predictions
    if options.save is not None and pretrained:
        trainer.save_model(str(options.save))
        tokenizer.save_pretrained(str(options.save))
    if settings.process_index == 0:
        figures = task.kind.judge(validation.records, validation.features, validation.of, outputs)
        options.result.write_text(json.dumps({"train": len(train.records), "figures": figures}))


def launched(options: argparse.Namespace, model: Path, variant: str, result: Path) -> dict[str, Any]:
    """Start the ranks of one variant → what the first wrote."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node", str(options.ranks), "--master_port", str(free_port())]
    given = {**vars(options), "model": model, "variant": variant, "result": result}
    words += ["-m", "zero_tp", "finetune"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    print(f"{variant}:", flush=True)
    done = subprocess.run([sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main(options: argparse.Namespace) -> None:
    if options.variant is not None:
        return rank(options)
    check(options)
    import transformers

    from zero_tp.checkpoint.convert import as_huggingface
    from zero_tp.data.tokenizer import open_tokenizer
    from zero_tp.evaluation.finetuning import TASKS, read_task
    from zero_tp.weights.files import open_weights
    from zero_tp.weights.load import open_any_config

    with tempfile.TemporaryDirectory() as folder, as_huggingface(options.model) as model:
        config, tokenizer, task = open_any_config(model), open_tokenizer(model), TASKS[options.task]
        open_weights(model)
        if type(config) not in getattr(transformers, task.kind.auto_class)._model_mapping:
            raise UserError(f"--task {options.task}: transformers has no {config.model_type} for it; use another model")
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"--model {options.model}: its tokenizer has no padding token, which rows of several lengths need: "
                'name one of its tokens as "pad_token" in tokenizer_config.json, that of an export where it is a run'
            )
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and options.length > positions:
            raise UserError(f"--length: {options.length} tokens, but the model has {positions} positions; shorten it")
        # Read here, so that a mistake is one line.
        read_task(task, options.train, options.validation, tokenizer, options.length)
        if options.save is not None:
            check_writable(options.save)
        found = {
            name: launched(options, model, name, Path(folder) / f"{name}.json") for name in ("pretrained", "random")
        }
    names = list(found["pretrained"]["figures"])
    print(f"{options.task}, {found['pretrained']['train']:,} training examples")
    print("".join([f"{'weights':<12}", *(f"{name:>14}" for name in names)]))
    for variant, result in found.items():
        print("".join([f"{variant:<12}", *(f"{result['figures'][name]:>14.1%}" for name in names)]))
