"""The one derivation of settings that plans leave out; the source of the weights answers it."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from pi2.diagnostics import UserError
from pi2.fitting import list_usual_backends
from pi2.fitting.budget import (
    MIB,
    Shortage,
    explain_shortage,
    find_largest_hot,
    fit_plan,
    round_segment,
    write_memory,
)
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.resolved import ResolvedPlan, has_packable_shape
from pi2.plan.arithmetic.sizes import USUAL_CHUNK, count_ffn_bytes, find_block_bytes, list_chunks
from pi2.plan.arithmetic.sources import Completion, FileFacts
from pi2.plan.checking.rules.stated import find_other_choice
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan, Segments
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    approximate_bytes,
    format_bytes,
    parse_quantity,
    read_percent,
)
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import ScalesPlace, round_up

USUAL_CONTEXT = 4096
CONTEXTS = (USUAL_CONTEXT, 2048, 1024, 512)
"""Tokens of a context that no plan states: the most for which there is room."""
WORKSPACE_SHARE = 0.02
"""Part of the budget, or of the weights, that the workspace may take for chunks beyond the usual:
about as much less is in memory."""
MEMORY_SHARE = 0.8
"""Share of the free memory that a plan without a budget takes, unless it needs more."""
WIDE_HEAD = 128
"""Elements of a head from which on the KV cache loses little in 8 bits."""
FAST_PREFERENCE = 0.2
"""``experts.prefer_cached`` that `quality = "fast"` stands for."""
SEGMENT_REASONS: Mapping[str, str] = {
    "runtime": "Python, libraries and tokenizer",
    "attention": "embeddings, attention, norms",
    "kv": "KV cache of the context",
    "state": "states of recurrent layers",
    "predictor": "what finds active neurons",
    "hot": "hot neurons",
    "cold": "the rest of the budget, as far as there are neurons",
    "workspace": "activations and staging",
}
_WHY_CONTEXT = f"the model's, at most {USUAL_CONTEXT}, or shorter if memory is short"
_SIZES = tuple(name for name in Segments.model_fields if name != "state")
_TABLES = ("memory", "layers", "bundle", "kv", "prefill", "decode", "experts", "backends")

FindMemory = Callable[[], tuple[int, int]]
"""Tells the installed and the free memory of this machine, in bytes."""
Setting = tuple[KeyPath, object, str]
"""A key, its value and the reason."""


class FillPlan(Protocol):
    """The facts of this machine's files and memory."""

    def __call__(self, values: Mapping[str, Any], path: Path, draft: Path | None = None) -> Origin:
        """Open the GGUF file that a plan at a path runs; ``draft``: the file that
        `decode.speculation` names.  `UserError`."""

    def describe(self, path: Path) -> dict[str, Any] | None:
        """Values of the plan that a GGUF file stands for; None for another file."""

    def names_file(self, weights: object, path: Path) -> bool:
        """Whether ``weights`` of the plan at a path are a GGUF file, and not a neuron store."""

    def find_model(self, weights: object, path: Path) -> str | None:
        """The model document of the store that the plan at a path names; None if there is none."""

    def find_memory(self) -> tuple[int, int]:
        """Installed and free memory, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a budget is spent on."""

    budget: int
    hot: float
    """Share of the weights that stays in memory."""
    sizes: Mapping[str, int]
    """Bytes by segment."""
    follows: Sequence[Setting] = ()
    """Settings that depend on resident weights."""
    facts: FileFacts | None = None
    """The facts of a file that is run as it is."""


class Weighed(ABC):
    """A plan with a context and a chunk, whose needs are known."""

    workspace: int
    """Bytes that activations take."""
    weights: int
    """Bytes that may be in memory or come from disk."""

    @property
    @abstractmethod
    def whole(self) -> int:
        """Budget that holds everything; may raise `Shortage`."""

    @abstractmethod
    def fit(self, budget: int) -> Fit:
        """Spend a budget; raises `Shortage`."""


class Origin(ABC):
    """The weights of a plan, as their source answers a derivation."""

    path = Path()
    """The file that is run as it is."""
    usual_chunk: int = USUAL_CHUNK
    """Tokens of a chunk beyond which its workspace has to be small."""
    why_hot, why_whole = "share of neurons that fits", "all neurons fit"
    reasons: Mapping[str, str] = SEGMENT_REASONS
    """What each segment holds."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @abstractmethod
    def list_settings(self, found: Completion, device: Device) -> Iterator[Setting]:
        """Settings that do not depend on memory; each sees those before it."""

    @abstractmethod
    def list_chunks(self, context: int) -> Iterable[int]:
        """Tokens of chunks that are of use, the most first."""

    @abstractmethod
    def count_bytes(self, found: Completion) -> int:
        """Bytes of the weights of which a budget may be a share."""

    @abstractmethod
    def weigh(self, plan: Plan, device: Device, found: Completion) -> Weighed:
        """Count what ``plan`` needs, which fills the gaps of ``found``."""

    def is_settled(self, found: Completion) -> bool:
        """Whether nothing is left that depends on memory."""
        return False


def leaves_out(values: Mapping[str, Any]) -> bool:
    """Whether a plan's values are tables as they should be, and something may be derived."""
    if not has_tables(values):
        return False
    memory = values.get("memory", {})
    segments = memory.get("segments", {})
    return (
        "quality" in values
        or not all(name in segments for name in _SIZES)
        or read_percent(memory.get("budget")) is not None
        or "budget" not in memory
        or "stride" not in values.get("bundle", {})
        or not {"split", "hot"} <= values.get("layers", {}).keys()
        or "context" not in values.get("kv", {})
    )


def has_tables(values: Mapping[str, Any]) -> bool:
    """Whether tables that a derivation reads are tables."""
    tables = {key: values.get(key, {}) for key in _TABLES}
    return all(isinstance(own, dict) for own in tables.values()) and isinstance(
        tables["memory"].get("segments", {}), dict
    )


def fill_gaps(values: Mapping[str, Any], hot: float = 0.0) -> dict[str, Any]:
    """Values of a plan, with arbitrary ones for the values to derive."""
    found = Completion(copy.deepcopy(dict(values)))
    if read_percent(found.read("memory", "budget")) is not None:
        del found.values["memory"]["budget"]
    gaps: dict[KeyPath, object] = {("memory", "budget"): "1 B", ("bundle", "stride"): "1 B"}
    gaps |= {("memory", "segments", name): "0 B" for name in Segments.model_fields}
    gaps |= {("layers", "split"): {"cpu": 1.0}, ("layers", "hot"): hot, ("kv", "context"): 1}
    for path, value in gaps.items():
        found.derive(path, value, "")
    return found.values


def complete_plan(
    values: Mapping[str, Any], device: Device, origin: Origin, find_memory: FindMemory | None = None
) -> Completion:
    """Derive what ``values`` of a plan leave out; `UserError` P026 for a small budget, P242.

    Nothing is derived from values that the schema refuses."""
    whole = fill_gaps(values)
    try:
        Plan.model_validate_json(json.dumps(whole))
    except (ValidationError, TypeError):
        return Completion(whole, is_sound=False)
    if not has_packable_shape(origin.model):
        raise UserError.of("P242", "the rank of the model's predictors is not a multiple of 32")
    found = Completion(copy.deepcopy(dict(values)), model=origin.model)
    unit = next((name for name, item in device.units.items() if item.kind == "cpu"), None)
    if unit is None:
        raise UserError.of(
            "P026",
            f"the device {device.id} has no CPU, and nothing else computes yet",
            help="add a unit of the kind cpu to the device",
        )
    found.derive(("layers", "split"), {unit: 1.0}, "the CPU computes everything")
    for path, value, reason in origin.list_settings(found, device):
        found.derive(path, value, reason)
    _choose_sizes(found, device, origin, find_memory)
    return found


def _choose_sizes(
    found: Completion, device: Device, origin: Origin, find_memory: FindMemory | None
) -> None:
    """Derive context, chunk, budget, segments and the share of weights in memory."""
    memory = device.memory
    installed = free = None if memory is None else memory.usable or memory.capacity
    if installed is None and find_memory is not None:
        installed, free = find_memory()
    budget = _read_budget(found, device, origin, installed)
    if origin.is_settled(found):
        found.derive(
            ("kv", "context"), min(origin.model.shape.context, USUAL_CONTEXT), _WHY_CONTEXT
        )
        return
    context, chunk, fit = _find_fit(found, device, origin, budget, free)
    found.derive(("kv", "context"), context, _WHY_CONTEXT)
    if chunk is not None:
        found.derive(("prefill", "chunk"), chunk, "the most that is of use and has room")
    found.derive(("memory", "budget"), format_bytes(fit.budget), "the need, within the free memory")
    why = origin.why_hot if fit.hot < 1.0 else origin.why_whole
    found.derive(("layers", "hot"), fit.hot, f"{why} into {approximate_bytes(fit.budget)}")
    for name, size in fit.sizes.items():
        if name != "state" or size:
            found.derive(("memory", "segments", name), format_bytes(size), origin.reasons[name])
    for path, value, reason in fit.follows:
        found.derive(path, value, reason)
    found.facts = fit.facts


def _find_fit(
    found: Completion, device: Device, origin: Origin, budget: int | None, free: int | None
) -> tuple[int, int | None, Fit]:
    """The longest context, and the longest chunk, with which a plan fits its ``budget``, or a part
    of the ``free`` memory; `UserError` P026."""
    stated = found.read("memory", "segments") or {}
    limit = max(MIB, int(free * MEMORY_SHARE) // MIB * MIB) if free else None
    most = origin.model.shape.context
    own, given = found.read("kv", "context"), found.read("prefill", "chunk")
    shortage: Shortage | None = None
    for context in [own] if own else dict.fromkeys(min(tokens, most) for tokens in CONTEXTS):
        chunks: Iterable[int | None] = origin.list_chunks(context)
        if given is not None or "workspace" in stated:
            chunks = [given]
        for chunk in chunks:
            values = copy.deepcopy(found.values)
            values.setdefault("kv", {})["context"] = context
            if chunk is not None:
                values.setdefault("prefill", {})["chunk"] = chunk
            plan = Plan.model_validate_json(json.dumps(fill_gaps(values, hot=1.0)))
            weighed = origin.weigh(plan, device, found)
            try:
                room = budget
                if room is None:
                    room = min(weighed.whole, limit or weighed.whole)
                is_long = given is None and chunk is not None and chunk > origin.usual_chunk
                if is_long and weighed.workspace > WORKSPACE_SHARE * min(room, weighed.weights):
                    continue
                return context, chunk, weighed.fit(room)
            except Shortage as short:
                shortage = short
    assert shortage is not None, "the last chunk is not long"
    if budget is None and free and shortage.needed_bytes <= free:
        with suppress(Shortage):
            return context, chunk, weighed.fit(shortage.needed_bytes)
    raise explain_shortage("P026", shortage, budget or limit or 0)


def _read_budget(
    found: Completion, device: Device, origin: Origin, installed: int | None
) -> int | None:
    """The stated budget in bytes; a share of the memory or of the weights becomes a size."""
    stated = found.read("memory", "budget")
    share = read_percent(stated)
    if share is None:
        return None if stated is None else _parse_bytes(stated)
    part, of_file = share
    whole = origin.count_bytes(found) if of_file else installed
    if whole is None:
        message = f"{stated} of what: the device {device.id} states no memory"
        raise UserError.of("P026", message, help="state a size, such as 4 GiB")
    size = int(whole * part) // MIB * MIB
    found.values["memory"] = {**found.values["memory"], "budget": format_bytes(size)}
    found.reasons[("memory", "budget")] = f"{stated} of {approximate_bytes(whole)}"
    return size


def _parse_bytes(sound: str) -> int:
    return int(parse_quantity(sound, BYTE_UNITS))


class StoreOrigin(Origin):
    """A neuron store, of whose model all sizes follow."""

    def list_settings(self, found: Completion, device: Device) -> Iterator[Setting]:
        model, has_predictor = self.model, found.read("decode", "predictor") is not None
        for path, value in list(_list_quality(found, model)):
            yield path, value, f'quality = "{found.read("quality")}"'
        yield from _choose_units(found, device)
        if not has_predictor and model.predictor is None:
            own = "gate" if found.read("sparsity") is not None else choose_predictor(model)
            yield ("decode", "predictor"), own, "how this model's neurons are found"
            if own == "router":
                why = "a router that looks ahead loses nothing"
                yield ("decode", "look_ahead"), "layer", why
        scales: ScalesPlace = (
            "resident" if found.read("bundle", "scales") == "resident" else "inline"
        )
        used, block = model.lay_out_bundle(scales=scales).used_bytes, find_block_bytes(device)
        why = f"{used} bytes are used, the device's block has {block}"
        yield ("bundle", "stride"), format_bytes(round_up(used, block)), why

    def list_chunks(self, context: int) -> Iterable[int]:
        return reversed(list_chunks(self.model, context))

    def count_bytes(self, found: Completion) -> int:
        neurons: int = self.model.shape.layers * self.model.layer_neurons
        return neurons * _parse_bytes(found.read("bundle", "stride"))

    def is_settled(self, found: Completion) -> bool:
        segments = found.read("memory", "segments") or {}
        is_whole = found.read("memory", "budget") and found.read("layers", "hot") is not None
        return bool(is_whole) and all(name in segments for name in _SIZES)

    def weigh(self, plan: Plan, device: Device, found: Completion) -> Weighed:
        wanted = ResolvedPlan(plan=plan, device=device, model=self.model, find_source=find_source)
        return _WeighedStore(wanted, found)


class _WeighedStore(Weighed):
    def __init__(self, wanted: ResolvedPlan, found: Completion) -> None:
        """``wanted`` states the most that may stay in memory."""
        names, segments = found.read("memory", "segments") or {}, wanted.plan.memory.segments
        self._stated = {name: size for name, size in segments if name in names}
        self._hot = found.read("layers", "hot")
        if "hot" in names and self._hot is None:
            wanted = find_largest_hot(wanted, segments.hot)
        self.workspace, self._wanted = wanted.needs.workspace.bytes, wanted
        self.weights = count_ffn_bytes(wanted)

    @property
    def whole(self) -> int:
        return fit_plan(self._wanted, None, stated=self._stated).plan.memory.budget

    def fit(self, budget: int) -> Fit:
        fitted = fit_plan(self._wanted, budget, stated=self._stated)
        plan, memory = self._wanted.plan, fitted.plan.memory
        hot = fitted.plan.layers.hot if self._hot is None else self._hot
        layers = plan.layers.model_copy(update={"hot": hot})
        final = replace(self._wanted, plan=plan.model_copy(update={"layers": layers}))
        sizes: dict[str, int] = dict(memory.segments)
        sizes["hot"] = max(sizes["hot"], round_segment(final.needs.hot.bytes))
        sizes |= self._stated
        if "cold" not in self._stated:
            others = sum(sizes.values()) - sizes["cold"]
            sizes["cold"] = max(0, min(sizes["cold"], budget - others))
        units = write_memory(fitted.plan).get("units")
        follows: list[Setting] = []
        if units is not None:
            follows.append((("memory", "units"), units, "what units with memory of their own keep"))
        return Fit(budget=budget, hot=hot, sizes=sizes, follows=follows)


def _choose_units(found: Completion, device: Device) -> Iterator[Setting]:
    splits = [found.read("layers", "split"), *_list_overrides(found.read("layers", "overrides"))]
    splits += [found.read("projections", key) for key in ("attention", "head")]
    names = {name for split in splits if isinstance(split, Mapping) for name in split}
    names |= {found.read("prefill", "unit")} - {None}
    kinds = {device.units[name].kind for name in names if name in device.units}
    if kinds - {"cpu"} or found.read("backends") is not None:
        for kind, backend in choose_backends(kinds).items():
            yield ("backends", kind), backend, f"what serves units of the kind {kind}"


def _list_overrides(overrides: object) -> Iterator[object]:
    for item in overrides if isinstance(overrides, list) else ():
        yield item.get("split") if isinstance(item, Mapping) else None


def choose_backends(kinds: Iterable[UnitKind]) -> dict[str, str]:
    """Backends of a plan that uses units of ``kinds``: real ones, or, if one of the kinds has none,
    ``null`` for all; the plan can then be simulated and run dry."""
    wanted, usual = sorted(set(kinds)), list_usual_backends()
    if all(kind in usual for kind in wanted):
        return {kind: usual[kind] for kind in wanted}
    return dict.fromkeys(wanted, "null")


def choose_predictor(model: Model) -> str:
    """``decode.predictor`` of a plan for ``model`` that does not state it."""
    return "low-rank" if model.predictor is not None else _choose_exact_predictor(model)


def _choose_exact_predictor(model: Model) -> str:
    if model.moe is not None:
        return "router"
    return "none" if model.is_smooth and not model.cut_layers else "gate"


def _list_quality(found: Completion, model: Model) -> Iterator[tuple[KeyPath, object]]:
    """Settings that ``quality`` stands for, by key."""
    predictor = found.read("decode", "predictor") or choose_predictor(model)
    match found.read("quality"):
        case "exact":
            if found.read("sparsity") is None:
                yield ("decode", "predictor"), _choose_exact_predictor(model)
        case "fast":
            yield ("prefill", "activations"), "int8"
            if model.shape.head_dim >= WIDE_HEAD:
                yield ("kv", "type"), "int8"
            if predictor == "low-rank" and found.read("decode", "missing_threshold") is None:
                yield ("decode", "leave_out"), 0.02
            moe = model.moe
            if predictor == "router" and moe is not None and find_other_choice(moe) is None:
                yield ("experts", "prefer_cached"), FAST_PREFERENCE


def resolve_values(values: Mapping[str, Any], device: Device, model: Model) -> ResolvedPlan:
    """Put a whole plan's values, its device and its model together."""
    plan = Plan.model_validate_json(json.dumps(values))
    return ResolvedPlan(plan=plan, device=device, model=model, find_source=find_source)
