"""LAMBADA (arXiv 1606.06031): accuracy of predicting a passage's last word.

A passage is correct if all sub-words of the word are the arg-max under teacher forcing (arXiv
1909.08053, section 5.2 and appendix E.2). Texts are tokenized as lm-eval does.
"""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import UserError
from zero_tp.data.documents import file_format, read_documents, read_objects
from zero_tp.data.records import text_of
from zero_tp.run.metrics import perplexity
from zero_tp.tools.evaluation.rows import check_continuations, continuation_rows, encode_pair
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task import Origin, Task, file_origin, read_hub_test_split

if TYPE_CHECKING:
    from zero_tp.tools.evaluation.eval_model import EvalModel


Passage = tuple[str, str]
"""Context and continuation: the passage up to its last word, without a space at the end; a space
and that word.
"""


class LambadaTask(Task):
    """Accuracy of the last word, and its perplexity: exp of the mean NLL per word, not per
    sub-word.
    """

    name = "lambada"
    logged = ("accuracy", "perplexity")

    def __init__(self, file: Path | None, options: TaskOptions):
        self.passages, self.origin = lambada_passages(file, options.text_key, options.limit)

    def check(self, window: int, tokenizer: Any) -> None:
        check_continuations(self.name, self.passages, window, tokenizer)

    def compute_metrics(self, model: EvalModel) -> dict[str, Any]:
        """Compute the metrics; `truncated` counts passages longer than the model's positions."""
        encoded = (encode_pair(model.tokenizer, *passage) for passage in self.passages)
        rows, truncated = continuation_rows(encoded, model.window)
        scores = [of_row[0] for of_row in model.score(rows, self.name)]
        count = len(scores)
        nll = math.fsum(score.nll for score in scores)
        accuracy = sum(score.greedy for score in scores) / count
        return {
            "data": self.origin,
            "accuracy": accuracy,
            # lm-eval's: the sample's standard deviation, with n - 1, over √n.
            "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / (count - 1))
            if count > 1
            else None,
            "perplexity": perplexity(nll / count),
            "nll": nll,
            "examples": count,
            "tokens": sum(row.scored for row in rows),
            "tokens_computed": sum(map(len, rows)),
            "truncated": truncated,
        }


def lambada_passages(
    path: Path | None, text_key: str, limit: int | None
) -> tuple[list[Passage], Origin]:
    """Read the passages of a file, or OpenAI's variant of the test split from the hub.

    A file has JSON lines with `context` and `continuation`, or whole passages: one per record, or
    line of a .txt file.
    """
    if path is None:
        records, origin = read_hub_test_split(
            "lambada", "EleutherAI/lambada_openai", "default", "lambada_test.jsonl"
        )
        return [
            _passage_of_text(record["text"], "EleutherAI/lambada_openai")
            for record in records[:limit]
        ], origin
    if file_format(path) == "jsonl":
        passages = [
            _passage_of_record(record, where, text_key)
            for where, record in islice(read_objects(path), limit)
        ]
    else:
        texts = (text for text in read_documents(path, text_key, "line") if text.strip())
        passages = [_passage_of_text(text, str(path)) for text in islice(texts, limit)]
    if not passages:
        raise UserError(f"{path}: it has no passage")
    return passages, file_origin(path)


def _passage_of_record(record: dict[str, Any], where: str, text_key: str) -> Passage:
    present = [key in record for key in ("context", "continuation")]
    if not any(present):
        return _passage_of_text(text_of(record, where, text_key), where)
    if not all(present):
        raise UserError(
            f"{where}: 'context' and 'continuation' go together; its keys are {', '.join(record)}"
        )
    if not (word := text_of(record, where, "continuation").strip()):
        raise UserError(f"{where}: its continuation is empty; give the passage's last word")
    # The file's own spaces between them do not count: the target is one space and the word.
    return text_of(record, where, "context").rstrip(), f" {word}"


def _passage_of_text(text: str, where: str) -> Passage:
    """Split a whole passage before its last word."""
    parts = text.strip().rsplit(maxsplit=1)
    if len(parts) < 2:
        raise UserError(f"{where}: a passage needs at least two words")
    return parts[0], f" {parts[1]}"
