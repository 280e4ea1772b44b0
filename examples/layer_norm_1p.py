import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.norm import NORMS
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import ConstantInit, ParameterMaker


class LayerNorm1P(nn.Module):
    """Nemotron's norm: LayerNorm times 1 + w, plus a bias. [*, h] → [*, h]."""

    parameter_names = ("weight", "bias")

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__()
        self.epsilon = epsilon
        layout = Replicated("partial" if sharded_input else "identical")
        self.weight = make.parameter("weight", (size,), layout, ConstantInit(1.0))
        self.bias = make.parameter("bias", (size,), layout, ConstantInit(0.0))

    def forward(self, tensor: Tensor) -> Tensor:
        return F.layer_norm(tensor, self.bias.shape, 1 + self.weight, self.bias, self.epsilon)


NORMS["layer_norm_1p"] = LayerNorm1P
