"""Random streams, activation memory, the loss, the engine, checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOSS = "tests/distributed/test_loss.py::"
RANDOM = "tests/distributed/test_random.py::"
MASKS = "tests/distributed/test_dropout_masks.py::"
RECOMPUTE = "tests/distributed/test_recompute.py::"
ENGINE = "tests/distributed/test_engine.py::"
DRAWN = ENGINE + "test_data_parallel_ranks_draw_each_weight_once_among_them[1-1-bf16]"
RECOMPUTE_TP = RECOMPUTE + "test_recomputing_changes_no_bit[2-False-1]"
RECOMPUTE_SP = RECOMPUTE + "test_recomputing_changes_no_bit[2-True-1]"
EVALUATION = ENGINE + "test_validation_is_the_mean_over_all_labels[1]"
RESUME = "tests/distributed/test_checkpoint.py::test_a_resumed_run_is_the_run_that_never_stopped[4-2-1-fp32-none]"
DOCUMENTS = "tests/distributed/test_documents.py::test_packed_documents_equal_documents_apart"
DOCUMENTS_RUN = "tests/distributed/test_documents_run.py::test_a_run_on_packed_documents_trains_the_plain_model"
FP16 = "tests/distributed/test_fp16.py::test_a_run_in_fp16_is_that_of_torchs_scaler"
STORES = "tests/distributed/test_stores.py::"
PLACES = "tests/unit/test_stores.py::test_checkpoints_are_where_the_config_says"
STEP = ENGINE + "test_loss_and_gradient_norm_of_a_step"

MUTANTS: dict[str, Mutant] = {
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
        "zero_tp/activations/stores.py",
        "_Slot(self._free.pop(), tensor.shape)",
        "_Slot(self._free[-1], tensor.shape)",
        (RECOMPUTE_TP,),
    ),
    # ---- checkpoints on their way to the host and back ---------------------------------------------------------------
    "copied-out-before-computed": Mutant(
        "A checkpoint leaves the device while the layer before is still computing it.",
        "zero_tp/activations/stores.py",
        "out.wait_stream(runtime.current_stream(device))",
        "out.record_event()",
        (STORES + "test_tensors_come_back[early]",),
    ),
    "freed-while-it-leaves": Mutant(
        "A checkpoint's memory on the device is used again before its copy to the host has run.",
        "zero_tp/activations/stores.py",
        "tensor.record_stream(out)",
        "assert out",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "copied-back-before-out": Mutant(
        "A checkpoint comes back from host memory that it has not reached.",
        "zero_tp/activations/stores.py",
        "back.wait_event(token.left)",
        "assert token.left",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "used-before-it-is-back": Mutant(
        "A layer runs again from a checkpoint that is still on its way.",
        "zero_tp/activations/stores.py",
        "current.wait_event(token.returned)",
        "assert token.returned",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "freed-while-it-is-used": Mutant(
        "A checkpoint that is back gives its memory to the next one while a layer still runs from it.",
        "zero_tp/activations/stores.py",
        "tensor.record_stream(current)",
        "assert current",
        (STORES + "test_tensors_come_back[early]",),
    ),
    "slot-freed-at-once": Mutant(
        "A checkpoint in the host's buffer does not hold its slot, and the next one overwrites it.",
        "zero_tp/activations/stores.py",
        "_InHostMemory(host, slot, device,",
        "_InHostMemory(host, None, device,",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "back-in-another-shape": Mutant(
        "Gathered pieces get the dimensions of the whole in another order.",
        "zero_tp/activations/stores.py",
        "whole[: shape.numel()].view(shape)",
        "whole[: shape.numel()].view(shape[::-1])",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "padded-in-front": Mutant(
        "The last piece of a checkpoint that t does not divide is padded at its wrong end.",
        "zero_tp/activations/stores.py",
        "F.pad(piece, (0, length - piece.numel()))",
        "F.pad(piece, (length - piece.numel(), 0))",
        (STORES + "test_tensors_come_back[late]",),
    ),
    "host-memory-not-page-locked": Mutant(
        "Copies to the host go through ordinary memory, and hold computation up.",
        "zero_tp/activations/stores.py",
        "dtype=tensor.dtype, pin_memory=True)",
        "dtype=tensor.dtype)",
        (STORES + "test_one_rank_computes_the_same[all]",),
    ),
    "checkpoint-stays-on-the-device": Mutant(
        "A checkpoint is copied to the host and kept on the device too.",
        "zero_tp/activations/stores.py",
        "token.left = out.record_event()",
        "token.left, token.stays = out.record_event(), tensor",
        (PLACES + "[TP 2-full-host]",),
    ),
    "nothing-comes-back-ahead": Mutant(
        "Backward waits for the whole copy of each checkpoint.",
        "zero_tp/activations/stores.py",
        "self._fetch(before)  # what backward wants next",
        "pass",
        (PLACES + "[TP 2-full-host]",),
    ),
    "everything-comes-back-ahead": Mutant(
        "The first layer of backward asks for all checkpoints, and the device holds them at once.",
        "zero_tp/activations/stores.py",
        """if before is not None:
            self._fetch(before)  # what backward wants next""",
        """while before is not None:
            self._fetch(before)
            before = before.before()""",
        (PLACES + "[TP 2-full-host]",),
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
        "divisor = counted.sum() if divisor is None",
        "divisor = torch.tensor(labels.numel()) if divisor is None",
        (LOSS + "test_frozen_weight_or_hidden_states[hidden-True]",),
    ),
    "upstream-gradient-ignored": Mutant(
        "The loss forms its gradient in forward and forgets the factor that accumulation and loss scaling bring.",
        "zero_tp/parallel/loss.py",
        "scale = gradient.float() / count.masked_fill(count == 0, 1.0)",
        "scale = 1.0 / count.masked_fill(count == 0, 1.0)",
        (LOSS + "test_frozen_weight_or_hidden_states[hidden-True]",),
    ),
    "first-block-alone": Mutant(
        "The weight's gradient is that of the last block of tokens.",
        "zero_tp/parallel/loss.py",
        "total[rows].add_(first[:, rows].t() @ second)",
        "total[rows].copy_(first[:, rows].t() @ second)",
        (LOSS + "test_bf16[24-5-10-False]",),
    ),
    "last-micro-batch-for-all": Mutant(
        "The reported loss is that of the last micro-batch.",
        "zero_tp/training/engine.py",
        "total += loss.detach()",
        "total = loss.detach().double() * len(batches)",
        (STEP + "[True-1]",),
    ),
    # ---- packed documents ------------------------------------------------------------------------------------------
    "documents-see-each-other": Mutant(
        "Attention runs on over the documents of a row.",
        "zero_tp/models/context.py",
        "seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])",
        "pass",
        (DOCUMENTS + "[2-True-llama]",),
    ),
    "packed-window-one-wider": Mutant(
        "Where no mask is made, a token sees one token more than its window holds.",
        "zero_tp/models/attention.py",
        "return Packed(pieces, -1 if mask.window is None else mask.window - 1)",
        "return Packed(pieces, -1 if mask.window is None else mask.window)",
        (DOCUMENTS + "[2-True-mistral]",),
    ),
    "positions-run-on": Mutant(
        "Attention stays inside a document, positions run on; rotary models would not notice, learned positions do.",
        "zero_tp/data/batch.py",
        "begins[:, 1:] = documents[:, 1:] != documents[:, :-1]",
        "begins[:, 1:] = False",
        (DOCUMENTS + "[2-True-gpt2]",),
    ),
    "next-document-predicted": Mutant(
        "The last token of a document learns to predict the first of whatever document was packed behind it.",
        "zero_tp/data/batch.py",
        "(after != documents[:, :-1]) | (after == PADDING)",
        "after == PADDING",
        (DOCUMENTS + "[2-True-gpt2]",),
    ),
    "mean-of-means": Mutant(
        "Each micro-batch takes the mean over its own labels, so that a token counts more where few are predicted.",
        "zero_tp/training/engine.py",
        "(self.engine, batch, num_items_in_batch=share)",
        "(self.engine, batch, num_items_in_batch=None)",
        (DOCUMENTS_RUN + "[4]",),
    ),
    "labels-of-one-data-rank": Mutant(
        "Each DP rank divides by its own number of labels.",
        "zero_tp/training/engine.py",
        "return all_reduce(torch.stack(counts).sum(), self.topology.data_group)",
        "return torch.stack(counts).sum() * self.topology.data",
        (DOCUMENTS_RUN + "[4]",),
    ),
    # ---- engine ----------------------------------------------------------------------------------------------------
    "norm-of-rank-zero": Mutant(
        "Without ZeRO the gradient norm counts the shards of TP rank 0 only, and clipping changes.",
        "zero_tp/parallel/gradients.py",
        "(isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0)",
        "topology.tensor_rank == 0",
        (ENGINE + "test_norm_and_clipping_without_zero[0.1]",),
    ),
    "replicas-counted-on-every-rank": Mutant(
        "Without ZeRO the gradient norm counts replicated parameters t times.",
        "zero_tp/parallel/gradients.py",
        "(isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0)",
        "True",
        (ENGINE + "test_norm_and_clipping_without_zero[0.1]",),
    ),
    "zero-init-with-mpu-alone": Mutant(
        "zero.Init ignores its mpu's DP group and overwrites the other TP ranks' shards with rank 0's.",
        "zero_tp/zero/stages.py",
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
        "zero_tp/zero/stages.py",
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
    "scale-updated-in-mid-step": Mutant(
        "The loss scale grows before the gradients are divided by it, as DeepSpeed 0.19.8 does.",
        "zero_tp/zero/loss_scale.py",
        "optimizer._update_scale = _later",
        "optimizer._update_scale, self.update = self._scaler.update_scale, _later",
        (FP16 + "[2-3-zero1]",),
    ),
    "loss-not-scaled": Mutant(
        "Without ZeRO the loss is not scaled, as in DeepSpeed 0.19.8, but the gradients are divided by the scale.",
        "zero_tp/zero/stages.py",
        "super().backward(loss if self.loss_scale is None else loss * self.loss_scale.value, **options)",
        "super().backward(loss, **options)",
        (FP16 + "[2-0-zero0]",),
    ),
    "drawn-elsewhere-and-lost": Mutant(
        "What other data-parallel ranks have drawn of a weight never reaches it.",
        "zero_tp/parallel/parameter.py",
        "        others.copy_(brought)",
        "        pass",
        (DRAWN,),
    ),
    "streams-not-resumed": Mutant(
        "A resumed run draws the dropout masks of its first steps again.",
        "zero_tp/checkpoint/resume.py",
        "streams.load_state_dict({name.removeprefix",
        "dict({name.removeprefix",
        (RESUME,),
    ),
    "streams-of-rank-zero-resumed": Mutant(
        "Every rank resumes with rank 0's dropout streams.",
        "zero_tp/checkpoint/resume.py",
        "checkpoint / states_file(topology.tensor_rank, topology.data_rank)",
        "checkpoint / states_file(0, 0)",
        (RESUME,),
    ),
}
