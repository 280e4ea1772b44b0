"""Mistakes in zero-shot evaluation: figures that are a little off."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOSS = "tests/distributed/test_loss.py::"

MUTANTS: dict[str, Mutant] = {
    "overlaps-scored-twice": Mutant(
        "Every window scores all its targets, those of the window before too.",
        "zero_tp/evaluation/perplexity.py",
        "yield Row(tokens[start : end + 1], end - scored)",
        "yield Row(tokens[start : end + 1], end - start)",
        ("tests/unit/test_perplexity.py::test_windows_score_each_target_once",),
    ),
    "line-breaks-not-counted": Mutant(
        "T_o counts words, without the line breaks that stand between spaces.",
        "zero_tp/evaluation/wikitext.py",
        'len(text.strip().split(" "))',
        "len(text.split())",
        ("tests/unit/test_wikitext.py::test_tokens_of_the_validation_split",),
    ),
    "first-answer-for-all": Mutant(
        "Answers that share a forward all get the first one's score.",
        "zero_tp/evaluation/harness.py",
        "answered_by.append((key, choices.index(token)))",
        "answered_by.append((key, 0))",
        ("tests/unit/test_harness.py::test_one_token_answers_share_a_forward",),
    ),
    "every-tie-is-first": Mutant(
        "A target with the greatest logit counts as the arg-max though a token before it has the same.",
        "zero_tp/parallel/scores.py",
        "softmax.chosen_first(choices == 1)",
        "owns.sum(0) == softmax.greatest.unsqueeze(1)",
        (LOSS + "test_of_tied_tokens_the_first_is_the_choice",),
    ),
}
