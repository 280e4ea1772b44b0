import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.norm import NORMS
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import ConstantInit, ParameterMaker


class OffsetRMSNorm(nn.Module):
    """Gemma's norm: x/rms(x) · (1 + w). [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__()
        self.epsilon = epsilon
        layout = Replicated("partial" if sharded_input else "identical")
        self.weight = make.parameter("weight", (size,), layout, ConstantInit(0.0))

    def forward(self, tensor: Tensor) -> Tensor:
        normed = F.rms_norm(tensor.float(), self.weight.shape, eps=self.epsilon)
        return (normed * (1 + self.weight.float())).type_as(tensor)


NORMS["offset_rms_norm"] = OffsetRMSNorm
