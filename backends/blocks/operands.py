"""Operands of instructions: areas of tokens, matrices, pairs with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import CONTEXT_BLOCK, PLANES
from pi2.backends.blocks.instructions import Planes, Weight
from pi2.formats.packing import round_up
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.plan import KvType, Plan

if TYPE_CHECKING:
    from pi2.arrays import I32


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a program computes at most, and how: its arrays depend on it."""

    chunk: int
    """Tokens of a prompt that are computed together."""
    step_tokens: int
    """Tokens of a step, which may be of different sequences."""
    context: int
    threads: int
    sequences: int = 1
    kv: KvType = "fp16"
    planes: Planes = Planes(1, 1, 1)  # noqa: RUF009
    """Planes of 8 bits of a quantised input: each is what those before it leave, quantised."""
    predicts: bool = False
    """Whether the router of the next layer chooses early (`RoutedLayer.prediction`), or neurons
    are named early."""
    outside: bool = False
    """Whether other code computes neurons (`Exchange`), and tensors are a neuron store's."""
    scratch_bytes: int = 0
    """What every thread has, at least."""

    @classmethod
    def of_file(cls, plan: Plan, threads: int, *, predicts: bool) -> Extent:
        """The program of a GGUF file that a plan runs."""
        one, many = (PLANES[own.activations] for own in (plan.decode, plan.prefill))
        return cls(
            chunk=plan.prefill.chunk,
            step_tokens=plan.decode.step_tokens,
            context=plan.kv.context,
            threads=threads,
            sequences=plan.decode.batch,
            kv=plan.kv.type,
            planes=Planes(one, one, many),
            predicts=predicts,
        )

    @property
    def rows(self) -> int:
        """Tokens whose logits are computed in a call."""
        return max(LOGIT_ROWS, self.step_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of a call."""
        return max(self.chunk, self.rows)

    @property
    def positions(self) -> int:
        """The context in whole blocks."""
        return round_up(self.context, CONTEXT_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Pairs of tokens and chosen experts of a layer, by addresses."""

    active: int
    """Experts of a token."""
    experts: int
    """Experts that are chosen from."""
    expert_of: int
    place_of: int
    token_of: int
    """The token of each pair."""
    starts: int
    pairs: int
    weights: int
    """float32, of each pair."""
    predicted: int
    """Experts of each pair that the next layer would choose, and their weights."""
    predicted_weights: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that instructions read, equal parts one after the other; it may be streamed."""

    key: str
    layer: int | None
    weight: Weight
    instructions: tuple[int, ...]
    numbers: I32 | None = None
    """Rows that the call's tokens look up; None of a matrix that all of a token reads."""
    each: int = 1
    """Rows that a token looks up."""
    skip: int = 0
    """Bytes of each part that are not read."""


@dataclass(frozen=True, slots=True)
class Area:
    """Vectors of tokens: float32, ``stride`` elements apart."""

    address: int
    stride: int

    def put(self, name: str) -> dict[str, int]:
        """Return the arguments ``name`` and its stride."""
        return {name: self.address, f"{name}_stride": self.stride}

    def skip(self, elements: int) -> Area:
        """Return the vectors that begin so many elements later."""
        return Area(self.address + 4 * elements, self.stride)


@dataclass(frozen=True, slots=True)
class Gates:
    """What multiplies heads."""

    area: Area
    places: Sequence[int]
    """First element of each head's gates in a token."""
    kind: str
    """One of `GATES`."""
    each: int = 1
    """0 where all elements of a head have one gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """A norm of heads, before or after their gates."""

    weights: int
    """Address of the first head's weights; the next head's begin ``step`` elements later."""
    step: int
    place: str
    """One of `NORM_PLACES`."""
    epsilon: float | None = None
    """Added to the mean of squares, if it is not the model's."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of heads."""

    weights: int
    """Their address."""
    place: str
    """One of `NORM_PLACES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix, and the use of its products."""

    key: str
    weight: Weight
    y: Area
    bias: int = 0
    """Address of a vector; 0 without."""
    added: bool = False
    """Whether the result is added to y."""
    factor: float = 1.0
    routed: Routed | None = None
    """The experts that have tokens, if the matrix belongs to experts."""
    of_tokens: bool = True
    """Whether experts read tokens and give something for each pair, or the other way round."""
    is_weighed: bool = False
    """Whether results are multiplied with the weights of experts."""


def find_address(weight: Weight) -> int:
    """Return where a tensor's bytes are; 0 where they come later."""
    return 0 if weight.data is None else int(weight.data.ctypes.data)
