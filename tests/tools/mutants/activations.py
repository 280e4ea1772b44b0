"""Recomputation, and the stores of activation checkpoints."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

STORES = "zero_tp/activations/stores.py::"
RECOMPUTE = "zero_tp/activations/recompute.py::"

REPLAY = "tests/parallel/test_random.py::test_recomputation_replays_the_masks[full-sdpa-True]"
RECOMPUTE_TP = "tests/activations/test_recompute.py::test_recomputing_changes_no_bit[2-False-1]"
RECOMPUTE_SP = "tests/activations/test_recompute.py::test_recomputing_changes_no_bit[2-True-1]"
EARLY = "tests/activations/test_stores.py::test_tensors_come_back[early]"
LATE = "tests/activations/test_stores.py::test_tensors_come_back[late]"

MUTANTS: dict[str, Mutant] = {
    "dropout-not-replayed": Mutant(
        "Recomputation draws new masks: the gradients belong to another network than the loss.",
        RECOMPUTE + "_Recompute.backward",
        "ctx.streams.replaying(ctx.states)",
        "torch.enable_grad()",
        (REPLAY,),
    ),
    "remade-from-the-output": Mutant(
        "A dropped activation is computed again from itself: norm(norm(x)), gelu(gelu(x)).",
        RECOMPUTE + "RecomputedOutput.consume",
        "source.detach()",
        "output.detach().clone()",
        (RECOMPUTE_TP,),
    ),
    "checkpoints-partitioned-under-sp": Mutant(
        "P_a slices and gathers sequence shards as if every rank held the same checkpoint.",
        "zero_tp/activations/activation_memory.py::ActivationMemory._make_store",
        "topology.sequence or topology.tensor == 1",
        "topology.tensor == 1",
        (RECOMPUTE_SP,),
    ),
    "padded-in-front": Mutant(
        "The last piece of a checkpoint that t does not divide is padded at its wrong end.",
        STORES + "Partitioned.put",
        "F.pad(piece, (0, length - piece.numel()))",
        "F.pad(piece, (length - piece.numel(), 0))",
        (LATE,),
    ),
    "slot-used-twice": Mutant(
        "The contiguous buffer gives the same slot to two checkpoints, and the later one overwrites the earlier.",
        STORES + "ContiguousBuffer.slot_for",
        "self._free.pop()",
        "self._free[-1]",
        (RECOMPUTE_TP,),
    ),
    # ---- copies of checkpoints to the host and back ------------------------------------------------------------------
    "copied-out-before-computed": Mutant(
        "A checkpoint leaves the device while the layer before still computes it.",
        STORES + "Host.put",
        "out.wait_stream(runtime.current_stream(device))",
        "pass",
        (EARLY,),
    ),
    "freed-during-the-copy-out": Mutant(
        "A checkpoint's memory on the device is used again before its copy to the host has run.",
        STORES + "Host._free_all_but_last",
        "torch.get_device_module(device).current_stream(device).wait_event(self._copies_out[0][1])",
        "pass",
        (LATE,),
    ),
    "used-before-the-copy-back": Mutant(
        "A layer runs again from a checkpoint whose copy back has not ended.",
        STORES + "Host.take",
        "torch.get_device_module(token.device).current_stream(token.device).wait_event(token.returned)",
        "pass",
        (LATE,),
    ),
    "copied-back-to-memory-in-use": Mutant(
        "A checkpoint is copied back to memory that the compute stream has freed but still uses.",
        STORES + "Host._fetch",
        "back.wait_stream(runtime.current_stream(token.device))",
        "pass",
        (EARLY,),
    ),
}
