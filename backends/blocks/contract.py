"""Arguments of the kernels: tables of int64, numbers and addresses, by name.

Plain Python: no TVM.  A kernel is called ``(table, first, end, thread)`` and computes items
``first`` to ``end``.  Strides of float32 are elements, those of quantised tokens and of weights
bytes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from pi2.backends.kernels.isa import Isa, choose_features, choose_isa
from pi2.model.blocks import Attention, list_attention
from pi2.model.options import find_unknown as find_undeclared
from pi2.model.options import read_options
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Attention as AttentionOptions

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PLANES: Mapping[str, int] = {"int8": 1, "int16": 2, "fp32": 3}
"""Planes of 8 bits that inputs of quantised matrices have, by `activations` of a plan."""
STEPS, COMMON, ROUTING, ATTENTION, STATES = "steps", "common", "routing", "attention", "states"
INDEX = "index"
"""Libraries that belong to no format: attention, and attention to chosen keys, have one for each
choice of `TOGETHER`."""
TOGETHER = (4, 3, 2, 1)
"""Heads that read the KV cache together; each takes as long to compile as a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A library for a processor: the kernels of a format, or of no format."""

    program: ClassVar[str] = "pi2.backends.blocks.program"
    library: str
    architecture: str
    features: tuple[str, ...]
    """Sorted features of the processor that choose the instructions."""

    @property
    def isa(self) -> Isa:
        return choose_isa(frozenset(self.features), self.architecture)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})


def describe_libraries(
    names: Iterable[str], features: Set[str], architecture: str
) -> list[BlockSpec]:
    """Return the libraries of a processor; only attention minds which cache prefetches fill."""
    specs = []
    for name in names:
        reads = name.partition("_")[0] in (ATTENTION, INDEX)
        own = choose_features(features, architecture, prefetches=reads)
        specs.append(BlockSpec(library=name, architecture=architecture, features=own))
    return specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What attention of a layer reads."""

    key_heads: int
    """Vectors of a kind that a token has in the KV cache."""
    widths: tuple[int, ...]
    """Elements of each kind: of a key and a value, or of a latent vector."""
    group: int
    """Heads that are computed together with the same keys."""
    key: int
    value: int
    """Elements of a head's query, and of its value."""


LATENT_GROUP = 16
"""Heads at most that share a tile or a part of a latent context: threads share the others."""


def describe_heads(own: Attention) -> Heads:
    latent = own.latent
    if latent is None and own.pooled is None:
        width = own.options.value_width or own.head_dim
        return Heads(
            key_heads=own.kv_heads,
            widths=(own.head_dim, width),
            group=own.heads // own.kv_heads,
            key=own.head_dim,
            value=width,
        )
    group = max(n for n in range(1, LATENT_GROUP + 1) if own.heads % n == 0)
    key, value = (own.head_dim,) * 2 if latent is None else (latent.kept, latent.rank)
    return Heads(key_heads=1, widths=(key,), group=group, key=key, value=value)


KV_TYPES: Mapping[KvType, str] = {"fp16": "float16", "fp32": "float32", "int8": "int8"}
"""Elements of the KV cache."""


def name_attention(kind: KvType, counts: Collection[int], library: str = ATTENTION) -> str:
    """Name the library of attention that computes so many heads together."""
    return "_".join([library, kind, *map(str, sorted(counts, reverse=True))])


def read_attention(library: str) -> tuple[KvType, list[int]]:
    """Return the arguments of `name_attention` by its result."""
    kind, *counts = library.split("_")[1:]
    return cast("KvType", kind), [int(count) for count in counts]


def list_libraries(model: Model, kind: KvType) -> list[str]:
    """Return the libraries that any model needs: `STEPS`, then the slowest to compile first."""
    groups = [describe_heads(own).group for own, _ in list_attention(model)]
    counts = {TOGETHER[0] for group in groups if group >= TOGETHER[0]}
    counts |= {group % TOGETHER[0] for group in groups} - {0}
    attention = name_attention(kind, counts)
    more = {ROUTING: model.moe is not None, STATES: _needs_states(model)}
    is_chosen = model.attention.index is not None or model.attention.pooled is not None
    more[name_attention(kind, counts, INDEX)] = is_chosen
    return [STEPS, COMMON, attention, *(name for name, is_needed in more.items() if is_needed)]


def _needs_states(model: Model) -> bool:
    """Whether the kernels of layers with a state compute something of it."""
    gates_heads = model.attention.output_gate or model.gated_streams is not None
    return bool(model.states) or gates_heads


COMPUTED = read_options(TABLE["computed"])
"""Options of models that there are kernels for."""
OF_STORES = COMPUTED - read_options(TABLE["not_in_stores"])
"""Options of models in stores."""
APART = (("attention.clip", "attention.output_gate"), ("attention.alibi", "attention.index"))
"""Options that do not go together."""


def cuts_normed(attention: AttentionOptions) -> bool:
    """Whether queries and keys are cut between their norm and their rotation."""
    is_first = attention.head_norm_of == "head" and attention.head_norm_place == "before"
    return attention.clip is not None and is_first


def find_unknown(model: Model) -> list[str]:
    """Return what a model has that there are no kernels for, by the keys of its document; empty
    where all of it can be computed."""
    tensors, moe = model.tensors, model.moe
    fused, order = tensors.fused_gate_up is not None, tensors.gate_up_order
    # The norm's weights are of FFNs as wide as an expert.
    has_others = moe is not None and bool(moe.shared_experts or moe.dense_layers)
    lying = {
        "ffn.sub_norm (moe)": model.ffn.sub_norm and has_others,
        "tensors.experts_turned": moe is not None and tensors.experts_turned,
        "tensors.fused_order": tensors.fused_qkv is not None and tensors.fused_order != "stacked",
        "tensors.gate_up_order": fused and order != "stacked",
    }
    unknown = find_undeclared(model, COMPUTED, APART)
    return unknown + [key for key, is_there in lying.items() if is_there]


LIBRARIES: Mapping[str, list[str]] = {
    name: kernels.split() for name, kernels in TABLE["libraries"].items()
}
"""Kernels of each library, or of a family of libraries."""
_TYPES = {"~": "float", "*": "float32", "#": "int32", "@": "uint8", "%": "int64"}
_PARTS = {name: own.format(**TABLE["parts"]) for name, own in TABLE["parts"].items()}
_KERNELS = {name: own.format(**_PARTS).split() for name, own in TABLE["kernels"].items()}
FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(field.rstrip("".join(_TYPES)) for field in fields)
    for name, fields in _KERNELS.items()
}
"""Names of each kernel's arguments, in the order of its table."""
TYPES: Mapping[str, Mapping[str, str]] = {
    name: {field[:-1]: _TYPES[field[-1]] for field in fields if field[-1] in _TYPES}
    for name, fields in _KERNELS.items()
}
"""Elements of arrays at addresses, and ``float`` of numbers that are a float32."""
_ABSENT = {kernel: dict.fromkeys(names, 0) for kernel, names in FIELDS.items()}
OPTIONAL: Mapping[str, list[str]] = {
    kernel: [name for name in names if f"has_{name}" in names] for kernel, names in FIELDS.items()
}
"""Arrays of each kernel that need not be given."""


def complete_arguments(kernel: str, values: Mapping[str, int]) -> dict[str, int]:
    """Return all arguments of a kernel: absent ones are 0, and ``has_NAME`` says whether an array
    is given."""
    unknown = values.keys() - _ABSENT[kernel].keys()
    assert not unknown, unknown
    flags = {f"has_{name}": 1 for name in OPTIONAL[kernel] if values.get(name)}
    return {**_ABSENT[kernel], **flags, **values}


PIECE = 1024
"""Elements of an item of kernels that take every element for itself."""
ACTIVATIONS = (
    *("silu", "gelu_tanh", "gelu", "relu", "drelu", "fatrelu", "relu2", "swiglu", "cut_silu"),
    "xielu",
)
"""What becomes of gates, by number; ``swiglu`` cuts gates and ups, and has a slope (gpt-oss);
``cut_silu`` cuts activations and ups; ``xielu`` has its numbers in limit, slope and up_offset;
``limit`` is the threshold of ``fatrelu``."""
XIELU_END = -1e-6
"""Largest exponent of ``xielu``: its definition cuts inputs there."""
ROUTERS = ("softmax", "sigmoid", "mixer", "root_softplus")
"""What makes weights of experts of scores, by number."""
NORM_PLACES = ("none", "before", "after")
"""Whether heads have a norm, and when, by number."""
STATE_BLOCK = 16
"""Channels, or columns of a state, that go through all tokens together."""
GATES = ("silu", "sigmoid", "softplus")
"""What becomes of gates of heads, by number."""


CONTEXT_BLOCK = 16
"""The KV cache is copied in pieces of so many tokens."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The last positions of a sequence that layers with a window keep."""

    window: int
    positions: int

    @property
    def slack(self) -> int:
        """Tokens by which a sequence may be taken back."""
        return self.positions - self.window
