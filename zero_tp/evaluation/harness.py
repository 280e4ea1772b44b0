"""A model answers lm-eval's requests, on every rank of its grid.

`Harness` is lm-eval's own Hugging Face adapter, from which it takes how text is cut into tokens and how generated text
is finished; what it computes, and on which rank, is ours. lm-eval sees one process everywhere: every rank builds all
requests, batches are dealt to the data-parallel ranks (subject.py), and every rank gets all the answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero_tp.errors import UserError
from zero_tp.evaluation.subject import Report, Row, Subject, continuation_rows

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""lm-eval's own defaults."""


class Harness(HFLM):
    """A harness is an lm-eval `LM` of a `Subject`. Every rank of its grid makes one and gives it the same requests.

    Attributes:
        tokens: scored or generated so far; tokens_computed: read by the model.
        truncated: requests whose context was longer than the model's positions.
        computing: the model scores; it stays so where that failed.
    """

    computing = False

    def __init__(self, subject: Subject, report: Report):
        # A stand-in, because lm-eval would tie the weights of a live model again.
        model = SimpleNamespace(config=subject.config, device=torch.device(subject.device), name_or_path="")
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(subject.tokenizer),  # it sets a padding token
            max_length=subject.positions,
            batch_size=subject.batch_size,
        )
        self.subject, self.report = subject, report
        self.tokens = self.tokens_computed = self.truncated = 0

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, arg-max) of each request's continuation (its third part) after its context (the
        second). Requests of one token after the same context share a forward."""
        rows, truncated = continuation_rows([asked[1:] for asked in requests], self.max_length)
        rows, answered_by = shared(rows)
        self.computing = True
        found = self.subject.score(rows, self.report)
        self.computing = False
        self.tokens += sum(len(continuation) for _, _, continuation in requests)
        self.tokens_computed += sum(map(len, rows))
        self.truncated += truncated
        answers = [(-found[row][choice].nll, found[row][choice].greedy) for row, choice in answered_by]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return each text's log-likelihood, in windows that score every token once and overlap in the last alone."""
        texts = [
            get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for request in requests
        ]
        windows = [[(None, *make_disjoint_window(window)) for window in text] for text in texts]
        answers = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(answers)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return each request's text, up to its stop sequences. A batch has requests with the same options.

        Raises:
            UserError: the model can't generate, or its positions leave no room for the context.
        """
        if not callable(getattr(self.subject.module, "generate", None)):
            raise UserError(f"{type(self.subject.module).__name__} can't generate text, which a task asks for")
        arguments = [request.args for request in requests]
        for _, options in arguments:
            length = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if length >= self.max_length:
                raise UserError(
                    f"a task generates {length:,} tokens, and the model's {self.max_length:,} positions leave no room "
                    "for a question; set generation_kwargs.max_gen_toks in its task file"
                )
        self.subject.agree([repr(arguments).encode()])
        order = Collator(
            arguments,
            sort_fn=lambda asked: (-len(self.tok_encode(asked[0])), asked[0]),
            group_by="gen_kwargs",
            group_fn=lambda asked: asked[1],
        )
        batches = list(enumerate(order.get_batched(n=self.subject.batch_size)))
        batches_texts = self.subject.map(self._generated, batches, lambda batch: len(batch[1]), self.report)
        texts = [text for each in batches_texts for text in each]
        self.tokens += sum(len(self.tok_encode(text, add_special_tokens=False)) for text in texts)
        found: list[str] = order.get_original(texts)
        return found

    def _generated(self, numbered: tuple[int, Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
        number, batch = numbered
        torch.manual_seed(SEEDS["torch"] + number)  # what is drawn depends on no rank
        texts: list[str] = super().generate_until([SimpleNamespace(args=asked) for asked in batch], disable_tqdm=True)
        return texts

    @torch.no_grad()
    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """Continue [b, n] → [b, n + generated] by the model's own `generate`."""
        # lm-eval's rule: temperature 0 is greedy decoding.
        temperature = options.pop("temperature", 0.0)
        options.setdefault("do_sample", temperature != 0.0)
        if options["do_sample"]:
            options["temperature"] = temperature
        if self.subject.lock_step:
            options["synced_gpus"] = True
        self.tokens_computed += context.numel()
        generated: torch.Tensor = self.subject.module.generate(
            input_ids=context,
            max_new_tokens=max_length - context.shape[1],
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **options,
        )
        return generated


def shared(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Make one row with alternatives of the rows with the same context and one token to score.

    Returns:
        The rows, and for each given one (row, which of its scores).
    """
    choices_after: dict[bytes | int, tuple[Row, list[int]]] = {}  # the first such row, and the last tokens of all
    answered_by: list[tuple[bytes | int, int]] = []
    for number, row in enumerate(rows):
        key = row.tokens[:-1].tobytes() if row.scored == 1 else number
        choices, token = choices_after.setdefault(key, (row, []))[1], int(row.tokens[-1])
        if token not in choices:
            choices.append(token)
        answered_by.append((key, choices.index(token)))
    index = {key: number for number, key in enumerate(choices_after)}
    distinct = [Row(row.tokens, row.scored, tuple(choices[1:])) for row, choices in choices_after.values()]
    return distinct, [(index[key], choice) for key, choice in answered_by]
