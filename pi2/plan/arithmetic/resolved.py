"""A resolved plan: plan, device and model put together, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pi2.plan.arithmetic.sources import FileFacts, Source
from pi2.plan.arithmetic.units import DividedRows, Needs, count_qkv_rows, count_rows
from pi2.plan.documents.common import dump_plain, hash_json
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.plan_units import LayerOverride, LayerSettings, list_layers
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import GROUP, BundleLayout, round_up

if TYPE_CHECKING:
    from pi2.plan.reading.thresholds import Thresholds


@dataclass(frozen=True, kw_only=True)
class DenseShare:
    """What a unit other than the sparse one has of a layer: the first neurons in stored order."""

    unit: str
    """Name of the unit in the device."""
    shares: tuple[float, ...]
    """Share of the layer's neurons that it computes in steps of 1, 2, ... sequences, or tokens that
    are verified together."""
    by_sequences: tuple[int, ...]
    """Neurons that it computes in steps of 1, 2, ... sequences."""

    @property
    def kept(self) -> int:
        """Neurons that it keeps in its memory, and computes of prompts."""
        return max(self.by_sequences)

    @property
    def least(self) -> int:
        """Neurons that no other unit ever computes; main memory need not hold them."""
        return min(self.by_sequences)


@dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """Settings of one layer, and the key path in the plan that set each of them."""

    split: Mapping[str, float]
    """Share of the layer's neurons by unit."""
    hot: float
    """Share of the layer's neurons that stay resident."""
    hot_neurons: int
    """Number of the layer's neurons that stay resident: the first ones in stored order."""
    dense: DenseShare | None = None
    """What a dense unit has of them; None where the sparse unit has all."""
    split_path: KeyPath
    hot_path: KeyPath
    splits: Mapping[KeyPath, Mapping[str, float]]
    """Its splits by their places: that for one sequence, then those for several."""

    def find_dense_share(self, sequences: int) -> float:
        """Share of its neurons that a dense unit computes in steps of so many sequences."""
        return 0.0 if self.dense is None else self.dense.shares[sequences - 1]

    @property
    def settings(self) -> tuple[object, ...]:
        """What layers are compared by."""
        return dict(self.split), self.hot, self.hot_neurons, self.dense

    @property
    def own_hot(self) -> range:
        """Stored indices of the hot neurons in the segment ``hot``."""
        first = 0 if self.dense is None else min(self.dense.least, self.hot_neurons)
        return range(first, self.hot_neurons)


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan with its device and its model: what rules, arithmetic and a run work with."""

    plan: Plan
    device: Device
    model: Model
    path: Path = Path()
    """The plan's file; empty for values that no file holds yet."""
    thresholds: Thresholds | None = None
    """What ``[sparsity]`` names, if the plan has it."""
    file: FileFacts | None = None
    """The facts of the GGUF file, if the plan runs one as it is."""
    derived: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)
    """Values that the plan does not state, with their reasons."""
    find_source: Callable[[ResolvedPlan], Source] = field(compare=False, repr=False)
    """Tells how the backends take a plan's neuron store."""
    draft: ResolvedPlan | None = None
    """The plan of the model that drafts tokens, if `decode.speculation` names one."""

    @cached_property
    def source(self) -> Source:
        """The source of the weights."""
        return self.file or self.find_source(self)

    @cached_property
    def needs(self) -> Needs:
        """Bytes that each segment needs."""
        return self.source.count_needs(self)

    @cached_property
    def chunks(self) -> int:
        """Chunks of a prompt that pass a layer together."""
        return self.source.count_chunks(self)

    @property
    def store_path(self) -> Path:
        return self.path.parent / self.plan.weights

    @cached_property
    def layers(self) -> tuple[ResolvedLayer, ...]:
        return _resolve_layers(self.plan, self.model, self.device)

    @cached_property
    def bundle(self) -> BundleLayout:
        """Layout of a neuron in the store; of a file that streams, its part of a step, or of the
        experts."""
        stated, model = self.plan.bundle, self.model
        layout = model.lay_out_bundle(scales=stated.scales)
        # A stride that is too small counts as the smallest that is not.
        least, stride = layout.used_bytes, stated.stride
        layout = model.lay_out_bundle(
            stride if stride >= least else round_up(least, 512), stated.scales
        )
        absent = sum(self.model.layer_neurons - layer.hot_neurons for layer in self.layers)
        streamed = self.source.count_streamed(self.model)
        if not streamed or not absent:
            return layout
        return replace(layout, stride=max(1, streamed // absent))

    @cached_property
    def sparse_unit(self) -> str:
        """Name of the unit that computes sparsely, and everything that no other unit computes: the
        first CPU of the splits, else their first unit."""
        return find_sparse_unit(self.plan, self.device)

    @property
    def beside_bytes(self) -> int:
        """Bytes that its segments take in the process of another plan, for which it drafts."""
        segments: Mapping[str, int] = dict(self.plan.memory.segments)
        return sum(segments.values()) - segments["runtime"]

    @property
    def names_by_cutoff(self) -> bool:
        """Whether gates name neurons in layers with a cutoff only; the other layers, whose
        activation is never zero, compute all neurons."""
        exact = self.plan.decode.predictor == "gate" and self.plan.sparsity is None
        return exact and self.model.is_smooth and bool(self.model.cut_layers)

    @cached_property
    def named_layers(self) -> tuple[int, ...]:
        """Layers in which a token computes only predicted neurons; in other layers it computes all
        of them, and cold ones are streamed."""
        if self.plan.decode.predictor == "none":
            return ()
        if self.names_by_cutoff:
            return self.model.cut_layers
        return tuple(range(self.model.shape.layers))

    @cached_property
    def whole_layers(self) -> tuple[int, ...]:
        named = frozenset(self.named_layers)
        return tuple(layer for layer in range(self.model.shape.layers) if layer not in named)

    def list_unit_kinds(self) -> list[UnitKind]:
        """Kinds of the units that compute next to the processor, or in its place."""
        names = [*self.dense_units, *self.source.whole_units]
        return [self.device.units[name].kind for name in names if name in self.device.units]

    @property
    def dense_units(self) -> tuple[str, ...]:
        """Names of the other units that have work, in the order of the layers; units that the
        device lacks, or without a backend in the plan, are left out."""
        names = dict.fromkeys(layer.dense.unit for layer in self.layers if layer.dense is not None)
        if self.plan.prefill.unit is not None:
            names[self.plan.prefill.unit] = None
        if self.divided_rows is not None:
            names[self.divided_rows.unit] = None
        names.pop(self.sparse_unit, None)
        return tuple(name for name in names if self.find_backend(name) is not None)

    def find_owned_share(self, unit: str) -> float:
        """Share of all neurons that a dense unit computes in steps of ``decode.batch``."""
        batch = self.plan.decode.batch
        owned = [item for item in self.layers if item.dense is not None and item.dense.unit == unit]
        return sum(item.find_dense_share(batch) for item in owned) / len(self.layers)

    @cached_property
    def divided_rows(self) -> DividedRows | None:
        """Rows of projections and of the head that a unit other than the sparse one computes."""
        table, model = self.plan.projections, self.model
        splits = {"attention": table.attention or {}, "head": table.head or {}}
        units = [
            name
            for split in splits.values()
            for name, share in split.items()
            if share > 0 and name != self.sparse_unit and name in self.device.units
        ]
        if not units:
            return None
        attention, head = (split.get(units[0], 0.0) for split in splits.values())
        return DividedRows(
            unit=units[0],
            qkv=count_rows(attention, count_qkv_rows(model)),
            output=count_rows(attention, model.shape.stored_hidden),
            head=count_rows(head, model.shape.vocab),
        )

    def find_backend(self, unit: str) -> str | None:
        return find_backend(self.plan, self.device, unit)

    def name_backend(self, unit: str) -> str:
        """The backend of a unit that has one."""
        found = self.find_backend(unit)
        assert found is not None, unit
        return found

    def shares_main_memory(self, unit: str) -> bool:
        """Whether what a dense unit keeps counts against the budget."""
        return uses_main_memory(self.plan, self.device, unit)

    def name_segment(self, unit: str) -> str:
        """What a dense unit's memory is charged to: the segment ``hot``, or ``units.NAME``."""
        has_own = unit in self.plan.memory.units or not self.shares_main_memory(unit)
        return f"units.{unit}" if has_own else "hot"

    def goes_on_without(self, unit: str) -> bool:
        """Whether a run goes on when a dense unit is lost."""
        settings = self.plan.units.get(unit)
        return settings is not None and settings.on_failure == "cpu"

    def list_backends(self) -> frozenset[str]:
        return frozenset(map(self.name_backend, (self.sparse_unit, *self.dense_units)))

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the canonical JSON of plan, device and model.

        Settings of layers count as resolved: two spellings of the same plan agree.  Contents of the
        device and model files count, their places do not; sizes of memory if they decide the
        result."""
        plan = dump_plain(self.plan)
        # What is kept between requests does not change what a run is.
        for key in ("device", "model", "layers", "serve"):
            del plan[key]
        if not (self.plan.decode.leaves_out or self.plan.experts.is_lossy):
            plan["memory"] = {"embedding": self.plan.memory.embedding}
        if plan["decode"]["speculation"] is None:
            del plan["decode"]["speculation"]
        elif self.draft is not None:
            plan["decode"]["speculation"]["plan"] = self.draft.digest
        # Plans have a copy of it, which counts.
        model = dump_plain(self.model)
        del model["sampling"]
        sparsity = plan.pop("sparsity")
        if sparsity is not None and self.thresholds is not None:
            found = self.thresholds
            limits = [list(pair) for pair in found.limits]
            if found.expert_limits is not None:
                limits = [
                    [*pair, *own] for pair, own in zip(limits, found.expert_limits, strict=True)
                ]
            plan["sparsity"] = {"method": sparsity["method"], "thresholds": limits}
        # Which matrices of a file are in memory changes nothing.
        layers = [_dump_layer(layer) for layer in self.source.list_set(self.layers)]
        return hash_json(
            {"plan": plan, "layers": layers, "device": dump_plain(self.device), "model": model}
        )


def name_layers(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def has_packable_shape(model: Model) -> bool:
    """Whether predictors fill groups, without which no size can be computed."""
    return model.predictor is None or model.predictor.rank % GROUP == 0


def find_backend(plan: Plan, device: Device, unit: str) -> str | None:
    """The backend of a unit of the device, or of its kind; None if the plan names none."""
    if unit not in device.units:
        return None
    settings = plan.units.get(unit)
    stated = None if settings is None else settings.backend
    return stated or plan.backends.get(device.units[unit].kind)


def uses_main_memory(plan: Plan, device: Device, unit: str) -> bool:
    memory = plan.memory.units.get(unit)
    if memory is not None and memory.shares_main_memory is not None:
        return memory.shares_main_memory
    return device.units[unit].memory is None


def find_sparse_unit(plan: Plan, device: Device) -> str:
    """Name of the unit that computes what no dense unit owns."""
    names = list(dict.fromkeys(name for own in list_placed_splits(plan) for name in own.split))
    known = [name for name in names if name in device.units]
    cpus = [name for name in known if device.units[name].kind == "cpu"]
    return (cpus or known or names)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSplit:
    """A split, and where it stands."""

    split: Mapping[str, float]
    path: KeyPath
    subject: str
    """For people: which layers it divides, and in which steps."""


def list_settings(plan: Plan) -> Iterator[tuple[KeyPath, str, LayerSettings | LayerOverride]]:
    """What a plan states of layers: its place, the layers for people, and the settings."""
    yield ("layers",), "all layers", plan.layers
    for number, override in enumerate(plan.layers.overrides):
        subject = f'layers "{override.select.strip()}"'
        yield ("layers", "overrides", number), subject, override


def list_placed_splits(plan: Plan) -> Iterator[PlacedSplit]:
    """Every split of the layers of a plan, in the order of the document."""
    for path, subject, own in list_settings(plan):
        if own.split is not None:
            yield PlacedSplit(split=own.split, path=(*path, "split"), subject=subject)
        for number, entry in enumerate(own.batches or ()):
            yield PlacedSplit(
                split=entry.split,
                path=(*path, "batches", number, "split"),
                subject=f"{subject} in steps of {entry.sequences} sequences",
            )


def _resolve_layers(plan: Plan, model: Model, device: Device) -> tuple[ResolvedLayer, ...]:
    """Expand ``[layers]`` and its overrides to one entry per layer; a later override wins."""
    stated: list[dict[str, tuple[Any, KeyPath]]] = [{} for _ in range(model.shape.layers)]
    for path, _, own in list_settings(plan):
        select = own.select if isinstance(own, LayerOverride) else f"0-{len(stated) - 1}"
        for key in ("split", "hot", "batches"):
            value = getattr(own, key)
            for layer in list_layers(select, len(stated)) if value is not None else ():
                stated[layer][key] = value, (*path, key)
    sparse = find_sparse_unit(plan, device)
    dense = {name for name in device.units if name != sparse}
    return tuple(_resolve_layer(plan, model, dense, settings) for settings in stated)


def _resolve_layer(
    plan: Plan, model: Model, dense: Set[str], stated: Mapping[str, tuple[Any, KeyPath]]
) -> ResolvedLayer:
    split, split_path = stated["split"]
    hot, hot_path = stated["hot"]
    batches, batches_path = stated["batches"]
    steps = [
        next((entry.split for entry in reversed(batches) if entry.sequences <= number), split)
        for number in range(1, plan.decode.step_tokens + 1)
    ]
    others = {(*batches_path, n, "split"): entry.split for n, entry in enumerate(batches)}
    return ResolvedLayer(
        split=MappingProxyType(split),
        hot=hot,
        hot_neurons=round(hot * model.layer_neurons),
        dense=_find_dense_share(steps, dense, model.layer_neurons),
        split_path=split_path,
        hot_path=hot_path,
        splits={split_path: split, **others},
    )


def _find_dense_share(
    splits: Sequence[Mapping[str, float]], dense: Set[str], neurons: int
) -> DenseShare | None:
    """What one of the ``dense`` units has of a layer, by the splits of steps of 1, 2, ...
    sequences; of several such units, which is an error, the first."""
    others = [name for split in splits for name, share in split.items() if name in dense and share]
    if not others:
        return None
    shares = tuple(split.get(others[0], 0.0) for split in splits)
    counts = tuple(round(share * neurons) for share in shares)
    return DenseShare(unit=others[0], shares=shares, by_sequences=counts)


def _dump_layer(layer: ResolvedLayer) -> dict[str, Any]:
    values: dict[str, Any] = {"split": dict(layer.split), "hot": layer.hot}
    if layer.dense is not None and len(set(layer.dense.by_sequences)) > 1:
        # Other splits for several sequences, which most plans do not have.
        values["batches"] = [layer.dense.unit, *layer.dense.by_sequences]
    return values
