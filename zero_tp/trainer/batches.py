"""A micro-batch of an ordinary data loader is made to fit tensor and sequence parallelism, and its labels are counted.

b rows, s tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.parallel.agreement import agree_on_tokens
from zero_tp.parallel.collectives import all_reduce
from zero_tp.topology import Topology

PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "document_ids": -1}
"""What is put after a row's end, by argument; 0 in the others."""


def padded(inputs: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """Return the arguments of a forward with rows whose length sequence parallelism can split.

    What is added is no token: no label, and nothing sees it.
    """
    length = inputs["input_ids"].shape[1]
    missing = -length % topology.tensor if topology.sequence else 0
    if not missing:
        return dict(inputs)
    whole = dict(inputs)
    whole.setdefault("attention_mask", torch.ones_like(whole["input_ids"]))
    return {
        name: F.pad(each, (0, missing), value=PADDING.get(name, 0))
        if isinstance(each, Tensor) and each.ndim == 2 and each.shape[1] == length
        else each
        for name, each in whole.items()
    }


def check_alike(inputs: Mapping[str, Any], topology: Topology) -> None:
    """Check that all ranks of a TP group hold the same micro-batch. All-gather of one number over TP.

    Raises:
        UserError: they do not, as the data collator or the data set draws other random numbers on each rank.
    """
    tensors = {name: each for name, each in sorted(inputs.items()) if isinstance(each, Tensor)}
    if not agree_on_tokens(topology.tensor_group, *tensors.values()):
        raise UserError(
            f"{', '.join(tensors)}: the ranks of a tensor parallel group were given different samples, as one has "
            "drawn more random numbers than another; let the data collator and the data set draw from generators of "
            "their own"
        )


def count_labels(
    batches: Sequence[Mapping[str, Any]], topology: Topology, device: torch.device, *, shifted: bool, everywhere: bool
) -> tuple[Tensor, Tensor] | None:
    """Return (labelled tokens, labelled rows) of a step's micro-batches, or None where they have no labels.

    Args:
        shifted: the first token of a row is no label, as a causal model shifts them.
        everywhere: those of all data-parallel ranks. All-reduce of two numbers over DP.
    """
    if not batches or "labels" not in batches[0]:
        return None
    tokens = rows = torch.zeros((), dtype=torch.int64)
    for batch in batches:
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        if shifted and "shift_labels" not in batch:
            labels = labels[..., 1:]
        tokens = tokens + (labels != IGNORE_INDEX).sum().cpu()
        if "next_sentence_label" in batch:
            rows = rows + (batch["next_sentence_label"] != IGNORE_INDEX).sum().cpu()
    counts = torch.stack([tokens, rows]).to(device)
    if everywhere:
        counts = all_reduce(counts, topology.data_group)
    return counts[0], counts[1]
