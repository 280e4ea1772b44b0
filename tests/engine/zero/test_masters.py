"""Under ZeRO-1 and 2 the masters of fp32 weights are the weights, not DeepSpeed's copy of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from tests.tiers import in_tiers
from zero_tp.engine.zero.adamw_update import AdamWUpdate
from zero_tp.engine.zero.zero_stages import ZeroStage1And2
from zero_tp.parallel.topology import Topology


def trained(tensor: int, stage: int, step: str, own: bool) -> dict[str, Tensor]:
    """Return a rank's weights, masters and states after two steps.

    Args:
        own: with DeepSpeed's own masters.
    """
    topology: Topology = grid(tensor, False)
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr(ZeroStage1And2, "_drop_masters", lambda _: None)
        if step == "DeepSpeed's":
            patch.setattr(AdamWUpdate, "is_supported", lambda _: False)
        adamw = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "fused": True}
        optimizer = {"type": "AdamW", "params": adamw}
        engine = build(topology, stage, optimizer=optimizer, gradient_clipping=0.5)
    for number in range(2):
        batch = tokens_of_step(number).chunk(topology.data)[topology.data_rank]
        engine.train_step([(part[:, :-1], part[:, 1:]) for part in batch.chunk(ACCUMULATION)])
    found = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    states = engine.zero.states()
    weights = engine.zero.optimizer.bit16_groups_flat
    shared = [weight.untyped_storage().data_ptr() for weight in weights]
    for fragment in states.fragments:
        assert (fragment.flat.untyped_storage().data_ptr() in shared) is not own
        for kind in states.kinds():
            found[f"{kind} of {fragment.name}"] = states.get(fragment, kind).detach().clone()
    return found


@pytest.mark.parametrize("step", ["ours", "DeepSpeed's"])
@pytest.mark.parametrize(
    ("tensor", "stage"), in_tiers([(2, 1), (4, 1), (1, 1), (1, 2), (4, 2)], [(4, 1), (1, 2)])
)
def test_weights_and_states_are_those_with_a_copy(
    ranks: Pools, tensor: int, stage: int, step: str
) -> None:
    ours, theirs = (ranks(4).run(trained, tensor, stage, step, own) for own in (False, True))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
