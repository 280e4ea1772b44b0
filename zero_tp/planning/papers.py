"""Apply the papers' formulas (planning/formulas.py) to one rank of a run, in its dtype and its model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from zero_tp.models.transformer import LAYERS
from zero_tp.planning import formulas
from zero_tp.planning.memory import Model
from zero_tp.planning.workload import Workload


@dataclass(frozen=True)
class PaperView:
    """The papers' account of one rank [bytes].

    Attributes:
        stage, data: ZeRO's stage and N_d.
    """

    model: Model
    workload: Workload
    stage: int
    data: int

    @property
    def parameters(self) -> float:
        """Return Ψ/t: the parameters of this rank before ZeRO partitions them."""
        return self.model.whole / self.workload.tensor

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
            remade_norms=len(LAYERS[spec.layer].recomputed_norms),
        )

    def layer_bytes(self, *, recomputes: bool) -> float:
        """Return what one layer keeps of one micro-batch, recomputed as the policy says or not at all."""
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
        """Return what the layers keep of one micro-batch: of the one that keeps the most, if some keep everything."""
        layers, policy = self.model.spec.layers, self.workload.policy
        recomputed = 0 if policy.keep_micro_batches else len(policy.recomputed_layers(layers))
        kept = (layers - recomputed) * self.layer_bytes(recomputes=False)
        return kept + recomputed * self.layer_bytes(recomputes=True)

    def outside_bytes(self) -> float:
        """Return what is kept outside the layers."""
        spec = self.model.spec
        vocabulary = self.workload.labelled * spec.vocabulary
        return formulas.kept_outside_layers(self.layer, vocabulary, dropout=spec.dropouts.embedding > 0)

    def bytes(self) -> dict[str, float]:
        """Return the bytes by category: parameters, gradients, optimizer, activations, those outside the layers."""
        return {
            **formulas.model_states(self.parameters, self.stage, self.data, self.workload.element),
            "activations": self.layers_bytes(),
            "outside layers": self.outside_bytes(),
        }
