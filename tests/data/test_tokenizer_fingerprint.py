"""A fingerprint changes with the ids of a tokenizer, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import MAKES, llama_3, own_bpe, sentencepiece_bpe, unigram
from zero_tp.base.errors import UserError
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint


def changed(
    make: Callable[[], PreTrainedTokenizerFast], change: Callable[[dict[str, Any]], None]
) -> Any:
    """A tokenizer after a change of its serialised form."""
    tokenizer: Any = make()
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    change(values)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(values)), **tokenizer.special_tokens_map
    )


def of(tokenizer: Any) -> TokenizerFingerprint:
    return TokenizerFingerprint.of(tokenizer)


def test_what_surrounds_ids_changes_no_fingerprint() -> None:
    before, tokenizer = of(llama_3()), llama_3()
    tokenizer.chat_template, tokenizer.padding_side, tokenizer.model_max_length = (
        "{{ messages }}",
        "left",
        7,
    )
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    after = of(tokenizer)
    assert after == before and before.difference(after, "", "") == ""
    assert before == TokenizerFingerprint.model_validate_json(before.model_dump_json())


def _swap_ids(values: dict[str, Any]) -> None:
    vocabulary = values["model"]["vocab"]
    vocabulary["Ġa"], vocabulary["Ġthe"] = vocabulary["Ġthe"], vocabulary["Ġa"]


def _lower_score(values: dict[str, Any]) -> None:
    values["model"]["vocab"][60][1] = -90.0


def _add_token(values: dict[str, Any]) -> None:
    values["added_tokens"].append({**values["added_tokens"][0], "id": 400, "content": "<new>"})


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "normalizer": ("llama_3", lambda values: values.update(normalizer={"type": "Lowercase"})),
    "digits": (
        "smollm",
        lambda values: values["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False),
    ),
    "merges": ("bpe", lambda values: values["model"]["merges"].pop(0)),
    "vocabulary": ("bpe", _swap_ids),
    "scores": ("unigram", _lower_score),
    "bytes": ("sentencepiece", lambda values: values["model"].update(byte_fallback=False)),
    "added tokens": ("deepseek", _add_token),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_ids_changes_the_fingerprint(name: str) -> None:
    make, change = CHANGES[name]
    before, after = of(MAKES[make]()), of(changed(MAKES[make], change))
    assert before.difference(after, "here", "there") and after.difference(before, "here", "there")


def test_a_difference_shows_two_texts() -> None:
    with pytest.raises(UserError) as refused:
        of(llama_3()).require_same(of(own_bpe()), "the tokenizer of A", "the one of B", "take A's")
    line = str(refused.value)
    assert line.startswith("the tokenizer of A differs from the one of B: ") and line.endswith(
        "; take A's"
    )
    assert (
        line.count(" with the former but ") == 2
        and line.count(" tokens (") == 4
        and "\n" not in line
    )


def test_an_added_token_is_shown_with_its_own_text() -> None:
    plain, extended = of(own_bpe()), own_bpe()
    extended.add_tokens([AddedToken("<|tool|>", special=True)])
    with pytest.raises(
        UserError, match=r'"a <\|tool\|> b" is .* with the former but 4 tokens .* with the latter'
    ):
        of(extended).check(own_bpe(), "A", "B", "")
    with pytest.raises(
        UserError, match=r"added_tokens differ, though \d+ example texts have the same ids"
    ):
        plain.check(extended, "A", "B", "")
    extended.add_tokens([AddedToken("<|im_start|>", special=True)])
    with pytest.raises(UserError, match=r"<\|im_start\|>"):
        plain.check(extended, "A", "B", "")


def test_another_version_of_the_libraries_may_write_an_equal_tokenizer_otherwise() -> None:
    """Settings with their default, merges in another form; else vocabulary and ids decide."""

    def rewrite(values: dict[str, Any]) -> None:
        values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
        values["model"].pop("ignore_merges"), values["model"].pop("dropout")

    before = of(own_bpe())
    assert of(changed(own_bpe, rewrite)) == before
    renamed = before.model_copy(update={"parts": before.parts | {"model": "0" * 64}})
    assert "its model differ" in before.difference(renamed, "", "")
    assert (
        before.difference(renamed.model_copy(update={"versions": {"tokenizers": "9"}}), "", "")
        == ""
    )
    other = of(llama_3()).model_copy(update={"versions": {"tokenizers": "9"}})
    assert before.difference(other, "", "")


def test_an_added_token_differs_in_any_version_of_the_libraries() -> None:
    """Neither corpus's probes have the other's added token, so no common probe shows it."""
    first, second = own_bpe(), own_bpe()
    first.add_tokens(["King Richard"])
    second.add_tokens(["Duke of York"])
    later = of(second).model_copy(update={"versions": {"tokenizers": "9"}})
    assert "its added_tokens differ" in of(first).difference(later, "", "")
    assert of(second).difference(later, "", "") == ""


def test_a_tokenizer_without_an_unknown_token_has_a_fingerprint() -> None:
    tokenizer = unigram()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    assert of(tokenizer).difference(of(sentencepiece_bpe()), "", "")
    bare = own_bpe()
    bare.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert of(bare).difference(of(own_bpe()), "", "")
