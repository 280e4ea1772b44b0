"""What can be evaluated: a Hugging Face model directory, or a training run as it is. Checked before anything large is
read, then loaded."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.errors import UserError, first_line
from zero_tp.topology import Topology
from zero_tp.weights.files import find_weights

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from zero_tp.evaluation.scoring import Scorer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """A model on its device, in evaluation mode.

    Attributes:
        module: what generates text. scorer: what scores.
        parameters: of the whole model.
    """

    module: Any
    scorer: Scorer
    parameters: int


@dataclass(frozen=True)
class ModelDirectory:
    """A checked directory: config and tokenizer are open and fit each other, weights are there but not read.

    Attributes:
        step: of the training run; None where that isn't known.
    """

    path: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    allow_pickle: bool = False
    step: int | None = None

    def positions(self) -> int | None:
        """Tokens that the model can read, where its config says so."""
        found: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found

    def sequence_length(self, asked: int | None) -> int:
        """Tokens of a window: `asked`, or all positions the model has. UserError: more than it has, or not known."""
        positions = self.positions()
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

    def load(self, dtype: str, device: str, topology: Topology | None = None) -> Loaded:
        """The model; over TP ranks as zero_tp's own, in one process as transformers' own, whatever its architecture.

        UserError: weights missing in the files, no such device, or an architecture that can't be split over TP ranks.
        """
        if topology is not None and topology.tensor > 1:
            from zero_tp.models.wrapper import ZeroTPForCausalLM

            return _parallel(
                ZeroTPForCausalLM.from_pretrained(
                    self.path, topology, dtype=_torch_dtype(dtype), device=device, allow_pickle=self.allow_pickle
                )
            )

        from zero_tp.evaluation.scoring import HuggingFaceScorer

        model = self._native(dtype)
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {device}: {first_line(error)}") from error
        return Loaded(model, HuggingFaceScorer(model), model.num_parameters())

    def _native(self, dtype: str) -> Any:
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
                dtype=_torch_dtype(dtype),
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=None if self.allow_pickle else True,
                weights_only=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise UserError(f"{self.path}: the weights can't be read: {first_line(error)}") from error
        finally:
            logging.set_verbosity(level)
        model, loading = opened
        if missing := sorted(loading["missing_keys"]):
            raise UserError(f"{self.path}: weights missing in the files: {missing[0]} and {len(missing) - 1} more")
        return model


@dataclass(frozen=True)
class RunDirectory(ModelDirectory):
    """A checkpoint of a training run.

    Attributes:
        path: the checkpoint's own directory.
    """

    def load(self, dtype: str, device: str, topology: Topology | None = None) -> Loaded:
        """The model from the fp32 masters; each rank reads what it holds. UserError: a file is missing or damaged."""
        from zero_tp.checkpoint.directory import in_use, read_manifest
        from zero_tp.checkpoint.reader import CheckpointReader
        from zero_tp.checkpoint.source import CheckpointSource
        from zero_tp.models.wrapper import ZeroTPForCausalLM

        with in_use(self.path):
            source = CheckpointSource(CheckpointReader(self.path, read_manifest(self.path)))
            return _parallel(
                ZeroTPForCausalLM(self.config, topology, source=source, dtype=_torch_dtype(dtype), device=device)
            )


def open_directory(path: Path, *, allow_pickle: bool = False, tokenizer: Path | None = None) -> ModelDirectory:
    """Check a directory and open its config and tokenizer.

    Args:
        allow_pickle: it may be one of pickled weights.
        tokenizer: a directory to take the tokenizer from, instead of the model's own.

    Raises:
        UserError: it doesn't exist, lacks config, weights or tokenizer, isn't a causal language model, or its tokenizer
            has more tokens than the model.
    """
    if not path.is_dir():
        raise UserError(f"--model {path}: {'not a directory' if path.exists() else 'no such directory'}")
    if _is_run(path):
        return _open_run(path, tokenizer)
    if not (path / "config.json").is_file():
        raise UserError(f"--model {path}: no config.json in it: not a Hugging Face model directory")
    find_weights(path, allow_pickle)

    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises anything from KeyError to its own types here
        raise UserError(f"{path / 'config.json'}: {first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"--model {path}: {config.model_type} is not a causal language model")
    return ModelDirectory(path, config, _open_tokenizer(tokenizer or path, config), allow_pickle)


def _open_run(path: Path, tokenizer: Path | None) -> RunDirectory:
    from zero_tp.checkpoint.convert import config_of, tokenizer_of
    from zero_tp.checkpoint.directory import find_checkpoint, read_manifest

    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    config = config_of(manifest)
    found = tokenizer_of(tokenizer, manifest["tokenizer"])
    if found is None:
        raise UserError(f"--model {path}: the run has no tokenizer: say where it is with --tokenizer DIR")
    return RunDirectory(checkpoint, config, _open_tokenizer(found, config), step=manifest["step"])


def _open_tokenizer(path: Path, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the same
        raise UserError(f"{path}: its tokenizer can't be read: {first_line(error)}") from error
    check_tokenizer(tokenizer, config, path)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, path: Path) -> None:
    """UserError: `path`'s tokenizer is empty, has no token to stand before a text, or more tokens than the model."""
    if not len(tokenizer):
        raise UserError(f"{path}: no tokenizer in it")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"{path}: its tokenizer has neither a bos nor an eos token to stand before a text")
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"{path}: its tokenizer has {len(tokenizer):,} tokens, the model only {vocabulary:,}: "
            "they don't belong together"
        )


def _parallel(model: Any) -> Loaded:
    from zero_tp.evaluation.scoring import ParallelScorer
    from zero_tp.parallel.layout import whole_shape

    model.eval()
    parameters = sum(_numel(whole_shape(parameter)) for parameter in model.parameters())
    return Loaded(model, ParallelScorer(model), parameters)


def _numel(shape: tuple[int, ...]) -> int:
    import torch

    return torch.Size(shape).numel()


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _is_run(path: Path) -> bool:
    """Whether the directory is a training run or one of its checkpoints."""
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file() or (path / "manifest.json").is_file():
        return True
    return _is_run_config(path / "config.json") or "checkpoints" in (path.name, path.parent.name)


def _is_run_config(path: Path) -> bool:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "zero_tp" in content
