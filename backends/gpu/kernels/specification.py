"""Which kernels are wanted, and for what device: everything that the generated code depends on.

Plain Python: no TVM.  Two programs with equal specifications share one compiled image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pi2.model.states import StateShape
from pi2.plan.documents.model_mixing import Latent
from pi2.plan.documents.model_parts import SMOOTH_ACTIVATIONS, Ffn, Moe, Norm
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import GROUP, Precision, fill_groups

if TYPE_CHECKING:
    from pi2.model.blocks import Attention
    from pi2.plan.documents.model import Model
    from pi2.plan.weights.layout import BundleLayout

Api = Literal["opencl", "webgpu", "cuda"]
NumberType = Literal["int32", "float32"]
Number = int | float

ENTRY_SUFFIX = "_kernel"
"""What TVM adds to a kernel's name in its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Work groups along one axis: ``times`` for each ``per`` of a number, rounded up, or ``times``
    without a number."""

    times: int = 1
    number: str | None = None
    per: int = 1

    def count(self, numbers: Mapping[str, Number]) -> int:
        if self.number is None:
            return self.times
        return self.times * -(-int(numbers[self.number]) // self.per)


ONCE = Axis()
"""An axis with a single work group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a kernel is launched."""

    name: str
    arrays: tuple[str, ...]
    """In the order of the code's parameters."""
    numbers: tuple[tuple[str, NumberType], ...]
    """They follow the arrays, in the order of the code's parameters."""
    block: tuple[int, int, int]
    """Threads of a work group by axis."""
    grid: tuple[Axis, Axis]
    """The first two axes: WebGPU needs the third itself."""
    code: int
    """Which of the image's codes holds it."""

    def count_groups(self, numbers: Mapping[str, Number]) -> tuple[int, int]:
        first, second = self.grid
        return first.count(numbers), second.count(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage:
    """Compiled kernels."""

    __pydantic_config__: ClassVar = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    api: Api
    codes: tuple[bytes, ...]
    """OpenCL C sources, WGSL sources, or cubins."""
    kernels: Mapping[str, Signature]

    def to_json(self) -> str:
        from pydantic import TypeAdapter

        return TypeAdapter(KernelImage).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> KernelImage:
        """Read what `to_json` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the compiler must know of a device."""

    api: Api
    fp16: bool
    """Whether kernels may have fp16 values; otherwise they take them out of words of 32 bits."""
    arch: str | None = None
    """Architecture of a CUDA device, such as ``sm_80``; None for the other APIs."""

    def __post_init__(self) -> None:
        assert (self.arch is not None) == (self.api == "cuda"), self


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnKernels:
    """The FFN over a range of a layer's neurons (`pi2.backends.gpu.kernels.ffn`)."""

    hidden: int
    precision: Precision
    options: Ffn
    experts: int = 0
    """Experts of an MoE model, shared ones included; 0 for a model without experts."""
    weighs_input: bool = False
    """Whether experts' weights multiply gates and ups, not what neurons compute of them."""
    in_rows: bool = False
    """Whether gates and up rows are in rows, as neurons in slots are, instead of in tiles."""

    def __post_init__(self) -> None:
        assert self.hidden % GROUP == 0, self

    @classmethod
    def of(cls, layout: BundleLayout, model: Model, *, in_rows: bool = False) -> FfnKernels:
        """Return the kernels for a model's neurons of ``layout``."""
        return cls(
            hidden=layout.hidden,
            precision=layout.precision,
            options=model.ffn.model_copy(update={"absent_layers": (), "gate_sparsity": ()}),
            experts=0 if model.moe is None else model.expert_count,
            weighs_input=model.moe is not None and model.moe.weighs == "input",
            in_rows=in_rows,
        )

    @property
    def parts(self) -> int:
        """Vectors of a neuron that are multiplied with the input."""
        return 2 if self.options.gated else 1

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.options.activation in SMOOTH_ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernels:
    """Products of inputs with a matrix whose rows have ``length`` elements."""

    length: int
    precision: Precision
    bias: bool = False
    relu: bool = False
    """Whether negative values become 0."""
    adds: bool = False
    """Whether products are added to what the outputs hold."""
    blocks: int = 1
    """Parts of the rows that have inputs of their own, such as the predictors of experts."""
    pitch: int | None = None
    """Elements from one token's products to the next one's, if they are more than the rows."""

    def __post_init__(self) -> None:
        assert self.length % GROUP == 0, self

    @property
    def name(self) -> str:
        parts = [f"product_{self.precision}_{self.length}"]
        parts += [name for name in ("bias", "relu", "adds") if getattr(self, name)]
        parts += [f"blocks_{self.blocks}"] if self.blocks > 1 else []
        parts += [f"pitch_{self.pitch}"] if self.pitch is not None else []
        return "_".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingKernels:
    """Embeddings of tokens (`pi2.backends.gpu.kernels.routing`)."""

    length: int
    precision: Precision
    factor: float = 1.0
    positions: bool = False
    """Whether positions have vectors, which are added."""

    def __post_init__(self) -> None:
        assert self.length % GROUP == 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKernels:
    """Norms of the residual stream, and sums into it (`pi2.backends.gpu.kernels.routing`)."""

    length: int
    """Elements of a vector in memory: zeros fill up the last group."""
    width: int
    """Elements that norms are taken of."""
    norm: Norm
    residual_factor: float = 1.0
    spreads: bool = False
    """Whether the FFN's sum begins with biases."""
    experts: int = 0
    """Experts of an MoE model with biases of their own; 0 for a model without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """Attention (`pi2.backends.gpu.kernels.attention`)."""

    heads: int
    kv_heads: int
    head_dim: int
    """Elements of a key; with latent attention, of the latent vector."""
    scale: float
    """Factor of the scores."""
    kv: KvType
    head_norm: bool = False
    epsilon: float = 0.0
    """Epsilon of the norms of heads."""
    norm_after: bool = False
    """Whether heads are normalised after they have been turned."""
    growth: bool = False
    """Whether queries have factors that depend on the position."""
    score_cap: float | None = None
    window: int | None = None
    """Tokens that a query looks back, itself included."""
    chunked: bool = False
    """Whether a query sees no token of the windows before its own, which do not overlap."""
    sinks: bool = False
    """Whether every head has a score in addition to the tokens' scores."""
    output_gate: bool = False
    """Whether gates of what heads mix come behind the values."""
    latent: Latent | None = None
    """Latent attention: one key head, whose first elements are the values."""

    def __post_init__(self) -> None:
        assert self.head_dim % 2 == 0 and self.heads % self.kv_heads == 0, self
        assert self.kv != "int8" or self.head_dim % 4 == 0, self

    @classmethod
    def of(cls, own: Attention, model: Model, kv: KvType) -> AttentionKernels:
        """Return the kernels for a layer's attention."""
        _, kv_heads, size = own.kept
        options, latent = own.options, own.latent
        return cls(
            heads=own.heads,
            kv_heads=kv_heads,
            head_dim=size,
            scale=options.scale or 1 / math.sqrt(latent.key if latent else own.head_dim),
            kv=kv,
            head_norm=own.options.head_norm,
            norm_after=options.head_norm_place == "after",
            growth=own.options.growth > 0,
            epsilon=model.norm.epsilon,
            score_cap=options.softcap,
            window=own.window,
            chunked=options.window_kind == "chunked",
            sinks=own.options.sinks,
            output_gate=options.output_gate,
            latent=latent,
        )

    @property
    def vectors(self) -> int:
        """QKV vectors of a token."""
        return self.heads + 2 * self.kv_heads

    @property
    def qkv_pitch(self) -> int:
        """Elements from one token's queries to the next one's."""
        return (self.vectors + self.heads * self.output_gate) * self.head_dim

    @property
    def latent_rows(self) -> int:
        """Elements from one token's query latent to the next one's."""
        assert self.latent is not None
        queries = self.latent.query_rank or self.heads * self.latent.key
        return queries + self.heads * self.output_gate + self.latent.kept

    @property
    def value_width(self) -> int:
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def mixed_pitch(self) -> int:
        """Elements from what a head has mixed to the next head's."""
        return self.head_dim if self.latent is None else fill_groups(self.latent.rank)

    @property
    def width(self) -> int:
        """Length of the attention's output: zeros fill up the last group."""
        return fill_groups(self.heads * self.mixed_pitch)

    @property
    def elements_per_word(self) -> int:
        """Elements of a key or value in a word of 32 bits."""
        return {"fp32": 1, "fp16": 2, "int8": 4}[self.kv]

    @property
    def row_words(self) -> int:
        return self.head_dim // self.elements_per_word

    @property
    def value_words(self) -> int:
        return -(-self.value_width // self.elements_per_word)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKernels:
    """Layers that keep a state (`pi2.backends.gpu.kernels.states`)."""

    shape: StateShape
    epsilon: float
    """Epsilon of the norm of their output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKernels:
    """The router of an MoE model (`pi2.backends.gpu.kernels.routing`)."""

    length: int
    """Of its inputs."""
    moe: Moe
    others: int = 0
    """Experts behind all of these, which only layers that are no MoE model need."""
    some_dense: bool = False
    """Whether there are such layers."""

    @property
    def rows(self) -> int:
        return self.moe.experts + self.moe.shared_gate

    @property
    def pitch(self) -> int:
        return self.moe.experts + self.moe.shared_experts + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectKernels:
    """The selection of neurons (`pi2.backends.gpu.kernels.gathered`)."""

    scored: bool = True
    """Whether neurons have scores."""
    experts: int = 0
    """Of an MoE model, shared ones too; 0 without."""
    expert_neurons: int = 0

    def __post_init__(self) -> None:
        assert self.scored or self.experts, self


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Kernels for a device."""

    target: Target
    ffn: FfnKernels | None = None
    gathered: FfnKernels | None = None
    """Neurons in slots (`pi2.backends.gpu.kernels.gathered`)."""
    gates: FfnKernels | None = None
    """All gates of neurons in slots."""
    select: SelectKernels | None = None
    router: RouterKernels | None = None
    products: tuple[ProductKernels, ...] = ()
    embedding: EmbeddingKernels | None = None
    norm: NormKernels | None = None
    attention: tuple[AttentionKernels, ...] = ()
    """Kinds of layers; names of kernels end with the number of theirs."""
    state: StateKernels | None = None
    reads: bool = False
    """Whether the device's read rate is to be measured."""

    @property
    def program(self) -> str:
        """The module that makes the kernels; all files in its folder are their sources."""
        return "pi2.backends.gpu.kernels.compile"

    def to_json(self) -> str:
        from pydantic import TypeAdapter

        return TypeAdapter(GpuSpec).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> GpuSpec:
        """Read what `to_json` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)
