"""How a model of zero_tp answers lm-eval's requests.

`Harness` is lm-eval's own Hugging Face adapter, from which it takes how text is cut into tokens and how generated text
is finished; what it computes, and on which rank, is ours. lm-eval sees one process everywhere: every rank builds all
requests, batches are dealt to the data-parallel ranks (scoring.py), and every rank gets all the answers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from zero_tp.errors import UserError
from zero_tp.evaluation.cloze import cut
from zero_tp.evaluation.lm_eval_parts import (
    HFLM,
    SEEDS,
    Collator,
    get_rolling_token_windows,
    make_disjoint_window,
    normalize_gen_kwargs,
    stop_sequences_criteria,
)
from zero_tp.evaluation.scoring import Report, Row
from zero_tp.evaluation.tasks import Subject


class Harness(HFLM):
    """An lm-eval `LM` of a `Subject`. Every rank of its grid makes one and calls it with the same requests.

    Attributes:
        tokens: scored or generated so far; tokens_computed: read by the model.
        truncated: requests whose context was longer than the model's positions.
    """

    def __init__(self, subject: Subject, report: Report):
        evaluator = subject.evaluator
        # A stand-in, because lm-eval would tie the weights of a live model again.
        model = SimpleNamespace(config=subject.config, device=torch.device(evaluator.device), name_or_path="")
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(subject.tokenizer),  # it sets a padding token
            max_length=subject.positions,
            batch_size=evaluator.batch_size,
        )
        self.subject, self.report = subject, report
        self.tokens = self.tokens_computed = self.truncated = 0

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, arg-max) of each request's continuation (its third part) after its context (the second).

        Requests of one token after the same context share a forward.
        """
        rows, places = shared([cut(context, continuation, self.max_length) for _, context, continuation in requests])
        self._agree([(row.tokens.tolist(), row.scored, row.alternatives) for row in rows])
        found = self.subject.evaluator.score(rows, self.report)
        self.tokens += sum(len(continuation) for _, _, continuation in requests)
        self.tokens_computed += sum(map(len, rows))
        self.truncated += sum(len(context) + len(after) > self.max_length + 1 for _, context, after in requests)
        answers = [(-found[row][alternative].nll, found[row][alternative].greedy) for row, alternative in places]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Each text's log-likelihood, in windows that score every token once and don't overlap but for the last."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            counts.append(len(windows) - before)
        answers = iter(self._loglikelihood_tokens(windows))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Each request's text, up to its stop sequences. A batch has requests with the same options.

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
        self._agree(arguments)
        order = Collator(
            arguments,
            sort_fn=lambda asked: (-len(self.tok_encode(asked[0])), asked[0]),
            group_by="gen_kwargs",
            group_fn=lambda asked: asked[1],
        )
        batches = list(enumerate(order.get_batched(n=self.subject.evaluator.batch_size)))
        done = 0

        def after(computed: Sequence[tuple[int, Any]]) -> None:
            nonlocal done
            done += sum(len(batch) for _, batch in computed)
            self.report(done, len(requests))

        texts = self.subject.evaluator.map(self._generated, batches, after)
        self.tokens += sum(len(self.tok_encode(text, add_special_tokens=False)) for each in texts for text in each)
        found: list[str] = order.get_original([text for each in texts for text in each])
        return found

    def _generated(self, numbered: tuple[int, Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
        number, batch = numbered
        torch.manual_seed(SEEDS["torch"] + number)  # what is drawn depends on no rank
        texts: list[str] = super().generate_until([SimpleNamespace(args=asked) for asked in batch], disable_tqdm=True)
        return texts

    @torch.no_grad()
    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """[b, n] → [b, n + generated], by the model's own `generate`."""
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

    def _agree(self, asked: Any) -> None:
        """RuntimeError: ranks have built different requests, and would compute what doesn't belong together."""
        topology = self.subject.evaluator.topology
        if topology.world == 1:
            return
        digests: list[Any] = [None] * topology.world
        dist.all_gather_object(digests, hashlib.sha256(repr(asked).encode()).hexdigest())
        if len(set(digests)) > 1:
            raise RuntimeError("ranks have built different requests for a task: is its data the same on all machines?")


def shared(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Rows with the same context and one token to score become one with alternatives.

    Returns:
        The rows, and for each given one (row, place among its scores).
    """
    distinct: list[Row] = []
    places: list[tuple[int, int]] = []
    by_context: dict[bytes, int] = {}
    for row in rows:
        context = row.tokens[:-1].tobytes()
        at = by_context.get(context) if row.scored == 1 else None
        if at is None:
            if row.scored == 1:
                by_context[context] = len(distinct)
            places.append((len(distinct), 0))
            distinct.append(row)
            continue
        first = distinct[at]
        choices = (int(first.tokens[-1]), *first.alternatives)
        token = int(row.tokens[-1])
        if token not in choices:
            distinct[at] = Row(first.tokens, 1, (*first.alternatives, token))
            choices += (token,)
        places.append((at, choices.index(token)))
    return distinct, places
