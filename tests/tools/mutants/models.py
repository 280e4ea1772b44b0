"""Parallel parts of the models: norms, positions and dropout of sequence shards, heads of the attention."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

TRANSFORMER = "zero_tp/models/transformer.py::"
PROJECTION = "zero_tp/models/projection.py::"

GRADIENTS = "tests/distributed/test_model.py::test_loss_logits_and_every_gradient"
MASKS = "tests/distributed/test_random.py::test_masks_over_a_grid"
FEWER_HEADS = "tests/distributed/test_decoders.py::test_each_family[fewer KV heads than TP-sdpa-4]"

MUTANTS: dict[str, Mutant] = {
    "norm-gradients-not-summed": Mutant(
        "Under SP every norm keeps the gradient of its own tokens, and the ranks' norms drift apart.",
        "zero_tp/models/norm.py::_LayerNormOfPart.backward",
        "ctx.total.start(*of(False, True, True)[1:])",
        "GradientSum(None).start(*of(False, True, True)[1:])",
        (GRADIENTS + "[-2-True]",),
    ),
    "final-norm-forgotten": Mutant(
        "One norm, outside the layers, ignores that its input is a sequence shard.",
        TRANSFORMER + "Transformer.__init__",
        'NORMS[spec.norm](make.child("final_norm"), spec.hidden, spec.norm_epsilon, part=make.topology.sequence)',
        'NORMS[spec.norm](make.child("final_norm"), spec.hidden, spec.norm_epsilon, part=False)',
        (GRADIENTS + "[-2-True]",),
    ),
    "positions-start-at-zero": Mutant(
        "Under SP every rank adds the first positions to its shard.",
        TRANSFORMER + "Embedding.forward",
        "self.tensor_rank * length if sequence else 0",
        "0",
        (GRADIENTS + "[-2-True]",),
    ),
    "residual-masks-differ": Mutant(
        "Without SP each TP rank drops other elements of the residual stream, which all ranks should repeat.",
        TRANSFORMER + "Transformer.__init__",
        "PER_RANK if make.topology.sequence else SHARED",
        "PER_RANK",
        (MASKS + "[False]",),
    ),
    "sequence-shards-drop-alike": Mutant(
        "Under SP every rank drops the same elements of its shard.",
        TRANSFORMER + "Transformer.__init__",
        "PER_RANK if make.topology.sequence else SHARED",
        "SHARED",
        (MASKS + "[True]",),
    ),
    "qkv-cut-plainly": Mutant(
        "The fused QKV is one part: a rank's queries are keys to another, and TP changes the model.",
        PROJECTION + "FusedProjection.__init__",
        "(width, width, width)",
        "(3 * width,)",
        (GRADIENTS + "[-2-False]",),
    ),
    "kv-gradients-not-summed": Mutant(
        "Replicated keys and values keep the gradient of the rank's own queries.",
        PROJECTION + "GroupedProjection.__init__",
        'Replicated("partial")',
        'Replicated("identical")',
        (FEWER_HEADS,),
    ),
    "kv-heads-of-other-queries": Mutant(
        "With fewer KV heads than TP every rank uses the first ones.",
        PROJECTION + "GroupedProjection.__init__",
        "range(start, start + local)",
        "range(local)",
        (FEWER_HEADS,),
    ),
}
