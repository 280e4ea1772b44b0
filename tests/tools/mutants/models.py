"""Parallel parts of the models: norms, positions and dropout of sequence shards, heads of the attention."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

TRANSFORMER = "zero_tp/models/transformer.py::"
PROJECTION = "zero_tp/models/projection.py::"
MOE = "zero_tp/models/moe.py::"

GRADIENTS = "tests/models/test_model.py::test_loss_logits_and_every_gradient"
MASKS = "tests/parallel/test_random.py::test_masks_over_a_grid"
FEWER_HEADS = "tests/architectures/test_decoders.py::test_each_family[fewer KV heads than TP-sdpa-4]"

EXPERTS = "tests/models/test_experts.py::test_both_losses_and_every_gradient[{}-random]"

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
        (MASKS + "[eager-2-False]",),
    ),
    "sequence-shards-drop-alike": Mutant(
        "Under SP every rank drops the same elements of its shard.",
        TRANSFORMER + "Transformer.__init__",
        "PER_RANK if make.topology.sequence else SHARED",
        "SHARED",
        (MASKS + "[eager-2-True]",),
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
    "keys-normed-by-own-heads": Mutant(
        "The norm of all heads takes the mean over the rank's own.",
        "zero_tp/models/norm.py::_SplitRMSNorm.forward",
        "all_reduce((rows.float().square() * share).sum(-1, keepdim=True), group)",
        "(rows.float().square() * share).sum(-1, keepdim=True)",
        (EXPERTS.format("olmoe-2-False"),),
    ),
    "shared-heads-counted-twice": Mutant(
        "The norm of all heads counts a KV head once for each rank that has it.",
        "zero_tp/models/norm.py::SplitRMSNorm.forward",
        "1 / count",
        "1.0",
        (EXPERTS.format("olmoe-4-False"),),
    ),
    "router-gradients-not-summed": Mutant(
        "A router keeps the gradient of the rank's columns of the experts.",
        MOE + "Router.__init__",
        '"partial" if make.topology.tensor > 1 else "identical"',
        '"identical"',
        (EXPERTS.format("mixtral-2-False"),),
    ),
    "shared-gates-not-summed": Mutant(
        "Under SP the gate of a shared expert keeps the gradient of the rank's own tokens.",
        MOE + "SharedExpert.__init__",
        '"partial" if make.topology.sequence else "identical"',
        '"identical"',
        (EXPERTS.format("qwen2_moe-2-True"),),
    ),
    "balance-counted-on-every-rank": Mutant(
        "The load-balancing loss counts once for each TP rank in the router's gradient.",
        "zero_tp/models/router_balance.py::_Loss.backward",
        "of_loss * balance.experts.count * share / balance.tensor_size",
        "of_loss * balance.experts.count * share",
        (EXPERTS.format("mixtral-2-False"),),
    ),
    "choices-not-normalised": Mutant(
        "The weights of a token's experts do not add up to 1.",
        MOE + "Router.forward",
        "weights / weights.sum(-1, keepdim=True)",
        "weights",
        (EXPERTS.format("mixtral-2-False"),),
    ),
    "groups-end-one-early": Mutant(
        "The last row of each expert is computed by the next one.",
        "zero_tp/parallel/grouped.py::Routing.of",
        "sizes.cumsum(0, dtype=torch.int32)",
        "(sizes.cumsum(0, dtype=torch.int32) - (torch.arange(count) < count - 1).int()).clamp(min=0)",
        (EXPERTS.format("mixtral-2-False"),),
    ),
    "kv-heads-of-other-queries": Mutant(
        "With fewer KV heads than TP every rank uses the first ones.",
        PROJECTION + "GroupedProjection.__init__",
        "(own.start * spec.head_size, own.stop * spec.head_size)",
        "(0, len(own) * spec.head_size)",
        (FEWER_HEADS,),
    ),
}
