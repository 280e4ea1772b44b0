"""Train nothing, save everything: a GPTModel of megatron-core on CPU ranks, and its logits.

    python -m tests.support.megatron_writer OPTIONS.json FOLDER

FOLDER gets a step as Megatron-LM saves it, `ids.pt` and `logits.pt`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

STEP = 7


class NoTracker:
    """Stands for the random streams of CUDA devices: there are none, and nothing is dropped."""

    def fork(self, name: str | None = None) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def add(self, name: str, seed: int) -> None: ...


def replace_cuda() -> None:
    """Make what asks for a CUDA device get the CPU."""
    device: Any = lambda: torch.device("cpu")  # noqa: E731
    torch.cuda.current_device = device
    # An object of its own for each name, as dynamo counts them.
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None
    cuda.set_device = lambda *_, **__: None
    cuda.current_stream = lambda *_: None
    cuda.Stream = lambda *_, **__: None
    # TopKRouter moves its bias by `.cuda()`.
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    # A tied head on a later stage takes its weight by it.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def build(options: dict[str, Any]) -> Any:
    """Return a GPTModel of local layers in fp32 with drawn weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # is left undefined without Transformer Engine
    megatron_random._CUDA_RNG_STATE_TRACKER = NoTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    rms = options["normalization"] == "RMSNorm"
    experts = options.get("num_moe_experts")
    parallel_state.initialize_model_parallel(
        options["tensor"],
        options["stages"],
        expert_model_parallel_size=options.get("expert", 1),
        expert_tensor_parallel_size=1 if experts and options.get("expert", 1) > 1 else None,
    )
    gelu = functools.partial(F.gelu, approximate="tanh")
    config = TransformerConfig(
        **options["config"],
        normalization=options["normalization"],
        tensor_model_parallel_size=options["tensor"],
        pipeline_model_parallel_size=options["stages"],
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=options.get("expert", 1),
        expert_tensor_parallel_size=1 if experts and options.get("expert", 1) > 1 else None,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        activation_func=F.silu if options["config"]["gated_linear_unit"] else gelu,
        **({"num_moe_experts": experts, **options["experts"]} if experts else {}),
    )
    layers = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=options["normalization"],
    )

    class Norm:
        """torch's norms; Megatron's own need apex."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            return (torch.nn.RMSNorm if rms else torch.nn.LayerNorm)(hidden_size, eps=eps)

    inner: Any = layers.submodules
    inner.input_layernorm = inner.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention = inner.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    transformer_block.LayerNormImpl = Norm
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        layers,
        vocab_size=options["padded"],
        max_sequence_length=options["positions"],
        pre_process=stage == 0,
        post_process=stage == options["stages"] - 1,
        position_embedding_type="rope" if rms else "learned_absolute",
        rotary_base=options.get("rotary_base", 10_000),
        share_embeddings_and_output_weights=options["tied"],
        parallel_output=False,
    ).eval()
    draw(model, options["seed"])
    return model


def draw(model: Any, seed: int) -> None:
    """Give every parameter values that no fault of rows can leave alike.

    A replicated one has the same on all TP ranks.
    """
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            cut = getattr(parameter, "tensor_model_parallel", False)
            # A tied head on the last stage is the embedding of the first.
            tied = name in ("embedding.word_embeddings.weight", "output_layer.weight") and (
                model.share_embeddings_and_output_weights
            )
            place = tensor if cut else 0
            chance = torch.Generator().manual_seed(
                seed + (10**6 if tied else 1000 * number + 100 * stage) + place
            )
            values = torch.randn(parameter.shape, generator=chance)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + values / 10 if norm else values / 8)


def logits_of(model: Any, ids: torch.Tensor, stages: int) -> torch.Tensor | None:
    """Return the logits on the last stage, None on others."""
    from megatron.core import parallel_state

    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length)[None].expand_as(ids)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage > 0:
        hidden = torch.empty(length, ids.shape[0], model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad():
        output: torch.Tensor = model(ids, positions, mask)
    if stage < stages - 1:
        dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output


def save(model: Any, options: dict[str, Any], folder: Path) -> None:
    """Save as Megatron-LM does: `torch_dist`, or a file for each rank."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    # Its own starts a process that imports torch again; nothing is written in the background.
    filesystem_async._get_write_results_queue = lambda: results
    step = folder / f"iter_{STEP:07d}"
    args = argparse.Namespace(**options["args"])
    if options["layout"] == "torch_dist":
        step.mkdir(parents=True, exist_ok=True)
        state = {
            "model": model.sharded_state_dict(metadata=options.get("metadata")),
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": STEP,
        }
        dist_checkpointing.save(state, str(step))
    else:
        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{tensor:02d}"
        if options["stages"] > 1:
            name += f"_{stage:03d}"
        if options.get("expert", 1) > 1:
            name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
        (step / name).mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict_for_save_checkpoint()}
        extra = {"args": args, "checkpoint_version": 3.0, "iteration": STEP}
        torch.save({**state, **extra}, step / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))


def rank_main(rank: int, options: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    world = options["tensor"] * options["stages"] * options.get("data", 1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    replace_cuda()
    model = build(options)
    ids = torch.randint(
        options["vocabulary"], (2, 9), generator=torch.Generator().manual_seed(options["seed"])
    )
    logits = logits_of(model, ids, options["stages"])
    model.to(getattr(torch, options.get("dtype", "float32")))
    if logits is not None:
        torch.save(ids, folder / "ids.pt")
        torch.save(logits, folder / "logits.pt")
    save(model, options, folder)
    dist.barrier()
    os._exit(0)  # Megatron's writers leave threads behind


def main(options_file: str, folder: str) -> None:
    options = json.loads(Path(options_file).read_text())
    world = options["tensor"] * options["stages"] * options.get("data", 1)
    # Its compiled functions before the replacement of CUDA, and once for all ranks.
    for module in ("models.gpt", "dist_checkpointing"):
        importlib.import_module(f"megatron.core.{module}")
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(rank, options, Path(folder)))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    sys.exit(any(code != 0 for code in codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
