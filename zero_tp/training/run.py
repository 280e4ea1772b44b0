"""A run reads and checks its data, tokenizer and model before any rank is connected."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from zero_tp.architectures.configs import check_unchanged, fields_of
from zero_tp.checkpoint.directory import complete_steps
from zero_tp.checkpoint.manifest import Manifest, content_hash
from zero_tp.config import RunConfig
from zero_tp.config.resolve import leaves
from zero_tp.config.schema import MaskedObjective
from zero_tp.data.masked import MaskedSamples, MaskedValidation, Masking, SegmentPairs
from zero_tp.data.read_ahead import ReadAhead
from zero_tp.data.samples import FixedSamples, PackedSamples, TrainingSamples, ValidationSamples
from zero_tp.data.sources import file_sha256
from zero_tp.data.tokenizer import (
    MaskingVocabulary,
    check_same_tokens,
    files_sha256,
    load_tokenizer,
    special_tokens,
    tokenizer_beside,
)
from zero_tp.errors import UserError, shown
from zero_tp.topology import Topology
from zero_tp.weights.files import has_commit, resolve
from zero_tp.weights.load import PretrainedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class RunInputs:
    """A RunInputs has read its data, tokenizer and model and checked them against each other.

    No rank is connected yet: every mistake that can be found early is found here.

    Raises:
        UserError: data, tokenizer and model do not fit, or the directory holds another run.
    """

    def __init__(self, config: RunConfig, directory: Path, *, allow_pickle: bool = False, whole: bool = True):
        """Read and check everything.

        Args:
            allow_pickle: `zero_tp.model.from_pretrained` may be a directory of pickled weights.
            whole: all of every corpus, which one rank of a node does (see `IndexedCorpus.content`).
        """
        block = config.zero_tp
        self.config, self.directory, self.allow_pickle, self.whole = config, directory, allow_pickle, whole
        self.tokenizer = tokenizer_beside(block.tokenizer, next(iter(block.data.train)))
        self.model_config = self._model_config()
        self.samples, self.validation = self._samples() if block.masked is None else self._masked_samples(block.masked)
        if not complete_steps(directory):
            self.pretrained()
            if self.config.pretrained is not None and self.tokenizer is not None:
                check_same_tokens(self.tokenizer, resolve(self.config.pretrained).directory)
        for corpus in (*self.samples.corpora, *(self.validation.corpora if self.validation else ())) if whole else ():
            corpus.check_vocabulary(self.model_config.vocab_size)

    @property
    def recorded_tokenizer(self) -> str | None:
        """Return how a checkpoint names the tokenizer: by its name on the hub, or its directory."""
        given = self.config.zero_tp.tokenizer
        if given is not None and has_commit(given):
            return given
        return None if self.tokenizer is None else str(self.tokenizer)

    @cached_property
    def corpora(self) -> dict[str, dict[str, Any]]:
        """Return what the training corpora are, by prefix."""
        return self.samples.identities(whole=self.whole)

    @cached_property
    def validation_corpora(self) -> dict[str, dict[str, Any]]:
        """Return what the validation corpora are, by prefix."""
        corpora = self.validation.corpora if self.validation else ()
        return {corpus.prefix: corpus.identity(whole=self.whole) for corpus in corpora}

    def read(self) -> dict[str, str]:
        """Return what was read, by what it is, as ranks compare it."""
        corpora = {f"corpus {prefix}": each for prefix, each in (self.corpora | self.validation_corpora).items()}
        read = {"config": self.config.resolved(), "model": json.loads(self.model_config.to_json_string()), **corpora}
        # `content` is what one rank of a node has read.
        known = {what: {key: value for key, value in each.items() if key != "content"} for what, each in read.items()}
        keys = {f"config: {key}": shown(value) for key, value in leaves(read["config"])}  # names the key at first
        tokenizer = {"tokenizer": self.recorded_tokenizer or "nothing"}  # before the model, whose tokens come from it
        if self.tokenizer is not None:
            tokenizer[f"tokenizer {self.recorded_tokenizer}"] = f"SHA-256 {files_sha256(self.tokenizer)[:12]}…"
        content = {what: f"SHA-256 {content_hash({'read': each})[:12]}…" for what, each in known.items()}
        tasks = {
            f"file of the task {task}": f"SHA-256 {file_sha256(Path(file))[:12]}…"
            for task, file in self.config.zero_tp.evaluation.task_data.items()
        }
        return keys | tokenizer | content | tasks

    def read_ahead(self, topology: Topology, last: int) -> ReadAhead[list[Any]]:
        """Return what this rank trains on up to the step `last`, as lists of a batch for each micro-batch."""
        sizes = (self.config.global_batch, self.config.micro_batch, self.config.accumulation)

        def read(step: int) -> list[Any]:
            return self.samples.rank_batches(step - 1, *sizes, topology.data_rank, topology.data)

        return ReadAhead(read, last)

    def pretrained(self) -> PretrainedSource | None:
        """Return the source of the first weights, None for the seed. It reads no tensor, but checks them all."""
        if self.config.pretrained is None:
            return None
        return PretrainedSource(
            resolve(self.config.pretrained, allow_pickle=self.allow_pickle).directory,
            self.model_config,
            allow_pickle=self.allow_pickle,
            seed=self.config.zero_tp.training.seed,
        )

    def check_resumed(self, checkpoint: Path, manifest: Manifest) -> None:
        """Check that what a run reads besides its file has not changed since it was started.

        Raises:
            UserError: a corpus is another one than the checkpoint's, or the model of `from_pretrained` is.
        """
        if self.config.pretrained is not None:
            check_unchanged(self.config.pretrained, self.model_config, manifest.model)
        for (prefix, found), before in zip(self.corpora.items(), manifest.corpora.values(), strict=False):
            compared = before.keys() & found.keys()  # `content` is not in what was saved before there was one
            found, before = ({key: each[key] for key in compared} for each in (found, before))
            if found != before:
                raise UserError(
                    f"zero_tp.data.train: {prefix} holds {_described(found)}, but the run of {checkpoint} was started "
                    f"with {_described(before)}; prepare it as it was, or give another --output-dir"
                )

    def _samples(self) -> tuple[TrainingSamples[Any], FixedSamples[Any] | None]:
        data, seed = self.config.zero_tp.data, self.config.zero_tp.training.seed
        length, separate = data.sequence_length, data.document_attention == "reset"
        samples = PackedSamples(data.train, length, seed, separate=separate)
        return samples, ValidationSamples(data.validation, length, separate=separate) if data.validation else None

    def _masked_samples(self, objective: MaskedObjective) -> tuple[TrainingSamples[Any], FixedSamples[Any] | None]:
        data, seed = self.config.zero_tp.data, self.config.zero_tp.training.seed
        if self.tokenizer is None or self._tokenizer is None:
            raise UserError(
                "zero_tp.tokenizer: the masked objective needs the tokenizer that the corpus was prepared with; set it "
                "to its directory"
            )
        vocabulary = MaskingVocabulary.of(self._tokenizer, self.tokenizer, self.model_config.vocab_size)
        masking = Masking(vocabulary, objective.mask_probability, objective.max_ngram)
        pairs = SegmentPairs(data.sequence_length, masking, objective.sentence_order)
        samples = MaskedSamples(data.train, pairs, seed)
        return samples, MaskedValidation(data.validation, pairs) if data.validation else None

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def _model_config(self) -> PretrainedConfig:
        """Return the Hugging Face config, its missing special tokens taken from the tokenizer.

        Those that the file or `from_pretrained` gives stay. An id that training depends on is only what the config
        says: the padding token's row of a Llama gets no gradient from the look-up, and tokenizers often pad with the
        token that ends a text.
        """
        hf_config: PretrainedConfig = self.config.hf_config()
        tokenizer = self._tokenizer
        if tokenizer is None:
            return hf_config
        if tokenizer.eos_token_id is None and self.config.zero_tp.masked is None:
            raise UserError(
                f"tokenizer {self.tokenizer}: it has no eos token, with which the causal objective's documents end"
            )
        size, tokens = special_tokens(tokenizer)
        if size > hf_config.vocab_size:
            raise UserError(
                f"zero_tp.model.vocab_size: {hf_config.vocab_size}, but the tokenizer {self.tokenizer} has {size} "
                f"tokens; set it to {size} or more"
            )
        trained = fields_of(hf_config.model_type).read
        for name, token in tokens.items():
            given = name in self.config.zero_tp.model or (
                self.config.pretrained and getattr(hf_config, name) is not None
            )
            if not given and name not in trained:
                setattr(hf_config, name, token)
        return hf_config


def _described(corpus: dict[str, Any]) -> str:
    return (
        f"{corpus['documents']:,} documents of {corpus['tokens']:,} tokens ({corpus['type']}, "
        f"SHA-256 {corpus.get('content', corpus['sha256'])[:12]}…"
        + (f", special tokens and words {corpus['vocabulary'][:12]}…)" if "vocabulary" in corpus else ")")
    )
