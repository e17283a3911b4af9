"""`KernelSpec`: everything that the generated code depends on, and nothing else.

Plain Python: no TVM.  Two requests with equal specs share one compiled library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from pi2.backends.executor import count_parts
from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.model.attention import Attention
from pi2.model.blocks import list_attention
from pi2.model.ffn import count_stored_cutoff_rows
from pi2.model.states import StateShape, describe_state
from pi2.plan.arithmetic.units import DividedRows
from pi2.plan.documents.common import Table
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Positions
from pi2.plan.documents.model_parts import Ffn, Moe, Norm, Quantization
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import GROUP, BundleLayout, ScalesPlace, fill_groups, lay_out_bundle

_Table = TypeVar("_Table", bound=Table)

PANEL = 256
"""Neurons whose activations are kept at once by the dense FFN."""
UNPACKED = 32
"""Neurons whose down weights are unpacked together in the dense FFN: a bit each in a mask."""
KEPT = 33
"""Tokens whose y a thread of the dense FFN keeps in its own room at a time, a multiple of the
tokens that share the loads of weights."""
PARTS = PANEL // UNPACKED
"""Masks of a panel."""
BLOCK = 240
"""Neurons that are taken through all tokens of a step before the next ones: with fewer, threads
begin anew too often, with more, tokens do not find in a cache what others have read."""
BLOCK_ROOM = BLOCK + 16
"""Room of a list of them, which is written 16 at a time."""
MOST_NAMING = 31
"""Tokens of a step that a mask of neurons has bits for."""
KV_BLOCK = 16
"""Tokens whose keys lie together, one per lane."""
SPANS = 16
"""Most parts that the context is divided into for one token's attention."""

KV_DTYPES: Mapping[KvType, str] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
"""Types of the kernels' arrays that hold it."""


NO_ROWS = DividedRows(unit="")
_UNSEEN = {
    "model": (
        *("name", "description", "licence", "rope", "other_rope", "other_heads", "layers"),
        *("recurrence", "convolution", "tied_head", "pooling", "tokenizer", "tensors"),
        *("predictor", "sparsity", "sampling"),
    ),
    "norm": ("weights", "weight_offset"),
    "attention": (
        *("head_norm", "head_norm_weights", "head_norm_layers", "value_width", "output_gate_of"),
        *("sinks", "sink_layers", "growth", "growth_interval", "growth_offset", "growth_layers"),
        *("sliding_window", "window_layers", "kv_shared_layers"),
    ),
    "ffn": ("absent_layers", "gate_sparsity"),
    "moe": ("shared_ffn", "dense_layers", "dense_ffn"),
    "layer_embedding": ("vocab",),
}
"""Keys of a model, by table, that change no kernel: numbers in `KernelSpec`, tensors and tables of
positions cover them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Operators of a model and choices of a run that its kernels are specialised for.

    Context length and chunk size are not part of it: they are arguments of the kernels."""

    program: ClassVar[str] = "pi2.backends.kernels.program"
    model: Model
    """The model without what changes no kernel (`describe_kernels`)."""
    attentions: tuple[Attention, ...]
    """Attention of distinct blocks; functions of the second one have number 1, and so on."""
    state: StateShape | None
    """Sizes of layers with a state, if there are some."""
    experts: int
    """Experts of an MoE model, shared ones included; 0 if the model is none."""
    side_ffn: int
    """Neurons of a dense FFN next to the experts; 0 without it."""
    sub_norm: int
    """Neurons whose activations are normalised together; 0 if they are not."""
    cutoff_rows: int
    """Rows of the matrices that tell cutoffs of gates; 0 if no layer has one."""
    kv: KvType
    gates: bool
    """Whether there are resident gate rows."""
    ranks: tuple[int, ...]
    """Different ranks among the layers' low-rank predictors, ascending."""
    stride: int
    scales: ScalesPlace = "inline"
    """Place of the scales of neurons."""
    threads: int
    planes: int
    """Bytes of an activation: 1 (int8), 2 (int16 as two int8 planes), 4 (float32, not rounded)."""
    chunk_planes: int
    """Bytes of an activation where several tokens go through a layer together."""
    architecture: str
    features: tuple[str, ...]
    """Sorted."""
    upper_steps: bool = False
    """Whether several tokens of a step are multiplied only by the upper 8 of their 16 bits."""
    rows: DividedRows = NO_ROWS
    """First rows of projections and of the head that another unit computes."""
    sequences: bool = False
    """Whether tokens of several sequences are decoded together: there are functions for it."""
    looks_ahead: bool = False
    """Whether predictions are made before the layer's own input is known."""
    passes: Literal[1, 2] = 1
    """Passes over gathered neurons: one for everything, or gates first (`kernels.gathered`)."""
    of_neurons: bool = False
    """Whether it is of functions that know neurons and what these read, and nothing of the
    residual stream."""

    def __post_init__(self) -> None:
        own = self.attention
        assert self.hidden % GROUP == 0, self
        assert own.latent is not None or own.head_dim % 2 == 0
        assert own.heads % own.kv_heads == 0
        assert {self.planes, self.chunk_planes} <= {1, 2, 4} and self.threads >= 1
        assert list(self.features) == sorted(set(self.features))

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def attention(self) -> Attention:
        return self.attentions[0]

    @property
    def norm(self) -> Norm:
        return self.model.norm

    @property
    def ffn(self) -> Ffn:
        return self.model.ffn

    @property
    def precision(self) -> Quantization:
        return self.model.quantization

    @property
    def divides_attention(self) -> bool:
        """Whether another unit computes rows of the attention block's projections."""
        return self.rows.qkv > 0 or self.rows.output > 0

    def list_blocks(self) -> list[KernelSpec]:
        """A spec for each distinct attention, this one's first."""
        return [dataclasses.replace(self, attentions=(own,)) for own in self.attentions]

    def has_other_heads(self, number: int) -> bool:
        """Whether attention of a number has other projections than the first, not only a window."""
        first, own = (
            (own.heads, own.kv_heads, own.head_dim, own.has_keys)
            for own in (self.attention, self.attentions[number])
        )
        return own != first

    @property
    def hidden(self) -> int:
        """Length of the residual stream's vectors, or of what functions of neurons read."""
        return self.neuron_width if self.of_neurons else self.model.shape.stored_hidden

    @property
    def normalized_width(self) -> int:
        """Elements that norms of the residual stream are taken of."""
        return self.hidden if self.of_neurons else self.model.shape.hidden

    @property
    def latent_experts(self) -> int:
        """Elements that experts read and give; 0 if it is the residual stream's."""
        return 0 if self.model.moe is None or self.of_neurons else self.model.moe.latent or 0

    @property
    def neuron_width(self) -> int:
        return self.model.stored_neuron_width

    def describe_neurons(self) -> KernelSpec:
        """The spec of functions that know neurons only: ``hidden`` is the neurons' width."""
        return dataclasses.replace(self, of_neurons=True) if self.latent_experts else self

    @property
    def bundle(self) -> BundleLayout:
        ffn = self.ffn
        return lay_out_bundle(
            self.neuron_width,
            self.precision.ffn,
            self.stride,
            gated=ffn.gated,
            bias=ffn.bias,
            factor=ffn.sub_norm,
            mixed=self.experts > 0,
            scales=self.scales,
            gate_up=self.precision.gate_up,
        )

    @property
    def layer_row(self) -> int:
        """Length of a row of the table of layers' own embeddings; 0 without them."""
        own = self.model.layer_embedding
        return 0 if own is None else fill_groups(self.model.shape.layers * own.width)

    @property
    def router(self) -> Moe | None:
        """The MoE router; None if none is compiled: routers that choose among groups or one expert
        at a time, or have a norm of their own or factors of the experts' weights."""
        moe = self.model.moe
        if moe is None or moe.router in ("mixer", "none") or moe.groups > 1:
            return None
        return None if moe.router_input == "stream" or moe.expert_scale else moe

    @property
    def side_norms(self) -> bool:
        """Whether the dense FFN next to experts has norms of its own."""
        return self.model.side_ffn is None or self.model.side_ffn.norms

    @property
    def weighs_input(self) -> bool:
        """Whether weights of experts multiply what these read."""
        return self.model.moe is not None and self.model.moe.weighs == "input"

    @property
    def keeps_input(self) -> bool:
        """Whether the layer's input is kept: for the FFN, for the router, or for AltUp."""
        model = self.model
        routes = model.moe is not None and model.moe.router_input == "layer"
        return model.residual == "parallel" or routes or model.altup is not None

    @property
    def most_planes(self) -> int:
        """Bytes of an activation that arrays have room for."""
        return max(self.planes, self.chunk_planes)

    @property
    def isa(self) -> Isa:
        """The schedule; tokens are taken in pairs as integers only."""
        isa = choose_isa(frozenset(self.features), self.architecture)
        return isa if self.most_planes < 4 else dataclasses.replace(isa, pairs=False, blocks=False)

    @property
    def has_other_chunks(self) -> bool:
        """Whether the tokens of a chunk are computed otherwise than a single token."""
        return self.chunk_planes != self.planes or self.isa.pairs or self.upper_steps

    @property
    def foresees(self) -> bool:
        """Whether a function predicts for a layer to come and begins the present one: not where
        experts have to be known before, or gates have cutoffs."""
        return self.looks_ahead and not self.experts and not self.cutoff_rows

    @property
    def multiplies_at_end(self) -> bool:
        return bool(self.side_ffn or self.latent_experts) or self.model.layer_embedding is not None

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.model.is_smooth

    @property
    def takes_stretches(self) -> bool:
        """Whether `pi2.backends.kernels.plain` computes the neurons of one token, however they
        were chosen: none of them is ever inactive."""
        return self.is_smooth and (self.experts > 0 or not self.has_gathered_ffn)

    @property
    def parts(self) -> int:
        """Parts of a token's neurons whose sums are kept until all are added: they are computed in
        any order then."""
        keeps = self.takes_stretches and self.experts > 0 and not self.sub_norm
        return count_parts(self.threads) if keeps else 1

    @property
    def has_plain_ffn(self) -> bool:
        """Whether `pi2.backends.kernels.plain` computes the FFN of all neurons of a layer."""
        return not self.takes_stretches and (not self.has_gathered_ffn or self.experts > 0)

    @property
    def uses_known_gates(self) -> bool:
        """Whether gates that have named neurons are not computed again with these."""
        return self.gates and self.has_gathered_ffn and self.experts == 0

    @property
    def has_gathered_ffn(self) -> bool:
        """Whether `pi2.backends.kernels.gathered` computes the neurons that a predictor names."""
        return self.ffn.gated and not self.ffn.bias

    @property
    def skips_ups(self) -> bool:
        """Whether a chunk's tokens need only the ups of neurons whose gates are open: of others,
        the activation is zero."""
        return self.ffn.gated and not self.is_smooth

    @property
    def closes_gates(self) -> bool:
        """Whether a gate is enough to tell that a gathered neuron has no effect."""
        return self.skips_ups and not self.ffn.bias

    @property
    def shares_neurons(self) -> bool:
        """Whether `pi2.backends.kernels.shared` computes what the tokens of a step name."""
        return self.sequences and self.closes_gates

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        values["model"] = self.model.model_dump(mode="json", exclude_defaults=True)
        for own in values["attentions"]:
            del own["options"], own["rope"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        # A store may have other formats than its document.
        weights = Quantization.model_construct(**values["model"].pop("quantization", {}))
        model = Model.model_validate_json(json.dumps(values["model"]))
        model = model.model_copy(update={"quantization": weights})
        same: dict[str, Any] = {"options": model.attention, "rope": model.rope}
        state = values["state"]
        read = {
            "model": model,
            "attentions": tuple(Attention(**same, **own) for own in values["attentions"]),
            "state": None if state is None else StateShape(**state),
            "rows": DividedRows(**values["rows"]),
            "ranks": tuple(values["ranks"]),
            "features": tuple(values["features"]),
        }
        return cls(**(values | read))


def describe_kernels(model: Model, **choices: Any) -> KernelSpec:
    """Return the spec of a model's kernels, with ``choices`` of a run."""
    seen = _strip_model(model, bool(choices["ranks"]))
    return KernelSpec(
        model=seen,
        attentions=tuple(dict.fromkeys(strip_attention(own, seen) for own in _list_own(model))),
        state=describe_state(model),
        experts=0 if model.moe is None else model.expert_count,
        side_ffn=model.side_width,
        sub_norm=model.layer_neurons if model.ffn.sub_norm else 0,
        cutoff_rows=count_stored_cutoff_rows(model) if model.cut_layers else 0,
        **choices,
    )


def _list_own(model: Model) -> list[Attention]:
    # A model without attention needs sizes, too.
    found = [block.attention for block in model.blocks if block.attention is not None]
    return found or [list_attention(model)[0][0]]


def strip_attention(own: Attention, seen: Model) -> Attention:
    """Return attention of a block without what changes no kernel; ``seen``: the spec's model."""
    return dataclasses.replace(
        own,
        options=seen.attention,
        rope=seen.rope,
        sinks=own.options.sinks,
        growth=float(own.options.growth > 0.0),
        keys_are_values=False,
        key_layer=None if own.has_keys else 0,
        chooses="all",
    )


def _strip_model(model: Model, has_ranks: bool) -> Model:
    weights, shape, own = model.quantization, model.shape, model.layer_embedding
    changes: dict[str, Any] = {"id": "kernels", "positions": model.positions and Positions()}
    changes["shape"] = shape.model_copy(
        update={"ffn": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "context": 1}
        | ({"layers": 1} if own is None else {})
    )
    changes["quantization"] = weights.model_copy(
        update={"head": weights.embedding if model.tied_head else weights.head}
        | ({} if has_ranks else {"predictor": "int8"})
    )
    for name in ("norm", "attention", "ffn", "moe", "layer_embedding"):
        if (table := getattr(model, name)) is not None:
            changes[name] = _forget(table, _UNSEEN[name])
    if model.ffn.activation != "fatrelu":
        changes["ffn"] = changes["ffn"].model_copy(update={"threshold": 0.0})
    if model.moe is not None and not any(block.ffn.has_router for block in model.blocks):
        changes["moe"] = changes["moe"].model_copy(update={"router": "none"})
    return _forget(model, _UNSEEN["model"]).model_copy(update=changes)


def _forget(table: _Table, keys: tuple[str, ...]) -> _Table:
    """Return a table with the defaults of ``keys``."""
    fields = type(table).model_fields
    return table.model_copy(update={key: fields[key].default for key in keys})
