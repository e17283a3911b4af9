"""What the functions of a library have in common: a spec and the instruction set it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.isa import BLOCK_TOKENS, Isa, count_blocks_bytes
from pi2.backends.kernels.matrix import Matrix
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import GROUP, Precision, scale_bytes, weight_bytes


def take_rows(
    take: Parameters, name: str, rows: int | str, length: int, precision: Precision
) -> tuple[v.Buffer, v.Buffer]:
    """Declare weights and scales of the rows of a packed matrix."""
    weights = take.take_array(f"{name}_weights", "uint8", rows, weight_bytes(length, precision))
    scales = take.take_array(f"{name}_scales", "uint8", rows, scale_bytes(length, precision))
    return weights, scales


def take_matrix(
    take: Parameters, name: str, rows: int, length: int, precision: Precision
) -> Matrix:
    """Declare weights and scales of a packed matrix."""
    weights, scales = take_rows(take, name, rows, length, precision)
    return Matrix(weights=weights, scales=scales, rows=rows, length=length, precision=precision)


def take_activations(
    take: Parameters,
    name: str,
    length: int,
    planes: int,
    count: v.Expr,
    chunk_planes: int | None = None,
    *,
    isa: Isa | None = None,
    rows: str = "tokens",
    upper: bool = False,
) -> Activations:
    """Declare the arrays of quantised activations for ``rows``; ``count`` is a positive parameter.

    With ``chunk_planes`` it is the number of tokens, and more than one have those planes and, if
    ``isa`` has pairs, the order of `i8mm`; with ``upper`` several are multiplied by the upper
    plane. ``isa`` None: rows are not unpacked for several tokens."""
    unpacks = isa is not None and isa.unpacks
    pairs = isa is not None and isa.pairs
    differs = chunk_planes is not None and (pairs or chunk_planes != planes)
    most_planes = max(planes, chunk_planes or 0)
    return Activations(
        several=count > 1 if differs else None,
        chunk_planes=chunk_planes or planes,
        once=T.min(count, 1),
        length=length,
        planes=planes,
        codes=take.take_array(f"{name}_codes", "int8", rows, most_planes, length),
        scales=take.take_array(f"{name}_scales", "float32", rows, length // GROUP),
        sums=take.take_array(f"{name}_sums", "int32", rows, length // GROUP),
        values=take.take_array(f"{name}_values", "float32", rows, length),
        tiles=take_tiles(take, name, length, isa) if isa is not None and unpacks else None,
        blocks=_take_blocks(take, name, length, most_planes, rows)
        if isa is not None and isa.blocks
        else None,
        upper_sums=take.take_array(f"{name}_upper_sums", "int32", rows, length // GROUP)
        if upper
        else None,
    )


def take_tiles(take: Parameters, name: str, length: int, isa: Isa) -> v.Buffer:
    """Declare the room in which every thread unpacks weights that several tokens share."""
    return take.take_array(f"{name}_tiles", "int8", "threads", isa.count_tile_bytes(length))


def _take_blocks(take: Parameters, name: str, length: int, planes: int, rows: str) -> v.Buffer:
    size = count_blocks_bytes(length, planes) // BLOCK_TOKENS
    return take.take_array(f"{name}_blocks", "int8", rows, size)


def emit_each_token(tokens: v.Expr, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for every token: in place for one, in parallel for more."""
    with T.If(tokens == 1):
        with T.Then():
            emit(T.int32(0))
        with T.Else(), T.parallel(tokens) as token:
            emit(token)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Declares parameters as the spec has them."""

    spec: KernelSpec
    isa: Isa
    ignores_tiles: bool = False
    """Whether arrays of tiles are parameters, and not used."""
    upper: bool = False
    """Whether several tokens are multiplied only by the upper planes of their activations."""

    def for_step(self) -> Schedule:
        """Return the schedule for a token each of several sequences: each as in a step of its own,
        or with activations of 8 bits (`KernelSpec.upper_steps`)."""
        spec = replace(self.spec, chunk_planes=self.spec.planes)
        isa = replace(self.isa, pairs=False, blocks=False, few_tokens=True)
        return Schedule(spec, isa, ignores_tiles=self.isa.pairs, upper=spec.upper_steps)

    def take_token(self, take: Parameters) -> v.Expr:
        """Declare the token that a function for one is about, if there are several."""
        return take.take_number("token") if self.spec.sequences else T.int32(0)

    def take_rows(self, take: Parameters, name: str, rows: str = "tokens") -> v.Buffer:
        """Declare vectors as long as what neurons read, float32."""
        return take.take_array(name, "float32", rows, self.spec.hidden)

    def take_hidden(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of one token; ``count`` is any positive parameter."""
        spec = self.spec
        hidden = take_activations(
            take, "hidden", spec.hidden, spec.planes, count, isa=self.isa, upper=self.upper
        )
        self._ignore_tiles(take, "hidden", spec.hidden)
        return hidden

    def take_dense(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of a chunk; ``count`` is any positive parameter."""
        spec = self.spec
        hidden = take_activations(
            take, "hidden", spec.hidden, spec.chunk_planes, count, isa=self.isa, upper=self.upper
        )
        self._ignore_tiles(take, "hidden", spec.hidden)
        return hidden.for_chunk()

    def take_chunk(self, take: Parameters, name: str, length: int, tokens: v.Expr) -> Activations:
        spec = self.spec
        chunk = take_activations(
            take,
            name,
            length,
            spec.planes,
            tokens,
            spec.chunk_planes,
            isa=self.isa,
            upper=self.upper,
        )
        self._ignore_tiles(take, name, length)
        return chunk

    def _ignore_tiles(self, take: Parameters, name: str, length: int) -> None:
        if self.ignores_tiles:
            take_tiles(take, name, length, self.isa)

    def take_routes(self, take: Parameters) -> v.Buffer | None:
        """Declare the weights of an MoE model's experts."""
        if not self.spec.experts:
            return None
        return take.take_array("routes", "float32", "tokens", self.spec.experts)
