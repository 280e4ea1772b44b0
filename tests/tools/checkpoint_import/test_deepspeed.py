"""Checkpoints that DeepSpeed writes of transformers' models become Hugging Face models whose bits
are those of DeepSpeed's own zero_to_fp32.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.deepspeed_runs import (
    PlainRun,
    hf_config,
    llama,
    reference_weights,
    rows_of,
    train_and_save,
    universal,
    write_hf_config,
)
from tests.support.native import native_model, perturbed
from tests.support.pools import Pools
from tests.support.tiny_configs import MODEL_TYPES, tiny_fields
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import aliases_of
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.importing import import_checkpoint

STEP = "global_step2"


def saved(ranks: Pools, run: PlainRun, folder: Path, chance: random.Random, world: int = 2) -> Path:
    """The root of a checkpoint of two steps, with config.json beside it."""
    steps = rows_of(run, chance.randrange(1000), 2, 2 * world)
    ranks(world).run(train_and_save, run, str(folder), steps)
    write_hf_config(run, folder)
    return folder


def exported(source: Path, output: Path, **options: Any) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(source, **options)
    import_checkpoint(checkpoint, output)
    return load_file(output / "model.safetensors")


def check_equal(written: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == torch.float32, name
        assert torch.equal(written[name], tensor.contiguous()), name


CASES = [
    *((stage, "bf16", ()) for stage in (1, 2, 3)),
    (1, "bf16", ("frozen",)),
    (3, "fp16", ("grouped",)),
    (2, "fp32", ("frozen", "grouped")),
    (3, "bf16", ("frozen", "grouped", "wrapped")),
    (3, "fp32", ("tied", "sub_groups", "grouped")),
    (1, "fp32", ("tied", "wrapped")),
    (1, "bf16_fp32_accumulation", ("grouped",)),
]


def case(stage: int, dtype: str, marks: tuple[str, ...], chance: random.Random) -> PlainRun:
    settings: dict[str, Any] = {}
    if dtype == "bf16_fp32_accumulation":
        settings = {"data_types": {"grad_accum_dtype": "fp32"}}
    if "sub_groups" in marks:
        settings["zero_optimization"] = {"stage": 3, "sub_group_size": 300}
    return PlainRun(
        llama(chance, tie_word_embeddings="tied" in marks),
        stage,
        dtype.partition("_")[0],
        chance.randrange(1000),
        ("layers.0.mlp.up_proj.weight", "norm.weight") if "frozen" in marks else (),
        grouped="grouped" in marks,
        wrapped="wrapped" in marks,
        settings=settings,
    )


@THOROUGH
@pytest.mark.parametrize(("stage", "dtype", "marks"), CASES)
def test_the_bits_are_those_of_zero_to_fp32(
    ranks: Pools, tmp_path: Path, seed: int, stage: int, dtype: str, marks: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    run = case(stage, dtype, marks, chance)
    source = saved(ranks, run, tmp_path / "source", chance)
    written = exported(source, tmp_path / "out")
    content = torch.load(next(source.glob("*/*mp_rank_00_model_states.pt")), weights_only=False)
    if dtype == "bf16_fp32_accumulation":
        # zero_to_fp32 reads no BF16_Optimizer; DeepSpeed's own rounding of the masters does.
        rounded = {name: tensor.bfloat16() for name, tensor in written.items()}
        assert all(torch.equal(rounded[name], content["module"][name]) for name in written)
        assert any(not torch.equal(rounded[name].float(), written[name]) for name in written)
        return
    prefix = "net." if run.wrapped else ""
    expected = {
        name.removeprefix(prefix): tensor.contiguous()
        for name, tensor in reference_weights(source).items()
    }
    if stage == 1:  # zero_to_fp32 leaves frozen parameters out
        module = content["module"]
        frozen = {name for name in module if name.removeprefix(prefix) not in expected}
        assert bool(frozen) == bool(run.frozen)
        expected |= {name.removeprefix(prefix): module[name].float() for name in frozen}
    if "tied" in marks:
        assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    check_equal(written, expected)
    if dtype == "bf16":
        trained = next(name for name in written if name.endswith("q_proj.weight"))
        assert not torch.equal(written[trained].bfloat16().float(), written[trained])


@THOROUGH
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 2), (3, 3)])
def test_any_number_of_ranks(
    ranks: Pools, tmp_path: Path, seed: int, world: int, stage: int
) -> None:
    chance = random.Random(seed)
    # Sizes that 3 does not divide, so that parameters have padding.
    fields = llama(chance, num_attention_heads=1, num_key_value_heads=1)
    fields |= {"hidden_size": chance.choice((5, 7)), "vocab_size": chance.choice((31, 47, 85))}
    run = PlainRun(fields, stage, "bf16", chance.randrange(1000))
    source = saved(ranks, run, tmp_path / "source", chance, world)
    check_equal(exported(source / STEP, tmp_path / "out"), reference_weights(source))


@THOROUGH
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_zero(ranks: Pools, tmp_path: Path, seed: int, dtype: str) -> None:
    """The weights are the module's; those of the masters, rounded, are too."""
    chance = random.Random(seed)
    run = PlainRun(llama(chance), 0, dtype, chance.randrange(1000))
    source = saved(ranks, run, tmp_path / "source", chance)
    written = exported(source, tmp_path / "out")
    content = torch.load(source / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    module = content["module"]
    assert written.keys() == module.keys()
    assert all(torch.equal(written[name].to(module[name].dtype), module[name]) for name in module)
    if dtype == "bf16":
        groups = content["optimizer"].get("fp32_groups_flat") or content["optimizer"]["fp32_groups"]
        flat = torch.cat([part.flatten() for group in groups for part in group])
        assert torch.equal(flat, torch.cat([written[name].flatten() for name in module]))


@THOROUGH
def test_masters_without_names_are_compared(ranks: Pools, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = PlainRun(llama(chance), 0, "bf16", chance.randrange(1000), backwards=True)
    source = saved(ranks, run, tmp_path / "source", chance)
    with pytest.raises(UserError, match="the masters are not in the model's order"):
        exported(source, tmp_path / "out")
    run = replace(run, backwards=False, grouped=True)
    source = saved(ranks, run, tmp_path / "grouped", chance)
    checkpoint = open_checkpoint(source)
    assert "the weights are the rounded ones" in checkpoint.notes[0]
    import_checkpoint(checkpoint, tmp_path / "rounded")
    module = torch.load(next(source.glob("*/*.pt")), weights_only=False)["module"]
    written = load_file(tmp_path / "rounded" / "model.safetensors")
    assert all(torch.equal(written[name], module[name]) for name in module)


@THOROUGH
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_folders(ranks: Pools, tmp_path: Path, seed: int, stage: int) -> None:
    chance = random.Random(seed)
    marks = chance.choice([("frozen", "grouped"), ("tied",), ("wrapped", "frozen")])
    run = case(stage, "bf16", marks, chance)
    source = saved(ranks, run, tmp_path / "source", chance)
    folder = universal(source / STEP, source / "global_step2_universal")
    expected = exported(source / STEP, tmp_path / "own")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.trainer == "universal"
    check_equal(exported(folder, tmp_path / "out"), expected)
    states, before = checkpoint.states, open_checkpoint(source / STEP).states
    assert states is not None and before is not None
    assert (states.steps, states.counters, states.frozen) == (2, before.counters, before.frozen)
    assert [names for _, names in states.groups] == [names for _, names in before.groups]
    for kind, tensors in before.moments.items():
        for name, tensor in tensors.items():
            both = (tensor, states.moments[kind][name])
            whole = [one.read(tuple(slice(0, size) for size in one.shape)) for one in both]
            assert torch.equal(*whole), (kind, name)


def one_file(folder: Path, model: Any, **entries: Any) -> Path:
    """A step of one rank in fp32 without ZeRO, as DeepSpeed writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = model.state_dict()
    buffers = [name for name, _ in model.named_buffers() if name in stored]
    content = {"module": stored, "buffer_names": buffers, "param_shapes": None, **entries}
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return folder


@THOROUGH
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_model_type(tmp_path: Path, seed: int, model_type: str) -> None:
    """What transformers writes of the same model."""
    torch.manual_seed(seed)
    model = perturbed(native_model(hf_config(tiny_fields(model_type, 71))))
    model.tie_weights()
    one_file(tmp_path / "source", model)
    written = exported(tmp_path / "source", tmp_path / "out")
    model.save_pretrained(str(tmp_path / "theirs"))
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    aliases = aliases_of(model.config)
    check_equal(written, {n: t for n, t in expected.items() if n not in aliases})


def damaged_states(source: Path) -> None:
    file = sorted(source.glob("*/*_optim_states.pt"))[1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def another_version(source: Path) -> None:
    for file in source.glob("*/*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"].pop("single_partition_of_fp32_groups")
        torch.save(content, file)


def shortened(source: Path) -> None:
    for file in source.glob("*/*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-9].clone()
        torch.save(content, file)


MISTAKES = {
    "a rank's file": (
        lambda source: sorted(source.glob("*/*_optim_states.pt"))[1].unlink(),
        "no file of rank 1 of 2",
    ),
    "all states": (
        lambda source: [file.unlink() for file in source.glob("*/*_optim_states.pt")],
        "has no \\*_optim_states.pt",
    ),
    "the model": (
        lambda source: (source / STEP / "mp_rank_00_model_states.pt").unlink(),
        "no file of the first rank's model",
    ),
    "damage": (damaged_states, "cannot be read"),
    "keys": (another_version, "not as DeepSpeed 0.19.8 writes it"),
    "length": (shortened, "the ranks hold"),
    "no config": (lambda source: (source / "config.json").unlink(), "--config"),
    "model-parallel": (
        lambda source: shutil.copy(
            source / STEP / "mp_rank_00_model_states.pt",
            source / STEP / "mp_rank_01_model_states.pt",
        ),
        "of a model-parallel rank",
    ),
    "experts": (
        lambda source: (source / STEP / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
        "DeepSpeed's own experts",
    ),
}


@THOROUGH
def test_each_mistake_is_named(ranks: Pools, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = PlainRun(llama(chance), chance.choice((1, 2)), "fp32", chance.randrange(1000))
    source = saved(ranks, run, tmp_path / "source", chance)
    for name, (spoil, message) in MISTAKES.items():
        copy = tmp_path / name.replace(" ", "_")
        shutil.copytree(source, copy)
        spoil(copy)
        with pytest.raises(UserError, match=message) as refusal:
            exported(copy, tmp_path / "out")
        assert "\n" not in str(refusal.value), name
        assert not (tmp_path / "out").exists()
    others = {
        "vocab_size": run.config["vocab_size"] + 1,
        "num_hidden_layers": run.config["num_hidden_layers"] + 1,
    }
    for key, value in others.items():
        config = hf_config(run.config | {key: value})
        with pytest.raises(UserError, match="--config"):
            exported(source, tmp_path / "out", config=config)
    fewer = hf_config(run.config | {"attention_bias": False, "mlp_bias": True})
    with pytest.raises(UserError, match=r"no tensor .*bias"):
        exported(source, tmp_path / "out", config=fewer)


@THOROUGH
def test_a_config_must_tie_what_was_tied(ranks: Pools, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for tied in (False, True):
        run = PlainRun(llama(chance, tie_word_embeddings=tied), chance.choice((1, 3)))
        source = saved(ranks, run, tmp_path / f"source{tied}", chance)
        other = replace(run, config=run.config | {"tie_word_embeddings": not tied})
        with pytest.raises(UserError, match=f"set tie_word_embeddings to {str(tied).lower()}"):
            exported(source, tmp_path / "out", config=hf_config(other.config))
