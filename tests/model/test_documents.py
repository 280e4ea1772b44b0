"""Documents packed in rows against transformers' model on each document by itself: one forward,
every gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.compare import grid
from tests.support.decoders import (
    chooses_by_rounding,
    shrink_linear_values,
    without_router_logits,
)
from tests.support.native import check_gradients, parallel_model, perturbed
from tests.support.packed import packed_kernels
from tests.support.packed_documents import (
    LENGTH,
    OF_LLAMA,
    ROWS,
    VOCABULARY,
    WINDOW,
    dynamic_model,
    token_losses_apart,
)
from tests.support.pools import Pools
from tests.support.tiny_configs import general_fields
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.data.batch import separate_documents
from zero_tp.model.gated_delta import CHUNK
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.topology import Topology

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": LENGTH + 1,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    },
    "llama": OF_LLAMA,
    "mistral": {**OF_LLAMA, "sliding_window": WINDOW},
    # Values of other widths than queries.
    "youtu": {
        **OF_LLAMA,
        **{"num_key_value_heads": OF_LLAMA["num_attention_heads"], "v_head_dim": 6},
        **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4},
    },
}
WEIGHTS = {"gpt2": 2 * 12 + 4, "llama": 2 * 8 + 3, "mistral": 2 * 8 + 3, "youtu": 2 * 11 + 2}


def reference_model(kind: str, attention: str, seed: int) -> Any:
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **CONFIGS[kind]
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return perturbed(AutoModelForCausalLM.from_config(config).eval())


def windows_of(lengths: list[int], seed: int, row: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Rows of documents of these lengths, in turn until the rows are full, and their numbers;
    [ROWS, row + 1].
    """
    tokens = torch.randint(
        VOCABULARY, (ROWS, row + 1), generator=torch.Generator().manual_seed(seed)
    )
    numbers = torch.arange(len(lengths) * tokens.numel()).repeat_interleave(
        torch.tensor(lengths).repeat(tokens.numel())
    )
    return tokens, numbers[: tokens.numel()].view_as(tokens)


def packed_equals_apart(
    topology: Topology, kind: str, attention: str, lengths: list[int], seed: int
) -> int:
    """Args: attention: "sdpa", "eager", or "packed": sdpa on an accelerator that needs no mask
    for documents.
    """
    packed, attention = attention == "packed", attention.replace("packed", "sdpa")
    reference = reference_model(kind, attention, seed)
    tokens, documents = windows_of(lengths, seed)
    total, count = token_losses_apart(reference, tokens, documents)
    (total / count).backward()
    model = parallel_model(reference, topology).train()
    assert model.spec.attention == attention
    assert set(model.spec.windows) == {WINDOW if kind == "mistral" else None}
    if not packed:
        return _equals(model, reference, tokens, documents, total, count)
    with packed_kernels() as kernel:
        compared = _equals(model, reference, tokens, documents, total, count)
        # Positions that never begin anew tell of no documents: without a window, the last of the
        # four forwards is causal and needs no kernel for documents.
        inputs = documents[:, :-1]
        parted = bool((inputs[:, 1:] != inputs[:, :-1]).any())
        forwards = 4 if parted or kind == "mistral" else 3
        assert kernel.call_count == forwards * model.spec.layers
        assert {call.kwargs["window_size"] for call in kernel.call_args_list} == {
            (WINDOW - 1 if kind == "mistral" else -1, 0)
        }
    return compared


def _equals(
    model: Any, reference: Any, tokens: Tensor, documents: Tensor, total: Tensor, count: int
) -> int:
    batch = separate_documents(tokens, documents)
    assert int((batch.labels != IGNORE_INDEX).sum()) == count
    given_to_model: dict[str, Any] = {
        "shift_labels": batch.labels,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
    }
    loss = model(batch.input_ids, **given_to_model).loss
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-6)
    loss.backward()
    compared = check_gradients(model, reference)
    with torch.no_grad():
        each = model(batch.input_ids, **given_to_model, reduction="none").loss
        shared = model(batch.input_ids, **given_to_model, num_items_in_batch=7.5).loss
        # Positions that begin anew tell the same, as they tell transformers.
        del given_to_model["document_ids"]
        by_positions = model(batch.input_ids, **given_to_model, reduction="none").loss
    assert torch.equal(by_positions, each)
    assert each.double().sum().item() == pytest.approx(total.item(), rel=1e-5)
    assert shared.item() == pytest.approx(total.item() / 7.5, rel=1e-5)
    return compared


def on_a_grid(
    world: int, sequence: bool, kind: str, attention: str, lengths: list[int], seed: int
) -> int:
    return packed_equals_apart(grid(world, sequence), kind, attention, lengths, seed)


# No shrinking: a failure on one rank costs a new pool.
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    attention=st.sampled_from(["sdpa", "eager", "packed"]),
    lengths=st.lists(st.integers(1, 2 * LENGTH), min_size=1, max_size=8),
    draw=st.integers(0, 2**20),
)
@example("sdpa", [5, 1, 1, 7, 2], 0)
@example("eager", [5, 1, 1, 7, 2], 0)
@example("sdpa", [2], 1)
@example("packed", [5, 1, 1, 7, 2], 0)
@example("packed", [LENGTH + 1], 0)
@example("packed", [LENGTH, 1], 0)
@pytest.mark.parametrize("kind", in_tiers(list(CONFIGS), ["mistral"]))
@pytest.mark.parametrize(
    ("world", "sequence"), in_tiers([(1, False), (2, False), (2, True)], [(2, True)])
)
def test_packed_documents_equal_documents_apart(
    ranks: Pools,
    world: int,
    sequence: bool,
    kind: str,
    attention: str,
    lengths: list[int],
    draw: int,
) -> None:
    if all(length == 1 for length in lengths):
        lengths = [*lengths, 2]
    if world == 1:
        compared = [packed_equals_apart(Topology(world=1), kind, attention, lengths, draw)]
    else:
        compared = ranks(world).run(on_a_grid, world, sequence, kind, attention, lengths, draw)
    assert compared == [WEIGHTS[kind]] * world


NEWER = ["cohere2", "exaone4", "gemma2", "gemma3_text", "glm4", "nanochat", "olmo3", "smollm3"]
NEWER += ["gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]


@pytest.mark.parametrize("model_type", in_tiers(NEWER, ["gemma2", "gpt_oss", "qwen3_next"]))
def test_packed_documents_of_other_parts(model_type: str, seed: int) -> None:
    """Soft caps, sinks, linear attention, layers of two types, several rotations or none."""
    fields = general_fields(model_type) | without_router_logits(model_type)
    config = AutoConfig.for_model(**fields)
    eager = ("gemma2", "gpt_oss")
    config._attn_implementation = "eager" if model_type in eager else "sdpa"
    torch.manual_seed(seed)
    reference = perturbed(AutoModelForCausalLM.from_config(config).eval())
    tokens, documents = windows_of([5, 1, 1, 7, 2], seed)
    total, count = token_losses_apart(reference, tokens, documents)
    (total / count).backward()
    model = parallel_model(reference, Topology(world=1)).train()
    assert _equals(model, reference, tokens, documents, total, count) > 10


DELTA_TYPES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
ROW = 2 * CHUNK + 6


def delta_reference(model_type: str, pieces: list[Tensor], seed: int) -> Any:
    """Of the next seeds the first whose experts rounding does not choose."""
    fields = general_fields(model_type) | without_router_logits(model_type)
    config = AutoConfig.for_model(**fields | {"max_position_embeddings": ROW})
    for candidate in range(seed, seed + 50):
        torch.manual_seed(candidate)
        model = perturbed(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
        shrink_linear_values(model)
        if not any(chooses_by_rounding(model, piece[None]) for piece in pieces):
            return model
    raise AssertionError(f"rounding decides all models of the seeds {seed} to {candidate}")


def delta_equals_apart(
    world: int, sequence: bool, model_type: str, lengths: list[int], recompute: str, seed: int
) -> int:
    """Rows of several chunks of the gated delta rule."""
    tokens, documents = windows_of(lengths, seed, ROW)
    rows = zip(tokens[:, :-1], documents[:, :-1], strict=True)
    pieces = [row[numbers == one] for row, numbers in rows for one in numbers.unique()]
    reference = delta_reference(model_type, pieces, seed)
    total, count = token_losses_apart(reference, tokens, documents)
    (total / count).backward()
    model = parallel_model(reference, grid(world, sequence)).train()
    assert model.spec.mixed_by("gated_delta")
    policy = RecomputePolicy(mode=recompute)
    ActivationMemory(model, policy, ActivationCheckpointing(), torch.device("cpu"))
    return _equals(model, reference, tokens, documents, total, count)


@THOROUGH
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(
    lengths=st.lists(st.integers(1, ROW), min_size=1, max_size=12),
    recompute=st.sampled_from(["none", "selective", "full"]),
    draw=st.integers(0, 2**20),
)
@example([5, 1, CHUNK, 1, 2, CHUNK - 7, CHUNK + 3], "full", 0)
@pytest.mark.parametrize("model_type", DELTA_TYPES)
@pytest.mark.parametrize(("world", "sequence"), [(2, False), (2, True)])
def test_packed_documents_of_linear_attention_over_ranks(
    ranks: Pools,
    world: int,
    sequence: bool,
    model_type: str,
    lengths: list[int],
    recompute: str,
    draw: int,
) -> None:
    """Documents that end inside a chunk, at its end, and after it."""
    lengths = [*lengths, 2]
    options = (model_type, lengths, recompute, draw)
    compared = ranks(world).run(delta_equals_apart, world, sequence, *options)
    assert compared == compared[:1] * world
    assert compared[0] > 30


@pytest.mark.parametrize("kind", CONFIGS)
def test_positions_that_begin_anew_part_documents_as_in_transformers(kind: str) -> None:
    """As trl's packing and transformers' DataCollatorWithFlattening give them."""
    reference = reference_model(kind, "sdpa", 3)
    tokens = torch.randint(VOCABULARY, (2, 8))
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
    model = parallel_model(reference, Topology(world=1))
    for each in (positions, positions[:1], positions[1:]):
        expected = reference(tokens, position_ids=each, use_cache=False).logits
        torch.testing.assert_close(
            model(tokens, position_ids=each).logits, expected, rtol=1e-4, atol=1e-5
        )


def test_frequencies_follow_the_length_and_positions_that_are_given(seed: int) -> None:
    for length, first in (
        (LENGTH, None),
        (LENGTH + 5, None),
        (LENGTH, 0),
        (LENGTH - 4, 9),
        (LENGTH + 3, 2),
    ):
        reference = dynamic_model(seed)  # anew: it remembers lengths
        tokens = torch.randint(VOCABULARY, (2, length))
        positions = None if first is None else torch.arange(first, first + length)[None]
        expected = reference(tokens, position_ids=positions, use_cache=False).logits
        found = parallel_model(reference, Topology(world=1))(tokens, position_ids=positions).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_frequencies_of_the_longest_forward_stay_as_in_transformers(seed: int) -> None:
    """Until a forward is shorter than the positions; with gradients and without."""
    reference = dynamic_model(seed).train()
    model = parallel_model(reference, Topology(world=1)).train()
    for length in (
        LENGTH,
        LENGTH + 9,
        LENGTH + 2,
        LENGTH,
        LENGTH - 1,
        LENGTH + 2,
        LENGTH + 5,
        LENGTH + 3,
    ):
        tokens = torch.randint(VOCABULARY, (2, length))
        with torch.set_grad_enabled(length % 2 == 0):
            expected = reference(tokens, labels=tokens, use_cache=False).loss
            loss = model(tokens, labels=tokens).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_what_documents_cannot_have() -> None:
    model = parallel_model(dynamic_model(), Topology(world=1))
    tokens = torch.zeros(1, LENGTH + 2, dtype=torch.long)
    with pytest.raises(
        UserError, match=f"document_ids: with rope_type 'dynamic' .* at most {LENGTH} tokens"
    ):
        model(tokens, document_ids=tokens)
    assert model(
        tokens[:, :LENGTH], labels=tokens[:, :LENGTH], document_ids=tokens[:, :LENGTH]
    ).loss.isfinite()
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss.isfinite()
        with pytest.raises(ValueError, match="document_ids with a KV cache"):
            model(tokens[:, :4], document_ids=tokens[:, :4], use_cache=True)
    with pytest.raises(ValueError, match=r"document_ids is \(1, 3\), expected \(1, 4\)"):
        model(tokens[:, :4], document_ids=tokens[:, :3])
