"""Type DeepSpeed's `optimizer` block, and choose the implementation of Adam.

DeepSpeed passes `params` to a constructor unread. Each constructor has a model here, so that a
mistyped key is reported by name. A test compares the models with the constructors' signatures.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny

from zero_tp.base.errors import ConfigError, did_you_mean, shown
from zero_tp.base.settings.keys import look_up
from zero_tp.base.validation import Below1, ConfigModel, NonNegative, validate


class OptimizerBlock(ConfigModel):
    """The block as written."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


ELEMENTWISE = ("Adam", "AdamW", "SGD")
"""Optimizers that update a shard exactly as they update the whole tensor."""
OPTIMIZERS = (*ELEMENTWISE, "Muon")

REFUSED_OPTIMIZERS = {
    "Lamb": "its trust ratio needs the norm of a whole tensor, and a rank holds a shard",
    "Lion": "DeepSpeed's Lion moves weights whose gradient is zero, such as rows of unused tokens",
    "Adagrad": "torch's Adagrad creates its states for the model's own tensors, which DeepSpeed "
    "replaces",
    "Adafactor": "it factors the moments of a whole matrix, and a rank holds a shard",
    **dict.fromkeys(
        ("MuAdam", "MuAdamW", "MuSGD"), "muP needs base shapes, which the model does not set"
    ),
    **dict.fromkeys(
        ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), "DeepSpeed removed the 1-bit optimizers"
    ),
}


class OptimizerParams(ConfigModel):
    """Arguments of every optimizer.

    The engine always passes `weight_decay`: the file's or 0, and never the constructor's default.
    """

    lr: NonNegative
    weight_decay: NonNegative = 0.0


class Adam(OptimizerParams):
    """Arguments of every Adam class, and the two arguments by which DeepSpeed chooses the class."""

    betas: tuple[Below1, Below1] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8  # the update is divided by it
    torch_adam: bool = False
    adam_w_mode: bool = True


class TorchAdam(Adam):
    amsgrad: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


class FusedAdam(Adam):
    """DeepSpeed's Adam on a device. Its `amsgrad` is left out, because true raises an error."""

    bias_correction: bool = True
    set_grad_none: bool = True


class CPUAdam(Adam):
    """DeepSpeed's Adam of offloaded states, which ignores `amsgrad`."""

    bias_correction: bool = True
    fp32_optimizer_states: bool = True


class SGD(OptimizerParams):
    momentum: Below1 = 0.0
    dampening: Below1 = 0.0
    nesterov: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


class MuonAdamW(ConfigModel):
    """Arguments of AdamW for what Muon does not update; those left out are torch's."""

    lr: Annotated[float, Field(gt=0)] | None = Field(None, description="None: Muon's.")
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    weight_decay: NonNegative | None = Field(None, description="None: Muon's.")


class Muon(OptimizerParams):
    """Arguments of `torch.optim.Muon`, with its defaults, and those of AdamW for the rest."""

    lr: NonNegative = 1e-3
    weight_decay: NonNegative = 0.1
    momentum: Below1 = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    per_head: bool = False
    adamw: MuonAdamW = Field(default_factory=MuonAdamW)


class Optimizer(ConfigModel):
    """The block with typed arguments."""

    type: str
    params: SerializeAsAny[OptimizerParams]
    legacy_fusion: bool = False

    @property
    def uses_torch_adam(self) -> bool:
        return isinstance(self.params, Adam) and self.params.torch_adam


IMPLEMENTATION = ("torch_adam", "fused", "foreach")
"""Arguments that choose an implementation of Adam and do not change its result."""


def params_model(name: str, torch_adam: bool, offload: bool) -> type[OptimizerParams]:
    """Return the model of the arguments of the class that DeepSpeed builds
    (`_configure_basic_optimizer`).

    Args:
        name: in lower case, one of OPTIMIZERS.
        offload: the optimizer's states are on the CPU.
    """
    if name == "sgd":
        return SGD
    if name == "muon":
        return Muon
    # In the order of DeepSpeed's `get_optimizer_configuration`: `torch_adam` wins over offloading.
    return TorchAdam if torch_adam else CPUAdam if offload else FusedAdam


def check_optimizer(values: dict[str, Any]) -> Optimizer:
    """Return the `optimizer` block of DeepSpeed's config, typed."""
    block = validate(OptimizerBlock, values["optimizer"], "optimizer")
    name = block.type
    lower = block.type.lower()
    for other, reason in REFUSED_OPTIMIZERS.items():
        if other.lower() == lower:
            remedy = f"use one of {', '.join(OPTIMIZERS)}"
            raise ConfigError("optimizer.type", f"{shown(name)} is refused: {reason}", remedy)
    # DeepSpeed takes its own optimizers' names in any case, and passes others to torch.optim as
    # they are written.
    if lower not in ("adam", "adamw") and name not in OPTIMIZERS:
        raise ConfigError(
            "optimizer.type", f"{shown(name)} is unknown", did_you_mean(name, OPTIMIZERS)
        )
    model = params_model(lower, bool(block.params.get("torch_adam")), offloads_optimizer(values))
    if name == "Muon":
        _refuse_names_of_deepspeed(block.params)
    params = validate(model, block.params, "optimizer.params")
    # The type alone decides: DeepSpeed's "Adam" is AdamW too, unless `adam_w_mode` is false.
    if lower == "adamw" and block.params.get("adam_w_mode") is False:
        problem = 'false is ignored by DeepSpeed when type is "AdamW"'
        raise ConfigError("optimizer.params.adam_w_mode", problem, 'use "Adam" with it, or drop it')
    # The keys that DeepSpeed gets are those of the file.
    written = block.model_fields_set | {"params"}
    return Optimizer.model_construct(
        written, type=name, params=params, legacy_fusion=block.legacy_fusion
    )


DEEPSPEED_MUON = {
    "muon_lr": "lr",
    "adam_lr": 'adamw: {"lr": …}',
    "ns_method": "ns_steps and ns_coefficients",
    "per_head_muon": "per_head",
}
"""Names of DeepSpeed's Muon → those of `Muon`."""


def _refuse_names_of_deepspeed(params: dict[str, Any]) -> None:
    for key, new in DEEPSPEED_MUON.items():
        if key in params:
            raise ConfigError(
                f"optimizer.params.{key}",
                "is a name of DeepSpeed's Muon, which orthogonalises shards and is not used",
                f"use {new}",
            )


def choose_implementation(values: dict[str, Any]) -> None:
    """Set torch's fused Adam in the `optimizer` block, unless the block chooses an implementation.

    Torch's needs no compiler. DeepSpeed's FusedAdam stays if `params` has an argument that only it
    takes, and its CPUAdam updates offloaded states.

    Args:
        values: DeepSpeed's config, with unchecked types.
    """
    params = look_up(values, "optimizer.params")
    name = str(look_up(values, "optimizer.type")).lower()
    if not isinstance(params, dict) or name not in ("adam", "adamw") or offloads_optimizer(values):
        return
    if params.keys() & (FusedAdam.model_fields.keys() - TorchAdam.model_fields.keys()):
        return
    # DeepSpeed's FusedAdam needs a compiler, on a CPU too. torch's fused AdamW took 15 ms where its
    # loop took 47 (19 M parameters, CPU).
    if params.setdefault("torch_adam", True) is True and "foreach" not in params:
        params.setdefault("fused", True)


def offloads_optimizer(values: dict[str, Any]) -> bool:
    """Return whether an unchecked DeepSpeed config offloads the optimizer's states to host
    memory or NVMe.
    """
    return look_up(values, "zero_optimization.offload_optimizer.device") not in (None, "none")
