"""What the functions of a library have in common: a spec and the instruction set it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.isa import BLOCK_TOKENS, Isa, count_blocks_bytes, count_tile_bytes
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
    rows: str = "tokens",
    upper: bool = False,
) -> Activations:
    """Declare the arrays of quantised activations for ``rows``; ``count`` is a positive parameter.

    With ``chunk_planes`` it is the number of tokens, and more than one have those planes; with
    ``upper`` several are multiplied by the upper plane."""
    several = planes if chunk_planes is None else chunk_planes
    most_planes = max(planes, several)
    sums = rows, length // GROUP
    return Activations(
        several=None if several == planes else count > 1,
        chunk_planes=several,
        once=T.min(count, 1),
        length=length,
        planes=planes,
        codes=take.take_array(f"{name}_codes", "int8", rows, most_planes, length),
        scales=take.take_array(f"{name}_scales", "float32", *sums),
        sums=take.take_array(f"{name}_sums", "int32", *sums),
        values=take.take_array(f"{name}_values", "float32", rows, length),
        upper_sums=take.take_array(f"{name}_upper_sums", "int32", *sums) if upper else None,
    )


def emit_each_token(tokens: v.Expr | int, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for every token: in place for one, in parallel for more."""
    if isinstance(tokens, int):
        assert tokens == 1
        emit(T.int32(0))
        return
    with T.If(tokens == 1):
        with T.Then():
            emit(T.int32(0))
        with T.Else(), T.parallel(tokens) as token:
            emit(token)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Declares parameters as the spec has them."""

    spec: KernelSpec
    upper: bool = False
    """Whether several tokens are multiplied only by the upper planes of their activations."""
    is_step: bool = False

    @property
    def isa(self) -> Isa:
        return replace(self.spec.isa, blocks=False) if self.is_step else self.spec.isa

    def for_step(self) -> Schedule:
        """Return the schedule for a token each of several sequences: each as in a step of its own,
        or with activations of 8 bits (`KernelSpec.upper_steps`)."""
        spec = replace(self.spec, chunk_planes=self.spec.planes)
        return Schedule(spec, upper=spec.upper_steps, is_step=True)

    def take_token(self, take: Parameters) -> v.Expr:
        """Declare the token that a function for one is about."""
        token = take.take_number("token")
        return token if self.spec.sequences else T.int32(0)

    def take_tokens(self, take: Parameters) -> tuple[v.Expr, v.Expr | int]:
        """Declare the first of some tokens, and their number: 1 unless there may be more."""
        tokens = take.take_number("first"), take.take_number("tokens")
        return tokens if self.spec.sequences else (T.int32(0), 1)

    def take_rows(self, take: Parameters, name: str, rows: str = "tokens") -> v.Buffer:
        """Declare vectors as long as what neurons read, float32."""
        return take.take_array(name, "float32", rows, self.spec.hidden)

    def take_hidden(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of one token; ``count`` is any positive parameter."""
        spec = self.spec
        return take_activations(take, "hidden", spec.hidden, spec.planes, count, upper=self.upper)

    def take_dense(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of a chunk; ``count`` is any positive parameter."""
        spec, length = self.spec, self.spec.hidden
        planes = spec.chunk_planes
        hidden = take_activations(take, "hidden", length, planes, count, upper=self.upper)
        if self.isa.blocks:
            size = count_blocks_bytes(length, planes) // BLOCK_TOKENS
            hidden = replace(
                hidden,
                tiles=take.take_array("tiles", "int8", "threads", count_tile_bytes(length)),
                blocks=take.take_array("blocks", "int8", "tokens", size),
            )
        return hidden.for_chunk()

    def take_chunk(self, take: Parameters, tokens: v.Expr) -> Activations:
        """Declare the activations of one token, or of several."""
        spec = self.spec
        return take_activations(
            take, "hidden", spec.hidden, spec.planes, tokens, spec.chunk_planes, upper=self.upper
        )

    def take_routes(self, take: Parameters) -> v.Buffer | None:
        """Declare the weights of an MoE model's experts."""
        if not self.spec.experts:
            return None
        return take.take_array("routes", "float32", "tokens", self.spec.experts)
