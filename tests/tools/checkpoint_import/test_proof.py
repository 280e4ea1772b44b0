"""The loss of a written model, read a layer at a time, is that of transformers' class."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.decoders import MODEL_TYPES, decoder, decoder_fields, tokens_for
from tests.tiers import examples, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import import proof
from zero_tp.tools.checkpoint_import.proof import prove

FIRST = ("gpt2", "llama", "qwen3_moe", "gemma2")


@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, FIRST))
@examples(1, 4)
@given(data=st.data())
def test_the_loss_is_that_of_transformers(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    written = data.draw(decoder_fields(model_type))
    reference = decoder(written, data.draw(st.integers(0, 2**31), label="seed"), "eager").eval()
    reference.save_pretrained(
        folder, max_shard_size=data.draw(st.sampled_from(["5GB", "20KB"]), label="shard")
    )
    tokens = tokens_for(written)[0]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(proof, "HEAD_ROWS", 7)
        found = prove(folder, tokens)
        logits = reference(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:]).item()
    assert found.loss == pytest.approx(expected, rel=2e-6)
    assert found.uniform == math.log(written["vocab_size"])


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    decoder(fields, 0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="up to 11"):
        prove(tmp_path, torch.tensor([3, 11]))
    with pytest.raises(UserError, match="has 1 tokens"):
        prove(tmp_path, torch.tensor([3]))
