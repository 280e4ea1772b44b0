"""lm-eval's `LM` interface for an `EvalModel`, on every rank of its grid.

`LMEvalModel` inherits tokenization, rolling windows and the post-processing of generated text from
lm-eval's Hugging Face adapter. lm-eval sees a single process: every rank builds all requests,
`EvalModel` distributes the batches over the data-parallel ranks, and every rank gets all answers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs

from zero_tp.base.errors import UserError
from zero_tp.tools.evaluation.eval_model import EvalModel
from zero_tp.tools.evaluation.rows import Row, continuation_rows


class LMEvalModel(HFLM):
    """An lm-eval `LM` of an `EvalModel`. Every rank passes it the same requests.

    Attributes:
        tokens: number of tokens scored or generated so far.
        tokens_computed: number of tokens read by the model, without padding.
        truncated: number of requests that were longer than the model's positions, or left no room
            for generated text.
        computing: True while the model scores. It stays True after an error of the model, but not
            after one of a task.
    """

    def __init__(self, model: EvalModel, title: str = ""):
        # Not the model itself: lm-eval would tie the weights of a live model again.
        facade = SimpleNamespace(
            config=model.config,
            device=torch.device(model.device),
            name_or_path="",
            generate=self._generate,
        )
        super().__init__(
            pretrained=facade,
            backend="causal",
            tokenizer=copy.deepcopy(model.tokenizer),  # lm-eval sets its padding token
            max_length=model.window,
            batch_size=sys.maxsize,  # `EvalModel` and `generate_until` form the batches
        )
        self.eval_model = model
        self.title = title
        self.computing = False
        self.tokens = self.tokens_computed = self.truncated = 0

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: Any = None,
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each request (texts, context, continuation).

        One-token continuations of the same context share a row.
        """
        rows, truncated = continuation_rows([request[1:] for request in requests], self.max_length)
        # The places lead each request to its score: (row of the merged ones, number of the score in
        # it).
        rows, places = merge_single_tokens(rows)
        # No `finally` below: after an error of the model the flag must stay, so that the error is
        # not taken for the task's.
        self.computing = True
        scores = self.eval_model.score(rows, self.title)
        self.computing = False
        self.tokens += sum(len(continuation) for _, _, continuation in requests)
        self.tokens_computed += sum(map(len, rows))
        self.truncated += truncated
        return [(-scores[row][choice].nll, scores[row][choice].greedy) for row, choice in places]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return each request's generated text, up to its stop sequences.

        A batch has requests of equal options.
        """
        if not callable(getattr(self.eval_model.module, "generate", None)):
            raise UserError(
                f"{type(self.eval_model.module).__name__} can't generate text, which a task "
                "requests"
            )
        arguments = [request.args for request in requests]
        self.eval_model.require_same_requests([repr(arguments).encode()])
        order = Collator(
            arguments,
            # The longest first, as in `EvalModel.score`: the first batch shows whether memory
            # suffices. The text breaks ties, so each rank has the same batches.
            sort_fn=lambda request: (-len(self.tok_encode(request[0])), request[0]),
            group_by="gen_kwargs",
            group_fn=lambda request: request[1],
        )
        batches = list(enumerate(order.get_batched(n=self.eval_model.batch_size)))
        generated = self.eval_model.map_batches(
            self._generate_batch, batches, lambda batch: len(batch[1]), self.title
        )
        texts = [text for batch in generated for text in batch]
        count = sum(len(self.tok_encode(text, add_special_tokens=False)) for text in texts)
        self.tokens += count
        self.tokens_computed += count
        for context, options in arguments:
            # lm-eval's adapter truncates prompts and does not say so. This is its rule: a prompt
            # must leave room for the text.
            prompt = len(self.tok_encode(context))
            limit = (
                self.max_length - normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            )
            self.tokens_computed += min(prompt, limit)
            self.truncated += prompt > limit
        in_order: list[str] = order.get_original(texts)
        return in_order

    def _generate_batch(
        self, numbered: tuple[int, Sequence[tuple[str, dict[str, Any]]]]
    ) -> list[str]:
        number, batch = numbered
        torch.manual_seed(DEFAULT_OTHER_SEED + number)  # sampled text must not depend on the rank
        requests = [SimpleNamespace(args=arguments) for arguments in batch]
        texts: list[str] = super().generate_until(requests, disable_tqdm=True)
        return texts

    def _generate(self, input_ids: torch.Tensor, max_length: int, **options: Any) -> torch.Tensor:
        """Call the model's `generate`: [b, n] → [b, n + new]. `max_new_tokens` overrides the
        model's own setting.
        """
        generated: torch.Tensor = self.eval_model.module.generate(
            input_ids=input_ids,
            # lm-eval's `max_length` counts the padded prompt; a model's own generation config may
            # have another limit.
            max_new_tokens=max_length - input_ids.shape[1],
            synced_gpus=self.eval_model.lock_step,
            **options,
        )
        return generated


def merge_single_tokens(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Merge rows that score one token after the same context into one row with alternatives.

    Returns:
        The merged rows, and for each input row the indices (merged row, score in it).
    """
    # Three answers " A", " B", " C" after one context c of 50 tokens:
    #
    #     rows      c A        c B        c C          150 tokens read
    #     merged    c A, alternatives B, C             50 tokens read
    #     places    (0, 0)     (0, 1)     (0, 2)
    #
    # One forward gives the logits after c, and with them the scores of all three. A longer answer
    # is input itself and keeps its row.
    merged: dict[
        bytes | int, tuple[Row, list[int]]
    ] = {}  # a context's first row, and the tokens to score after it
    places: list[tuple[bytes | int, int]] = []
    for number, row in enumerate(rows):
        key = row.tokens[:-1].tobytes() if row.scored == 1 else number
        choices = merged.setdefault(key, (row, []))[1]
        token = int(row.tokens[-1])
        if token not in choices:
            choices.append(token)
        places.append((key, choices.index(token)))
    index = {key: number for number, key in enumerate(merged)}
    distinct = [Row(row.tokens, row.scored, tuple(choices[1:])) for row, choices in merged.values()]
    return distinct, [(index[key], choice) for key, choice in places]
