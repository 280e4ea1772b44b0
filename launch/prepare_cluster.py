#!/usr/bin/env python3
"""Prepare a corpus on a cluster with datatrove: read, repair, drop short documents and near copies,
tokenize, merge.

    python launch/prepare_cluster.py --input 'raw/*.jsonl.zst' --tokenizer DIR --output data/corpus
    --tasks 64 \\
        --executor slurm --executor-arguments '{"partition": "cpu", "time": "4:00:00"}'

Copy it to add other steps of datatrove, in `stages`. Tasks split the inputs by file. A repeated
start skips completed tasks: they write to OUTPUT.work/DIGEST, and DIGEST is a hash of the inputs,
the settings and the number of tasks. docs/data_cluster.md says how the deduplication differs from
that of `zero-tp prepare`.

Slurm's jobs load pickled steps and do not run this file, so its functions must import the names
that they use.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from zero_tp.base import cli
from zero_tp.base.errors import UserError, show
from zero_tp.base.files import check_replaceable
from zero_tp.base.strict_json import InvalidJson, parse_object
from zero_tp.data.documents import HUB
from zero_tp.data.tokenizer import DocumentEncoder
from zero_tp.tools.corpus.settings import check_validation_size, find_reusable
from zero_tp.tools.corpus.similarity import SHINGLE
from zero_tp.tools.corpus.stages import TOKENIZER

try:
    from zero_tp.tools.corpus.datatrove import CorpusReader, TokenizedCorpus
except UserError as error:  # datatrove is not installed
    sys.exit(f"error: {error}")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.formatters import FTFYFormatter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

Step = Any  # a PipelineStep, or a function of (data, rank, number of tasks); datatrove has no types
EXECUTORS = {
    "local": LocalPipelineExecutor,
    "slurm": SlurmPipelineExecutor,
    "ray": RayPipelineExecutor,
}
BUCKETS = 14
HASHES = 8
"""Documents of similarity s are compared with probability 1 - (1 - s^8)^14: 0.77 at 0.75, 0.92
at 0.8.
"""


def parser() -> argparse.ArgumentParser:
    arguments = cli.Parser(description=__doc__)
    arguments.add_argument(
        "--input", nargs="+", required=True, metavar="FILE|DIR|GLOB", help="as for zero-tp prepare"
    )
    arguments.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="an existing tokenizer"
    )
    arguments.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory to make or replace"
    )
    arguments.add_argument(
        "--tasks",
        type=int,
        required=True,
        metavar="N",
        help="number of tasks among which the inputs are divided",
    )
    arguments.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="local",
        help="what runs the tasks (default: local)",
    )
    arguments.add_argument(
        "--executor-arguments",
        type=json_object,
        default={},
        metavar="JSON",
        help="arguments of datatrove's executor; Slurm's needs partition and time",
    )
    arguments.add_argument(
        "--text-key", metavar="KEY", help="field of the text (default: text, see docs/data.md)"
    )
    arguments.add_argument(
        "--documents",
        choices=("file", "line", "blank-line"),
        default="file",
        help="the unit of a .txt file that is one document",
    )
    arguments.add_argument(
        "--repair-unicode", dest="repair", action="store_true", help="mend Unicode (ftfy)"
    )
    arguments.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="drop documents of fewer tokens"
    )
    arguments.add_argument(
        "--no-deduplicate", dest="deduplicate", action="store_false", help="keep near duplicates"
    )
    arguments.add_argument("--eos", metavar="TOKEN", help="the token that ends a document")
    arguments.add_argument(
        "--split-sentences",
        dest="sentences",
        metavar="LANGUAGE",
        help="store the starts of sentences",
    )
    arguments.add_argument("--format", type=no_token_files, help=argparse.SUPPRESS)
    arguments.add_argument(
        "--seed", type=int, default=1234, help="seed of the split (default: 1234)"
    )
    arguments.add_argument(
        "--validation-fraction", dest="validation", type=float, default=0.02, metavar="F|COUNT"
    )
    return arguments


def no_token_files(name: str) -> str:
    raise argparse.ArgumentTypeError(
        f"{name}: datatrove has no reader of tokens: zero-tp prepare --format {name} reads them, "
        "in processes on one machine"
    )


def json_object(text: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode())
    except InvalidJson as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Words(WhitespaceTokenizer):
    """Split words as `zero-tp prepare --deduplicate near` does; datatrove's tokenizer for
    English needs spaCy.
    """

    def word_tokenize(self, text: str) -> list[str]:
        from zero_tp.tools.corpus.similarity import words

        return words(text)


def minhash_config() -> MinhashConfig:
    """Return the settings of MinHash.

    Shingles are 5 words of the text as it is, because datatrove's own normalisation turns every
    number into 0.
    """
    unchanged = TextNormConfig(False, False, False, False, False)
    # Its default hash raises with xxhash 4.
    return MinhashConfig(
        SHINGLE, BUCKETS, HASHES, norm_config=unchanged, hash_config=HashConfig(hash_fc="sha1")
    )


def is_long_enough(encoder: DocumentEncoder, min_tokens: int, document: Document) -> bool:
    ((ids, _),) = encoder.encode([document.text])
    return len(ids) - encoder.eos_count >= min_tokens


def stages(
    options: argparse.Namespace, reader: CorpusReader, writer: TokenizedCorpus, work: Path
) -> dict[str, tuple[list[Step], int]]:
    """Return the steps of each stage and its number of tasks, in order."""
    documents: list[Step] = [reader]
    if options.repair:  # with ftfy's own defaults, as in zero-tp prepare
        fixes = ("fix_latin_ligatures", "fix_character_width", "uncurl_quotes", "fix_line_breaks")
        documents.append(FTFYFormatter(**dict.fromkeys(fixes, True), normalization="NFC"))
    if not options.deduplicate:
        return {"tokenize": ([*documents, writer], options.tasks)}
    if options.min_tokens:  # before MinHash, which might keep the shorter one of two
        documents.append(
            LambdaFilter(functools.partial(is_long_enough, writer.encoder, options.min_tokens))
        )
    config = minhash_config()
    signatures, buckets, removed = (
        str(work / "minhash" / name) for name in ("signatures", "buckets", "removed")
    )
    return {
        "signatures": (
            [*documents, MinhashDedupSignature(signatures, config, Words())],
            options.tasks,
        ),
        "buckets": ([MinhashDedupBuckets(signatures, buckets, config=config)], BUCKETS),
        "cluster": ([MinhashDedupCluster(buckets, removed, config=config)], 1),
        "tokenize": ([*documents, MinhashDedupFilter(removed), writer], options.tasks),
    }


def executor(
    options: argparse.Namespace,
    work: Path,
    name: str,
    steps: list[Step],
    tasks: int,
    before: PipelineExecutor | None,
) -> PipelineExecutor:
    """Return the executor of a stage. `before`: Slurm's jobs, which are only queued, wait for
    those of this one.
    """
    defaults: dict[str, dict[str, Any]] = {
        "local": {"workers": min(tasks, len(os.sched_getaffinity(0)))},
        "slurm": {"job_name": f"{options.output.name}-{name}"},
    }
    try:
        arguments = {**defaults.get(options.executor, {}), **options.executor_arguments}
        logs = str(work / "logs" / name)
        return EXECUTORS[options.executor](
            steps, tasks=tasks, logging_dir=logs, depends=before, **arguments
        )
    except TypeError as error:  # an unknown argument, or one of the three that the script sets
        raise UserError(f"--executor-arguments: {error}") from error


def run_stage(name: str, stage: PipelineExecutor, logs: Path) -> None:
    """Run a stage after those before it have ended. UserError: a task failed; the next stage would
    wait for it forever.

    Ray's executor does not raise the error of a task; the last line of the task's log is that
    error.
    """
    stage.run()
    first = getattr(stage, "local_rank_offset", 0)
    count = getattr(stage, "local_tasks", stage.world_size)
    failed = stage.get_incomplete_ranks(range(first, first + count), skip_completed=True)
    if failed:
        log = logs / "logs" / f"task_{failed[0]:05d}.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        reason = next(
            (line for line in reversed(lines) if line.strip()), "it has no log: was it killed?"
        )
        reason = reason.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
        raise UserError(
            f"stage {name}: {len(failed):,} of {count:,} tasks failed, the first with: {reason} "
            f"({log})"
        )


def merge_parts(parts: Path, output: Path, validation: float, *_: Any) -> None:
    """Write the output. datatrove adds (data, rank, number of tasks) to the arguments."""
    from zero_tp.tools.corpus.parts import merge

    merged = merge(parts, output, validation, overwrite=True)
    show(
        f"{'up to date:' if merged.reused else 'wrote'} {output}: "
        f"{merged.report['documents']['kept']:,} documents"
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    options = parser().parse_args()
    check_validation_size(options.validation)
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: at least 1")
    # Workers may have another working directory.
    inputs = [word if word.startswith(HUB) else os.path.abspath(word) for word in options.input]
    output = Path(os.path.abspath(options.output))
    # Refuses before the work what `merge` would refuse after it.
    find_reusable(output, dict, overwrite=True)
    check_replaceable(output, (TOKENIZER,))
    reader = CorpusReader(inputs, options.text_key, options.documents)
    settings = {
        name: getattr(options, name) for name in ("text_key", "documents", "repair", "deduplicate")
    }
    settings["inputs"] = digest([[source.name, *source.size_and_time] for source in reader.sources])
    writer = TokenizedCorpus(
        options.tokenizer,
        output,
        eos=options.eos,
        sentences=options.sentences,
        seed=options.seed,
        min_tokens=options.min_tokens,
        settings=settings,
        reader=reader,
    )
    work = output.with_name(f"{output.name}.work") / digest([writer.settings, options.tasks])
    writer.parts = work / "parts"
    executors: dict[str, PipelineExecutor] = {}
    for name, (steps, tasks) in stages(options, reader, writer, work).items():
        executors[name] = executor(
            options, work, name, steps, tasks, next(reversed(executors.values()), None)
        )
    for rank in range(options.tasks):  # a part that was removed is made again
        if not (writer.parts / f"{rank:05d}").exists():
            (work / "logs" / "tokenize" / "completions" / f"{rank:05d}").unlink(missing_ok=True)
    merging = functools.partial(merge_parts, writer.parts, output, options.validation)
    if options.executor == "slurm":  # its executor only queues jobs
        # Merging again is cheap if nothing has changed, and datatrove would skip it.
        (work / "logs" / "merge" / "completions" / "00000").unlink(missing_ok=True)
        executor(options, work, "merge", [merging], 1, executors["tokenize"]).run()
        show(f"queued; the logs will be in {work / 'logs'}")
    else:
        for name, stage in executors.items():
            run_stage(name, stage, work / "logs" / name)
        merging()


if __name__ == "__main__":
    cli.run(main)
