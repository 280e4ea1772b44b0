"""Micro-batches of an ordinary data loader.

They are padded for sequence parallelism and compared over TP, and their labels are counted.

b rows, s tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.parallel.agreement import checksum, differ_over
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.host_copy import HostCopy
from zero_tp.parallel.topology import Topology

PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "document_ids": -1}
"""The value that pads a row, by argument of the forward; 0 for the others."""


def pad_for_sequence_parallelism(
    inputs: Mapping[str, Any], topology: Topology, *, causal: bool
) -> dict[str, Any]:
    """Pad the rows of a forward's arguments to a length that sequence parallelism can split.

    Padding has no label, and no token attends to it. `unpadded_length` tells the forward where it
    begins.

    Args:
        causal: rows with `document_ids` or `position_ids` may be packed documents, and get no
            attention mask: a mask would join documents that only restarting positions separate
            (`CausalLM.forward`).
    """
    ids = inputs.get("input_ids")
    if ids is None or not topology.sequence or ids.shape[1] % topology.tensor == 0:
        return dict(inputs)  # without `input_ids` the forward refuses the other arguments by name
    length = ids.shape[1]
    # A row of 5 tokens at TP 4, where ranks have 2 tokens each:
    #
    #     input_ids        a  b  c  d  e  0  0  0
    #     attention_mask   1  1  1  1  1  0  0  0
    #     position_ids     0  1  2  3  4  0  0  0
    #     labels           a  b  c  d  e  -100 …
    #     document_ids     0  0  0  1  1 -1 -1 -1     in packed rows, instead of the mask
    missing = -length % topology.tensor
    arguments = {name: value for name, value in inputs.items() if value is not None}
    if not causal or ("position_ids" not in arguments and "document_ids" not in arguments):
        arguments.setdefault("attention_mask", torch.ones_like(ids))
    # RoPE frequencies may depend on the greatest position, which must be that of the row without
    # its padding.
    arguments.setdefault("position_ids", torch.arange(length, device=ids.device)[None])
    padded = {
        name: F.pad(value, (0, missing), value=PADDING.get(name, 0))
        # By shape and not by name: a data collator may add arguments with a value for each token.
        if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length
        else value
        for name, value in arguments.items()
    }
    return padded | {"unpadded_length": length}


class SampleComparison:
    """Compares a micro-batch between the ranks of a TP group.

    It costs an all-reduce of two numbers; at TP 1 it does nothing.

    `require_same` makes the host wait until the device has finished all work enqueued before the
    comparison. Call it after the forward has been enqueued: the device then computes the forward
    while the host waits. The cost is one such wait a micro-batch, and a host that runs ahead of the
    device by one forward at most.

    Rows of different lengths make the forward's collectives hang. The device runs the comparison
    before them, so `require_same` still raises. If a forward fills the driver's launch queue, the
    host waits before `require_same`, and NCCL's time-out ends the job. CPU collectives block the
    host: there call `require_same` before the forward.
    """

    def __init__(self, inputs: Mapping[str, Any], topology: Topology):
        """Start the all-reduce. Collective over the TP group; the host does not wait on an
        accelerator.
        """
        self._differs: HostCopy | None = None
        if topology.tensor == 1:
            return
        # Sorted by name: a rank whose dictionary has another order must not look different.
        tensors = {
            name: value for name, value in sorted(inputs.items()) if isinstance(value, Tensor)
        }
        self._names = ", ".join(tensors)
        self._differs = HostCopy(differ_over(topology.tensor_group, checksum(tensors)))

    def require_same(self) -> None:
        """Wait for the result.

        Raises:
            UserError: the samples differ between ranks, because the data collator or the data set
                draws different random numbers on each rank.
        """
        if self._differs is not None and self._differs.read():
            raise UserError(
                f"{self._names}: the samples differ between the ranks of a tensor parallel group, "
                "because one rank has "
                "drawn more random numbers than another; let the data collator and the data set "
                "draw from generators "
                "of their own"
            )


def count_labels(
    batches: Sequence[Mapping[str, Any]],
    topology: Topology,
    device: torch.device,
    *,
    shifted: bool,
    over_data_parallel: bool,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return (labelled tokens, labelled rows) of a step's micro-batches.

    Without labels both are None.

    Args:
        shifted: the first token of a row is no label, as a causal model shifts them.
        over_data_parallel: count on all data-parallel ranks, with an all-reduce of two numbers.
    """
    if not batches or "labels" not in batches[0]:
        return None, None
    tokens = rows = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        if shifted and "shift_labels" not in batch:
            labels = labels[..., 1:]
        # Each micro-batch's count moves to the device by itself, and no number comes back: the
        # divisor is needed on the device only.
        tokens = tokens + (labels != IGNORE_INDEX).sum().to(device)
        if "next_sentence_label" in batch:
            rows = rows + (batch["next_sentence_label"] != IGNORE_INDEX).sum().to(device)
    # Two numbers in one all-reduce: a collective this small costs its latency.
    counts = torch.stack([tokens, rows])
    if over_data_parallel:
        counts = all_reduce(counts, topology.data_group)
    return counts[0], counts[1]
