"""Read and check a run's data, tokenizer and model before any rank is connected."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError, shown
from zero_tp.base.settings.keys import leaves
from zero_tp.base.weight_files import has_commit, resolve
from zero_tp.data.batch import ReadAhead
from zero_tp.data.documents import file_sha256
from zero_tp.data.masked import MaskedRowBuilder, MaskedSamples, MaskedValidation, Masking
from zero_tp.data.masking_vocabulary import MaskingVocabulary
from zero_tp.data.samples import PackedSamples, TrainingSamples, chain
from zero_tp.data.tokenizer import (
    check_same_tokens,
    corpus_fingerprint,
    files_sha256,
    find_tokenizer,
    load_tokenizer,
    special_token_ids,
    vocabulary_size,
)
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.data.validation_samples import FixedSamples, ValidationSamples
from zero_tp.model.architectures.configs import check_unchanged, fields_of
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.check_imported import check_imported
from zero_tp.run.checkpoint.directory import complete_steps
from zero_tp.run.checkpoint.manifest import Manifest, content_hash
from zero_tp.run.config import RunConfig
from zero_tp.run.config.stages import stage_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class RunInputs:
    """A run's data, tokenizer and model config, checked against each other.

    No rank is connected yet, so a mistake ends the job early.

    Raises:
        UserError: data, tokenizer and model do not fit, or the directory holds another run.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        *,
        allow_pickle: bool = False,
        hash_tokens: bool = True,
    ):
        """Read and check everything.

        Args:
            allow_pickle: `zero_tp.model.from_pretrained` may be a directory of pickled weights.
            hash_tokens: read and hash all tokens (see `IndexedCorpus.content`); one rank of each
                machine does.
        """
        self.config = config
        self.directory = directory
        self.allow_pickle = allow_pickle
        self.hash_tokens = hash_tokens
        self.tokenizer = find_tokenizer(config.zero_tp.tokenizer, config.training_corpora[0])
        self.model_config = self._model_config()
        self.sequences, self.validation = self._samples()
        if config.has_timeline:
            chain(self.sequences, config.timeline.sequence_ends)
            self._check_epochs()
        # A run that resumes needs no initial weights, and its directory of `from_pretrained` may be
        # gone.
        if not complete_steps(directory):
            self.pretrained()
            if self.config.pretrained is not None and self.tokenizer is not None:
                check_same_tokens(self.tokenizer, resolve(self.config.pretrained))
        training = (corpus for samples in self.sequences for corpus in samples.corpora)
        corpora = (*training, *(self.validation.corpora if self.validation else ()))
        # An id outside the vocabulary would be an error in a kernel, hours later; under TP no rank
        # has its row, and it would be embedded as zeros.
        for corpus in corpora if hash_tokens else ():
            corpus.check_vocabulary(self.model_config.vocab_size)
        self.notes = self._compare_tokenizers() if hash_tokens else []

    @property
    def recorded_tokenizer(self) -> str | None:
        """Return the tokenizer's name in checkpoints: its name on the hub, or its directory."""
        name = self.config.zero_tp.tokenizer
        if name is not None and has_commit(name):
            return name
        return None if self.tokenizer is None else str(self.tokenizer)

    @cached_property
    def fingerprint(self) -> TokenizerFingerprint | None:
        """Return the fingerprint of the run's tokenizer.

        Without a tokenizer it is that of the corpora's; None if none is known.
        """
        recorded = [one for one in self._corpus_fingerprints.values() if one is not None]
        if self._tokenizer is None:
            return recorded[0] if recorded else None
        # With the texts of the corpora's fingerprints, so that all can be compared.
        return TokenizerFingerprint.of(
            self._tokenizer, [text for one in recorded for text in one.probes]
        )

    @cached_property
    def _corpus_fingerprints(self) -> dict[str, TokenizerFingerprint | None]:
        validation = self.config.zero_tp.data.validation or ()
        return {
            prefix: corpus_fingerprint(prefix)
            for prefix in (*self.config.training_corpora, *validation)
        }

    def _compare_tokenizers(self) -> list[str]:
        """Check that all corpora have the ids of the run's tokenizer.

        Returns a line on those that record none.
        """
        recorded = self._corpus_fingerprints
        training = self.config.training_corpora
        first = next((prefix for prefix, one in recorded.items() if one is not None), None)
        name = (
            f"the tokenizer {self.tokenizer}"
            if self.tokenizer is not None
            else f"the tokenizer of {first}"
        )
        for prefix, fingerprint in recorded.items():
            if fingerprint is not None and self.fingerprint is not None:
                key = "zero_tp.data.train" if prefix in training else "zero_tp.data.validation"
                remedy = "prepare all corpora with one tokenizer (--tokenizer DIR)"
                if self.tokenizer is not None:
                    remedy += ", and set zero_tp.tokenizer to it"
                fingerprint.require_same(
                    self.fingerprint, f"{key}: the tokenizer of {prefix}", name, remedy
                )
        unknown = [prefix for prefix, fingerprint in recorded.items() if fingerprint is None]
        if not unknown or self.fingerprint is None:
            return []
        return [
            f"no tokenizer is recorded with {', '.join(unknown)}, so it was not compared with "
            f"{name}"
        ]

    @cached_property
    def corpora(self) -> dict[str, dict[str, Any]]:
        """Return the identities of the training corpora by prefix."""
        identities: dict[str, dict[str, Any]] = {}
        for samples in self.sequences:
            for corpus in samples.corpora:
                if corpus.prefix not in identities:
                    identities[corpus.prefix] = samples.identity(
                        corpus, hash_tokens=self.hash_tokens
                    )
        return identities

    @property
    def samples(self) -> TrainingSamples[Any]:
        """Return the samples of the run's first stage."""
        return self.sequences[0]

    def epochs(self, prefix: str, stages: Sequence[int]) -> float:
        """Return the passes over a training corpus that these stages of the run make."""
        timeline = self.config.timeline
        passes = 0.0
        for stage in stages:
            steps = timeline.stage_steps(stage)
            first = timeline.step_samples(steps.start)
            samples = self.sequences[first.sequence]
            last = (
                first.first
                + timeline.step_samples(steps.stop).samples_before
                - first.samples_before
            )
            for index, corpus in enumerate(samples.corpora):
                if corpus.prefix == prefix:
                    read = [samples.windows_read(end)[index] for end in (first.first, last)]
                    passes += (read[1] - read[0]) / samples.windows[index]
        return passes

    def _check_epochs(self) -> None:
        limit = self.config.zero_tp.data.max_epochs
        if limit is None:
            return
        for prefix in self.config.training_corpora:
            epochs = self.epochs(prefix, range(len(self.config.stages)))
            if epochs > limit * (1 + 1e-9):  # a sum over stages rounds
                raise UserError(
                    f"zero_tp.data.max_epochs: {limit:g}, but the run reads {prefix} "
                    f"{epochs:.4g} times; train on fewer tokens, add a corpus, or raise it"
                )

    @cached_property
    def validation_corpora(self) -> dict[str, dict[str, Any]]:
        """Return the identities of the validation corpora by prefix."""
        corpora = self.validation.corpora if self.validation else ()
        return {corpus.prefix: corpus.identity(hash_tokens=self.hash_tokens) for corpus in corpora}

    def fingerprints(self) -> dict[str, str]:
        """Return a short value of each input by its name, for ranks to compare."""
        corpora = {
            # Only one rank of each node reads `content`.
            f"corpus {prefix}": {key: value for key, value in identity.items() if key != "content"}
            for prefix, identity in (self.corpora | self.validation_corpora).items()
        }
        config = self.config.resolved()
        objects = {
            "config": config,
            "model": json.loads(self.model_config.to_json_string()),
            **corpora,
        }
        # The first difference names the key.
        keys = {f"config: {key}": shown(value) for key, value in leaves(config)}
        # Before "model", which holds its token ids.
        tokenizer = {"tokenizer": self.recorded_tokenizer or "nothing"}
        if self.tokenizer is not None:
            tokenizer[f"tokenizer {self.recorded_tokenizer}"] = (
                f"SHA-256 {files_sha256(self.tokenizer)[:12]}…"
            )
        content = {
            name: f"SHA-256 {content_hash({'read': value})[:12]}…"
            for name, value in objects.items()
        }
        tasks = {
            f"file of the task {task}": f"SHA-256 {file_sha256(Path(file))[:12]}…"
            for task, file in self.config.zero_tp.evaluation.task_data.items()
        }
        return keys | tokenizer | content | tasks

    def read_ahead(self, topology: Topology, last: int) -> ReadAhead[list[Any]]:
        """Return a reader of this rank's batches, up to the step `last`.

        A step is a list with one batch a micro-batch.
        """

        def read(step: int) -> list[Any]:
            samples = self.config.timeline.step_samples(step)
            stage = self.config.stages[samples.stage]
            assert stage.batch.micro is not None
            return self.sequences[samples.sequence].batches_from(
                samples.first,
                stage.batch.micro,
                stage.accumulation(samples.samples),
                topology.data_rank,
                topology.data,
            )

        return ReadAhead(read, last)

    def pretrained(self) -> PretrainedSource | None:
        """Return the source of the initial weights; None for the seed.

        It checks all tensors and reads none.
        """
        if self.config.pretrained is None:
            return None
        return PretrainedSource(
            resolve(self.config.pretrained, allow_pickle=self.allow_pickle),
            self.model_config,
            allow_pickle=self.allow_pickle,
            seed=self.config.zero_tp.training.seed,
        )

    def check_resumed(self, checkpoint: Path, manifest: Manifest) -> None:
        """Check that the run's inputs are those of a checkpoint.

        Compared are the corpora, the tokenizer and the model of `from_pretrained`.

        Raises:
            UserError: a corpus, the tokenizer or the model has changed since the run was started.
        """
        if manifest.imported is not None:
            check_imported(checkpoint, manifest, self.config, self.model_config)
            return
        if self.config.pretrained is not None:
            index = self.config.timeline.stage_of(max(1, manifest.step))
            rope = self.config.stages[index].rope
            expected = stage_model(self.model_config, rope, index)
            check_unchanged(self.config.pretrained, expected, manifest.model)
        saved = manifest.tokenizer_fingerprint
        remedy = "restore it, or give another --output-dir"
        if saved is not None and self.hash_tokens and self.fingerprint is not None:
            name = (
                "the run's tokenizer"
                if self.tokenizer is None
                else f"the tokenizer {self.tokenizer}"
            )
            self.fingerprint.require_same(
                saved, name, f"the one that {checkpoint} was trained with", remedy
            )
        # Those of later stages may change, and come last.
        trained = self.config.trained_corpora(manifest.step)
        pairs = zip(trained, manifest.corpora.values(), strict=False)
        for prefix, before in pairs:
            identity = self.corpora[prefix]
            compared = before.keys() & identity.keys()  # only one rank of each node reads `content`
            if any(identity[key] != before[key] for key in compared):
                raise UserError(
                    f"zero_tp.data.train: {prefix} holds {_describe_corpus(identity, compared)}, "
                    "but the run of "
                    f"{checkpoint} was started with {_describe_corpus(before, compared)}; prepare "
                    "it as it was, or "
                    "give another --output-dir"
                )

    def _sources(self) -> list[tuple[dict[str, float], int]]:
        """Return the corpora with weights, and the samples' length, of each sequence of samples."""
        sources: list[tuple[dict[str, float], int]] = []
        for stage in self.config.stages:
            source = (stage.data, stage.length)
            # A stage with those of the one before continues its sequence.
            if not sources or sources[-1] != source:
                sources.append(source)
        return sources

    def _samples(self) -> tuple[list[TrainingSamples[Any]], FixedSamples[Any] | None]:
        """Return the objective's sequences of training samples, and its validation samples."""
        block = self.config.zero_tp
        data = block.data
        seed = block.training.seed
        objective = block.masked
        length = block.data.sequence_length
        if objective is None:
            separate = data.document_attention == "reset"
            validation = (
                ValidationSamples(data.validation, length, separate=separate)
                if data.validation
                else None
            )
            return [
                PackedSamples(weights, tokens, seed, separate=separate)
                for weights, tokens in self._sources()
            ], validation
        if self.tokenizer is None or self._tokenizer is None:
            raise UserError(
                "zero_tp.tokenizer: the masked objective needs the tokenizer that the corpus was "
                "prepared with; set it "
                "to its directory"
            )
        vocabulary = MaskingVocabulary.from_tokenizer(
            self._tokenizer, self.tokenizer, self.model_config.vocab_size
        )
        masking = Masking(vocabulary, objective.mask_probability, objective.max_ngram)

        def rows_of(tokens: int) -> MaskedRowBuilder:
            return MaskedRowBuilder(tokens, masking, objective.sentence_order)

        masked_validation = (
            MaskedValidation(data.validation, rows_of(length)) if data.validation else None
        )
        return [
            MaskedSamples(weights, rows_of(tokens), seed) for weights, tokens in self._sources()
        ], masked_validation

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def _model_config(self) -> PretrainedConfig:
        """Return the Hugging Face config, with missing special tokens taken from the tokenizer.

        Ids from the run's file or `from_pretrained` stay. The tokenizer sets no id that changes
        training: Llama's look-up gives the padding row no gradient, and many tokenizers pad with
        the end-of-text token.
        """
        hf_config: PretrainedConfig = self.config.hf_config()
        tokenizer = self._tokenizer
        if tokenizer is None:
            return hf_config
        if tokenizer.eos_token_id is None and self.config.zero_tp.masked is None:
            raise UserError(
                f"tokenizer {self.tokenizer}: it has no eos token, with which the causal "
                "objective's documents end"
            )
        if (size := vocabulary_size(tokenizer)) > hf_config.vocab_size:
            raise UserError(
                f"zero_tp.model.vocab_size: {hf_config.vocab_size}, but the tokenizer "
                f"{self.tokenizer} has {size} "
                f"tokens; set it to {size} or more"
            )
        # Fields that the architecture reads, such as `pad_token_id`: they change training, so only
        # the config may set them.
        used_ids = fields_of(hf_config.model_type).read
        for name, token in special_token_ids(tokenizer).items():
            is_set = name in self.config.zero_tp.model or (
                self.config.pretrained and getattr(hf_config, name) is not None
            )
            if not is_set and name not in used_ids:
                setattr(hf_config, name, token)
        return hf_config


def _describe_corpus(identity: dict[str, Any], keys: Set[str]) -> str:
    """Describe a corpus by these keys of its identity."""
    sha256 = identity["content" if "content" in keys else "sha256"]
    vocabulary = (
        f", special tokens and words {identity['vocabulary'][:12]}…" if "vocabulary" in keys else ""
    )
    return (
        f"{identity['documents']:,} documents of {identity['tokens']:,} tokens "
        f"({identity['type']}, "
        f"SHA-256 {sha256[:12]}…{vocabulary})"
    )
