"""RunConfig: what a valid file gives, and one line for each mistake."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.mistakes import MISTAKES, RIGHT, WORLD_SIZE, Mistake, changed, written
from zero_tp.base.settings.deepspeed import ConfigFile
from zero_tp.base.validation import ConfigErrors, nested_names, validate
from zero_tp.commands.check import describe
from zero_tp.parallel.devices import Device
from zero_tp.run.checkpoint.same_run import fixed_settings
from zero_tp.run.config import ConfigError, RunConfig


def test_sequence_parallelism_follows_tensor_unless_given(tmp_path: Path) -> None:
    def sequence(*overrides: str) -> bool:
        return RunConfig.load(written(tmp_path), overrides).zero_tp.parallel.sequence

    assert sequence() is True
    assert sequence("zero_tp.parallel.tensor=1") is False
    assert sequence("zero_tp.parallel.sequence=false") is False


def test_deepspeed_gets_whole_batch_sizes_and_no_block_of_ours(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path), world_size=8)
    assert (config.data_parallel, config.micro_batch, config.accumulation, config.global_batch) == (
        4,
        4,
        2,
        32,
    )
    given_to_deepspeed = config.engine_settings.written()
    assert given_to_deepspeed["train_batch_size"] == 32 and "zero_tp" not in given_to_deepspeed
    assert given_to_deepspeed["scheduler"]["params"]["total_num_steps"] == 101
    given_to_deepspeed["optimizer"]["params"].clear()
    assert config.engine_settings.written()["optimizer"]["params"]["lr"] == 3e-4
    assert (config.zero_stage, config.dtype, config.name, config.world_size) == (
        2,
        "bf16",
        "run",
        8,
    )


def test_a_config_goes_to_other_processes(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path), world_size=4)
    assert pickle.loads(pickle.dumps(config)) == config


def test_errors_keep_their_order_when_a_key_has_several() -> None:
    errors = [ConfigError("a", "first"), ConfigError("b", "first"), ConfigError("a", "second")]
    assert ConfigErrors(errors).errors == errors[:2]


def test_strings_instead_of_numbers_are_named_in_the_order_of_the_file() -> None:
    keys = [name for name in Device.model_fields if name.endswith(("_gib", "_tflops", "_gbps"))]
    with pytest.raises(ConfigErrors) as caught:
        validate(Device, {"name": "mine", **dict.fromkeys(keys, "1")}, "")
    assert [error.key for error in caught.value.errors] == keys and len(keys) > 8


def test_a_model_from_a_directory(tmp_path: Path) -> None:
    model = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 61,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**model, "attn_pdrop": 0.2, "eos_token_id": 3})
    )
    raw = changed(zero_tp__data__sequence_length=64)
    raw["zero_tp"]["model"] = {"from_pretrained": str(tmp_path / "model"), "resid_pdrop": 0.0}
    config = RunConfig.load(written(tmp_path, raw), world_size=4)
    found = config.hf_config()
    assert config.pretrained == tmp_path / "model"
    assert (found.n_layer, found.vocab_size, found.eos_token_id, found.bos_token_id) == (
        3,
        61,
        3,
        None,
    )
    assert (found.attn_pdrop, found.resid_pdrop, found.embd_pdrop) == (0.2, 0.0, 0.1)
    again = RunConfig.load(written(tmp_path, config.resolved(), "config.json"), world_size=4)
    assert again.resolved() == config.resolved()
    assert fixed_settings(again) == fixed_settings(config)
    assert fixed_settings(config)["zero_tp.model"] == raw["zero_tp"]["model"]
    raw["zero_tp"]["data"]["sequence_length"] = 65
    with pytest.raises(ConfigError, match=r"sequence_length: 65 tokens.*use another model"):
        RunConfig.load(written(tmp_path, raw), world_size=4)
    raw["zero_tp"]["model"]["attn_pdrop"] = 2.0
    with pytest.raises(
        ConfigError, match=r"^zero_tp\.model\.attn_pdrop: 2\.0 is not a probability"
    ):
        RunConfig.load(written(tmp_path, raw), world_size=4)


def test_a_scheduler_that_says_only_its_type_can_start(tmp_path: Path) -> None:
    config = RunConfig.load(
        written(tmp_path, changed(scheduler={"type": "WarmupLR"})), world_size=4
    )
    assert config.engine_settings.written()["scheduler"] == {"type": "WarmupLR", "params": {}}


def test_an_integer_may_have_an_exponent(tmp_path: Path) -> None:
    """DeepSpeed's own constructor refuses a float."""
    config = RunConfig.load(
        written(tmp_path), ["scheduler.params.warmup_num_steps=1e1"], world_size=4
    )
    assert isinstance(
        config.engine_settings.written()["scheduler"]["params"]["warmup_num_steps"], int
    )
    assert "lr 9.03e-05 at step 1" in describe(config, tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("zero_optimization.stage", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("gradient_clipping.value=3", "gradient_clipping is 1.0, not an object"),
        ("gradient_clipping=NaN", 'gradient_clipping: "NaN"'),
        ("zero_tp.data.train={}", "zero_tp.data.train: is empty"),
        ('zero_tp.data.train={"a": 0}', "zero_tp.data.train.a: 0: must be greater than 0"),
        ("optimizer.params.eps=1e9", "optimizer.params.eps: 1000000000.0: must be less than 1"),
        ("fp16.loss_scale=-1", "fp16.loss_scale: -1: must be greater than or equal to 0"),
        ("optimizer.params.adam_w_mode=false", "is ignored by DeepSpeed"),
        ("optimizer.params.torch_adam=1", "expected true or false"),
        ("zero_tp.model.hidden_size=64", "is another name of n_embd"),
        ("zero_tp.model.n_inner=101", "MLP width 101 ≠ tensor 2 × 50.5"),
        ('zero_tp.recompute={"mode": "ful"}', "zero_tp.recompute.mode: "),
        ('zero_tp.recompute={"mod": "full"}', "zero_tp.recompute.mod: "),
        ("zero_tp.recompute=7", "zero_tp.recompute: "),
        ('zero_tp.recompute={"mode": "full", "layers": 2, "every": 2}', "both choose the layers"),
        ('zero_tp.recompute={"mode": "full", "modules": ["norm"]}', "chooses the parts of a layer"),
        *(
            (
                f'zero_tp.recompute={{"mode": "none", "{name}": 1}}',
                f'"{name}" narrows what is recomputed',
            )
            for name in ("layers", "every", "keep_micro_batches")
        ),
    ],
)
def test_wrong_overrides(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path), [override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_world_size_what_is_determined_is_checked(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path))
    assert config.batch.micro == 4 and config.batch.total is None
    with pytest.raises(ConfigError, match=r"20 ≠ micro 4 × accumulation 2 × data 2.5"):
        RunConfig.load(written(tmp_path), ["train_batch_size=20"])
    with pytest.raises(AssertionError, match="world_size"):
        config.engine_settings.written()


def test_the_hugging_face_config_drops_default_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path)).hf_config()
    assert (config.model_type, config.n_layer, config.vocab_size) == ("gpt2", 2, 512)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    large = RunConfig.load(written(tmp_path), ["zero_tp.model.vocab_size=50257"]).hf_config()
    assert (large.bos_token_id, large.eos_token_id) == (50256, 50256)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.floats()
    | st.sampled_from(["", "auto", "cpu", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["", "a", "stage", "type"]), inner)
    ),
    max_leaves=3,
)
PATHS = sorted(
    {path for mistake in MISTAKES for path in mistake.changes}
    | {
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "zero_tp.model",
        "zero_tp.data",
        "zero_tp.parallel",
    }
    | {
        f"zero_tp.model.{key}"
        for key in ("vocab_size", "n_inner", "eos_token_id", "n_positions", "hidden_size")
    }
    | set(nested_names(ConfigFile))
)


@pytest.mark.slow
@given(path=st.sampled_from(PATHS), value=JSON, other=st.sampled_from(PATHS), other_value=JSON)
@example("zero_tp", {}, "zero_optimization.leaf_module.classes", ["", ""])
@example("train_batch_size", {"": "auto"}, "activation_checkpointing", None)
@settings(max_examples=100, deadline=None)
def test_nothing_but_a_config_error_stops_a_config(
    path: str, value: object, other: str, other_value: object
) -> None:
    def change(config: Any, path: str, value: object) -> None:
        *blocks, name = path.split(".")
        for part in blocks:
            config = config.setdefault(part, {})
            if not isinstance(config, dict):
                return
        config[name] = value

    config = copy.deepcopy(RIGHT)
    change(config, path, value)
    change(config, other, other_value)
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(ConfigError):
        loaded = RunConfig.load(written(Path(directory), config), world_size=4)
        describe(loaded, Path(directory))
        again = RunConfig.load(written(Path(directory), loaded.resolved()), world_size=4)
        assert again.resolved() == loaded.resolved()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_one_line_that_names_key_and_remedy(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path, mistake.config()), world_size=WORLD_SIZE)
    assert not isinstance(caught.value, ConfigErrors) or len(caught.value.errors) == 1
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert line.startswith(mistake.key + ": ")
    assert all(words in line for words in mistake.words), line
    assert len(line) < 400
