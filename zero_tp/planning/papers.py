"""Apply the papers' formulas (planning/formulas.py) to one rank of a run, in its dtype and its model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from zero_tp.models.transformer import LAYERS
from zero_tp.planning import formulas
from zero_tp.planning.memory import Model
from zero_tp.planning.workload import Workload


@dataclass(frozen=True)
class PaperView:
    """A view gives the papers' account of a run [bytes].

    Attributes:
        stage, data: of ZeRO, over how many ranks.
        pipeline, interleaving: p and m; runs themselves have none.
    """

    model: Model
    workload: Workload
    stage: int
    data: int
    pipeline: int = 1
    interleaving: int = 1

    @property
    def layer(self) -> formulas.Layer:
        at, spec = self.workload, self.model.spec
        return formulas.Layer(
            at.length,
            at.batch,
            spec.hidden,
            spec.heads,
            at.tensor,
            at.sequence,
            element=at.element,
            head_size=spec.head_size,
            kv_heads=spec.kv_heads,
            mlp_size=spec.mlp_size,
            gated=spec.mlp_matrices == 3,
            residual_dropout=spec.dropouts.residual > 0,
            attention_dropout=spec.dropouts.attention > 0,
            remade_norms=len(LAYERS[spec.layer].remade_norms),
        )

    def layer_bytes(self, *, recomputes: bool) -> float:
        """Return what one layer keeps of one micro-batch."""
        layer, policy = self.layer, self.workload.policy
        core = formulas.eager_core if self.model.spec.attention == "eager" else formulas.sdpa_fused_core
        if not recomputes or policy.mode == "none":
            return formulas.kept(layer, core)
        if policy.mode == "full":
            if self.workload.to_host:
                return 0.0
            return formulas.kept_full(layer, partitioned=self.workload.partitioned)
        return formulas.kept_selective(layer, core, policy.chosen_modules)

    def layers_bytes(self) -> float:
        """Return what the layers keep of p micro-batches in flight, some of which may keep everything."""
        layers, policy = self.model.spec.layers, self.workload.policy
        again = len(policy.recomputed_layers(layers))
        everything = layers * self.layer_bytes(recomputes=False)
        less = again * self.layer_bytes(recomputes=True) + (layers - again) * self.layer_bytes(recomputes=False)
        share = min(policy.keep_micro_batches, self.pipeline) / self.pipeline
        return (share * everything + (1 - share) * less) * formulas.pipeline_factor(self.pipeline, self.interleaving)

    def outside_bytes(self) -> float:
        """Return what is kept outside the layers."""
        spec = self.model.spec
        return formulas.kept_outside_layers(
            self.layer,
            self.workload.labelled * spec.vocabulary,
            pipeline=self.pipeline,
            dropout=spec.dropouts.embedding > 0,
        )

    def bytes(self) -> dict[str, float]:
        """Return the bytes by category: parameters, gradients, optimizer, activations, those outside the layers."""
        own = self.model.whole / (self.workload.tensor * self.pipeline)
        return {
            **formulas.model_states(own, self.stage, self.data, self.workload.element),
            "activations": self.layers_bytes(),
            "outside layers": self.outside_bytes(),
        }
