"""What the functions of a library have in common: a spec and the instruction set it runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.norms import NormWeights
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.parameters import take_activations, take_tiles
from pi2.backends.kernels.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Schedule:
    """Declares parameters as the spec has them."""

    spec: KernelSpec
    isa: Isa
    ignores_tiles: bool = False
    """Whether arrays of tiles are parameters, and not used."""
    upper: bool = False
    """Whether several tokens are multiplied by the upper planes of their activations alone."""

    def for_step(self) -> Schedule:
        """Return what computes a token each of several sequences: each as it is computed alone, or
        with activations of 8 bits (`KernelSpec.upper_steps`)."""
        spec = replace(self.spec, chunk_planes=self.spec.planes)
        isa = replace(self.isa, pairs=False, blocks=False, few_tokens=True)
        return Schedule(spec, isa, ignores_tiles=self.isa.pairs, upper=spec.upper_steps)

    def take_token(self, take: Parameters) -> v.Expr:
        """Declare the token that a function for one is about, where there are several."""
        return take.take_number("token") if self.spec.sequences else T.int32(0)

    def take_rows(self, take: Parameters, name: str, rows: str = "tokens") -> v.Buffer:
        """Declare vectors of the residual stream's length, float32."""
        return take.take_array(name, "float32", rows, self.spec.hidden)

    def take_hidden(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of one token; ``count`` is any positive parameter."""
        spec = self.spec
        hidden = take_activations(
            take,
            "hidden",
            spec.hidden,
            spec.planes,
            count,
            isa=self.isa,
            upper=self.upper,
        )
        self._ignore_tiles(take, "hidden", spec.hidden)
        return hidden

    def take_dense(self, take: Parameters, count: v.Expr) -> Activations:
        """Declare the activations of a chunk; ``count`` is any positive parameter."""
        spec = self.spec
        hidden = take_activations(
            take,
            "hidden",
            spec.hidden,
            spec.chunk_planes,
            count,
            isa=self.isa,
            upper=self.upper,
        )
        self._ignore_tiles(take, "hidden", spec.hidden)
        return hidden.for_chunk()

    def take_chunk(self, take: Parameters, name: str, length: int, tokens: v.Expr) -> Activations:
        """Declare the activations of one token or a chunk."""
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
        """Declare the weights of a mixture's experts."""
        if not self.spec.experts:
            return None
        return take.take_array("routes", "float32", "tokens", self.spec.experts)

    def take_input_norm(self, take: Parameters, name: str = "norm") -> NormWeights | None:
        """Declare the norm of what attention or the FFN reads."""
        return self.take_norm(take, name) if self.spec.norm_inputs else None

    def take_norm(self, take: Parameters, name: str = "norm") -> NormWeights:
        """Declare weight and bias of a norm of the model's width."""
        width = self.spec.hidden
        weight = take.take_array(name, "float32", width)
        bias = take.take_array(f"{name}_bias", "float32", width) if self.spec.norm_bias else None
        return NormWeights(weight=weight, bias=bias)
