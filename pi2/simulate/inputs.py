"""What the simulation needs of a plan, its device and its model, as plain numbers.

Everything else here works with these classes only; `pi2.simulate.reading` fills them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pi2.simulate.activations import Hotness, unite_chosen
from pi2.simulate.constants import Constants
from pi2.simulate.flash import Flash

Policy = Literal["neuron-cluster", "layer-barrier", "mmap"]
LookAhead = Literal["none", "attention", "layer"]
PrefillOrder = Literal["chunks-first", "layers-first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a document that the simulation used."""

    name: str
    status: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a device.  Bandwidths in bytes per second, arithmetic in operations per second."""

    cpu_bytes_s: float
    dense_bytes_s: float | None
    """Read bandwidth of the NPU or GPU that the plan uses, if any."""
    shared_bytes_s: float
    """Rate that all units reach together."""
    cpu_ops_s: float | None
    dense_ops_s: float | None
    flash: Flash | None
    io_core: str | None
    """CPU cluster whose cores issue the reads."""
    read_overlap: float = 1.0
    """Part of the CPU's rate that is left while neurons are read."""
    stream_overlap: float = 1.0
    """Part of the CPU's rate that is left while layers stream in sequence."""
    cpu_power_w: float | None = None
    dense_power_w: float | None = None
    power_w: float | None = None
    """Power of the whole device with all units at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a model.  Bytes are of one layer unless the name says otherwise."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Neurons of a layer, or of one expert."""
    experts: int
    active_experts: int
    attention_bytes: float
    kv_token_bytes: float
    """Keys and values of one token."""
    predictor_bytes: float
    """What is read to name the active neurons of one token."""
    head_bytes: float
    """Bytes of the output head, read once per token."""
    neuron_bytes: float
    """Weights and scales of one neuron."""
    dense_neuron_bytes: float
    """Weights and scales of a neuron on the dense unit: NPUs have one scale for a whole row."""
    attention_weights: float
    """Number of weights, for arithmetic."""
    active: float
    """Share of the computed neurons that the engine computes for a token."""
    skew: float
    """Share of the neurons that make 80 % of the activations."""
    batch: int = 1
    """Sequences that generate at the same time."""
    hotness: Hotness | None = None
    """Distribution that was counted; None for the one of ``active`` and ``skew``."""

    @property
    def layer_neurons(self) -> int:
        """Neurons of a layer, those of all experts together."""
        return self.ffn * self.experts

    @property
    def computed_neurons(self) -> int:
        """Neurons of the experts that compute one token."""
        return self.ffn * self.active_experts

    @property
    def chosen(self) -> float:
        """Chance of an expert to compute a token."""
        return self.active_experts / self.experts

    @property
    def step_chosen(self) -> float:
        """Chance of an expert to compute a token of any sequence."""
        return unite_chosen(self.chosen, self.batch)

    @property
    def step_neurons(self) -> float:
        """Neurons of the experts that compute a token of any sequence."""
        if self.batch == 1:
            return self.computed_neurons
        return self.layer_neurons * self.step_chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """A plan's settings of some layers."""

    dense: float
    """Share of the neurons that the NPU or GPU computes densely."""
    hot: float
    """Share of the layer's neurons that stays in memory."""
    count: int
    """Number of layers with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A plan's settings of the whole run."""

    policy: Policy
    phases: int
    cluster: int
    prefill_order: PrefillOrder
    chunk: int
    compute_threads: int
    io_threads: int
    cold_neurons: float
    """Capacity of the cache, all layers together."""
    predicted: bool
    """Whether only active neurons are computed."""
    stride_bytes: int
    gate_read_bytes: int
    """First of two reads; with one read, the whole bundle."""
    rest_read_bytes: int
    """Second read, 0 if there is none."""
    page_cache_bytes: float
    """Memory that mapped files may fill."""
    layers: tuple[LayerChoice, ...]
    look_ahead: LookAhead = "none"
    """When a layer's reads begin: with its FFN, with its attention, or with the FFN before it."""
    streams_hot: bool = True
    """Whether hot neurons that are nearly always active are computed densely on the CPU."""
    embedding_s: float = 0.0
    """Reading the rows of the embedding that a token needs, where they do not stay."""
    keeps_most_used: bool = False
    """Whether the cache holds the neurons that follow the hot ones, as with ``lfu`` and known
    frequencies, instead of the last ones that were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInput:
    """All inputs of a simulation."""

    name: str
    digest: str
    machine: Machine
    workload: Workload
    choices: Choices
    constants: Constants = field(default_factory=Constants)
    figures: tuple[Figure, ...] = ()
    """Figures that the inputs come from."""
    assumptions: tuple[str, ...] = ()
    """What is taken to be otherwise than the engine does it, a sentence each."""

    def count_statuses(self) -> Mapping[str, int]:
        """Number of figures by status."""
        return Counter(figure.status for figure in self.figures)
