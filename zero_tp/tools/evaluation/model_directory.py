"""Find and open `--model`: a Hugging Face directory, a training run, or one of its checkpoints.

Finding it imports neither torch nor transformers, so a wrong path is reported at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.weight_files import find_weights, resolve, resolve_tokenizer
from zero_tp.data.tokenizer_fingerprint import read_fingerprint
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.directory import check_sizes, is_run
from zero_tp.run.checkpoint.find import RunCheckpoint, find_checkpoint, verify_checkpoint
from zero_tp.run.checkpoint.run_tokenizer import (
    REMEDY,
    check_run_tokenizer,
    find_run_tokenizer,
    uncompared_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from zero_tp.tools.evaluation.eval_model import EvalModel


FIRST_POSITION_AFTER_PADDING = {
    *(
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "lilt",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
    ),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Model types whose first token has the position pad_token_id + 1."""


def usable_positions(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that the model takes, in tokens; None: its config doesn't say."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or config.model_type not in FIRST_POSITION_AFTER_PADDING:
        return positions
    # RoBERTa's 514 positions and padding id 1: its first token has position 2, so 512 fit.
    return positions - (config.pad_token_id or 0) - 1


def open_directory(
    path: Path, *, allow_pickle: bool = False, tokenizer: Path | None = None
) -> ModelDirectory:
    """Find the files of a model in a directory or by its name on the Hugging Face hub.

    Args:
        allow_pickle: accept pickled weights.
        tokenizer: directory of another tokenizer than the model's own.
    """
    path = resolve(path, "--model", allow_pickle=allow_pickle)
    if not path.is_dir():
        raise UserError(
            f"--model {path}: {'not a directory' if path.exists() else 'no such directory'}"
        )
    if is_run(path):
        checkpoint = find_checkpoint(path)
        check_sizes(checkpoint.path, checkpoint.manifest.files)
        tokenizer = find_run_tokenizer(tokenizer, checkpoint)
        if tokenizer is None:
            raise UserError(
                f"--model {path}: the run has no tokenizer; give one with --tokenizer DIR"
            )
        notes = checkpoint.notes + uncompared_tokenizer(tokenizer, checkpoint)
        return ModelDirectory(checkpoint.path, checkpoint, tokenizer, note="; ".join(notes))
    if not (path / "config.json").is_file():
        raise UserError(
            f"--model {path}: no config.json and no complete checkpoint there; give a Hugging Face "
            "directory, "
            "a run, or RUN/checkpoints/step_N"
        )
    find_weights(path, allow_pickle)
    return ModelDirectory(
        path, None, resolve_tokenizer(tokenizer, None) or path, allow_pickle=allow_pickle
    )


@dataclass(frozen=True)
class ModelDirectory:
    """The files of a causal language model and its tokenizer; each is opened on first use.

    Attributes:
        path: a Hugging Face directory, or a checkpoint's.
        checkpoint: None for a Hugging Face directory.
        tokenizer_path: directory of the tokenizer.
        note: a line to print with the results (see `RunCheckpoint`), or "".
        allow_pickle: accept pickled weights.
    """

    path: Path
    checkpoint: RunCheckpoint | None
    tokenizer_path: Path
    note: str = ""
    allow_pickle: bool = False

    @property
    def step(self) -> int | None:
        """Return the checkpoint's step; None for a Hugging Face directory."""
        return None if self.checkpoint is None else self.checkpoint.step

    @cached_property
    def config(self) -> PretrainedConfig:
        """Return the config of the model, which must be a causal language model."""
        from zero_tp.model.architectures import ARCHITECTURES
        from zero_tp.model.weights.native import open_config

        config = open_config(self.path) if self.checkpoint is None else self.checkpoint.hf_config()
        architecture = ARCHITECTURES.get(config.model_type)
        if architecture is not None and not architecture.causal:
            raise UserError(
                f"{self.path}: {config.model_type} is an encoder, not a causal language model; it "
                "can neither continue "
                "a text nor run these tasks; an encoder's training run logs its masked accuracy"
            )
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; UserError if it is not the model's, or the model cannot use it
        (`check_tokenizer`).
        """
        from zero_tp.data.tokenizer_files import open_tokenizer

        config = self.config  # before the tokenizer, which transformers opens with it
        tokenizer = open_tokenizer(self.tokenizer_path)
        check_tokenizer(tokenizer, config, self.tokenizer_path)
        if self.checkpoint is not None:
            check_run_tokenizer(tokenizer, self.tokenizer_path, self.checkpoint)
        elif (recorded := read_fingerprint(find_weights(self.path, self.allow_pickle))) is not None:
            owner = f"the one that {self.path} was trained with"
            recorded.check(tokenizer, f"the tokenizer {self.tokenizer_path}", owner, REMEDY)
        return tokenizer

    def sequence_length(self, requested: int | None) -> int:
        """Return the tokens of a window: `requested`, or the model's positions."""
        positions = usable_positions(self.config.get_text_config())
        if positions is not None and positions < 1:
            raise UserError(
                f"{self.path}: its max_position_embeddings leave {positions} positions; at least 1 "
                "is needed"
            )
        length = positions if requested is None else requested
        if length is None:
            raise UserError(
                f"{self.path}: its config has no max_position_embeddings; give --sequence-length"
            )
        if positions is not None and length > positions:
            raise UserError(f"--sequence-length {length:,}: the model has {positions:,} positions")
        return length

    def load(
        self,
        dtype: str,
        device: str,
        topology: Topology | None = None,
        *,
        batch_size: int = 8,
        window: int | None = None,
    ) -> EvalModel:
        """Load the model, to score windows of `window` tokens (by default all positions).

        With TP and from checkpoints it is zero_tp's class, else transformers' own.
        """
        import torch

        from zero_tp.model.huggingface import ZeroTPForCausalLM
        from zero_tp.tools.evaluation.eval_model import (
            EvalModel,
            HuggingFaceScorer,
            ParallelScorer,
            Scorer,
        )

        topology = topology or Topology()
        tokenizer = self.tokenizer
        window = self.sequence_length(window)
        model = self.load_module(getattr(torch, dtype), device, topology).eval()
        scorer: Scorer
        if isinstance(model, ZeroTPForCausalLM):
            scorer = ParallelScorer(model)
        else:
            self._check_causal(model, window)
            scorer = HuggingFaceScorer(model)
        return EvalModel(
            scorer,
            model,
            tokenizer,
            self.config,
            window,
            batch_size=batch_size,
            device=device,
            topology=topology,
        )

    def load_module(
        self, dtype: torch.dtype | Literal["auto"], device: str, topology: Topology
    ) -> Any:
        """Load the module alone.

        "auto" means the dtype of a Hugging Face directory's weights, and fp32 for a checkpoint.

        Each rank reads only its own slices.
        """
        if self.checkpoint is None and topology.tensor == 1:
            return self._load_native(dtype, device)
        import torch
        from transformers import GenerationConfig

        from zero_tp.model.huggingface import ZeroTPForCausalLM
        from zero_tp.run.checkpoint.reader import CheckpointReader

        dtype = torch.float32 if dtype == "auto" else dtype
        if self.checkpoint is None:
            return ZeroTPForCausalLM.from_pretrained(
                self.path, topology, dtype=dtype, device=device, allow_pickle=self.allow_pickle
            )
        manifest = self.checkpoint.manifest
        verify_checkpoint(self.checkpoint)
        # Each parameter takes this rank's shard from the reader as it is made (`fill`).
        source = CheckpointReader(self.path, manifest)
        model = ZeroTPForCausalLM(self.config, topology, source=source, dtype=dtype, device=device)
        if manifest.generation is not None:
            model.generation_config = GenerationConfig(**manifest.generation)
        return model

    def _load_native(self, dtype: torch.dtype | Literal["auto"], device: str) -> Any:
        import torch

        from zero_tp.model.weights.native import open_model

        model = open_model(self.path, self.config, dtype, allow_pickle=self.allow_pickle)
        try:
            # Two steps with errors of their own: a device may have too little memory, and a config
            # may not fit its class.
            model.to(device)
        except (RuntimeError, AssertionError) as error:  # too little memory
            raise UserError(f"--device {device}: {first_line(error)}") from error
        try:
            with torch.no_grad():
                model(torch.zeros(1, 1, dtype=torch.long, device=device))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # another architecture can raise anything
            raise UserError(
                f"{self.path}: the model of its config.json fails in forward: {first_line(error)}"
            ) from error
        return model

    def _check_causal(self, model: Any, window: int) -> None:
        """Check that a token does not change the logits before it.

        It does in an XLM whose config lacks `causal`.
        """
        import torch

        vocabulary = self.config.get_text_config().vocab_size
        # Two rows of two tokens that differ in the second one only. A causal model's logits at the
        # first are the same:
        #
        #     row 0    x x    logits after the first x
        #     row 1    x y    logits after the first x: equal, unless the model sees y
        rows = torch.full((2, 2), vocabulary - 1, device=model.device)
        rows[1, 1] = max(vocabulary - 2, 0)
        with torch.no_grad():
            first, second = model(rows[:, :window], use_cache=False).logits[:, 0].float()
        # Rounding may differ between the rows of a batch.
        if (first - second).abs().max() > math.sqrt(
            torch.finfo(model.dtype).eps
        ) * first.abs().max():
            raise UserError(
                f"{self.path}: a token of this {type(model).__name__} sees those after it; give a "
                "model that predicts "
                "the next token"
            )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, path: Path
) -> None:
    """Check that a causal model can use the tokenizer of `path`."""
    if not len(tokenizer):
        raise UserError(f"{path}: it has no tokenizer")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"{path}: its tokenizer has neither a bos nor an eos token to put before a text"
        )
    vocabulary = config.get_text_config().vocab_size
    # Ids may have holes, so the number of tokens alone does not tell the largest id.
    largest = max(len(tokenizer) - 1, *tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise UserError(
            f"{path}: its tokenizer has {len(tokenizer):,} tokens with ids up to {largest:,}, the "
            "model only "
            f"{vocabulary:,}; give the model's own tokenizer"
        )
