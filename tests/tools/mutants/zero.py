"""The engines of the ZeRO stages, DeepSpeed's mistakes that they correct, and the loss scale."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

STAGES = "zero_tp/zero/stages.py::"

ENGINE = "tests/training/test_engine.py::test_"
FP16 = "tests/zero/test_fp16.py::test_a_run_in_fp16_is_that_of_torchs_scaler"
ASYNCHRONOUS = "tests/zero/test_asynchronous.py::test_an_asynchronous_device_gives_the_same_run[3]"
SPIKE = "tests/training/test_spikes.py::test_a_spike_is_skipped_alike_on_a_run_and_one_that_was_resumed"

MUTANTS: dict[str, Mutant] = {
    "zero-init-with-mpu-alone": Mutant(
        "zero.Init ignores its mpu's DP group and overwrites the other TP ranks' shards with rank 0's.",
        STAGES + "PartitionedParameters.construction",
        "self.topology.data_group",
        "None",
        (ENGINE + "loss_and_gradient_norm_of_a_step[True-3]",),
        guard="differs between tensor parallel ranks",
    ),
    "first-step-kept": Mutant(
        "DeepSpeed's step on zero gradients stays: masters decayed once, Adam's bias correction one step ahead.",
        STAGES + "WithoutZero.initialize",
        "self._undo_first_step()",
        "pass",
        (ENGINE + "no_step_is_taken_before_the_first",),
    ),
    "loss-not-scaled": Mutant(
        "Without ZeRO the loss is not scaled, as in DeepSpeed 0.19.8, but the gradients are divided by the scale.",
        STAGES + "WithoutZero.backward",
        "loss * self.loss_scale.value",
        "loss",
        (FP16 + "[2-0-zero0]",),
    ),
    "scale-updated-in-mid-step": Mutant(
        "The loss scale grows before the gradients are divided by it, as in DeepSpeed 0.19.8.",
        "zero_tp/zero/loss_scale.py::LossScale.__init__",
        "optimizer._update_scale = _no_update",
        "optimizer._update_scale, self.update = self._scaler.update_scale, _no_update",
        (FP16 + "[2-3-zero1]",),
    ),
    "a-vetoed-step-updates": Mutant(
        "A step beyond the bound is reported, and updates the weights all the same.",
        "zero_tp/zero/zero_engine.py::ZeroEngine._is_vetoed",
        "self._veto(norm)",
        "self._veto(norm) is None",
        (SPIKE,),
    ),
    "gathers-overtake-the-update": Mutant(
        "ZeRO-3 gathers a step's first weights while the update of the step before still writes them.",
        STAGES + "PartitionedParameters._step",
        "gathers.wait_stream(accelerator.current_stream())",
        "pass",
        (ASYNCHRONOUS,),
    ),
    "gathered-weights-not-waited-for": Mutant(
        "ZeRO-3 uses weights while the all-gather may still run.",
        "zero_tp/zero/zero3_loops.py::wait",
        "handle.allgather_handle.wait()",
        "pass",
        (ASYNCHRONOUS,),
    ),
}
