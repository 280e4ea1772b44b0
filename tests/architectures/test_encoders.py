"""Every encoder split over ranks against transformers' own class in one process, for random small configs with padding:
a bare backward, then DeepSpeed's ZeRO, and the loss of masked tokens by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.compare import check_close, grid, leaf, piece_of
from tests.support.encoders import LENGTH, MODEL_TYPES, config_of, encoder, encoder_fields, losses_and_logits, rows_for
from tests.support.native import Native, check_gradients, parallel_model
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.huggingface import ZeroTPForPreTraining
from zero_tp.models.context import ForwardInputs
from zero_tp.parallel.collectives import gather_rows
from zero_tp.parallel.layout import audit, split_vocabulary
from zero_tp.parallel.loss import vocab_parallel_cross_entropy
from zero_tp.topology import Topology

EACH_TYPE = pytest.mark.parametrize("model_type", MODEL_TYPES)
EACH_WORLD = pytest.mark.parametrize("world", in_tiers([2, 4], [4]))


def same_as_native(world: int, fields: dict[str, Any], seed: int, attention: str) -> dict[str, int]:
    """How many gradients were compared, and how many of them are parts that are summed."""
    reference, rows = encoder(fields, seed), rows_for(fields, seed)
    loss, logits = losses_and_logits(reference, rows)
    loss.backward()
    counts = {}
    for sequence in (False, True):
        model = parallel_model(reference, grid(world, sequence), attention=attention).train()
        audit(model, model.topology)
        found = model(**rows, return_logits=True)
        check_close({name: found[name] for name in logits}, logits)
        assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
        right = logits["prediction_logits"].argmax(-1) == rows["labels"]
        assert found.masked_accuracy.item() == pytest.approx(right[rows["labels"] != -100].float().mean().item())
        found.loss.backward()
        counts[f"gradients, SP {sequence}"] = check_gradients(model, reference)
        assert all(fired == 1 for fired in model.gradient_hooks.fired.values())
        counts[f"parts, SP {sequence}"] = len(model.gradient_hooks.fired)
        # A length that does not divide, which is computed without SP where no gradient is taken.
        odd = {name: each[:, : LENGTH - 3].contiguous() if each.ndim == 2 else each for name, each in rows.items()}
        with torch.no_grad():
            each = model(**odd, reduction="none")
            words = losses_and_logits(reference, odd)[1]["prediction_logits"]
        expected = F.cross_entropy(words.transpose(1, 2), odd["labels"], reduction="none")
        check_close({"odd": each.masked_loss}, {"odd": expected})
    return counts


@EACH_WORLD
@EACH_TYPE
@hypothesis.settings(max_examples=2)
@given(data=st.data())
def test_logits_losses_and_every_gradient(ranks: Pools, world: int, model_type: str, data: st.DataObject) -> None:
    fields = data.draw(encoder_fields(model_type))
    attention = data.draw(st.sampled_from(["sdpa", "eager"]), label="attention")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    counts = ranks(world).run(same_as_native, world, fields, seed, attention)
    assert counts == counts[:1] * world
    layers, order = fields["num_hidden_layers"], 0 if fields["architectures"] else 4
    norms = 2 * layers + 1  # with the one after the embeddings, or the last
    assert counts[0]["gradients, SP True"] == 3 + 8 * layers + 2 * norms + 5 + order
    assert counts[0]["gradients, SP False"] == counts[0]["gradients, SP True"]
    # Under SP the norms outside the head, positions and token types see a shard.
    assert counts[0]["parts, SP False"] == 0
    assert counts[0]["parts, SP True"] == 2 * norms + 2


RECOMPUTE: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]},
    {"mode": "full"},
]


def trained(fields: dict[str, Any], seed: int, tensor: int, sequence: bool, stage: int, recompute: int) -> list[float]:
    """Two steps through DeepSpeed, of two micro-batches with other numbers of labels each: losses, norms, figures, and
    what validation gives, as transformers and torch's optimizer have them."""
    from zero_tp.activations.policy import RecomputePolicy
    from zero_tp.data.batch import MaskedBatch
    from zero_tp.training.engine import TrainingEngine

    topology, reference = grid(tensor, sequence), encoder(fields, seed)
    rows = rows_for(fields, seed, batch=8)
    each = 4 // topology.data
    settings = {
        "train_micro_batch_size_per_gpu": each,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = TrainingEngine(
        config_of(fields),
        topology,
        settings,
        seed=0,
        source=Native(reference),
        recompute=RecomputePolicy(**RECOMPUTE[recompute]),
    )
    own = [
        {name: part.split(each)[2 * topology.data_rank + number] for name, part in rows.items()} for number in (0, 1)
    ]
    batches = [MaskedBatch(part).to(engine.device) for part in own]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    told = []
    for _ in range(2):
        loss, logits = losses_and_logits(reference, rows)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([parameter.grad.double().norm() for parameter in reference.parameters()]).norm().item()
        validation = engine.evaluate(batches)
        told.append(engine.train_step(batches))
        assert told[-1] == pytest.approx(loss.item(), rel=1e-5)
        assert engine.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert validation["loss"] == pytest.approx(loss.item(), rel=1e-5)
        expected = figures_of(logits, rows)
        assert engine.figures.keys() == (expected.keys() if len(expected) > 2 else {"masked_accuracy"})
        for name, value in expected.items():
            assert validation[name] == pytest.approx(value, rel=1e-5), name
            assert engine.figures.get(name, value) == pytest.approx(value, rel=1e-5), name
        optimizer.step()
    return told


def figures_of(logits: dict[str, Tensor], rows: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    names = {"masked": ("prediction_logits", "labels"), "sentence": ("seq_relationship_logits", "next_sentence_label")}
    for figure, (words, labels) in names.items():
        if labels not in rows:
            continue
        scores, wanted = logits[words].flatten(0, -2), rows[labels].flatten()
        found[f"{figure}_loss"] = F.cross_entropy(scores, wanted).item()
        found[f"{figure}_accuracy"] = (scores.argmax(1) == wanted)[wanted != -100].float().mean().item()
    return found


STEPS = [(tensor, sequence, stage) for tensor in (1, 2, 4) for sequence in (False, True) for stage in range(4)]
STEPS = [(tensor, sequence and tensor > 1, stage) for tensor, sequence, stage in STEPS if tensor > 1 or not sequence]
FIRST = [(2, True, 3), (1, False, 2)]


@pytest.mark.parametrize(("tensor", "sequence", "stage"), in_tiers(STEPS, FIRST))
@EACH_TYPE
@hypothesis.settings(max_examples=1)
@given(data=st.data())
def test_steps_through_zero(
    ranks: Pools, model_type: str, tensor: int, sequence: bool, stage: int, data: st.DataObject
) -> None:
    fields = data.draw(encoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    recompute = (tensor + sequence + stage + (model_type == "bert")) % len(RECOMPUTE)
    found = ranks(4).run(trained, fields, seed, tensor, sequence, stage, recompute)
    assert found == found[:1] * 4
    assert found[0][1] < found[0][0]


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def scored(world: int, sequence: bool, seed: int) -> int:
    """Loss, choices and every gradient of a head with a bias, and of the rows that it sees, against torch."""
    topology = grid(world, sequence)
    generator = torch.Generator().manual_seed(seed)
    length, batch, hidden, vocabulary = 8, 3, 6, 13

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    whole, weight, bias = drawn(length, batch, hidden), drawn(vocabulary, hidden), drawn(vocabulary)
    bias[[2, 9]] = 30.0  # tied for the greatest where the weights agree, on several ranks
    weight[9] = weight[2]
    places = torch.randperm(length * batch, generator=generator)[:9]
    labels = torch.randint(vocabulary, (9, 1), generator=generator)
    labels[0], labels[1] = 2, 9
    given = [leaf(whole), leaf(weight), leaf(bias)]
    logits = F.linear(given[0].flatten(0, 1)[places], given[1], given[2])
    expected = F.cross_entropy(logits, labels[:, 0], reduction="sum") / 4
    (expected * 3).backward()

    cut = split_vocabulary(vocabulary)
    own = leaf(piece_of(whole, topology))
    shards = [leaf(cut.shard(each, topology.tensor_rank, world)) for each in (weight, bias)]
    rows = gather_rows(own, places, topology.tensor_group, sequence=sequence).unsqueeze(1)
    common: dict[str, Any] = {"vocabulary": vocabulary, "group": topology.tensor_group, "bias": shards[1]}
    loss, right = vocab_parallel_cross_entropy(rows, shards[0], labels, divisor=4.0, accuracy=True, **common)
    (loss * 3).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert right.item() == (logits.argmax(1) == labels[:, 0]).sum().item() >= 1
    of_hidden, *of_others = (gradient_of(each) for each in given)
    wanted = {"hidden": piece_of(of_hidden, topology)}
    for name, gradient in zip(("weight", "bias"), of_others, strict=True):
        wanted[name] = cut.shard(gradient, topology.tensor_rank, world)
    found = dict(zip(wanted, map(gradient_of, (own, *shards)), strict=True))
    check_close(found, wanted)
    return len(found)


@pytest.mark.parametrize(
    ("world", "sequence"), in_tiers([(2, False), (2, True), (4, False), (4, True)], [(2, True), (4, False)])
)
def test_loss_of_gathered_rows(ranks: Pools, world: int, sequence: bool, seed: int) -> None:
    assert ranks(world).run(scored, world, sequence, seed) == [3] * world


def there_and_back(source: Path, folder: Path, tensor: int) -> tuple[list[str], float]:
    """What is said of the heads, and how far hidden states are from transformers' own; exports the model."""
    import warnings

    from transformers import BertModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ZeroTPForPreTraining.from_pretrained(source, grid(tensor, tensor > 1), seed=3).eval()
    model.save_pretrained(folder / f"tp{tensor}")
    reference: Any = BertModel.from_pretrained(source).eval()
    tokens = torch.randint(30522, (2, 32), generator=torch.Generator().manual_seed(tensor))
    padding = (torch.arange(32) < torch.tensor([32, 20])[:, None]).long()
    with torch.no_grad():
        expected = reference(tokens, attention_mask=padding).last_hidden_state.transpose(0, 1)
        hidden = model.transformer(tokens.t().contiguous(), inputs=ForwardInputs(padding), sequence=tensor > 1)
    own = piece_of(expected, model.topology)
    return [str(one.message) for one in caught], float((hidden - own).norm() / own.norm())


@THOROUGH
@pytest.mark.parametrize("tensor", in_tiers([1, 2, 4], [4]))
def test_a_real_model_there_and_back(ranks: Pools, minilm: Path, tmp_path: Path, tensor: int) -> None:
    """A trained BertModel, whose heads are drawn: all of it bit for bit at any TP, the drawn heads at TP 1's bits."""
    from transformers import BertForPreTraining, BertModel

    for said, far in ranks(4).run(there_and_back, minilm, tmp_path, tensor):
        heads = "the head of masked tokens, the sentence head"
        assert [text.partition(": has no ")[2] for text in said] == [f"weights of {heads}: drawn from the seed"]
        assert far < 1e-5
    before: Any = BertModel.from_pretrained(minilm)
    after: Any = BertForPreTraining.from_pretrained(tmp_path / f"tp{tensor}")
    for name, weight in before.state_dict().items():
        assert torch.equal(after.bert.state_dict()[name], weight), name
    drawn = parallel_model(after, Topology(world=1))
    fresh = ZeroTPForPreTraining(drawn.config, Topology(world=1), seed=3)
    for name, weight in drawn.named_parameters():
        if name.startswith(("head.", "sentence_head.classifier")):
            assert torch.equal(weight, fresh.get_parameter(name)), name
