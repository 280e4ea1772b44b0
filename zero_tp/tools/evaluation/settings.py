"""The settings of an evaluation, which are options of `zero-tp evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero_tp.base.constants import DTYPES
from zero_tp.base.errors import UserError
from zero_tp.base.options import option, options_of

MAXIMUM = 2**31 - 1
MINIMUM = {"batch_size": 1, "limit": 1, "num_fewshot": 0, "overlap": 1, "sequence_length": 1}


@dataclass(frozen=True)
class TaskOptions:
    """Options of tasks."""

    text_key: str = option("text", "field of the text in JSON lines (default: text)", metavar="KEY")
    overlap: int | None = option(
        None,
        "stride of the windows in tokens: after a text's first window, each scores only its last N "
        "tokens (default: 32 for wikitext103; for perplexity the window's length, so windows don't "
        "overlap)",
        metavar="N",
    )
    limit: int | None = option(None, "only the first N examples of each task", metavar="N")
    num_fewshot: int | None = option(
        None, "examples before each question of lm-eval's tasks", metavar="N"
    )
    include_path: Path | None = option(
        None, "a directory with lm-eval task files (.yaml)", metavar="DIR"
    )
    allow_task_code: bool = option(
        False, "let task files of --include-path run Python; only if you trust them"
    )
    apply_chat_template: bool = option(
        False,
        "format the requests of lm-eval's tasks by the tokenizer's chat template, examples as "
        "turns of their own",
        "--apply-chat-template",
        "--apply_chat_template",
    )
    log_samples: bool = option(
        False,
        "write each request of lm-eval's tasks with its answer next to --output, as JSON lines for "
        "each task",
        "--log-samples",
        "--log_samples",
    )

    def check(self) -> None:
        """Raise a UserError for a number that is out of range."""
        for name, one in options_of(type(self)).items():
            value = getattr(self, name)
            minimum = MINIMUM.get(name)
            if minimum is None or value is None or minimum <= value <= MAXIMUM:
                continue
            flag = one.all_flags(name)[0]
            raise UserError(f"{flag} {value}: from {minimum} to {MAXIMUM}")


@dataclass(frozen=True)
class EvaluationSettings(TaskOptions):
    """Options of `zero-tp evaluate`."""

    batch_size: int = option(8, "batch size of each rank (default: 8)", metavar="N")
    sequence_length: int | None = option(
        None, "tokens of a window, with its context (default: the model's maximum)", metavar="N"
    )
    dtype: str = option("float32", "float32, bfloat16 or float16 (default: float32)")
    device: str | None = option(
        None, "such as cpu or cuda:0 (default: cuda if there is one, else cpu)"
    )
    tensor_parallel: int = option(1, "ranks, of those launched, that share one model", metavar="T")
    tokenizer: Path | None = option(
        None, "another tokenizer's directory or hub name", metavar="DIR"
    )
    allow_pickle: bool = option(
        False, "read pickled weights if there are no safetensors; only if you trust them"
    )

    def check_ranks(self, world: int) -> None:
        """Check the settings for `world` ranks."""
        self.check()
        if self.dtype not in DTYPES.values():
            raise UserError(f"--dtype {self.dtype}: one of {', '.join(DTYPES.values())}")
        if self.tensor_parallel < 1 or world % self.tensor_parallel:
            raise UserError(
                f"--tensor-parallel {self.tensor_parallel}: it must divide the {world} "
                f"rank{'s' if world > 1 else ''}; deepspeed --num_accelerators N starts N"
            )
        if world > 1 and self.device not in (None, "cuda", "cpu"):
            raise UserError(
                f"--device {self.device}: with several ranks cuda or cpu; each rank uses its own"
            )
