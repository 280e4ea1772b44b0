"""Task files of lm-eval for the shared test sets, one for each kind of request."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MULTIPLE_CHOICE = ("copa_local", "openbook_local", "winograd_local")
CHOSEN = ("lambada_local", *MULTIPLE_CHOICE, "letters_local")


def task_file(
    name: str, file: Path, output_type: str, metrics: dict[str, str], **fields: Any
) -> str:
    """Return a task file of lm-eval, as JSON, which is YAML; `!function …` becomes a tag.

    Args:
        metrics: aggregations by metric.
        fields: `doc_to_text`, `doc_to_target` and others.
    """
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": output_type,
        "metric_list": [
            {
                "metric": metric,
                "aggregation": aggregation,
                "higher_is_better": aggregation == "mean",
            }
            for metric, aggregation in metrics.items()
        ],
        **fields,
    }
    return re.sub(r'"(!function [\w.]+)"', r"\1", json.dumps(content))


def write_tasks(
    directory: Path, shared_file: Callable[[str], Path], *, sample: bool = False
) -> Path:
    """Write `lambada_local`, `copa_local`, `openbook_local`, `winograd_local` (several contexts,
    one continuation), `letters_local` (one-token answers), `wikitext_local` (lm-eval's definition)
    and `generate_local`; return the directory.
    """
    copa, openbook = shared_file("data/copa.jsonl"), shared_file("data/openbook_qa.jsonl")
    lambada, winograd = (
        shared_file("data/lambada_openai_first1000.jsonl"),
        shared_file("data/winograd_wsc.jsonl"),
    )
    pages = directory / "pages.jsonl"
    directory.mkdir(parents=True, exist_ok=True)

    def write(
        name: str, file: Path, output_type: str, metrics: dict[str, str], *texts: str, **fields: Any
    ) -> None:
        fields |= dict(zip(("doc_to_text", "doc_to_target", "doc_to_choice"), texts, strict=False))
        (directory / f"{name}.yaml").write_text(
            task_file(name, file, output_type, metrics, **fields)
        )

    choice = ("multiple_choice", {"acc": "mean", "acc_norm": "mean"})
    write("copa_local", copa, *choice, "{{query}}", "{{gold}}", "{{choices}}")
    write("openbook_local", openbook, *choice, "{{query}}", "{{gold}}", "{{choices}}")
    write(
        "winograd_local", winograd, *choice, "{{gold}}", "{{continuation}}", "{{context_options}}"
    )
    write("letters_local", copa, *choice, "{{query}} A or B? Answer:", "{{gold}}", "['A', 'B']")
    word = {"perplexity": "perplexity", "acc": "mean"}
    write("lambada_local", lambada, "loglikelihood", word, "{{context}}", "{{' ' + continuation}}")
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    functions: dict[str, Any] = {
        "process_results": "!function wikitext.process_results",
        "metric_list": metrics,
    }
    texts = ("", "!function wikitext.wikitext_detokenizer")
    write("wikitext_local", pages, "loglikelihood_rolling", {}, *texts, **functions)
    drawn = {
        "until": ["."],
        "max_gen_toks": 12,
        "do_sample": sample,
        "temperature": 0.7 if sample else 0.0,
    }
    generated = ("generate_until", {"exact_match": "mean"}, "{{query}}", "{{choices[gold]}}")
    write("generate_local", copa, *generated, generation_kwargs=drawn)
    (directory / "wikitext.py").write_text(
        "from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, "
        "wikitext_detokenizer\n"
    )
    with gzip.open(
        shared_file("data/wikitext-103-validation.txt.gz"), "rt", encoding="utf-8"
    ) as file:
        # At headings of the first level.
        articles = re.split(r"^(?= = [^=])", file.read(), flags=re.MULTILINE)
    pages.write_text(
        "".join(json.dumps({"page": page}) + "\n" for page in articles if page.strip())
    )
    return directory


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """What the model answered to a task's requests, by document, of lm-eval's `log_samples`."""
    return [
        sample["resps"]
        for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    ]
