"""Decoders: grouped queries, rotary positions, windows, generation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODERS = "tests/distributed/test_decoders.py::"
FEWER = DECODERS + "test_each_family[fewer KV heads than TP-4]"
UNEVEN = DECODERS + "test_each_family[fewer KV heads than TP-2]"
PARALLEL = DECODERS + "test_each_family[parallel residual-2]"
DRAW = DECODERS + "test_ranks_draw_the_numbers_of_the_first"

MUTANTS: dict[str, Mutant] = {
    "kv-gradients-not-summed": Mutant(
        "Replicated keys and values keep the gradient of the rank's own queries.",
        "zero_tp/models/projection.py",
        'replicated: Layout = Replicated("partial")',
        'replicated: Layout = Replicated("identical")',
        (FEWER,),
    ),
    "kv-heads-of-other-queries": Mutant(
        "With fewer KV heads than TP every rank uses the first ones.",
        "zero_tp/models/projection.py",
        "serving = [head // each for head in range(topology.tensor_rank * local, (topology.tensor_rank + 1) * local)]",
        "serving = [head // each for head in range(local)]",
        (FEWER,),
    ),
    "kv-heads-served-evenly": Mutant(
        "A rank whose KV heads serve unevenly many queries repeats them evenly.",
        "zero_tp/models/projection.py",
        "return kept if self.serving is None else kept[:, self.serving]",
        "return kept.repeat_interleave(6 // kept.shape[1], 1)",
        (UNEVEN,),
    ),
    "head-norm-gradients-not-summed": Mutant(
        "The norm of each head keeps the gradient of the rank's own heads.",
        "zero_tp/models/attention.py",
        "norm, own_heads = NORMS[spec.norm], make.topology.tensor > 1",
        "norm, own_heads = NORMS[spec.norm], False",
        (FEWER,),
    ),
    "rms-norm-gradients-not-summed": Mutant(
        "Under SP every RMSNorm keeps the gradient of its own tokens.",
        "zero_tp/models/norm.py",
        "reducing = ctx.total.start(weight_gradient)",
        "reducing = GradientSum(None).start(weight_gradient)",
        (DECODERS + "test_each_family[grouped queries-2]",),
    ),
    "padding-token-learns": Mutant(
        "The padding token's row gets a gradient from the look-up.",
        "zero_tp/parallel/embedding.py",
        "looked_up = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_row)",
        "looked_up = F.embedding(local.masked_fill(elsewhere, 0), self.weight)",
        (FEWER,),
    ),
    "window-one-wider": Mutant(
        "A token sees one token more than its window holds.",
        "zero_tp/models/context.py",
        "seen = seen & (key > query - self.window)",
        "seen = seen & (key >= query - self.window)",
        (FEWER,),
    ),
    "whole-heads-turn": Mutant(
        "The share of a head that does not turn is dropped from the queries.",
        "zero_tp/models/position.py",
        "return turned if staying.shape[-1] == 0 else torch.cat((turned, staying), -1)",
        "return turned if staying.shape[-1] == 0 else torch.cat((turned, 0 * staying), -1)",
        (PARALLEL,),
    ),
    "heads-not-interleaved": Mutant(
        "GPT-NeoX's Q, K and V of each head are taken for blocks.",
        "zero_tp/models/architectures/table.py",
        "yield RowRange(self.names[0], (part * self.heads + head) * size, (head * 3 + part) * size, size)",
        "yield RowRange(self.names[0], (part * self.heads + head) * size, (part * self.heads + head) * size, size)",
        (PARALLEL,),
    ),
    "branches-in-sequence": Mutant(
        "The MLP of a parallel layer starts from the attention's output.",
        "zero_tp/models/transformer.py",
        "mlp = self.dropout(self.mlp(self.mlp_norm(x), context=context))",
        "return SequentialLayer.forward(self, x, context=context)  # type: ignore[arg-type]",
        (PARALLEL,),
    ),
    "ranks-sample-by-themselves": Mutant(
        "Each TP rank samples with its own random numbers.",
        "zero_tp/parallel/agreement.py",
        "generator.set_state(_from_first(state, group, device))",
        "_from_first(state, group, device)",
        (DRAW,),
    ),
}
