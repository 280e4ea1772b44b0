"""Ways to break the library that no exception, and often no loss curve, tells of; tests/mutations.py tries them.

Each is a mistake of the kind that this field makes: the code still runs and trains. `old` occurs exactly once in
`file`, so that a mutant whose code has changed is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = "tests/distributed/test_layers.py::"
MODEL = "tests/distributed/test_model.py::"
LOSS = "tests/distributed/test_loss.py::"
RANDOM = "tests/distributed/test_random.py::"
MASKS = "tests/distributed/test_dropout_masks.py::"
RECOMPUTE = "tests/distributed/test_recompute.py::"
WEIGHTS = "tests/distributed/test_weights.py::"
ENGINE = "tests/distributed/test_engine.py::"

GRADIENTS_SP = MODEL + "test_loss_logits_and_every_gradient[-2-True]"
GRADIENTS_TP = MODEL + "test_loss_logits_and_every_gradient[-2-False]"
COLUMN_SP = LAYERS + "test_linear_layers_equal_torch[column-parts0-True-2-True]"
ROW_SP = LAYERS + "test_linear_layers_equal_torch[row-parts2-True-2-True]"
ROW_TP = LAYERS + "test_linear_layers_equal_torch[row-parts2-True-2-False]"
RECOMPUTE_TP = RECOMPUTE + "test_recomputing_changes_no_bit[2-False-1]"
RECOMPUTE_SP = RECOMPUTE + "test_recomputing_changes_no_bit[2-True-1]"
EVALUATION = ENGINE + "test_validation_is_the_mean_over_all_labels[1]"
RESUME = "tests/distributed/test_checkpoint.py::test_a_resumed_run_is_the_run_that_never_stopped[4-2-1-fp32-none]"
STEP = ENGINE + "test_loss_and_gradient_norm_of_a_step"


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        imitates: the silent failure, in a sentence.
        tests: pytest node ids, of which at least one must fail.
        guard: words of the library's own check that stops a run of this mutant.
    """

    imitates: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    guard: str = ""


MUTANTS: dict[str, Mutant] = {
    # ---- gradients of what is replicated over TP -------------------------------------------------------------------
    "norm-gradients-not-summed": Mutant(
        "Under SP every norm keeps the gradient of its own tokens, and the ranks' norms drift apart.",
        "zero_tp/models/norm.py",
        "start_all_reduce(torch.stack((weight_part, bias_part)), ctx.group)",
        "start_all_reduce(torch.stack((weight_part, bias_part)), None)",
        (GRADIENTS_SP,),
    ),
    "final-norm-forgotten": Mutant(
        "One norm, outside the layers, is not told that its input is a sequence shard.",
        "zero_tp/models/transformer.py",
        "return self.final_norm(stream, sequence=sequence)",
        "return self.final_norm(stream, sequence=False)",
        (GRADIENTS_SP,),
    ),
    "position-gradient-not-summed": Mutant(
        "The position embedding is classified as if every rank had its whole gradient under SP.",
        "zero_tp/models/position.py",
        'Replicated("partial" if make.topology.sequence else "identical")',
        'Replicated("identical")',
        (GRADIENTS_SP,),
    ),
    "hook-returns-the-part": Mutant(
        "The gradient hook fires and is counted, but what it returns is the rank's own part.",
        "zero_tp/parallel/layout.py",
        "return all_reduce(gradient.contiguous().clone(), group)",
        "return gradient",
        (GRADIENTS_SP,),
    ),
    "positions-start-at-zero": Mutant(
        "Under SP every rank adds the first positions to its shard.",
        "zero_tp/models/transformer.py",
        "first = self.tensor_rank * length if sequence else 0",
        "first = 0",
        (GRADIENTS_SP,),
    ),
    # ---- linear layers ---------------------------------------------------------------------------------------------
    "row-bias-forgotten": Mutant(
        "The bias after the reduction is left out; biases start at zero, so the first loss is right.",
        "zero_tp/parallel/linear.py",
        "return whole if self.bias is None else whole + self.bias",
        "return whole if self.bias is None else whole + 0 * self.bias",
        (ROW_TP,),
    ),
    "row-bias-on-every-rank": Mutant(
        "The bias is added before the reduction, t times.",
        "zero_tp/parallel/linear.py",
        "whole = reduce_from_tensor_region(F.linear(tensor, self.weight), self.group)\n"
        "        return whole if self.bias is None else whole + self.bias",
        "return reduce_from_tensor_region(F.linear(tensor, self.weight, self.bias), self.group)",
        (ROW_TP,),
    ),
    "row-bias-gradient-of-the-shard": Mutant(
        "Under SP the row bias takes its gradient from the rank's own tokens.",
        "zero_tp/parallel/linear.py",
        "whole.sum((0, 1)) if needs_bias else None",
        "gradient.sum((0, 1)) if needs_bias else None",
        (ROW_SP,),
    ),
    "reduced-forward-and-backward": Mutant(
        "f̄ sums in backward too, so that gradients before it count t times (Adam hides the factor).",
        "zero_tp/parallel/collectives.py",
        "return all_reduce(tensor.contiguous().clone(), group)\n\n"
        "    @staticmethod\n"
        "    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:\n"
        "        return gradient, None",
        "ctx.group = group\n"
        "        return all_reduce(tensor.contiguous().clone(), group)\n\n"
        "    @staticmethod\n"
        "    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:\n"
        "        return all_reduce(gradient.contiguous().clone(), ctx.group), None",
        (LAYERS + "test_operators_do_what_they_are_defined_to_do[2]", ROW_TP),
    ),
    "input-gradient-reduced-twice": Mutant(
        "The column layer's input gradient is all-reduced a second time.",
        "zero_tp/parallel/linear.py",
        "return reducing.wait() if reducing is not None else None, weight_gradient, bias_gradient, None, None",
        "if reducing is not None and not ctx.sequence:\n"
        "            reducing = start_all_reduce(reducing.wait(), ctx.group)\n"
        "        return reducing.wait() if reducing is not None else None, weight_gradient, bias_gradient, None, None",
        (GRADIENTS_TP,),
    ),
    "own-shard-for-the-gathered-input": Mutant(
        "Backward under SP takes the weight's gradient against this rank's shard in place of the whole input.",
        "zero_tp/parallel/linear.py",
        "whole = gathering.wait() if gathering is not None else shard",
        "whole = shard.repeat(len(gradient) // len(shard), 1, 1)",
        (COLUMN_SP,),
    ),
    "gathered-input-in-another-order": Mutant(
        "The input gathered for backward has the ranks' shards in another order than forward had.",
        "zero_tp/parallel/linear.py",
        "whole = gathering.wait() if gathering is not None else shard",
        "whole = gathering.wait().roll(len(shard), 0) if gathering is not None else shard",
        (COLUMN_SP,),
    ),
    "foreign-tokens-look-up-row-zero": Mutant(
        "The embedding adds its first row for every token that another rank holds.",
        "zero_tp/parallel/embedding.py",
        "looked_up = looked_up.masked_fill(elsewhere.unsqueeze(-1), 0.0)",
        "looked_up = looked_up * 1.0",
        (LAYERS + "test_embedding_equals_torch[5-2-True]",),
    ),
    # ---- layouts ---------------------------------------------------------------------------------------------------
    "qkv-cut-plainly": Mutant(
        "The fused QKV is one part: with TP a rank's queries are keys to another, and TP changes the model.",
        "zero_tp/models/attention.py",
        "spec.hidden, (width, width, width), bias",
        "spec.hidden, (3 * width,), bias",
        (GRADIENTS_TP,),
    ),
    "qkv-cut-plainly-on-import": Mutant(
        "Import cuts c_attn into t plain pieces.",
        "zero_tp/weights/load.py",
        "local.copy_(layout.shard(tensor, topology.tensor_rank, topology.tensor))",
        "parts = getattr(layout, 'parts', ())\n"
        "        plain = type(layout)(layout.dim, (sum(parts),), layout.padded) if parts else layout\n"
        "        local.copy_(plain.shard(tensor, topology.tensor_rank, topology.tensor))",
        (WEIGHTS + "test_from_pretrained[changes0-5GB-saved0-None]",),
    ),
    "qkv-joined-plainly-on-export": Mutant(
        "Export puts the ranks' fused pieces one after another.",
        "zero_tp/weights/export.py",
        "return layout.unshard(list(all_gather(local.unsqueeze(0), group)))",
        "plain = Sharded(layout.dim, (sum(layout.parts),), layout.padded)\n"
        "    return plain.unshard(list(all_gather(local.unsqueeze(0), group)))",
        (WEIGHTS + "test_saved_models_open_in_transformers[changes0-2]",),
    ),
    "unmarked-shards": Mutant(
        "No shard carries the mark that DeepSpeed's gradient norm reads: it counts those of TP rank 0 only.",
        "zero_tp/parallel/layout.py",
        'MARKS = ("tensor_model_parallel", "model_parallel")',
        "MARKS: tuple[str, ...] = ()",
        (STEP + "[True-1]", STEP + "[True-3]"),
    ),
    # ---- random streams --------------------------------------------------------------------------------------------
    "one-stream-for-all-ranks": Mutant(
        "The per-rank stream has the same seed on every TP rank: each rank's heads drop the same elements.",
        "zero_tp/topology.py",
        "self.tensor_rank if per_rank else 'shared'",
        "'shared'",
        (RANDOM + "test_masks_over_a_grid[False]",),
    ),
    "data-ranks-drop-alike": Mutant(
        "DP ranks draw the same masks for different samples.",
        "zero_tp/topology.py",
        'f"{base}/{self.data_rank}/',
        'f"{base}/0/',
        (RANDOM + "test_masks_over_a_grid[False]",),
    ),
    "residual-masks-differ": Mutant(
        "Without SP each TP rank drops other elements of the residual stream that all should repeat.",
        "zero_tp/models/transformer.py",
        "stream = PER_RANK if make.topology.sequence else SHARED",
        "stream = PER_RANK",
        (RANDOM + "test_masks_over_a_grid[False]",),
    ),
    "sequence-shards-drop-alike": Mutant(
        "Under SP every rank drops the same elements of its shard.",
        "zero_tp/models/transformer.py",
        "stream = PER_RANK if make.topology.sequence else SHARED",
        "stream = SHARED",
        (RANDOM + "test_masks_over_a_grid[True]",),
    ),
    # ---- activation memory -----------------------------------------------------------------------------------------
    "checkpoints-partitioned-under-sp": Mutant(
        "P_a slices and gathers sequence shards as if every rank held the same checkpoint.",
        "zero_tp/activations/memory.py",
        "if topology.sequence or topology.tensor == 1:",
        "if topology.tensor == 1:",
        (RECOMPUTE_SP,),
    ),
    "dropout-not-replayed": Mutant(
        "Recomputation draws new masks, and gradients belong to another network than the loss.",
        "zero_tp/activations/recompute.py",
        "with torch.enable_grad(), ctx.streams.replaying(ctx.states):",
        "with torch.enable_grad():",
        (MASKS + "test_recomputation_replays_the_masks[full-sdpa-True]",),
    ),
    "streams-left-rewound": Mutant(
        "Recomputation replays its masks and leaves the streams there: the next micro-batch draws them again.",
        "zero_tp/parallel/random.py",
        "self._states = now\n",
        "assert now\n",
        (MASKS + "test_recomputation_replays_the_masks[full-sdpa-True]",),
    ),
    "remade-from-the-output": Mutant(
        "A dropped activation is made again from itself: norm(norm(x)), gelu(gelu(x)).",
        "zero_tp/activations/recompute.py",
        "kept, needs_gradient = source.detach(), source.requires_grad",
        "kept, needs_gradient = output.detach().clone(), source.requires_grad",
        (RECOMPUTE_TP,),
    ),
    "slot-handed-out-twice": Mutant(
        "The contiguous buffer gives the same place to two checkpoints, and the later one overwrites the earlier.",
        "zero_tp/activations/contiguous.py",
        "_Slot(self._free.pop(), tensor.shape)",
        "_Slot(self._free[-1], tensor.shape)",
        (RECOMPUTE_TP,),
    ),
    # ---- loss ------------------------------------------------------------------------------------------------------
    "padding-gets-probability": Mutant(
        "Rows that pad the vocabulary have a logit of zero and take part in the softmax.",
        "zero_tp/parallel/loss.py",
        "logits[:, valid:] = torch.finfo(torch.float32).min",
        "logits[:, valid:] = 0.0",
        (LOSS + "test_frozen_weight_or_hidden_states[hidden-True]",),
    ),
    "ignored-labels-counted": Mutant(
        "The mean is over all labels, ignored ones too.",
        "zero_tp/parallel/loss.py",
        "count = counted.sum().float()",
        "count = torch.tensor(float(labels.numel()))",
        (LOSS + "test_frozen_weight_or_hidden_states[hidden-True]",),
    ),
    "upstream-gradient-ignored": Mutant(
        "The loss forms its gradient in forward and forgets the factor that accumulation and loss scaling bring.",
        "zero_tp/parallel/loss.py",
        "scale = gradient.float() / count.clamp(min=1.0)",
        "scale = 1.0 / count.clamp(min=1.0)",
        (LOSS + "test_frozen_weight_or_hidden_states[hidden-True]",),
    ),
    "last-micro-batch-for-all": Mutant(
        "The reported loss is that of the last micro-batch.",
        "zero_tp/training/engine.py",
        "total += loss.detach()",
        "total = loss.detach().double() * len(micro_batches)",
        (STEP + "[True-1]",),
    ),
    # ---- engine ----------------------------------------------------------------------------------------------------
    "norm-of-rank-zero": Mutant(
        "Without ZeRO the gradient norm counts the shards of TP rank 0 only, and clipping changes.",
        "zero_tp/training/clipping.py",
        "(isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0)",
        "topology.tensor_rank == 0",
        (ENGINE + "test_norm_and_clipping_without_zero[0.1]",),
    ),
    "replicas-counted-on-every-rank": Mutant(
        "Without ZeRO the gradient norm counts replicated parameters t times.",
        "zero_tp/training/clipping.py",
        "(isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0)",
        "True",
        (ENGINE + "test_norm_and_clipping_without_zero[0.1]",),
    ),
    "zero-init-with-mpu-alone": Mutant(
        "zero.Init ignores its mpu's DP group and overwrites the other TP ranks' shards with rank 0's.",
        "zero_tp/training/engine.py",
        "data_parallel_group=self.topology.data_group,\n",
        "",
        (STEP + "[True-3]",),
        guard="differs between tensor parallel ranks",
    ),
    "norms-decay": Mutant(
        "Weight decay takes norms and biases too.",
        "zero_tp/training/engine.py",
        '{"params": flat, "weight_decay": 0.0}',
        '{"params": flat, "weight_decay": weight_decay}',
        (ENGINE + "test_norms_and_biases_do_not_decay[1]",),
    ),
    "partitions-taken-for-biases": Mutant(
        "Under ZeRO-3 the shape that the module shows is its partition's, and nothing decays.",
        "zero_tp/training/engine.py",
        "matrices = [parameter for _, parameter in named if len(whole_shape(parameter)) >= 2]",
        "flat, matrices = [p for _, p in named if p.ndim < 2], [p for _, p in named if p.ndim >= 2]",
        (ENGINE + "test_norms_and_biases_do_not_decay[3]",),
    ),
    "first-step-kept": Mutant(
        "DeepSpeed's step on zero gradients stays: masters decayed once, Adam's bias correction one step ahead.",
        "zero_tp/training/engine.py",
        "self._undo_first_step()\n",
        "pass\n",
        (ENGINE + "test_no_step_is_taken_before_the_first",),
    ),
    "validation-of-one-data-rank": Mutant(
        "Validation reports the loss of each DP rank's own samples.",
        "zero_tp/training/engine.py",
        "total, count = all_reduce(sums, self.topology.data_group).tolist()",
        "total, count = sums.tolist()",
        (EVALUATION,),
    ),
    "validation-with-dropout": Mutant(
        "Validation leaves dropout on.",
        "zero_tp/training/engine.py",
        "self.engine.eval()\n",
        "pass\n",
        (EVALUATION,),
    ),
    "training-without-dropout": Mutant(
        "The run trains in evaluation mode.",
        "zero_tp/training/engine.py",
        "self.engine.train()\n        total = torch.zeros(",
        "self.engine.eval()\n        total = torch.zeros(",
        (EVALUATION,),
    ),
    "streams-not-resumed": Mutant(
        "A resumed run draws the dropout masks of its first steps again.",
        "zero_tp/checkpoint/state.py",
        "engine.model.streams.load_state_dict(load_file(checkpoint / _random_file(engine.topology.rank)))",
        "load_file(checkpoint / _random_file(engine.topology.rank))",
        (RESUME,),
    ),
    "streams-of-rank-zero-resumed": Mutant(
        "Every rank resumes with rank 0's dropout streams.",
        "zero_tp/checkpoint/state.py",
        "load_file(checkpoint / _random_file(engine.topology.rank))",
        "load_file(checkpoint / _random_file(0))",
        (RESUME,),
    ),
}
