"""The table of norms over the last dimension, by the names that a spec has."""

from __future__ import annotations

from zero_tp.model.layer_norm import BiaslessLayerNorm, LayerNorm, Norm, OffsetLayerNorm
from zero_tp.model.rms_norm import OffsetRMSNorm, RMSNorm, WeightlessRMSNorm, WideRMSNorm

NORMS: dict[str, type[Norm] | type[WeightlessRMSNorm]] = {
    "layer_norm": LayerNorm,
    "biasless_layer_norm": BiaslessLayerNorm,
    "offset_layer_norm": OffsetLayerNorm,
    "rms_norm": RMSNorm,
    "wide_rms_norm": WideRMSNorm,
    "offset_rms_norm": OffsetRMSNorm,
    "weightless_rms_norm": WeightlessRMSNorm,
}
