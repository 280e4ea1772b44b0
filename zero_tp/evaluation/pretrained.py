"""A Hugging Face model directory: checked before anything large is read, then opened."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zero_tp.errors import UserError
from zero_tp.weights.files import find_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelDirectory:
    """A checked directory: config and tokenizer are open and fit each other, weights are there but not read."""

    path: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    allow_pickle: bool = False

    @property
    def prefix_token(self) -> int:
        """What stands before a text: bos, or eos when there is none."""
        tokenizer = self.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        assert isinstance(found, int)
        return found

    def sequence_length(self, asked: int | None) -> int:
        """Tokens of a window: `asked`, or all positions the model has. UserError: more than it has, or not known."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if asked is not None and asked < 1:
            raise UserError(f"--sequence-length {asked}: at least 1")
        if asked is None and positions is None:
            raise UserError(f"{self.path}: its config doesn't say how many positions it has: give --sequence-length")
        if asked is not None and positions is not None and asked > positions:
            raise UserError(f"--sequence-length {asked:,}: the model has {positions:,} positions")
        if asked is not None:
            return asked
        assert isinstance(positions, int)
        return positions

    def load(self, dtype: str, device: str) -> PreTrainedModel:
        """The model in evaluation mode. UserError: weights missing in the files, or no such device."""
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            # With output_loading_info it returns a pair, which its annotations don't say.
            opened: Any = AutoModelForCausalLM.from_pretrained(
                str(self.path),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=None if self.allow_pickle else True,
                weights_only=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise UserError(f"{self.path}: the weights can't be read: {_first_line(error)}") from error
        finally:
            logging.set_verbosity(level)
        model, loading = opened
        if missing := sorted(loading["missing_keys"]):
            raise UserError(f"{self.path}: weights missing in the files: {missing[0]} and {len(missing) - 1} more")
        try:
            return cast("PreTrainedModel", model.to(device).eval())
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {device}: {_first_line(error)}") from error


def open_directory(path: Path, *, allow_pickle: bool = False) -> ModelDirectory:
    """Check a directory and open its config and tokenizer.

    Args:
        allow_pickle: it may be one of pickled weights.

    Raises:
        UserError: it doesn't exist, is one of zero_tp's own run or checkpoint directories (which must be exported
            first), lacks config, weights or tokenizer, isn't a causal language model, or its tokenizer has more tokens
            than the model.
    """
    if not path.is_dir():
        raise UserError(f"--model {path}: {'not a directory' if path.exists() else 'no such directory'}")
    _refuse_run(path)
    if not (path / "config.json").is_file():
        raise UserError(f"--model {path}: no config.json in it: not a Hugging Face model directory")
    find_weights(path, allow_pickle)

    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises anything from KeyError to its own types here
        raise UserError(f"{path / 'config.json'}: {_first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"--model {path}: {config.model_type} is not a causal language model")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise UserError(f"--model {path}: its tokenizer can't be read: {_first_line(error)}") from error
    if not len(tokenizer):
        raise UserError(f"--model {path}: no tokenizer in it")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"--model {path}: its tokenizer has neither a bos nor an eos token to stand before a text")
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"--model {path}: its tokenizer has {len(tokenizer):,} tokens, the model only {vocabulary:,}: "
            "they don't belong together"
        )
    return ModelDirectory(path, config, tokenizer, allow_pickle)


def _refuse_run(path: Path) -> None:
    """UserError when the directory is a training run or one of its checkpoints."""
    run = (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file() or _is_run_config(path / "config.json")
    if run or "checkpoints" in (path.name, path.parent.name):
        raise UserError(
            f"--model {path} is a training run, not a Hugging Face model: export it first with "
            f"python launch/convert.py to-hf {path} --output EXPORT and give that directory"
        )


def _is_run_config(path: Path) -> bool:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "zero_tp" in content


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
