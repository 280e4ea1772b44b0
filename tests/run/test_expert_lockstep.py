"""With expert parallelism each forward is a collective over an expert group: no door hangs where
ranks have different numbers of forwards, and each rank gets what the whole model gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.compare import grid
from tests.support.experts import fields, reference_model
from tests.support.native import parallel_model
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.data.batch import MaskedBatch
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.architectures.configs import config_from_block
from zero_tp.model.huggingface import parallel_model as split_model
from zero_tp.model.weights.live_weights import LiveSource
from zero_tp.parallel.topology import Topology

FIELDS = fields(num_local_experts=8, eos_token_id=7)
VOCABULARY = FIELDS["vocab_size"]
LIMIT = 60.0
"""Seconds of an idle machine."""
GRIDS = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 3), (2, 1, 1)]
"""TP, EP, ZeRO stage, of four ranks."""


def reference() -> Any:
    return reference_model({**FIELDS, "output_router_logits": False}, seed=5).eval()


def tokens(seed: int, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


def engine_of(tensor: int, expert: int, stage: int = 1, **options: Any) -> TrainingEngine:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    native = reference()
    source = LiveSource(native, native.config)
    topology = grid(tensor, tensor > 1, expert)
    return TrainingEngine.from_dict(
        native.config, topology, settings, seed=3, source=source, **options
    )


# --- evaluation -----------------------------------------------------------------------------------


def evaluation_rows(data_rank: int) -> list[torch.Tensor]:
    """Batches of a rank: none on the first, and one more on each that follows."""
    return [tokens(10 * data_rank + number, 2, 7 + number) for number in range(data_rank)]


def evaluated(tensor: int, expert: int, stage: int) -> float:
    engine = engine_of(tensor, expert, stage)
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in evaluation_rows(engine.topology.data_rank)]
    loss = engine.evaluate(batches)["loss"]
    assert engine.evaluate(batches)["loss"] == loss, "it left something behind"
    return loss


@pytest.mark.parametrize(("tensor", "expert", "stage"), in_tiers(GRIDS, GRIDS[:1]))
def test_ranks_evaluate_different_numbers_of_batches(
    ranks: Pools, tensor: int, expert: int, stage: int
) -> None:
    model = reference()
    total = count = 0.0
    for data_rank in range(4 // tensor):
        for rows in evaluation_rows(data_rank):
            with torch.no_grad():
                loss = model(input_ids=rows, labels=rows).loss
            total += float(loss) * rows[:, 1:].numel()
            count += rows[:, 1:].numel()
    losses = ranks(4).run(evaluated, tensor, expert, stage, timeout=LIMIT)
    assert losses == [pytest.approx(total / count, rel=1e-5)] * 4


def evaluated_sentences(encoder_fields: dict[str, Any]) -> dict[str, float]:
    """Of rank r, r batches of rows with their order of sentences, under ZeRO-3 without weights that
    stay gathered.
    """
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    config = config_from_block(encoder_fields)
    engine = TrainingEngine.from_dict(config, grid(1, False), settings, seed=3)
    batches = []
    for number in range(engine.topology.data_rank):
        ids = tokens(10 * engine.topology.data_rank + number, 2, 7 + number)
        order = torch.tensor([0, 1])
        arguments = {"input_ids": ids, "labels": ids, "next_sentence_label": order}
        batches.append(MaskedBatch(arguments))
    return engine.evaluate(batches)


def test_ranks_evaluate_different_numbers_of_batches_with_a_sentence_head(ranks: Pools) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2}
    encoder_fields = {"model_type": "bert", "vocab_size": VOCABULARY, **sizes}
    found = ranks(4).run(evaluated_sentences, encoder_fields, timeout=LIMIT)
    assert found == found[:1] * 4 and found[0]["loss"] > 0


def guarded(tensor: int, expert: int) -> list[float]:
    """Steps that run a micro-batch twice and compare its gradients."""
    engine = engine_of(tensor, expert)
    found = []
    for step in range(2):
        rows = tokens(100 * step + engine.topology.data_rank, 2, 9)
        batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        found.append(engine.train_step([batch], guarded=step, guard_gradients=True))
    return found


@THOROUGH
@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (1, 4), (2, 2)])
def test_guards_run_in_lockstep(ranks: Pools, tensor: int, expert: int) -> None:
    expected = ranks(4).run(guarded, tensor, 1, timeout=LIMIT)
    losses = ranks(4).run(guarded, tensor, expert, timeout=LIMIT)
    assert losses == [pytest.approx(each, rel=1e-5) for each in expected]


# --- generation -----------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "chunks of the prompt": {"cache_implementation": "static", "prefill_chunk_size": 2},
    "no cache": {"use_cache": False},
    "sampled": {"do_sample": True, "top_k": 5},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "synced_gpus": {"synced_gpus": True},
}


def generated(tensor: int, expert: int, way: dict[str, Any]) -> list[Any]:
    """Each data rank's own prompt to its own length, and what transformers gives for it."""
    native = reference()
    topology = grid(tensor, tensor > 1, expert)
    model = parallel_model(native, topology).eval()
    rank = topology.data_rank
    rows = 1 if "prompt_lookup_num_tokens" in way else 2
    prompt = tokens(rank, rows, 3 + 2 * rank)
    outputs = []
    for each in (native, model):
        options = {
            name: value for name, value in way.items() if each is model or name != "synced_gpus"
        }
        torch.manual_seed(rank)
        outputs.append(
            each.generate(prompt, max_new_tokens=2 + 3 * (3 - rank), pad_token_id=0, **options)
        )
    return [output.tolist() for output in outputs]


@pytest.mark.parametrize("way", in_tiers(list(WAYS), ["greedy"]))
@pytest.mark.parametrize(("tensor", "expert"), in_tiers([(1, 2), (1, 4), (2, 2)], [(2, 2)]))
def test_ranks_generate_from_different_prompts_to_different_lengths(
    ranks: Pools, tensor: int, expert: int, way: str
) -> None:
    found = ranks(4).run(generated, tensor, expert, WAYS[way], timeout=LIMIT)
    assert len({len(output[0]) for _, output in found}) > 1
    for expected, output in found:
        assert output == expected


def generated_by_one_group() -> str:
    """The ranks of the first TP group have different prompts, those of the second the same."""
    topology = grid(2, True, 2)
    model = parallel_model(reference(), topology).eval()
    seed = topology.rank if topology.data_rank == 0 else 7
    try:
        return str(model.generate(tokens(seed, 1, 4), max_new_tokens=5).shape[1])
    except UserError as error:
        return str(error)


def test_a_refused_prompt_leaves_no_rank_waiting(ranks: Pools) -> None:
    first, second, *others = ranks(4).run(generated_by_one_group, timeout=LIMIT)
    assert "the tensor parallel ranks have different prompts" in first
    assert second == first and others == ["9", "9"]


def drafted() -> str:
    model = parallel_model(reference(), grid(1, False, 2)).eval()
    with pytest.raises(UserError) as refused:
        model.generate(tokens(1, 1, 4), max_new_tokens=5, assistant_model=model)
    return str(refused.value)


def test_an_assistant_with_divided_experts_is_refused(ranks: Pools) -> None:
    for message in ranks(4).run(drafted, timeout=LIMIT):
        assert message.startswith("generate: an assistant_model with expert parallelism is not")


# --- weights --------------------------------------------------------------------------------------


def saved(folder: str, tensor: int, expert: int) -> list[str]:
    """Save the model in two ways, and return what the doors of state dicts refuse."""
    model = split_model(reference(), grid(tensor, tensor > 1, expert))
    model.save_pretrained(folder, max_shard_size="20KB")
    messages = []
    for door in (
        lambda: model.save_pretrained(folder, state_dict=model.state_dict()),
        lambda: model.load_state_dict(reference().state_dict()),
    ):
        with pytest.raises(UserError) as refused:
            door()
        messages.append(str(refused.value))
    return messages


def saved_whole(folder: str) -> None:
    split_model(reference(), Topology(world=1)).save_pretrained(folder, max_shard_size="20KB")


@pytest.mark.parametrize(("tensor", "expert"), in_tiers([(1, 2), (1, 4), (2, 2)], [(2, 2)]))
def test_save_pretrained_writes_the_files_of_a_whole_model(
    ranks: Pools, tmp_path: Path, tensor: int, expert: int
) -> None:
    saved_whole(str(tmp_path / "whole"))
    for messages in ranks(4).run(saved, str(tmp_path / "split"), tensor, expert, timeout=LIMIT):
        assert messages[0].startswith("save_pretrained: state_dict holds one rank's shards")
        assert messages[1].startswith("load_state_dict: a rank of a split model holds shards")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "split").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name in names:
        written, whole = ((tmp_path / folder / name).read_bytes() for folder in ("split", "whole"))
        assert written == whole, name
    assert load_file(tmp_path / "split" / next(n for n in names if n.endswith("safetensors")))
