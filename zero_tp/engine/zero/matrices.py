"""The matrices that Muon orthogonalises, and where their elements lie.

A matrix is a tensor of Hugging Face's files: Q, K and V are three where a file has three, each
expert has its own, and what a file fuses is one. Our parameters may fuse or stack them, TP cuts the
parameters, and ZeRO cuts the shards. Llama's gate and up (rows of one parameter), at TP 2:

    parameter      g0 g1 g2 g3 u0 u1 u2 u3
    shard, rank 1  g2 g3 u2 u3               gate: its rows 0, 1 are the matrix's 2, 3
                                             up: its rows 2, 3 are the matrix's 2, 3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, architecture_of, weights_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.parallel.layout import Replicated, layout_of, whole_shape
from zero_tp.parallel.spans import Span, Spans

QKV = ".attention.qkv."


@dataclass(frozen=True)
class ShardRows:
    """The rows of a matrix that a TP rank's shard of one parameter has.

    Attributes:
        rows: between the shard's rows (the whole), of which a stacked parameter has those of all
            experts, and the matrix's (local).
        columns: of the matrix.
    """

    rows: Spans
    columns: slice

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def height(self) -> int:
        return sum(span.length for span in self.rows)

    def elements(self) -> Iterator[slice]:
        """Yield the runs of the flattened shard's elements that the matrix has."""
        for span in self.rows:
            yield slice(span.whole.start * self.width, span.whole.stop * self.width)


@dataclass(frozen=True)
class MatrixPart:
    """What one of our parameters has of a matrix.

    Attributes:
        parameter: our name.
        shards: by TP rank. is_replicated: all ranks have the same.
    """

    parameter: str
    shards: tuple[ShardRows, ...]
    is_replicated: bool


@dataclass(frozen=True)
class Matrix:
    """One matrix, in the orientation of our parameters, [out, in].

    Attributes:
        name: Hugging Face's.
        shape: [rows, columns] of our orientation.
        is_transposed: the file has [in, out], whose shape sets the learning rate.
        parts: of the parameters that it consists of.
    """

    name: str
    shape: tuple[int, int]
    is_transposed: bool
    parts: tuple[MatrixPart, ...]

    @property
    def stored_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


def matrices_of(
    config: PretrainedConfig,
    parameters: Mapping[str, nn.Parameter],
    tensor: int,
    *,
    per_head: bool = False,
) -> list[Matrix]:
    """Return the matrices that these parameters consist of, in the order of the weights' table.

    Args:
        parameters: by our name.
        tensor: TP degree.
        per_head: of Q, K and V each head is a matrix.

    Raises:
        UserError: a file's tensor of which another parameter has a part.
    """
    spec = architecture_of(config).spec(config)
    maps: dict[str, dict[str, ExpertRows]] = {}
    transposed: dict[str, bool] = {}
    for weight in weights_of(config):
        if weight.our_name not in parameters:
            continue
        for name, rows in _rows_of_matrices(weight, whole_shape(parameters[weight.our_name])):
            maps.setdefault(name, {})[weight.our_name] = rows
            transposed[name] = weight.form == "transposed"
    matrices = list[Matrix]()
    for name, by_parameter in maps.items():
        height = next(along.local_length for _, along in by_parameter.values())
        covered = sum(part.length for _, along in by_parameter.values() for part in along)
        if covered != height:
            raise UserError(
                f"zero_tp.param_groups: {covered} of the {height} rows of {name} are in a group of "
                "Muon; give all of its parameters the same optimizer"
            )
        parts = tuple(
            _part(parameter, parameters[parameter], rows, tensor)
            for parameter, rows in by_parameter.items()
        )
        columns = whole_shape(parameters[parts[0].parameter])[-1]
        matrix = Matrix(name, (height, columns), transposed[name], parts)
        sizes = rows_of_head(spec, parts[0].parameter) if per_head else ()
        matrices += heads_of(matrix, sizes) if sizes else [matrix]
    return matrices


def call_of(matrix: Matrix, calls: Mapping[str, int]) -> int:
    """Return the number of the optimizer's call that updates a matrix.

    Args:
        calls: of each parameter.

    Raises:
        UserError: two calls update a part of it each.
    """
    first, *others = {calls[part.parameter] for part in matrix.parts}
    if others:
        raise UserError(
            f"zero_optimization.sub_group_size: {matrix.name} lies in two sub-groups, which "
            "ZeRO-3 updates one after the other; raise it"
        )
    return first


def rows_of_head(spec: TransformerSpec, parameter: str) -> tuple[int, ...]:
    """Return the rows of each of a head's matrices in a parameter, by its name; none: it has no
    heads.
    """
    _, _, part = parameter.partition(QKV)
    if spec.latent is None:
        return (spec.head_size,) if part else ()
    # A head's keys are before its values, as in Hugging Face's files.
    keys = spec.head_size - spec.latent.rotated
    return {
        "query.weight": (spec.head_size,),
        "key_value.weight": (keys, spec.latent.value),
    }.get(part, ())


def heads_of(matrix: Matrix, sizes: tuple[int, ...]) -> Iterator[Matrix]:
    """Yield runs of rows as matrices: a head's Q, K or V, of these sizes in turn."""
    ends = list(itertools.accumulate(sizes * (matrix.shape[0] // sum(sizes))))
    for start, stop in itertools.pairwise([0, *ends]):
        head = slice(start, stop)
        parts = tuple(
            replace(
                part,
                shards=tuple(replace(shard, rows=shard.rows.narrow(head)) for shard in part.shards),
            )
            for part in matrix.parts
        )
        name = f"{matrix.name}, rows {start} to {head.stop - 1}"
        yield Matrix(name, (stop - start, matrix.shape[1]), matrix.is_transposed, parts)


ExpertRows = tuple[int, Spans]
"""(number of the expert in a stacked parameter [E, o, i], else 0; the map between its rows and a
tensor's).
"""


def _rows_of_matrices(weight: Weight, shape: tuple[int, ...]) -> Iterator[tuple[str, ExpertRows]]:
    """Yield Hugging Face's name and the rows of our parameter that its tensor has."""
    if len(shape) > 2 and weight.experts is None:  # the file stacks experts, too
        for expert in range(shape[0]):
            yield f"{weight.names[0]}, expert {expert}", (expert, Spans.identity(shape[-2]))
        return
    for expert, matrix in enumerate(weight.matrices()):
        for name, along in matrix.spans(shape[-2]).items():
            yield name, (expert, along)


def _part(name: str, parameter: nn.Parameter, rows: ExpertRows, tensor: int) -> MatrixPart:
    layout = layout_of(parameter, name)
    shape = whole_shape(parameter)
    expert, along = rows
    shards = []
    for rank in range(tensor):
        *experts, of_one, columns = layout.spans(shape, rank, tensor)
        # Experts are whole on each rank, one after the other. Only this one's rows are mapped: maps
        # of all rows took minutes for 18,624 matrices.
        first = expert * of_one.local_length
        own = tuple(
            Span(first + start, local, length) for start, local, length in of_one.onto(along)
        )
        total = of_one.local_length * math.prod(dimension.local_length for dimension in experts)
        (run,) = columns
        assert run.length == columns.local_length, f"{name}: padded columns"
        shards.append(ShardRows(Spans(own, total, along.local_length), run.whole))
    return MatrixPart(name, tuple(shards), isinstance(layout, Replicated))
