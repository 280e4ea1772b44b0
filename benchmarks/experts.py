"""Time experts divided over ranks beside ZeRO-3 and beside DeepSpeed's own layer, in turns.

    torchrun --nproc_per_node 4 -m benchmarks.experts --output benchmarks/results/

A Mixtral of 16 experts in fp32: most CPUs have no fast products in bf16. "divided" is E 4 at
ZeRO-2, "gathered" all experts on every rank at ZeRO-3; both train the same rows from the same
weights. Then one layer, forward and backward: ours with E 4, and DeepSpeed's `MoE` with ep_size 4
and without dropped tokens, with the same weights, rows and choices; their outputs are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import MixtralConfig

from benchmarks.dated import write_result
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.expert_groups import is_divided
from zero_tp.model.context import ForwardContext
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.moe import Experts
from zero_tp.parallel.topology import Topology
from zero_tp.run.process.connect import connect

EXPERTS = 16
MODEL = MixtralConfig(
    num_hidden_layers=4,
    hidden_size=384,
    intermediate_size=768,
    num_attention_heads=6,
    num_key_value_heads=6,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    vocab_size=4096,
    max_position_embeddings=256,
    output_router_logits=False,
)
ROWS, LENGTH = 2, 256


def engine_of(topology: Topology, stage: int) -> TrainingEngine:
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "torch_adam": True, "fused": True},
        },
        "zero_optimization": {"stage": stage},
    }
    return TrainingEngine.from_dict(MODEL, topology, settings, seed=1)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done the work."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def batch_of(step: int, topology: Topology) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step * topology.world + topology.rank)
    tokens = torch.randint(MODEL.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    return [(tokens[:, :-1], tokens[:, 1:])]


def steps_in_turns(
    engines: dict[str, TrainingEngine], rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Return each engine's seconds of a step, and how far their losses are apart at most."""
    taken: dict[str, list[float]] = {name: [] for name in engines}
    apart = 0.0
    for step in range(rounds + 1):
        losses = []
        for name, engine in engines.items():
            batch = batch_of(step, engine.topology)

            def run(engine: TrainingEngine = engine, batch: Any = batch) -> None:
                engine.run_step(batch)

            taken[name].append(seconds(run))
            losses.append(engine.loss)
        apart = max(apart, max(losses) - min(losses))
    # The first step makes states.
    return {name: each[1:] for name, each in taken.items()}, apart


class GatedExpert(nn.Module):
    """One expert of DeepSpeed's layer. [*, h] → [*, h]."""

    def __init__(self) -> None:
        super().__init__()
        hidden, size = MODEL.hidden_size, MODEL.intermediate_size
        self.gate_up = nn.Linear(hidden, 2 * size, bias=False)
        self.down = nn.Linear(size, hidden, bias=False)

    def forward(self, tensor: Tensor) -> Tensor:
        gate, up = self.gate_up(tensor).chunk(2, -1)
        output: Tensor = self.down(nn.functional.silu(gate) * up)
        return output


def deepspeed_layer(ours: Experts, topology: Topology) -> nn.Module:
    """Return DeepSpeed's layer with the weights of ours. Collective."""
    from deepspeed.moe.layer import MoE

    options = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    layer = MoE(
        MODEL.hidden_size,
        GatedExpert(),
        num_experts=EXPERTS,
        ep_size=topology.expert,
        k=MODEL.num_experts_per_tok,
        **options,
    )
    layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(ours.router.weight)
        pairs = zip(layer.deepspeed_moe.experts.deepspeed_experts, range(EXPERTS), strict=False)
        for expert, number in pairs:
            expert.gate_up.weight.copy_(ours.gate_up.weight[number])
            expert.down.weight.copy_(ours.down.weight[number])
    return layer


def layers_in_turns(topology: Topology, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return each layer's seconds of a forward and backward, and how far their outputs are apart,
    as a share.
    """
    model = ZeroTPForCausalLM(MODEL, topology, seed=1)
    ours = model.transformer.layers[0].mlp
    assert isinstance(ours, Experts)
    theirs = deepspeed_layer(ours, topology)
    generator = torch.Generator().manual_seed(topology.rank)
    rows = torch.randn(LENGTH, ROWS, MODEL.hidden_size, generator=generator)
    outputs: dict[str, Tensor] = {}

    def our_pass() -> None:
        tensor = rows.clone().requires_grad_()
        outputs["ours"] = ours(tensor, context=ForwardContext(sequence=False, masks={}))
        outputs["ours"].sum().backward()

    def their_pass() -> None:
        tensor = rows.clone().requires_grad_()
        outputs["DeepSpeed"] = theirs(tensor)[0]
        outputs["DeepSpeed"].sum().backward()

    taken: dict[str, list[float]] = {"ours": [], "DeepSpeed": []}
    for _ in range(rounds + 1):
        taken["ours"].append(seconds(our_pass))
        taken["DeepSpeed"].append(seconds(their_pass))
    ours_output, theirs_output = (output.detach() for output in outputs.values())
    difference = (ours_output - theirs_output).norm() / ours_output.norm()
    return {name: each[1:] for name, each in taken.items()}, float(difference)


def expert_elements(engine: TrainingEngine) -> int:
    """Return the elements of experts' weights on this rank."""
    return sum(weight.numel() for weight in engine.model.parameters() if is_divided(weight))


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Return the median, least and greatest ratio of the rounds."""
    each = [one / other for one, other in zip(slower, faster, strict=True)]
    return [statistics.median(each), min(each), max(each)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder of the dated result")
    arguments = parser.parse_args()
    whole, _ = connect()
    divided = Topology(expert=whole.data)
    engines = {"divided": engine_of(divided, 2), "gathered": engine_of(whole, 3)}
    steps, apart = steps_in_turns(engines, arguments.rounds)
    layers, difference = layers_in_turns(divided, arguments.rounds)
    if whole.rank:
        return
    of_all = MODEL.num_hidden_layers * EXPERTS * 3 * MODEL.hidden_size * MODEL.intermediate_size
    result = {
        "ranks": whole.world,
        "tokens of a step": whole.world * ROWS * LENGTH,
        "expert weights of a rank": expert_elements(engines["divided"]) / of_all,
        "seconds of a step": {name: statistics.median(each) for name, each in steps.items()},
        "gathered / divided": ratios(steps["gathered"], steps["divided"]),
        "losses apart": apart,
        "seconds of a layer": {name: statistics.median(each) for name, each in layers.items()},
        "DeepSpeed / ours": ratios(layers["DeepSpeed"], layers["ours"]),
        "outputs apart": difference,
    }
    for key, value in result.items():
        print(f"{key}: {value}")
    if arguments.output:
        write_result(arguments.output, "experts", result)


if __name__ == "__main__":
    main()
