"""Tensor-parallel layers, their collectives, gradients, layouts, random streams and loss."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

LINEAR = "zero_tp/parallel/linear.py::"
LOSS = "zero_tp/parallel/loss.py::"
RANDOM = "zero_tp/parallel/random.py::RandomStreams."
SEED = "zero_tp/topology.py::Topology.seed"

LAYERS = "tests/parallel/test_layers.py::test_"
COLUMN_SP = LAYERS + "linear_layers_equal_torch[column-parts0-True-2-True]"
ROW_SP = LAYERS + "linear_layers_equal_torch[row-parts2-True-2-True]"
ROW_TP = LAYERS + "linear_layers_equal_torch[row-parts2-True-2-False]"
GRADIENTS_SP = "tests/models/test_model.py::test_loss_logits_and_every_gradient[-2-True]"
NCCL = "tests/parallel/test_nccl.py::test_a_step_computes_the_same_on_every_schedule[gpt2-SP-full]"
MASKS = "tests/parallel/test_random.py::test_masks_over_a_grid[eager-2-False]"
REPLAY = "tests/parallel/test_random.py::test_recomputation_replays_the_masks[full-sdpa-True]"
RESUME = "tests/checkpoint/test_checkpoint.py::test_a_resumed_run_is_the_run_that_never_stopped[4-2-1-fp32-none]"
STEP = "tests/training/test_engine.py::test_loss_and_gradient_norm_of_a_step"
FROZEN = "tests/parallel/test_loss.py::test_frozen_weight_or_hidden_states[hidden-True]"

MUTANTS: dict[str, Mutant] = {
    # ---- linear layers -----------------------------------------------------------------------------------------------
    "row-bias-forgotten": Mutant(
        "The bias after the reduction is left out; biases start at zero, so the first loss is right.",
        LINEAR + "_RowParallel.forward",
        "whole.add_(bias)",
        "whole.add_(0 * bias)",
        (ROW_TP,),
    ),
    "row-bias-on-every-rank": Mutant(
        "The bias is added before the reduction, t times.",
        LINEAR + "_RowParallel.forward",
        "partial = F.linear(matrix, weight).unflatten(0, rows)",
        "partial, bias = F.linear(matrix, weight, bias).unflatten(0, rows), None",
        (ROW_TP,),
    ),
    "row-bias-gradient-of-the-shard": Mutant(
        "Under SP the row bias takes its gradient from the rank's own tokens.",
        LINEAR + "_RowParallel.backward",
        "whole.sum((0, 1))",
        "gradient.sum((0, 1))",
        (ROW_SP,),
    ),
    "reduced-forward-and-backward": Mutant(
        "f̄ sums in backward too: gradients before it count t times, and Adam hides the factor.",
        LINEAR + "_RowParallel.backward",
        "gradient @ weight",
        "all_reduce(gradient.clone(), ctx.group) @ weight",
        (ROW_TP,),
    ),
    "own-shard-for-the-gathered-input": Mutant(
        "Backward under SP computes the weight's gradient from this rank's shard instead of the whole input.",
        LINEAR + "_ColumnParallel.backward",
        "gathering.wait() if gathering is not None else shard",
        "shard.repeat(len(gradients[0]) // len(shard), 1, 1)",
        (COLUMN_SP,),
    ),
    "own-rows-for-the-gathered": Mutant(
        "Forward under SP multiplies this rank's rows in the place of the other ranks' rows.",
        LINEAR + "_gathered_products",
        "whole[first:end]",
        "shard.repeat((end - first) // rows, 1, 1)",
        (COLUMN_SP,),
    ),
    # ---- the order of collectives and computation on an accelerator --------------------------------------------------
    "reduced-gradient-not-waited-for": Mutant(
        "A column layer returns its input gradient while the reduce-scatter may still run.",
        LINEAR + "_ColumnParallel.backward",
        "reducing.wait()",
        "reducing._tensor",
        (NCCL,),
    ),
    "gathered-rows-not-waited-for": Mutant(
        "Forward multiplies the other ranks' rows while the all-gather may still run.",
        LINEAR + "_gathered_products",
        "gathering.wait()",
        "gathering._tensor",
        (NCCL,),
    ),
    "input-cleared-during-the-reduce-scatter": Mutant(
        "A column layer clears the memory of its input gradient while the reduce-scatter may still read it.",
        LINEAR + "_ColumnParallel.backward",
        "reducing = start(whole_gradient, ctx.group)",
        "reducing = start(whole_gradient, ctx.group)\nwhole_gradient.zero_()",
        (NCCL,),
    ),
    "summed-gradients-not-waited-for": Mutant(
        "DeepSpeed reduces a gradient over DP while the sum over TP still runs.",
        "zero_tp/parallel/gradients.py::_register_sum",
        "total.start(gradient, async_op=False).wait()[0]",
        "total.start(gradient)._tensor[0]",
        ("tests/zero/test_asynchronous.py::test_an_asynchronous_device_gives_the_same_run[3]",),
    ),
    # ---- gradients, layouts, initial weights -------------------------------------------------------------------------
    "foreign-tokens-look-up-row-zero": Mutant(
        "The embedding adds its first row for every token that another rank holds.",
        "zero_tp/parallel/embedding.py::VocabParallelEmbedding.forward",
        "embedded.masked_fill(remote.unsqueeze(-1), 0.0)",
        "embedded * 1.0",
        (LAYERS + "embedding_equals_torch[5-2-True]",),
    ),
    "hook-returns-the-part": Mutant(
        "The gradient hook fires and is counted, but returns the rank's own part.",
        "zero_tp/parallel/gradients.py::_register_sum",
        "total.start(gradient, async_op=False).wait()[0]",
        "(total.start(gradient).wait(), gradient)[1]",
        (GRADIENTS_SP,),
    ),
    "replicas-counted-on-every-rank": Mutant(
        "Without ZeRO the gradient norm counts replicated parameters t times.",
        "zero_tp/parallel/gradients.py::gradient_norm",
        "isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0",
        "True",
        ("tests/training/test_engine.py::test_norm_and_clipping_without_zero[0.1]",),
    ),
    "unmarked-shards": Mutant(
        "No shard carries the mark that DeepSpeed's gradient norm reads: it counts those of TP rank 0 only.",
        "zero_tp/parallel/layout.py::MARKS",
        '("tensor_model_parallel", "model_parallel")',
        "()",
        (STEP + "[True-1]", STEP + "[True-3]"),
    ),
    "fused-parts-joined-plainly": Mutant(
        "The ranks' shards are put one after another, although each holds a piece of Q, K and V.",
        "zero_tp/parallel/layout.py::Sharded.unshard",
        "lengths = self.piece_sizes(len(shards))",
        "return torch.cat(list(shards), self.dim).narrow(self.dim, 0, sum(self.parts))",
        ("tests/weights/test_weights.py::test_saved_models_open_in_transformers[changes0-2]",),
    ),
    "drawn-elsewhere-and-lost": Mutant(
        "A weight misses the blocks that the other data-parallel ranks drew.",
        "zero_tp/parallel/parameter.py::ShardedSeededInit._draw",
        "others.copy_(gathered)",
        "pass",
        ("tests/training/test_engine.py::test_data_parallel_ranks_draw_each_weight_once_among_them[1-1-bf16]",),
    ),
    # ---- random streams ----------------------------------------------------------------------------------------------
    "one-stream-for-all-ranks": Mutant(
        "The per-rank stream has the same seed on every TP rank: each rank's heads drop the same elements.",
        SEED,
        "name = f\"{base}/{self.data_rank}/{self.tensor_rank if per_rank else 'shared'}\"",
        'name = f"{base}/{self.data_rank}/shared"',
        (MASKS,),
    ),
    "data-ranks-drop-alike": Mutant(
        "DP ranks draw the same masks for different samples.",
        SEED,
        "name = f\"{base}/{self.data_rank}/{self.tensor_rank if per_rank else 'shared'}\"",
        "name = f\"{base}/{self.tensor_rank if per_rank else 'shared'}\"",
        (MASKS,),
    ),
    "streams-left-rewound": Mutant(
        "Recomputation replays its masks and does not restore the streams: the next micro-batch draws the same masks.",
        RANDOM + "replaying",
        "self._generators = current",
        "pass",
        (REPLAY,),
    ),
    "streams-not-resumed": Mutant(
        "A resumed run draws the dropout masks of its first steps again.",
        RANDOM + "load_state_dict",
        "generator.set_state(states[name])",
        "pass",
        (RESUME,),
    ),
    # ---- loss --------------------------------------------------------------------------------------------------------
    "padding-gets-probability": Mutant(
        "Rows that pad the vocabulary have a logit of zero and take part in the softmax.",
        LOSS + "_without_padding",
        "torch.finfo(torch.float32).min",
        "0.0",
        (FROZEN,),
    ),
    "ignored-labels-counted": Mutant(
        "The mean is over all labels, ignored ones too.",
        LOSS + "_divisor",
        "counted.sum()",
        "torch.tensor(counted.numel())",
        (FROZEN,),
    ),
    "upstream-gradient-ignored": Mutant(
        "The loss forms its gradient in forward and forgets the factor of accumulation and loss scaling.",
        LOSS + "_LinearCrossEntropy.backward",
        "gradient.float()",
        "1.0",
        (FROZEN,),
    ),
    "last-block-alone": Mutant(
        "The weight's gradient is that of the last block of tokens.",
        LOSS + "_add_product_",
        "total[rows].add_(first[:, rows].t() @ second)",
        "total[rows].copy_(first[:, rows].t() @ second)",
        ("tests/parallel/test_loss.py::test_bf16[24-5-10-False]",),
    ),
}
