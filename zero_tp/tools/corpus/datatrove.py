"""Steps of datatrove pipelines (extra `datatrove`) that make a corpus on many machines.

`CorpusReader` reads inputs as `prepare` does, and `TokenizedCorpus` tokenizes the documents of any
pipeline, each task into a part (parts.py) that `zero-tp prepare --merge` joins.
launch/prepare_cluster.py is a whole pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.base.files import partial_directory, put_in_place
from zero_tp.data.documents import find_sources, group_records, read_blocks
from zero_tp.data.formats import import_optional
from zero_tp.data.records import Problem, Record, RecordBlock, RecordCounts, location
from zero_tp.data.tokenizer import DocumentEncoder, load_tokenizer, save_tokenizer
from zero_tp.tools.corpus.blocks import BlockProcessor
from zero_tp.tools.corpus.parts import MANIFEST
from zero_tp.tools.corpus.settings import (
    PrepareSettings,
    check_settings,
    describe_files,
    library_versions,
)
from zero_tp.tools.corpus.spool import Spool
from zero_tp.tools.corpus.stages import TOKENIZER
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec

# Before the imports below, so that a missing package is named with the extra that installs it.
import_optional("datatrove", "zero_tp.tools.corpus.datatrove", "datatrove")

from datatrove.data import Document  # noqa: E402
from datatrove.pipeline.base import PipelineStep  # noqa: E402

SOURCE = "source_number"
FILE = "file_path"
PLACE = "place"
"""Metadata of a document: the number of its input, the input's name (datatrove's readers set it,
too), its line.
"""
_TEXT = "text"
NumberedInput = tuple[int, str]


class CorpusReader(PipelineStep):
    """Read inputs as `zero-tp prepare` does; each task reads every n-th input.

    Args:
        inputs, text_key, documents: see `find_sources`. Standard input can't be read by several
            tasks.

    Attributes:
        inputs: the number and the name of each input.
        counts: counts of this task's records.
    """

    type = "📖 - READER"
    name = "zero_tp"

    def __init__(
        self, inputs: Sequence[str | Path], text_key: str | None = None, documents: str = "file"
    ) -> None:
        super().__init__()
        self.sources = find_sources(inputs, text_key, documents)
        if any(source.path is None and source.kind != "hub" for source in self.sources):
            raise UserError(
                "standard input can't be read by several tasks: write it to a file first"
            )
        self.inputs = [(number, source.name) for number, source in enumerate(self.sources)]
        self.counts = RecordCounts()

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Yield the documents of an earlier reader, then those of this task, in order."""
        self.counts = RecordCounts()
        # datatrove passes the documents of an earlier step, or None to the first one.
        yield from data or ()
        for number, _ in self.inputs[rank::world_size]:
            yield from self._documents(number)

    def _documents(self, number: int) -> Iterator[Document]:
        source = self.sources[number]
        for block in read_blocks(source):
            for place, document in block.documents():
                self.counts.read += 1
                self.stat_update("total")
                if isinstance(document, Problem):
                    self.stat_update("dropped", f"dropped_{document.reason}")
                    self.counts.drop(location(source.name, place), document)
                    continue
                metadata = {SOURCE: number, FILE: source.name, PLACE: place}
                yield Document(document.text, location(source.name, place), metadata=metadata)


class TokenizedCorpus(PipelineStep):
    """Tokenize documents and write a part of a corpus; the last step of a pipeline.

    Args:
        tokenizer: a directory, or a name on the hub.
        parts: directory for the parts of all tasks, which all machines can read and write.
        eos, sentences, seed, min_tokens: see `PrepareSettings`.
        settings: other settings of the pipeline, such as its inputs and filters; parts that differ
            in them can't be merged.
        reader: this pipeline's reader: the report then counts the records that it drops, and as
            `filtered` the documents that later steps drop. Documents that later steps add count as
            read.
    """

    type = "🔢 - TOKENIZER"
    name = "zero_tp"

    def __init__(
        self,
        tokenizer: str | Path,
        parts: str | Path,
        *,
        eos: str | None = None,
        sentences: str | None = None,
        seed: int = PrepareSettings.seed,
        min_tokens: int = 0,
        settings: Mapping[str, Any] | None = None,
        reader: CorpusReader | None = None,
    ) -> None:
        super().__init__()
        spec = TokenizerSpec.parse(str(tokenizer))
        if spec.directory is None:
            raise UserError(
                f"tokenizer {tokenizer}: a cluster takes an existing tokenizer: prepare some of "
                "the documents with "
                "zero-tp prepare first, then pass that output's tokenizer directory"
            )
        options: dict[str, Any] = {
            "eos": eos,
            "sentences": sentences,
            "seed": seed,
            "min_tokens": min_tokens,
        }
        chosen = PrepareSettings(str(tokenizer), **options)
        check_settings(chosen)
        # Slurm's jobs load the pickled step and may start in another directory.
        self.tokenizer = spec.directory.absolute()
        self.parts = Path(parts)
        self.eos = eos
        # datatrove copies or pickles a pipeline as one list, so this stays the pipeline's own
        # reader in each task.
        self.reader = reader
        existing = load_tokenizer(spec.directory, eos)
        with tempfile.TemporaryDirectory() as directory:  # before any task: it may be refused
            save_tokenizer(existing, Path(directory), spec.directory)
        self.encoder = DocumentEncoder(existing, sentences)
        self.processor = BlockProcessor(chosen, self.encoder)
        identity = {"tokenizer": spec.identity(), **options, "versions": library_versions()}
        self.settings = identity | dict(settings or {})

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        """Write the part of task `rank`.

        It replaces the part of a killed task or of an earlier run.
        """
        part = self.parts / f"{rank:05d}"
        with (
            partial_directory(part, (TOKENIZER,)) as directory,
            # The identity is empty: a killed task starts from nothing, because datatrove runs whole
            # tasks again.
            contextlib.closing(Spool(directory).open({})) as spool,
        ):
            inputs = self.reader.inputs[rank::world_size] if self.reader is not None else []
            sources = {source: number for number, source in enumerate(inputs)}
            for source, block in self._blocks(data, sources):
                with self.track_time():
                    spool.append(self.processor(source, block))
            self.stat_update("documents", value=spool.counts.kept)
            spool.commit()
            # Rank 0's files serve all parts. The check is against the tokenizer at the pipeline's
            # start, which each task has pickled.
            if rank == 0:
                tokenizer = load_tokenizer(self.tokenizer, self.eos)
                name = f"the tokenizer {self.tokenizer}"
                owner = "the one with which the pipeline started"
                self.encoder.fingerprint.check(
                    tokenizer, name, owner, "restore it, or start over with other parts"
                )
                save_tokenizer(tokenizer, directory / TOKENIZER, self.tokenizer)
            counts = spool.counts
            if self.reader is not None:
                # The reader yielded 100 documents. Later steps drop 10: 90 arrive, so 10 are
                # `filtered`. Later steps add 5: 105 arrive, so 5 more count as read.
                counts = copy.deepcopy(self.reader.counts)
                filtered = counts.kept - spool.counts.read
                # `filtered` is negative if later steps added more than they dropped: the surplus
                # counts as read.
                counts.add(
                    max(0, -filtered),
                    # A sum of Counters leaves out what is not above 0.
                    Counter(filtered=filtered) + spool.counts.dropped,
                    spool.counts.problems,
                )
            manifest = {
                **{"part": rank, "tasks": world_size, "settings": self.settings},
                "sources": [{"number": number, "name": name} for number, name in sources],
                "documents": counts.as_dict(),
                "tokenizer": self.encoder.fingerprint.model_dump(),
                "files": describe_files(directory),
            }
            (directory / MANIFEST).write_text(
                json.dumps(manifest, indent=1) + "\n", encoding="utf-8"
            )
            put_in_place(directory, part, is_stale=lambda name: True)

    def _blocks(
        self, data: Iterable[Document], sources: dict[NumberedInput, int]
    ) -> Iterator[tuple[int, RecordBlock]]:
        """Yield the number of a source and a block of its documents.

        New sources are added to `sources`.
        """
        numbers = itertools.count()
        # A task's inputs come one after another, so a run of documents of one input is all of it.
        # If a step shuffles them, an input has several runs, under one number.
        for source, documents in itertools.groupby(data, _input_of):
            records = (
                Record(document.metadata.get(PLACE, 0), {_TEXT: document.text})
                for document in documents
            )
            for block in group_records(records):
                yield (
                    sources.setdefault(source, len(sources)),
                    RecordBlock(source[1], next(numbers), _TEXT, block),
                )


def _input_of(document: Document) -> NumberedInput:
    return document.metadata.get(SOURCE, 0), str(document.metadata.get(FILE, ""))
