"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): bound attention scores by scaling Q and K.

After an update the queries' and keys' rows of a head are scaled, biases too, if its largest score S
in this step exceeded the threshold τ:

    γ = min(1, τ / S)        W_q ← γ^α W_q        W_k ← γ^(1-α) W_k

A group of queries shares its keys, so S is the largest of the group, and γ scales all of it, as in
Megatron-core. Of latent attention W_q and W_k are those of the features that do not rotate; a
head's queries that rotate are scaled by γ, and the keys that all heads share are not. S is over
positions, micro-batches and all ranks, so ranks that share a KV head scale it alike. Masters are
scaled before they are rounded to weights; momentum and moments stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.engine.settings.zero_rules import qk_clip_rules
from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.matrices import QKV
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import LatentSpec, TransformerSpec
from zero_tp.model.attention_scores import AttentionScores
from zero_tp.parallel.layout import layout_of, whole_shape


def check_qk_clip(
    threshold: float | None, config: PretrainedConfig, settings: DeepSpeedSettings
) -> None:
    """Check that QK-clip, if a threshold is set, is exact for this model and these settings.

    Raises:
        ConfigError: says why it is not.
    """
    if threshold is None:
        return
    architecture_of(config).spec(config).check_qk_clip()
    for rule in qk_clip_rules(settings, is_used=True):
        if rule.applies:
            raise rule.error


@dataclass(frozen=True)
class ScaledRows:
    """The rows of a fragment that QK-clip may scale.

    Attributes:
        layer: number of the layer.
        factors: the place of each row's factor in the layer's table, int64 [rows of the shard].
        width: elements of a row.
    """

    fragment: Fragment
    layer: int
    factors: Tensor
    width: int

    def scale(self, table: Tensor) -> None:
        """Multiply the rows of the master, of which the first and the last may be cut."""
        master, span = self.fragment.master, self.fragment.span
        factors = table[self.factors]
        begin = span.whole.start
        while begin < span.whole.stop:
            row, column = divmod(begin, self.width)
            rows = max(1, (span.whole.stop - begin) // self.width) if column == 0 else 1
            end = min(span.whole.stop, (row + rows) * self.width)
            part = master[begin - span.whole.start : end - span.whole.start]
            # A cut row is one row of fewer elements.
            part.view(rows, -1).mul_(factors[row : row + rows, None])
            begin = end


class QKClip:
    """Record scores in training's forwards, and scale Q and K in the update.

    Args:
        zero: initialised, of a model that passes `check_qk_clip`; its optimizer calls `_scale`.
        threshold: τ. alpha: α.

    Attributes:
        clipped_heads: heads whose group was scaled in the last step.
        largest_score: of the last step, if it exceeded the threshold; else None.
    """

    def __init__(self, zero: ZeroEngine, threshold: float, alpha: float):
        model = zero.model
        spec = model.spec
        self._topology = model.topology
        self._threshold = threshold
        self._alpha = alpha
        self._group_size = spec.heads // spec.kv_heads
        device = next(model.parameters()).device
        heads = spec.heads // self._topology.tensor
        self.scores = AttentionScores(model.transformer, threshold, heads, device)
        self._rows = self._scaled_rows(zero)
        self._tables: list[Tensor] | None = None
        self.clipped_heads = 0
        self.largest_score: float | None = None
        zero.on_update(self._scale)

    @classmethod
    def create(cls, zero: ZeroEngine, threshold: float | None, alpha: float) -> QKClip | None:
        """Return QK-clip; None without a threshold."""
        return None if threshold is None else cls(zero, threshold, alpha)

    def _scaled_rows(self, zero: ZeroEngine) -> list[ScaledRows]:
        topology = self._topology
        rows = []
        for fragment in zero.fragments():
            before, _, part = fragment.name.partition(QKV)
            factors = factor_places(zero.model.spec).get(part)
            if factors is None or not fragment.span.length:
                continue
            parameter = zero.model.get_parameter(fragment.name)
            layout = layout_of(parameter, fragment.name)
            width = math.prod(whole_shape(parameter)[1:])
            own = layout.shard(factors, topology.tensor_rank, topology.tensor)
            layer = int(before.rpartition(".")[2])
            rows.append(ScaledRows(fragment, layer, own.to(fragment.flat.device), width))
        return rows

    def prepare(self) -> None:
        """Reduce the step's scores over all ranks, before its update. The host waits for them.

        One all-reduce of [layers, a] numbers over the world.
        """
        own = self.scores.take()
        layers, heads = own.shape
        scores = own.new_full((layers, heads * self._topology.tensor), -torch.inf)
        scores[:, self._topology.tensor_rank * heads :][:, :heads] = own
        if self._topology.world > 1:
            dist.all_reduce(scores, dist.ReduceOp.MAX)
        groups = scores.unflatten(1, (-1, self._group_size)).amax(-1).double()
        is_clipped = groups > self._threshold
        gamma = torch.where(is_clipped, self._threshold / groups, 1.0)
        self.clipped_heads = int(is_clipped.sum()) * self._group_size
        self.largest_score = float(groups.max()) if self.clipped_heads else None
        self._tables = None
        if self.clipped_heads:
            ones = torch.ones_like(gamma[:, :1])
            factors = [gamma**self._alpha, gamma ** (1 - self._alpha), ones, gamma]
            tables = torch.cat(factors, 1)
            self._tables = list(tables.float())

    def _scale(self, masters: Sequence[Tensor]) -> bool:
        """Scale the rows that lie in these masters; return whether any step's score asks for it."""
        if self._tables is None:
            return False
        updated = {id(master) for master in masters}
        for rows in self._rows:
            if id(rows.fragment.flat) in updated:
                rows.scale(self._tables[rows.layer].to(rows.fragment.flat.device))
        return True


def factor_places(spec: TransformerSpec) -> dict[str, Tensor]:
    """Return the place of each row's factor in a layer's table, by the end of a parameter's name.

    A table has γ^α of each KV head's group, then γ^(1-α), then 1, then γ. With 4 heads and 2 KV
    heads of 1 row:

        query, query_bias    0 0 1 1
        key, key_bias        2 3
        weight, bias         0 0 1 1   2 3   4 4 of a fused parameter: Q | K | V

    Of latent attention with 2 heads of 2 features, of which 1 rotates, and values of 1 (the keys'
    features that rotate are all heads', and stay):

        query.weight         0 5   1 6           K | V of each head:
        key_value.weight     2 4   3 4
    """
    count, size = spec.kv_heads, spec.head_size
    if spec.latent is not None:
        return _places_of_latents(count, size, spec.latent)
    queries = torch.arange(spec.heads * size) // size // (spec.heads // count)
    keys = count + torch.arange(count * size) // size
    fused = torch.cat([queries, keys, torch.full((count * size,), 2 * count)])
    return {
        "weight": fused,
        "bias": fused,
        "query": queries,
        "query_bias": queries,
        "key": keys,
        "key_bias": keys,
    }


def _places_of_latents(count: int, size: int, latent: LatentSpec) -> dict[str, Tensor]:
    heads = torch.arange(count)[:, None]
    keys = size - latent.rotated
    queries = (heads.expand(-1, keys), (2 * count + 1 + heads).expand(-1, latent.rotated))
    values = torch.full((count, latent.value), 2 * count)
    return {
        "query.weight": torch.cat(queries, 1).flatten(),
        "key_value.weight": torch.cat([(count + heads).expand(-1, keys), values], 1).flatten(),
    }
