"""Every decoder's model_type generates what transformers' own class does, for random small configs,
in one process and on ranks that agree on every token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compare import grid
from tests.support.decoders import (
    BATCH,
    MODEL_TYPES,
    decoder,
    decoder_fields,
    without_router_logits,
)
from tests.support.native import parallel_model
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.parallel.agreement import broadcast_rng_state
from zero_tp.parallel.topology import Topology


@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, ["gpt2", "llama", "qwen3"], every=2))
@examples(4, 10)
@given(data=st.data())
def test_generate_equals_transformers(model_type: str, data: st.DataObject) -> None:
    """Greedy, sampled and with beams; padded on the left or not; past sliding windows and past the
    positions that scaling reckons with, where there are no learned ones.
    """
    fields = data.draw(decoder_fields(model_type)) | without_router_logits(model_type)
    reference = decoder(fields, data.draw(st.integers(0, 2**31), label="seed"))
    model = parallel_model(reference, Topology(world=1)).eval()
    prompt = torch.randint(
        1, fields["vocab_size"], (BATCH, data.draw(st.integers(1, 9), label="prompt"))
    )
    asked: dict[str, Any] = {"max_new_tokens": 7 if model_type == "gpt2" else 14, "pad_token_id": 0}
    ways: list[dict[str, Any]] = [
        {},
        {"use_cache": False},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 2},
    ]
    ways += [{"cache_implementation": "static"}, {"cache_implementation": "static", "num_beams": 2}]
    asked |= data.draw(st.sampled_from(ways), label="way")
    if data.draw(st.booleans(), label="padded"):
        asked["attention_mask"] = torch.ones_like(prompt)
        asked["attention_mask"][0, : prompt.shape[1] // 2] = 0
    outputs = []
    for each in (reference, model):
        torch.manual_seed(1)
        outputs.append(each.generate(prompt, **asked))
    assert torch.equal(outputs[1], outputs[0])


def generated(
    world: int, fields: dict[str, Any], seed: int, prompt: list[list[int]], ways: Any
) -> list[Any]:
    """On this rank, and by transformers in one process."""
    reference = decoder(fields, seed)
    pairs = []
    for sequence in (False, True):
        model = parallel_model(reference, grid(world, sequence)).eval()
        for settings in ways:
            outputs = []
            for each in (reference, model):
                # Ranks that would draw different random numbers.
                torch.manual_seed(5 if each is reference else 5 + grid(world, sequence).tensor_rank)
                outputs.append(
                    each.generate(
                        torch.tensor(prompt), pad_token_id=0, max_new_tokens=6, **settings
                    )
                )
            pairs.append([output.tolist() for output in outputs])
    return pairs


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, MODEL_TYPES[:1], every=3))
@examples(2, 2)
@given(data=st.data())
def test_generate_agrees_on_every_token(
    ranks: Pools, world: int, model_type: str, data: st.DataObject
) -> None:
    """Greedy and sampled, on all ranks what transformers gives: they sample with the first
    rank's random numbers.
    """
    fields = data.draw(decoder_fields(model_type)) | without_router_logits(model_type)
    tokens = st.integers(1, fields["vocab_size"] - 1)
    length = data.draw(st.integers(1, 9), label="prompt")
    prompt = data.draw(
        st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=2, max_size=2)
    )
    # Sampled to the full length: ranks that disagreed would otherwise wait for one that has ended.
    ways: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 4, "min_new_tokens": 6},
    ]
    ways += [
        {"do_sample": False, "cache_implementation": "static", **chunks}
        for chunks in ({}, {"prefill_chunk_size": 2})
    ]
    seed = data.draw(st.integers(0, 2**31), label="seed")
    for pairs in ranks(world).run(generated, world, fields, seed, prompt, ways):
        assert len(pairs) == 2 * len(ways)
        for expected, found in pairs:
            assert found == expected


SMALL_GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 50257}


def different_prompts() -> list[str]:
    """Another token on a rank, or no prompt there, which transformers would begin by itself."""
    from zero_tp.base.errors import UserError

    topology, said = grid(2, False), []
    model = parallel_model(decoder(SMALL_GPT2, 0), topology)
    for other in (torch.tensor([[1, 3]]), None):
        with pytest.raises(UserError) as caught:
            model.generate(
                other if topology.tensor_rank else torch.tensor([[1, 2]]), max_new_tokens=1
            )
        said.append(str(caught.value))
    return said


def test_different_prompts_are_refused(ranks: Pools) -> None:
    assert all(
        "different prompts" in text for said in ranks(2).run(different_prompts) for text in said
    )


def drawn() -> tuple[list[float], list[float], list[float]]:
    """What this rank would draw by itself, what it draws together with the others, and what it
    draws next.
    """
    topology = grid(2, False)
    torch.manual_seed(topology.tensor_rank)
    alone = torch.rand(2).tolist()
    torch.manual_seed(topology.tensor_rank)
    with broadcast_rng_state(topology.tensor_group, torch.device("cpu")):
        together = torch.rand(2).tolist()
    return alone, together, torch.rand(2).tolist()


def test_ranks_draw_the_numbers_of_the_first(ranks: Pools) -> None:
    (alone, together, after), (other_alone, other_together, other_after) = ranks(2).run(drawn)
    assert alone != other_alone
    assert together == other_together == alone
    assert other_after == other_alone, "as if nothing had been drawn"
    assert after not in (alone, other_alone), "the first rank's have gone on"
