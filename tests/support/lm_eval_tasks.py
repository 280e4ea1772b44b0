"""Task files of lm-eval for the test sets beside the repository, one for each kind of request. A test writes them where
it wants, since they name their data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MULTIPLE_CHOICE = ("copa_local", "openbook_local", "winograd_local")
CHOSEN = ("lambada_local", *MULTIPLE_CHOICE, "letters_local")

_CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{text}"
doc_to_choice: "{choice}"
doc_to_target: "{target}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""

_LAMBADA = """\
task: lambada_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{' ' + continuation}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""

_WIKITEXT = """\
task: wikitext_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: !function wikitext.wikitext_detokenizer
process_results: !function wikitext.process_results
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""

_GENERATE = """\
task: generate_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: {sample}, temperature: {temperature}}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def write_tasks(directory: Path, shared_file: Callable[[str], Path], *, sample: bool = False) -> Path:
    """Write `lambada_local`, `copa_local`, `openbook_local`, `winograd_local` (several contexts, one continuation),
    `letters_local` (one-token answers), `wikitext_local` (lm-eval's definition) and `generate_local`. Gives the
    directory."""
    copa, openbook = shared_file("data/copa.jsonl"), shared_file("data/openbook_qa.jsonl")
    question = {"text": "{{query}}", "choice": "{{choices}}", "target": "{{gold}}"}
    letters = {"text": "{{query}} A or B? Answer:", "choice": "['A', 'B']", "target": "{{gold}}"}
    winograd = {"text": "{{gold}}", "choice": "{{context_options}}", "target": "{{continuation}}"}
    pages = directory / "pages.jsonl"
    files = {
        "lambada_local": _LAMBADA.format(file=shared_file("data/lambada_openai_first1000.jsonl")),
        "copa_local": _CHOICE.format(name="copa_local", file=copa, **question),
        "openbook_local": _CHOICE.format(name="openbook_local", file=openbook, **question),
        "winograd_local": _CHOICE.format(
            name="winograd_local", file=shared_file("data/winograd_wsc.jsonl"), **winograd
        ),
        "letters_local": _CHOICE.format(name="letters_local", file=copa, **letters),
        "wikitext_local": _WIKITEXT.format(file=pages),
        "generate_local": _GENERATE.format(file=copa, sample=str(sample).lower(), temperature=0.7 if sample else 0.0),
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
