"""The models whose memory is followed in small, and planned as they are shipped."""

from __future__ import annotations

from dataclasses import dataclass

from zero_tp.config import RunConfig
from zero_tp.shipped import CONFIGS, shipped


@dataclass(frozen=True)
class Model:
    """A Model is one that is measured in small and planned as it is shipped.

    Attributes:
        core: of its attention.
        file: in ds_configs. positions: the key of how many its model has. small: changes for what is measured.
        devices: H100 of its plan. large: changes for it.
    """

    name: str
    kind: str
    core: str
    file: str
    positions: str
    small: tuple[str, ...]
    devices: int
    large: tuple[str, ...]

    def in_small(self, *changes: str) -> RunConfig:
        return RunConfig.load(shipped(CONFIGS) / self.file, [*SMALL, *self.small, *changes], 1)

    def at_full_size(self, *changes: str) -> RunConfig:
        return RunConfig.load(shipped(CONFIGS) / self.file, [*self.large, *changes], self.devices)

    def at(self, length: int, batch: int) -> tuple[str, ...]:
        """Return the changes that give it this length and batch."""
        return (
            f"zero_tp.model.{self.positions}={length}",
            f"zero_tp.data.sequence_length={length}",
            f"train_micro_batch_size_per_gpu={batch}",
        )

    @property
    def on(self) -> str:
        return f"{self.name} on {self.devices} H100"


SMALL = (
    "zero_tp.parallel.tensor=1",
    "zero_tp.recompute=none",
    "train_batch_size=auto",
    "gradient_accumulation_steps=1",
    "train_micro_batch_size_per_gpu=4",
    "zero_tp.data.sequence_length=256",
    "optimizer.params.torch_adam=true",
)
GPT2 = Model(
    "GPT-2 of 355 M",
    "GPT-2",
    "eager",
    "gpt2_355m.json",
    "n_positions",
    (
        "zero_tp.attention=eager",
        'zero_tp.model={"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 256, '
        '"vocab_size": 4096, "attn_pdrop": 0.1}',
    ),
    1,
    ("zero_tp.recompute=none", "zero_tp.attention=eager", "train_batch_size=auto", "gradient_accumulation_steps=1"),
)
LLAMA = Model(
    "Llama of 8 B",
    "Llama",
    "fused",
    "llama3_8b.json",
    "max_position_embeddings",
    (
        'zero_tp.model={"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768, '
        '"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "vocab_size": 4096, '
        '"bos_token_id": 0, "eos_token_id": 0}',
    ),
    64,
    ("zero_tp.recompute=none", "train_batch_size=auto", "gradient_accumulation_steps=1"),
)


MODELS = {"gpt2": GPT2, "llama": LLAMA}
CORES = (
    ("eager core", GPT2, ()),
    ("fused core", GPT2, ("zero_tp.attention=sdpa", "zero_tp.model.attn_pdrop=0.0")),
    ("fused core", LLAMA, ()),
)
