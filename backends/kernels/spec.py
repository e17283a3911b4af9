"""`KernelSpec`: everything that the kernels of neurons depend on, and nothing else.

Plain Python: no TVM.  Two requests with equal specs share one compiled library."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.formats import find_packing
from pi2.formats.packing import Packing
from pi2.model.ffn import count_stored_cutoff_rows, find_cutoff_precision
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import SMOOTH_ACTIVATIONS, Ffn
from pi2.plan.weights.layout import BundleLayout, Precision, ScalesPlace, lay_out_bundle

PANEL = 256
"""Neurons whose activations are kept at once by the dense FFN."""
UNPACKED = 32
"""Neurons whose down weights are unpacked together in the dense FFN: a bit each in a mask."""
KEPT = 33
"""Tokens whose y a thread of the dense FFN keeps in its own room at a time, a multiple of the
tokens that share the loads of weights."""
DENSE_FLOATS = (UNPACKED + KEPT) * 128
"""Numbers that a thread of the dense FFN has room for, in the program's scratch."""
PARTS = PANEL // UNPACKED
"""Masks of a panel."""
BLOCK = 240
"""Neurons that are taken through all tokens of a step before the next ones: with fewer, threads
begin anew too often, with more, tokens do not find in a cache what others have read."""
BLOCK_ROOM = BLOCK + 16
"""Room of a list of them, which is written 16 at a time."""
MOST_NAMING = 31
"""Tokens of a step that a mask of neurons has bits for."""

_UNSEEN = ("absent_layers", "gate_sparsity")
"""Keys of an FFN that change no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Precisions of what kernels read."""

    ffn: Precision
    """Of neurons, or of their down columns where `gates` differs."""
    gates: Precision
    """Of gates and ups."""
    predictor: Precision | None
    cutoff: Precision | None
    """Of the matrices that tell cutoffs of gates; None without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """An FFN and choices of a run that the kernels of its neurons are specialised for.

    Context length and chunk size are not part of it: they are arguments of the kernels."""

    program: ClassVar[str] = "pi2.backends.kernels.program"
    hidden: int
    """Length of the vectors that neurons read and give, as stores have them."""
    ffn: Ffn
    """Without what changes no kernel."""
    precision: Formats
    experts: int
    """Experts of an MoE model, shared ones included; 0 if the model is none."""
    weighs_input: bool
    """Whether weights of experts multiply what these read."""
    sub_norm: int
    """Neurons whose activations are normalised together; 0 if they are not."""
    epsilon: float
    """Added to the mean of the squares of these."""
    cutoff_rows: int
    """Rows of the matrices that tell cutoffs of gates; 0 if no layer has one."""
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
    sequences: bool = False
    """Whether tokens of several sequences are decoded together: there are functions for it."""
    looks_ahead: bool = False
    """Whether predictions are made before the layer's own input is known."""
    passes: Literal[1, 2] = 1
    """Passes over gathered neurons: one for everything, or gates first (`kernels.gathered`)."""

    @property
    def bundle(self) -> BundleLayout:
        ffn, own = self.ffn, self.precision
        return lay_out_bundle(
            self.hidden,
            own.ffn,
            self.stride,
            gated=ffn.gated,
            bias=ffn.bias,
            factor=ffn.sub_norm,
            mixed=self.experts > 0,
            scales=self.scales,
            gate_up=None if own.gates == own.ffn else own.gates,
        )

    @property
    def packing(self) -> Packing:
        """Of gates and ups."""
        return find_packing(self.precision.gates)

    @property
    def most_planes(self) -> int:
        """Bytes of an activation that arrays have room for."""
        return max(self.planes, self.chunk_planes)

    @property
    def isa(self) -> Isa:
        """The schedule; tiles multiply integers only."""
        isa = choose_isa(frozenset(self.features), self.architecture)
        return isa if self.most_planes < 4 else dataclasses.replace(isa, blocks=False)

    @property
    def has_other_chunks(self) -> bool:
        """Whether the tokens of a chunk are computed otherwise than a single token."""
        return self.chunk_planes != self.planes or self.upper_steps

    @property
    def foresees(self) -> bool:
        """Whether the neurons of a layer are predicted before its input is known: not where experts
        have to be known before, or gates have cutoffs."""
        return self.looks_ahead and bool(self.ranks) and not self.experts and not self.cutoff_rows

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.ffn.activation in SMOOTH_ACTIVATIONS

    @property
    def uses_known_gates(self) -> bool:
        """Whether gates that have named neurons are not computed again with these."""
        return self.gates and self.ffn.gated and self.experts == 0

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
        values["ffn"] = self.ffn.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        read = {
            "ffn": Ffn.model_validate_json(json.dumps(values["ffn"])),
            "precision": Formats(**values["precision"]),
            "ranks": tuple(values["ranks"]),
            "features": tuple(values["features"]),
        }
        return cls(**(values | read))


def describe_kernels(model: Model, **choices: Any) -> KernelSpec:
    """Return the spec of the kernels of a model's neurons, with ``choices`` of a run."""
    weights, own, moe = model.quantization, model.ffn, model.moe
    fields, forgotten = type(own).model_fields, list(_UNSEEN)
    if own.activation != "fatrelu":
        forgotten.append("threshold")
    return KernelSpec(
        hidden=model.stored_neuron_width,
        ffn=own.model_copy(update={key: fields[key].default for key in forgotten}),
        precision=Formats(
            ffn=weights.ffn,
            gates=weights.gates,
            predictor=weights.predictor if choices["ranks"] else None,
            cutoff=find_cutoff_precision(model) if model.cut_layers else None,
        ),
        experts=0 if moe is None else model.expert_count,
        weighs_input=moe is not None and moe.weighs == "input",
        sub_norm=model.layer_neurons if own.sub_norm else 0,
        epsilon=model.norm.epsilon if own.sub_norm else 0.0,
        cutoff_rows=count_stored_cutoff_rows(model) if model.cut_layers else 0,
        **choices,
    )
