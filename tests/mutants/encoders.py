"""Encoders: attention in both directions, gathered rows, heads with a bias."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENCODERS = "tests/distributed/test_encoders.py::"
ALONE = "tests/unit/test_encoders.py::"
ROWS = ENCODERS + "test_loss_of_gathered_rows[2-True]"
GRADIENTS = ALONE + "test_logits_losses_and_every_gradient[bert]"

MUTANTS: dict[str, Mutant] = {
    "rows-of-others-gathered": Mutant(
        "Under SP a rank adds rows of its own shard in the places of the other ranks' rows.",
        "zero_tp/parallel/collectives.py",
        "found = rows[own.masked_fill(elsewhere, 0)].masked_fill(elsewhere.unsqueeze(1), 0.0)",
        "found = rows[own.masked_fill(elsewhere, 0)]",
        (ROWS,),
    ),
    "decoder-bias-not-trained": Mutant(
        "The bias of the decoder has no gradient.",
        "zero_tp/parallel/loss.py",
        "bias_gradient += logits.sum(0, dtype=torch.float32)",
        "bias_gradient += 0.0",
        (ROWS,),
    ),
    "padding-is-seen": Mutant(
        "Tokens of an encoder see padding.",
        "zero_tp/models/context.py",
        "return (kept | ~kept.any(1, keepdim=True))[:, None, None, :]",
        "return torch.ones_like(kept)[:, None, None, :]",
        (GRADIENTS,),
    ),
    "encoder-looks-back-alone": Mutant(
        "An encoder without padding computes causal attention.",
        "zero_tp/models/attention.py",
        "causal = self.causal and mask is None and query.shape[2] > 1",
        "causal = mask is None and query.shape[2] > 1",
        ("tests/distributed/test_masked_task.py::test_masked_equals_a_plain_loop",),
    ),
    "accuracy-of-every-tie": Mutant(
        "In training a masked token counts as right on every rank whose own first choice it is.",
        "zero_tp/parallel/loss.py",
        "right = softmax.chosen_first(softmax.others[:, 1] == 1) if choosing else None",
        "right = (softmax.others[:, 1] == 1).any(0) if choosing else None",
        (ROWS,),
    ),
    "the-later-segment-is-cut": Mutant(
        "Two segments end after s - 3 tokens, within a sentence that tells which is the later one.",
        "zero_tp/data/masked.py",
        "if self.sentence_order and len(begins):",
        "if False:",
        ("tests/unit/test_masked_samples.py::test_no_full_stop_tells_the_order",),
    ),
}
