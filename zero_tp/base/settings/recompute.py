"""`zero_tp.recompute` of the config file: what backward recomputes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from zero_tp.base.validation import ConfigModel, Count, Positive

RecomputeMode = Literal["none", "selective", "full"]
RecomputeModule = Literal["attention_core", "mlp_activation", "norm"]


class RecomputePolicy(ConfigModel):
    """Which layers, or parts of a layer, backward recomputes (arXiv 2205.05198, section 5)."""

    mode: RecomputeMode = Field(description="What backward computes again.")
    modules: list[RecomputeModule] | None = Field(
        default=None,
        min_length=1,
        description="With `selective`: which parts of a layer. `attention_core`: scores, softmax, "
        "its dropout, "
        "attention over V; of linear attention the delta rule. "
        "`mlp_activation`: the MLP's elementwise function. `norm`: the norms "
        "before attention and "
        "MLP.",
        json_schema_extra={"default": '`["attention_core"]`'},
    )
    layers: Positive | None = Field(
        default=None,
        description="Recompute the first N layers only.",
        json_schema_extra={"default": "all"},
    )
    every: Positive | None = Field(
        default=None,
        description="Recompute every Nth layer only: the first, the one N after it, and so on.",
        json_schema_extra={"default": "1"},
    )
    keep_micro_batches: Count = Field(
        default=0,
        description="When accumulating: the first N micro-batches of a step keep all their "
        "activations "
        "(arXiv 2205.05198, appendix C).",
    )

    @model_validator(mode="after")
    def _choices_fit(self) -> RecomputePolicy:
        if self.layers is not None and self.every is not None:
            raise ValueError('"layers" and "every" both choose the layers: give one of them')
        if self.modules is not None and self.mode != "selective":
            raise ValueError(
                '"modules" chooses the parts of a layer for "selective": leave it out with '
                f'"{self.mode}"'
            )
        for name in ("layers", "every", "keep_micro_batches"):
            if self.mode == "none" and getattr(self, name):
                raise ValueError(f'"{name}" narrows what is recomputed: leave it out with "none"')
        return self

    @property
    def chosen_modules(self) -> tuple[RecomputeModule, ...]:
        """Return the parts of a layer that `selective` recomputes."""
        # By default the attention core: its scores grow with s², and it takes few FLOPs to compute
        # again (arXiv 2205.05198, section 5).
        return tuple(dict.fromkeys(self.modules or ("attention_core",)))

    def recomputed_layers(self, layers: int) -> range:
        """Return the indices of the recomputed layers of a model of `layers` layers.

        Of 6 layers: `layers` 2 gives 0 and 1, `every` 2 gives 0, 2 and 4.
        """
        if self.mode == "none":
            return range(0)
        if self.every is not None:
            return range(0, layers, self.every)
        return range(layers if self.layers is None else self.layers)

    def mean_recomputed_layers(self, layers: int, micro_batches: int) -> float:
        """Return how many layers backward recomputes, in whole or in part: the mean over a
        step's micro-batches.
        """
        # A fraction: the first micro-batches of a step keep their activations.
        recomputing = max(0, micro_batches - self.keep_micro_batches)
        return len(self.recomputed_layers(layers)) * recomputing / micro_batches

    def recomputed_layers_and_cores(self, layers: int, micro_batches: int) -> tuple[float, float]:
        """Return (layers, attention cores) whose matrix products backward runs again: means over
        micro-batches.
        """
        recomputed = self.mean_recomputed_layers(layers, micro_batches)
        cores = self.mode == "selective" and "attention_core" in self.chosen_modules
        return recomputed * (self.mode == "full"), recomputed * cores
