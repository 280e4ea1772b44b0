"""Random small encoders of every model_type, as hypothesis draws them, and rows to train them
on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from tests.support.decoders import MODEL_TYPES as DECODERS
from tests.support.native import native_model, perturbed
from tests.support.tiny_models import bert_fields
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.parallel.topology import Topology

LENGTH, BATCH, HEADS = 16, 3, 4
MODEL_TYPES = sorted(ARCHITECTURES.keys() - DECODERS)


@st.composite
def encoder_fields(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Fields of a Hugging Face config: every choice that the tables compute can come up."""
    heads = HEADS * draw(st.integers(1, 3), label="heads / 4")
    return {
        "model_type": model_type,
        "vocab_size": draw(st.integers(11, 70), label="vocabulary"),
        "hidden_size": heads * draw(st.integers(2, 6), label="head size"),
        "num_hidden_layers": draw(st.integers(1, 3), label="layers"),
        "num_attention_heads": heads,
        "intermediate_size": 4 * draw(st.integers(2, 12), label="MLP / 4"),
        "max_position_embeddings": LENGTH,
        "type_vocab_size": draw(st.integers(2, 3), label="token types"),
        "hidden_act": draw(st.sampled_from(["gelu", "gelu_new", "relu"]), label="activation"),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": draw(st.sampled_from([None, 0, 7]), label="padding token"),
        "architectures": draw(
            st.sampled_from([None, [without_sentences(model_type)]]), label="class"
        ),
    }


def without_sentences(model_type: str) -> str:
    """The class that has no sentence head."""
    name = ARCHITECTURES[model_type].masked_lm_class
    assert name is not None
    return name


def encoder(fields: dict[str, Any], seed: int) -> Any:
    """Hugging Face's model, random everywhere."""
    torch.manual_seed(seed)
    return perturbed(
        native_model(AutoConfig.for_model(**fields), attn_implementation="eager").eval()
    )


def rows_for(
    fields: dict[str, Any], seed: int, batch: int = BATCH, length: int = LENGTH
) -> dict[str, Tensor]:
    """Rows of several lengths, one of them without padding, some tokens masked; the padding
    token among them.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    ids = drawn(fields["vocab_size"], batch, length)
    ids[0, 3] = fields["pad_token_id"] or 0
    lengths = 3 + drawn(length - 2, batch)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    chosen = (drawn(4, batch, length) == 0) & (mask == 1)
    chosen[:, 1] = True
    rows = {
        "input_ids": ids,
        "token_type_ids": drawn(fields["type_vocab_size"], batch, length),
        "attention_mask": mask,
        "labels": drawn(fields["vocab_size"], batch, length).masked_fill(~chosen, IGNORE_INDEX),
    }
    if not fields["architectures"]:
        rows["next_sentence_label"] = drawn(2, batch)
    return rows


def losses_and_logits(reference: Any, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What transformers makes of rows: the loss, and the logits under the names of ours."""
    output = reference(**rows)
    if "next_sentence_label" not in rows:
        return output.loss, {"prediction_logits": output.logits.detach()}
    names = ("prediction_logits", "seq_relationship_logits")
    return output.loss, {name: output[name].detach() for name in names}


ALL_ENCODERS = pytest.mark.parametrize("model_type", MODEL_TYPES)
ALONE = Topology(world=1)


def fields_of(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "max_position_embeddings": LENGTH,
    }
    rest = {"type_vocab_size": 2, "pad_token_id": 0, "architectures": None}
    return bert_fields(model_type=model_type, **{**sizes, **rest, **changes})
