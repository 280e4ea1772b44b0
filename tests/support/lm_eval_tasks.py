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


def task_file(name: str, file: Path, output_type: str, metrics: dict[str, str], **fields: Any) -> str:
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
            {"metric": metric, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}
            for metric, aggregation in metrics.items()
        ],
        **fields,
    }
    return re.sub(r'"(!function [\w.]+)"', r"\1", json.dumps(content))


def write_tasks(directory: Path, shared_file: Callable[[str], Path], *, sample: bool = False) -> Path:
    """Write `lambada_local`, `copa_local`, `openbook_local`, `winograd_local` (several contexts, one continuation),
    `letters_local` (one-token answers), `wikitext_local` (lm-eval's definition) and `generate_local`; return the
    directory."""
    copa, openbook = shared_file("data/copa.jsonl"), shared_file("data/openbook_qa.jsonl")
    lambada, winograd = shared_file("data/lambada_openai_first1000.jsonl"), shared_file("data/winograd_wsc.jsonl")
    pages = directory / "pages.jsonl"

    def choice(name: str, file: Path, text: str, choices: str, target: str) -> str:
        metrics = {"acc": "mean", "acc_norm": "mean"}
        fields = {"doc_to_text": text, "doc_to_choice": choices, "doc_to_target": target}
        return task_file(name, file, "multiple_choice", metrics, **fields)

    files = {
        "lambada_local": task_file(
            "lambada_local",
            lambada,
            "loglikelihood",
            {"perplexity": "perplexity", "acc": "mean"},
            doc_to_text="{{context}}",
            doc_to_target="{{' ' + continuation}}",
        ),
        "copa_local": choice("copa_local", copa, "{{query}}", "{{choices}}", "{{gold}}"),
        "openbook_local": choice("openbook_local", openbook, "{{query}}", "{{choices}}", "{{gold}}"),
        "winograd_local": choice("winograd_local", winograd, "{{gold}}", "{{context_options}}", "{{continuation}}"),
        "letters_local": choice("letters_local", copa, "{{query}} A or B? Answer:", "['A', 'B']", "{{gold}}"),
        "wikitext_local": task_file(
            "wikitext_local",
            pages,
            "loglikelihood_rolling",
            {},
            doc_to_text="",
            doc_to_target="!function wikitext.wikitext_detokenizer",
            process_results="!function wikitext.process_results",
            metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        ),
        "generate_local": task_file(
            "generate_local",
            copa,
            "generate_until",
            {"exact_match": "mean"},
            doc_to_text="{{query}}",
            doc_to_target="{{choices[gold]}}",
            generation_kwargs={
                "until": ["."],
                "max_gen_toks": 12,
                "do_sample": sample,
                "temperature": 0.7 if sample else 0.0,
            },
        ),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    (directory / "wikitext.py").write_text(
        "from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer\n"
    )
    with gzip.open(shared_file("data/wikitext-103-validation.txt.gz"), "rt", encoding="utf-8") as file:
        articles = pages_of(file.read())
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in articles))
    return directory


def pages_of(text: str) -> list[str]:
    """The articles of a WikiText split: each begins with a heading of the first level."""
    pages: list[str] = []
    for line in text.splitlines(keepends=True):
        heading = line.startswith(" = ") and not line.startswith(" = = ")
        if heading or not pages:
            pages.append("")
        pages[-1] += line
    return [page for page in pages if page.strip()]


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """What the model answered to a task's requests, by document, of lm-eval's `log_samples`."""
    return [sample["resps"] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]
