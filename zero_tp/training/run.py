"""What a run needs before any rank is connected."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from zero_tp.checkpoint.directory import complete_steps
from zero_tp.config import RunConfig
from zero_tp.data.samples import PackedSamples, ValidationSamples
from zero_tp.data.tokenizer import special_tokens, tokenizer_beside
from zero_tp.errors import UserError
from zero_tp.evaluation.live import LiveTasks
from zero_tp.evaluation.tasks import TaskOptions
from zero_tp.weights.load import PretrainedSource


class Run:
    """What a run needs before any rank is connected; every mistake that can be found early is found here.

    Raises:
        UserError: data, tokenizer and model do not fit, or the directory holds another run.
    """

    def __init__(self, config: RunConfig, directory: Path, *, allow_pickle: bool = False):
        """
        Args:
            allow_pickle: `zero_tp.model.from_pretrained` may be a directory of pickled weights.
        """
        block = config.zero_tp
        self.config, self.directory, self.allow_pickle = config, directory, allow_pickle
        self.samples = PackedSamples(block.data.train, block.data.sequence_length, block.training.seed)
        self.validation = (
            ValidationSamples(block.data.validation, block.data.sequence_length) if block.data.validation else None
        )
        self.tokenizer = tokenizer_beside(block.tokenizer, next(iter(block.data.train)))
        self.model_config = self._model_config()
        self.tasks = self._tasks()
        if not complete_steps(directory):
            self.pretrained()

    def pretrained(self) -> PretrainedSource | None:
        """Where the first weights come from; None: from the seed. Reads no tensor, but checks them all."""
        if self.config.pretrained is None:
            return None
        return PretrainedSource(self.config.pretrained, self.model_config, allow_pickle=self.allow_pickle)

    def _tasks(self) -> LiveTasks | None:
        """The zero-shot tasks, their data read; None when there are none."""
        asked = self.config.zero_tp.evaluation
        if not asked.tasks:
            return None
        if self.tokenizer is None:
            raise UserError("zero_tp.evaluation.tasks: they need a tokenizer; set zero_tp.tokenizer to its directory")
        options = TaskOptions(
            limit=asked.task_limit, include_path=Path(asked.task_include_path) if asked.task_include_path else None
        )
        data = {task: Path(file) for task, file in asked.task_data.items()}
        try:
            return LiveTasks(asked.tasks, data, options, self.tokenizer, self.model_config)
        except UserError as error:
            # Where the command has options, the file has keys.
            raise UserError(
                f"zero_tp.evaluation.tasks: {error} (--data is zero_tp.evaluation.task_data here)"
            ) from error

    def _model_config(self) -> PretrainedConfig:
        """The Hugging Face config, its special tokens those of the tokenizer unless the file gives them."""
        hf_config: PretrainedConfig = self.config.hf_config()
        if self.tokenizer is None:
            return hf_config
        size, tokens = special_tokens(self.tokenizer)
        if size > hf_config.vocab_size:
            raise UserError(
                f"zero_tp.model.vocab_size: {hf_config.vocab_size}, but the tokenizer {self.tokenizer} has {size} "
                f"tokens; set it to {size} or more"
            )
        for name, token in tokens.items():
            if name not in self.config.zero_tp.model:
                setattr(hf_config, name, token)
        return hf_config
