"""Layers, their gradients and their layouts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYERS = "tests/distributed/test_layers.py::"
MODEL = "tests/distributed/test_model.py::"
WEIGHTS = "tests/distributed/test_weights.py::"
ENGINE = "tests/distributed/test_engine.py::"
GRADIENTS_SP = MODEL + "test_loss_logits_and_every_gradient[-2-True]"
GRADIENTS_TP = MODEL + "test_loss_logits_and_every_gradient[-2-False]"
COLUMN_SP = LAYERS + "test_linear_layers_equal_torch[column-parts0-True-2-True]"
ROW_SP = LAYERS + "test_linear_layers_equal_torch[row-parts2-True-2-True]"
ROW_TP = LAYERS + "test_linear_layers_equal_torch[row-parts2-True-2-False]"
STEP = ENGINE + "test_loss_and_gradient_norm_of_a_step"

MUTANTS: dict[str, Mutant] = {
    # ---- gradients of what is replicated over TP -------------------------------------------------------------------
    "norm-gradients-not-summed": Mutant(
        "Under SP every norm keeps the gradient of its own tokens, and the ranks' norms drift apart.",
        "zero_tp/models/norm.py",
        "ctx.total.start(*of(False, True, True)[1:])",
        "GradientSum(None).start(*of(False, True, True)[1:])",
        (GRADIENTS_SP,),
    ),
    "backward-sees-what-follows": Mutant(
        "The backward of causal attention by products gives a share to keys behind a query.",
        "zero_tp/models/flash.py",
        "            share[:, :, begin:].tril_()\n",
        "            share[:, :, begin:].tril_(1)\n",
        ("tests/unit/test_attention_cores.py::test_a_model_learns_the_same_from_attention_by_products",),
    ),
    "scores-that-follow": Mutant(
        "Causal attention by products gives a query the key after it.",
        "zero_tp/models/flash.py",
        "dtype=torch.float32).triu_(1)",
        "dtype=torch.float32).triu_(2)",
        ("tests/unit/test_attention_cores.py::test_attention_by_products_is_that_of_torch",),
    ),
    "final-norm-forgotten": Mutant(
        "One norm, outside the layers, is not told that its input is a sequence shard.",
        "zero_tp/models/transformer.py",
        'make.child("final_norm"), spec.hidden, spec.norm_epsilon, part=make.topology.sequence',
        'make.child("final_norm"), spec.hidden, spec.norm_epsilon, part=False',
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
        "zero_tp/parallel/gradients.py",
        "lambda gradient: made.start(gradient).wait()[0]",
        "lambda gradient: (made.start(gradient).wait(), gradient)[1]",
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
        "return whole if bias is None else whole.add_(bias)",
        "return whole if bias is None else whole.add_(0 * bias)",
        (ROW_TP,),
    ),
    "row-bias-on-every-rank": Mutant(
        "The bias is added before the reduction, t times.",
        "zero_tp/parallel/linear.py",
        "partial = F.linear(matrix, weight).unflatten(0, rows)",
        "partial, bias = F.linear(matrix, weight, bias).unflatten(0, rows), None",
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
        "zero_tp/parallel/linear.py",
        "whole, of_input = gradient, (gradient @ weight,) if needs_input else ()",
        "whole = all_reduce(gradient.clone(), ctx.group)\n"
        "            of_input = (whole @ weight,) if needs_input else ()",
        (LAYERS + "test_operators_do_what_they_are_defined_to_do[2]", ROW_TP),
    ),
    "input-gradient-reduced-twice": Mutant(
        "The column layer's input gradient is all-reduced a second time.",
        "zero_tp/parallel/linear.py",
        "return reducing.wait() if reducing is not None else None, None, None, None, *of_weights, *of_biases",
        "if reducing is not None and not ctx.sequence:\n"
        "            reducing = start_all_reduce(reducing.wait(), ctx.group)\n"
        "        return reducing.wait() if reducing is not None else None, None, None, None, *of_weights, *of_biases",
        (GRADIENTS_TP,),
    ),
    "own-shard-for-the-gathered-input": Mutant(
        "Backward under SP takes the weight's gradient against this rank's shard in place of the whole input.",
        "zero_tp/parallel/linear.py",
        "whole = gathering.wait() if gathering is not None else shard",
        "whole = shard.repeat(len(gradients[0]) // len(shard), 1, 1)",
        (COLUMN_SP,),
    ),
    "gathered-input-in-another-order": Mutant(
        "The input gathered for backward has the ranks' shards in another order than forward had.",
        "zero_tp/parallel/linear.py",
        "whole = gathering.wait() if gathering is not None else shard",
        "whole = gathering.wait().roll(len(shard), 0) if gathering is not None else shard",
        (COLUMN_SP,),
    ),
    "own-rows-for-the-gathered": Mutant(
        "Forward under SP multiplies this rank's rows where those of the other ranks should be.",
        "zero_tp/parallel/linear.py",
        "multiply(first, end, whole[first:end])",
        "multiply(first, end, shard.repeat((end - first) // rows, 1, 1))",
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
        "zero_tp/models/projection.py",
        "spec.hidden, (width, width, width), bias",
        "spec.hidden, (3 * width,), bias",
        (GRADIENTS_TP,),
    ),
    "qkv-cut-plainly-on-import": Mutant(
        "Import cuts c_attn into t plain pieces.",
        "zero_tp/weights/load.py",
        "for start, stop, rows in layout.rows_of(local, topology.tensor_rank, topology.tensor):",
        'if hasattr(layout, "parts"):\n'
        "            layout = type(layout)(layout.dim, (sum(layout.parts),), layout.padded)\n"
        "        for start, stop, rows in layout.rows_of(local, topology.tensor_rank, topology.tensor):",
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
}
