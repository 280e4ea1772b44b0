"""The programs that the papers timed: how they differ from this project, according to their
sources.
"""

from __future__ import annotations

from zero_tp.tools.planning.timing import StepTimeEstimator, Traffic


class Megatron(StepTimeEstimator):
    """What Megatron-LM's programs share."""

    def update_traffic(self) -> float:
        """Count Apex's kernels: gradients become fp32, their norm and clipping, Adam, and the
        rounded weights.
        """
        zero = self.settings
        e = self.workload.itemsize
        part = self.parameters / (zero.data if zero.stage else 1)
        update = 2 * (4 + zero.moments) + 4 + (4 + e if e < 4 else 0)
        conversion = zero.grad_accum_itemsize + 4 if zero.grad_accum_itemsize < 4 else 0
        clipping = 8 if zero.clips_gradients else 0
        return part * (update + conversion + clipping) + 4 * self.parameters

    def launches(self) -> float:
        """Return 0: the papers' kernels take longer than their launches."""
        return 0.0


class Megatron2019Synchronous(Megatron):
    """Megatron-LM in 2019, with gradients reduced after backward."""

    def overlapped_products(self) -> float:
        """Return 0: its autograd functions wait for every collective (mpu/mappings.py)."""
        return 0.0

    def memory_traffic(self) -> dict[str, Traffic]:
        """Count three operations on the scores and the biases of column-parallel products, each by
        itself.

        The scores are divided, multiplied and subtracted from (mpu/transformer.py). torch's linear
        layer then added the bias of a tensor of three dimensions after the product.
        """
        passes = super().memory_traffic()
        e = self.workload.itemsize
        forward, backward = passes["attention_core"]
        passes["attention_core"] = (
            forward + 4 * e * self.sizes.scores,
            backward + 4 * e * self.sizes.scores,
        )
        passes["column biases"] = 2 * passes["column biases"][1], passes["column biases"][1]
        return passes


class Megatron2019(Megatron2019Synchronous):
    """Megatron-LM in 2019 with torch's DistributedDataParallel (README: "the scaling increases
    from 60% to 76%").
    """

    @property
    def reduces_in_backward(self) -> bool:
        return True


class Megatron2022(Megatron):
    """Megatron-LM in 2022. A fused kernel scales, masks and takes the softmax; gradients are
    reduced after backward.
    """

    def memory_traffic(self) -> dict[str, Traffic]:
        passes = super().memory_traffic()
        forward, backward = passes["attention_core"]
        passes["attention_core"] = (
            forward - 2 * self.workload.itemsize * self.sizes.scores,
            backward,
        )
        return passes

    def accumulation_time(self) -> float:
        """Leave out reading and writing new gradients, which the product of a weight's gradient
        accumulates in fp32.

        With bf16 Megatron-LM requires fp32 accumulation (megatron/arguments.py).
        """
        return (
            super().accumulation_time()
            - 2 * self.workload.itemsize * self.parameters / self.rates.memory
        )
