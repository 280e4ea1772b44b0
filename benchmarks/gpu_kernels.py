"""Count the kernels that inductor would launch on an H200, and their bytes, without one.

    pip install --no-deps --target DIR triton==3.7.1    # torch's CPU build has no triton
    PYTHONPATH=DIR python -m benchmarks.gpu_kernels

Tensors are fake and the device's properties are pretended. The Triton source is generated and not
compiled: launches and bytes are proved, speed is not. Tried with torch 2.13.0. Units are U = tokens
× hidden × 2 bytes, and Uf = tokens × MLP width × 2 bytes; of experts U × a token's experts; of the
update an element of a weight.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.engine.zero.adamw import adamw
from zero_tp.model.mlp import _gated
from zero_tp.model.position import _rotate_back_and_join, _rotate_pairs_
from zero_tp.model.rms_norm import (
    Scaling,
    _gradients,
    _gradients_of_both,
    _rms_norm,
    _rows_gradient,
    _sum_and_norm,
    _weight_gradient,
)
from zero_tp.parallel.grouped_linear import (
    _sum_copies_,
    _sum_weighted_copies_,
    _weight_and_project_rows,
    _weight_rows,
)

TOKENS = 16_384
HIDDEN = 2048
WIDTH = 5504
HEAD_SIZE = 128
EXPERTS_PER_TOKEN = 8
EPSILON = 1e-5
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    total_memory=140 * 2**30,
    shared_memory_per_block_optin=232448,
    max_threads_per_block=1024,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


class Input(NamedTuple):
    """A tensor that a compiled function is given.

    Attributes:
        strides: by default those of a contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    def empty(self, device: str) -> Tensor:
        """Return an uninitialised tensor like this input."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class Kernels(NamedTuple):
    """What inductor generates for a function.

    Attributes:
        names: of the launched kernels, in order. moved: bytes that they read and write.
    """

    names: list[str]
    moved: int
    source: str


def constant(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments that returns `value`."""
    return lambda *args, **kwargs: value


def pretend_device() -> None:
    """Let torch and Triton see an H200 in this process."""
    answers = {
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, constant(answer))
    vars(torch.version)["cuda"] = "13.0"
    _pretend_triton_driver()

    from torch._dynamo import device_interface
    from torch._inductor import config as inductor_config
    from torch.utils import _triton  # noqa: F401  # first, with the answers above

    interface: Any = device_interface.get_interface_for_device("cuda")
    interface.Worker.get_device_properties = staticmethod(constant(PROPERTIES))
    answers = {
        "get_device_properties": PROPERTIES,
        "get_compute_capability": 90,
        "is_available": True,
        "current_device": 0,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(constant(answer)))
    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1


def _pretend_triton_driver() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(
        types.SimpleNamespace(
            get_current_target=constant(GPUTarget("cuda", 90, 32)),
            get_current_device=constant(0),
            get_active_torch_device=constant(torch.device("cuda:0")),
            get_device_capability=constant((9, 0)),
            is_active=constant(True),
        )
    )


def generate(function: Callable[..., Any], inputs: Sequence[Input], **options: Any) -> Kernels:
    """Return the kernels of `function` compiled alone, on a pretended device.

    Args:
        options: inductor's, as `torch.compile` takes them.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with inductor_config.patch(options), fake:
        # Traced for the CPU: indexing tensors of a device that torch was not built for fails.
        pure = torch.func.functionalize(function, remove="mutations")
        trace = make_fx(pure, decomposition_table=select_decomp_table(), tracing_mode="real")
        module = trace(*(tensor.empty("cpu") for tensor in inputs))
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
        tensors = [tensor.empty("cuda:0") for tensor in inputs]
        view_to_reshape(module)
        FakeTensorProp(module, fake).propagate_dont_convert_inputs(*tensors)
        graph = GraphLowering(
            module, example_inputs=tensors, shape_env=fake.shape_env, is_inference=True
        )
        with (
            V.set_graph_handler(graph),
            V.set_fake_mode(fake),
            V.set_real_inputs(tensors),
            V.set_debug_handler(DebugContext()),
        ):
            graph.run(*tensors)
            code, _ = graph.codegen()
            total, *_ = graph.count_bytes()
    source: str = code.value if hasattr(code, "value") else str(code)
    # Its own kernels, and those of ATen that it calls between them.
    aten = r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.([\w.]+)\("
    names = re.findall(rf"(triton_\w+)\.run\(|{aten}", source, re.MULTILINE)
    return Kernels([own or other for own, other in names], total, source)


def lower(
    name: str, function: Callable[..., Any], inputs: Sequence[Input], unit: float, **options: Any
) -> str:
    """Print launches and bytes of `function` compiled alone; return the generated source.

    Args:
        unit: bytes that count as 1.
        options: inductor's, as `torch.compile` takes them.
    """
    names, moved, source = generate(function, inputs, **options)
    print(f"{name:34s} launches={len(names)} bytes={moved / unit:6.2f} units {names}")
    return source


def rms_forward(rows: Tensor, weight: Tensor) -> Any:
    return _rms_norm(rows, weight, EPSILON, Scaling)


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(function, scaling=Scaling)


def sum_and_rms_forward(rows: Tensor, branch: Tensor, weight: Tensor) -> Any:
    return _sum_and_norm(rows, branch, weight, EPSILON, Scaling)


def swiglu_forward(intermediate: Tensor) -> Tensor:
    return _gated(intermediate, F.silu)


def adamw_and_weight(gradient: Tensor, *tensors: Tensor) -> Any:
    updated = adamw(gradient, *tensors)
    return *updated, updated[0].to(gradient.dtype)


def experts() -> None:
    """Lower what experts do with the copies of tokens."""
    length = TOKENS * EXPERTS_PER_TOKEN
    rows = Input((TOKENS, HIDDEN), torch.bfloat16)
    copies = Input((length, HIDDEN), torch.bfloat16)
    row_of_copy = Input((TOKENS, EXPERTS_PER_TOKEN), torch.int64)
    by_token = Input((TOKENS, EXPERTS_PER_TOKEN), torch.float32)
    by_row = Input((length, 1), torch.float32)
    unit = length * HIDDEN * 2
    lower("experts' outputs", _sum_weighted_copies_, [rows, row_of_copy, by_token, copies], unit)
    lower("their input's gradient", _sum_copies_, [rows, row_of_copy, copies], unit)
    lower("gradients of rows, weights", _weight_and_project_rows, [copies, by_row, copies], unit)
    lower("weighted gradients", _weight_rows, [copies, by_row], unit)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pretend_device()
    rows = Input((TOKENS, HIDDEN), torch.bfloat16)
    weight = Input((HIDDEN,), torch.bfloat16)
    scale = Input((TOKENS, 1), torch.float32)
    intermediate = Input((TOKENS, 2 * WIDTH), torch.bfloat16)
    unit = TOKENS * HIDDEN * 2
    backward = (rows, rows, scale, weight)
    lower("rms forward", rms_forward, [rows, weight], unit)
    lower("rms weight gradient", scaled(_weight_gradient), [rows, rows, scale], unit)
    lower("rms rows gradient", scaled(_rows_gradient), backward, unit)
    lower("rms backward as one function", scaled(_gradients), backward, unit)
    both = (rows, rows, scale, rows, weight)
    lower("the same + residual's gradient", scaled(_gradients_of_both), both, unit)
    lower("sum + rms forward", sum_and_rms_forward, [rows, rows, weight], unit)
    lower("swiglu forward", swiglu_forward, [intermediate], TOKENS * WIDTH * 2)
    heads = HIDDEN // HEAD_SIZE
    half = Input(
        (TOKENS, 1, heads, HEAD_SIZE // 2), rows.dtype, (3 * HIDDEN, 3 * HIDDEN, HEAD_SIZE, 1)
    )
    table = Input((TOKENS, 1, 1, HEAD_SIZE // 2), rows.dtype)
    lower("rotation of Q and K", _rotate_pairs_, [half] * 4 + [table] * 2, unit)
    head = Input((TOKENS, 1, heads, HEAD_SIZE), rows.dtype)
    back = partial(_rotate_back_and_join, neighbours=False, last=False)
    lower("its backward, joined", back, [head] * 3 + [table] * 2, unit)
    experts()
    numel = HIDDEN * WIDTH
    narrow = Input((numel,), torch.bfloat16)
    wide = Input((numel,), torch.float32)
    scalars = Input((8,), torch.float32)
    lower("AdamW of a weight", adamw_and_weight, [narrow, wide, wide, wide, scalars], numel)


if __name__ == "__main__":
    main()
