"""RunConfig: what a right file gives, and how overrides, "auto" and a resumed run change it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.mistakes import MISTAKES, RIGHT, WORLD_SIZE, Mistake, changed, written
from tests.tools import config_page
from zero_tp.checkpoint.manifest import fixed_of
from zero_tp.commands.check import describe
from zero_tp.config import ConfigError, RunConfig, check_accelerator
from zero_tp.config.config_file import ConfigFile
from zero_tp.config.resolve import SavedStart, resolve_batch
from zero_tp.config.schema import RecomputePolicy
from zero_tp.files import MOST_BYTES
from zero_tp.topology import data_parallel_size
from zero_tp.validation import ConfigErrors, nested_names, validate

REPOSITORY = Path(__file__).parents[2]


def test_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    block = RunConfig.load(written(tmp_path)).zero_tp
    assert block.model == RIGHT["zero_tp"]["model"]
    assert (block.attention, block.recompute, block.objective, block.compile) == ("sdpa", "none", "causal", "auto")
    assert (block.parallel.tensor, block.parallel.sequence) == (2, True)
    assert block.data.train == {"data/quickstart/train": 1.0}
    assert block.data.validation is None and block.data.document_attention == "continue"
    training = block.training
    assert (training.seed, training.guard_interval, training.on_nonfinite) == (1234, 500, "skip")
    assert training.timeout_minutes == 30
    checkpoint = block.checkpoint
    assert (checkpoint.interval, checkpoint.keep, checkpoint.keep_every) == (None, 3, None)
    assert (checkpoint.async_, checkpoint.on_corrupt) == (False, "stop")
    assert (block.evaluation.interval, block.evaluation.batches, block.evaluation.tasks) == (None, 20, [])
    assert block.logging.interval == 1 and block.tokenizer is None


def test_sequence_parallelism_follows_tensor_unless_given(tmp_path: Path) -> None:
    def sequence(*overrides: str) -> bool:
        return RunConfig.load(written(tmp_path), overrides).zero_tp.parallel.sequence

    assert sequence() is True
    assert sequence("zero_tp.parallel.tensor=1") is False
    assert sequence("zero_tp.parallel.sequence=false") is False


def test_deepspeed_gets_whole_batch_sizes_and_no_block_of_ours(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path), world_size=8)
    assert (config.data_parallel, config.micro_batch, config.accumulation, config.global_batch) == (4, 4, 2, 32)
    given_to_deepspeed = config.deepspeed_config()
    assert given_to_deepspeed["train_batch_size"] == 32 and "zero_tp" not in given_to_deepspeed
    assert given_to_deepspeed["scheduler"]["params"]["total_num_steps"] == 101
    given_to_deepspeed["optimizer"]["params"].clear()
    assert config.deepspeed_config()["optimizer"]["params"]["lr"] == 3e-4
    assert (config.zero_stage, config.dtype, config.name, config.world_size) == (2, "bf16", "run", 8)


def test_the_resolved_config_loads_again_as_the_same(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path), world_size=4)
    again = RunConfig.load(written(tmp_path, config.resolved(), "config.json"), world_size=4)
    assert again.resolved() == config.resolved()
    resolved = config.resolved()
    assert resolved["zero_tp"].pop("compile") == "auto", "which a run's device decides"
    assert '"auto"' not in json.dumps(resolved)


def test_a_config_goes_to_other_processes(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path), world_size=4)
    assert pickle.loads(pickle.dumps(config)).typed == config.typed


def test_a_model_from_a_directory(tmp_path: Path) -> None:
    model = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 61}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**model, "attn_pdrop": 0.2, "eos_token_id": 3}))
    raw = changed(zero_tp__data__sequence_length=64)
    raw["zero_tp"]["model"] = {"from_pretrained": str(tmp_path / "model"), "resid_pdrop": 0.0}
    config = RunConfig.load(written(tmp_path, raw), world_size=4)
    found = config.hf_config()
    assert config.pretrained == tmp_path / "model"
    assert (found.n_layer, found.vocab_size, found.eos_token_id, found.bos_token_id) == (3, 61, 3, None)
    assert (found.attn_pdrop, found.resid_pdrop, found.embd_pdrop) == (0.2, 0.0, 0.1)
    again = RunConfig.load(written(tmp_path, config.resolved(), "config.json"), world_size=4)
    assert again.resolved() == config.resolved()
    assert fixed_of(again) == fixed_of(config)
    assert fixed_of(config)["zero_tp.model"] == raw["zero_tp"]["model"]
    raw["zero_tp"]["data"]["sequence_length"] = 65
    with pytest.raises(ConfigError, match=r"sequence_length: 65 tokens.*use another model"):
        RunConfig.load(written(tmp_path, raw), world_size=4)
    raw["zero_tp"]["model"]["attn_pdrop"] = 2.0
    with pytest.raises(ConfigError, match=r"^zero_tp\.model\.attn_pdrop: 2\.0 is not a probability"):
        RunConfig.load(written(tmp_path, raw), world_size=4)


def test_a_scheduler_that_says_only_its_type_can_start(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path, changed(scheduler={"type": "WarmupLR"})), world_size=4)
    assert config.deepspeed_config()["scheduler"] == {"type": "WarmupLR", "params": {}}


def test_an_auto_schedule_follows_the_steps_until_its_rate_falls(tmp_path: Path) -> None:
    path = written(tmp_path, changed(scheduler__params__warmup_num_steps="auto"))
    first = RunConfig.load(path, ["zero_tp.training.steps=1000"], world_size=4)
    params = {"total_num_steps": 1001, "warmup_num_steps": 10}
    assert first.deepspeed_config()["scheduler"]["params"] == params
    for updates in (0, 10, 11, 900):
        saved = SavedStart(first.resolved(), {}, updates)
        later = RunConfig.load(path, ["zero_tp.training.steps=3000"], 4, saved)
        has_begun = updates > 10
        expected = params if has_begun else {**params, "total_num_steps": 3001}
        assert later.deepspeed_config()["scheduler"]["params"] == expected and later.zero_tp.training.steps == 3000
        said = r"stays 1001, because the rate has been falling since step 10; --set \S+=3001" if has_begun else "3001, "
        assert re.match(f"scheduler.params.total_num_steps: {said}", later.cautions()[0])
        assert not RunConfig.load(path, ["zero_tp.training.steps=1000"], 4, saved).cautions()
        written_out = RunConfig.load(path, ["scheduler.params.total_num_steps=2000"], 4, saved)
        assert written_out.deepspeed_config()["scheduler"]["params"]["total_num_steps"] == 2000


def test_a_run_may_say_its_tokens(tmp_path: Path) -> None:
    """As many steps as see them, the last of which may see more; the resolved config has the steps."""
    raw = changed(train_batch_size=64, train_micro_batch_size_per_gpu="auto")
    step = 64 * raw["zero_tp"]["data"]["sequence_length"]
    for tokens, steps in ((20 * step - 1, 20), (20 * step, 20), (20 * step + 1, 21)):
        raw["zero_tp"]["training"] = {"tokens": tokens}
        for world in (None, 4):
            config = RunConfig.load(written(tmp_path, raw), world_size=world)
            assert config.zero_tp.training.steps == steps and config.zero_tp.training.tokens is None
            assert config.deepspeed_config()["scheduler"]["params"]["total_num_steps"] == steps + 1 if world else True
            again = RunConfig.load(written(tmp_path, config.resolved(), "config.json"), world_size=world)
            assert again.zero_tp.training.steps == steps
    del raw["train_batch_size"]
    raw["train_micro_batch_size_per_gpu"] = 2
    with pytest.raises(ConfigError, match=r"^zero_tp\.training\.tokens: needs the global batch.*--world-size"):
        RunConfig.load(written(tmp_path, raw))


def test_a_decay_may_begin_anywhere_in_the_stable_phase(tmp_path: Path) -> None:
    params = {"num_warmup_steps": "auto", "num_training_steps": "auto", "num_decay_steps": 100}
    path = written(tmp_path, changed(scheduler={"type": "warmup_stable_decay", "params": params}))
    first = RunConfig.load(path, ["zero_tp.training.steps=1000"], 4)
    assert first.deepspeed_config()["scheduler"]["params"] == {
        **{"num_warmup_steps": 10, "num_training_steps": 1001, "num_decay_steps": 100}
    }
    for updates, length in ((500, 601), (901, 601), (902, 1001)):
        later = RunConfig.load(path, ["zero_tp.training.steps=600"], 4, SavedStart(first.resolved(), {}, updates))
        assert later.deepspeed_config()["scheduler"]["params"]["num_training_steps"] == length


def test_auto_values(tmp_path: Path) -> None:
    config = changed(
        train_micro_batch_size_per_gpu="auto",
        train_batch_size=64,
        gradient_clipping="auto",
        bf16__enabled="auto",
        fp16__enabled="auto",
        optimizer__params__eps="auto",
        zero_optimization__reduce_bucket_size="auto",
    )
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    }
    loaded = RunConfig.load(written(tmp_path, config), world_size=4)
    resolved = loaded.deepspeed_config()
    assert loaded.micro_batch == 16 and loaded.dtype == "bf16"
    assert resolved["gradient_clipping"] == 1.0
    assert resolved["optimizer"]["params"]["eps"] == 1e-8
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert resolved["scheduler"]["params"] == {"total_num_steps": 101, "warmup_num_steps": 1, "warmup_max_lr": 3e-4}


@pytest.mark.parametrize("key", ["zero_optimization.stage", "zero_tp.training.steps", "tensorboard.job_name"])
def test_an_auto_that_nothing_resolves_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f'^{key}: "auto"'):
        RunConfig.load(written(tmp_path), [f"{key}=auto"])


def test_overrides_are_json_or_else_strings(tmp_path: Path) -> None:
    overrides = (
        "zero_optimization.stage=3",
        "zero_tp.data.train=data/other",
        'zero_tp.data.validation={"a": 1, "b": 0.5}',
        "zero_tp.logging.interval=10",
        "zero_tp.logging.interval=20",
    )
    config = RunConfig.load(written(tmp_path), overrides)
    assert config.zero_stage == 3
    assert config.zero_tp.data.train == {"data/other": 1.0}
    assert config.zero_tp.data.validation == {"a": 1.0, "b": 0.5}
    assert config.zero_tp.logging.interval == 20


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
        ("fp16.loss_scale=-1", "fp16.loss_scale: -1: must be >= 0"),
        ("zero_optimization.offload_optimizer.ratio=0.5", "ratio: refused unless it is 1: "),
        ("optimizer.params.maximise=true", 'did you mean "maximize"?'),
        ("optimizer.params.adam_w_mode=false", "is ignored by DeepSpeed"),
        ("optimizer.params.torch_adam=1", "expected true or false"),
        ("zero_tp.model.hidden_size=64", "is another name of n_embd"),
        ("zero_tp.model.summary_type=mean", "a head that is not trained"),
        ("zero_tp.model.n_inner=101", "MLP width 101 ≠ tensor 2 × 50.5"),
        ("zero_tp.model.model_type=quantum", "supported: bert, gpt2"),
        ("zero_tp.model.scale_attn_weights=false", "1/sqrt(head size); leave it at true"),
        ("autotuning.enabled=true", "autotuning.enabled: true is refused"),
        ("tensor_parallel=true", "use zero_tp.parallel.tensor"),
        ("zero_optimization.offload_optimizer.device=nvme", 'refused as "nvme" below stage 3'),
        ("zero_tp.objective=masked", "gpt2 is a causal decoder"),
    ],
)
def test_wrong_overrides(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path), [override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b" 2}', "line 2 column 6"),
        ('{"a": 1, "a": 2}', '"a" appears twice'),
        ("[1]", "not an object"),
        ('{"gradient_clipping": NaN}', "NaN is not a finite number"),
        ('{"gradient_clipping": 1e999}', "1e999 is not a finite number"),
        ('{"gradient_clipping": ' + "9" * 101 + "}", "an integer of 101 digits"),
        ('{"gradient_clipping": -' + "9" * 4301 + "}", "an integer of 4,301 digits"),
        ('{"gradient_clipping": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        ('{"gradient_clipping": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_not_one_json_object(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)


def test_what_is_too_long_or_no_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ConfigError, match=r"can't be read \(268,435,457 bytes, at most 268,435,456 are read\)"):
        RunConfig.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"can't be read \(not a regular file\)"):
        RunConfig.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        RunConfig.load(tmp_path / "none.json")


def test_without_a_world_size_what_is_determined_is_checked(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path))
    assert config.batch.micro == 4 and config.batch.total is None
    with pytest.raises(ConfigError, match=r"20 ≠ micro 4 × accumulation 2 × data 2.5"):
        RunConfig.load(written(tmp_path), ["train_batch_size=20"])
    with pytest.raises(AssertionError, match="world_size"):
        config.deepspeed_config()


@given(
    data=st.integers(1, 64),
    micro=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    given=st.sampled_from([("total", "micro"), ("total", "accumulation"), ("micro", "accumulation")]),
)
@settings(max_examples=50, deadline=None)
def test_any_two_batch_sizes_give_the_third(data: int, micro: int, accumulation: int, given: tuple[str, ...]) -> None:
    keys = {
        "total": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    sizes = {"total": micro * accumulation * data, "micro": micro, "accumulation": accumulation}
    batch = resolve_batch({keys[name]: sizes[name] for name in given}, data)
    assert (batch.total, batch.micro, batch.accumulation) == tuple(sizes.values())


def test_world_sizes() -> None:
    assert data_parallel_size(6, 3) == 2
    with pytest.raises(ConfigError, match=r"^zero_tp.parallel.tensor: tensor 4 × data 1.5 ≠ world 6; "):
        data_parallel_size(6, 4)
    with pytest.raises(ConfigError, match="not positive"):
        data_parallel_size(0, 1)


def test_the_hugging_face_config_drops_default_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    config = RunConfig.load(written(tmp_path)).hf_config()
    assert (config.model_type, config.n_layer, config.vocab_size) == ("gpt2", 2, 512)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    large = RunConfig.load(written(tmp_path), ["zero_tp.model.vocab_size=50257"]).hf_config()
    assert (large.bos_token_id, large.eos_token_id) == (50256, 50256)


def test_the_accelerator_decides_on_fp16() -> None:
    def accelerator(*supported: str) -> SimpleNamespace:
        known = {f"is_{dtype}_supported": lambda dtype=dtype: dtype in supported for dtype in ("fp16", "bf16")}
        return SimpleNamespace(device_name=lambda: "cpu", **known)

    check_accelerator("fp16", accelerator("fp16", "bf16"))
    check_accelerator("fp32", accelerator())
    with pytest.raises(
        ConfigError, match=r"^fp16.enabled: .*\(cpu\) does not support fp16; use bf16, or a machine that"
    ):
        check_accelerator("fp16", accelerator("bf16"))
    with pytest.raises(ConfigError, match=r"^bf16.enabled: .* use fp32, or a machine that supports it$"):
        check_accelerator("bf16", accelerator())


def test_an_object_for_recompute_says_which_layers() -> None:
    assert validate(RecomputePolicy, {"mode": "full", "layers": 2}, "zero_tp.recompute").layers == 2
    with pytest.raises(ConfigError, match="both choose the layers"):
        validate(RecomputePolicy, {"mode": "full", "layers": 2, "every": 2}, "zero_tp.recompute")
    with pytest.raises(ConfigError, match="chooses the parts of a layer"):
        validate(RecomputePolicy, {"mode": "full", "modules": ["norm"]}, "zero_tp.recompute")
    for narrowed in ("layers", "every", "keep_micro_batches"):
        with pytest.raises(ConfigError, match=f'"{narrowed}" narrows what is recomputed'):
            validate(RecomputePolicy, {"mode": "none", narrowed: 1}, "zero_tp.recompute")


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        ({"mode": "none"}, []),
        ({"mode": "full"}, [0, 1, 2, 3, 4]),
        ({"mode": "full", "layers": 2}, [0, 1]),
        ({"mode": "selective", "every": 2}, [0, 2, 4]),
        ({"mode": "full", "every": 5}, [0]),
    ],
)
def test_which_layers_are_recomputed(policy: dict[str, object], layers: list[int]) -> None:
    assert list(RecomputePolicy.model_validate(policy).recomputed_layers(5)) == layers


@pytest.mark.parametrize(
    ("value", "key"),
    [({"mode": "ful"}, "zero_tp.recompute.mode"), ({"mod": "full"}, "zero_tp.recompute.mod"), (7, "zero_tp.recompute")],
)
def test_wrong_recompute(value: object, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path, changed(zero_tp__recompute=value)))
    assert str(caught.value).startswith(key + ": ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.sampled_from(["", "auto", "cpu", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "a", "stage", "type"]), inner),
    max_leaves=3,
)
PATHS = sorted(
    {path for mistake in MISTAKES for path in mistake.changes}
    | {"optimizer.params", "scheduler", "scheduler.params", "zero_tp.model", "zero_tp.data", "zero_tp.parallel"}
    | {f"zero_tp.model.{key}" for key in ("vocab_size", "n_inner", "eos_token_id", "n_positions", "hidden_size")}
    | set(nested_names(ConfigFile))
)


@given(path=st.sampled_from(PATHS), value=JSON, other=st.sampled_from(PATHS), other_value=JSON)
@example("zero_tp", {}, "zero_optimization.leaf_module.classes", ["", ""])
@example("train_batch_size", {"": "auto"}, "activation_checkpointing", None)
@settings(max_examples=100, deadline=None)
def test_nothing_but_a_config_error_stops_a_config(path: str, value: object, other: str, other_value: object) -> None:
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


def test_the_documentation_is_current() -> None:
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == config_page.page(), "run python -m tests.tools.config_page --write docs/config.md"
