"""Derives what a plan for a neuron store leaves open; `fit_plan` decides what memory decides."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from pi2.diagnostics import UserError
from pi2.fitting import list_usual_backends
from pi2.fitting.budget import (
    FIXED,
    MIB,
    Shortage,
    find_largest_hot,
    fit_plan,
    round_segment,
    write_memory,
)
from pi2.fitting.sizes import find_needs
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.estimates import USUAL_CHUNK, list_chunks
from pi2.plan.arithmetic.resolved import ResolvedPlan, has_packable_shape
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.checking.rules.stated import find_other_choice
from pi2.plan.documents.device import Device, UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan, Segments
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    approximate_bytes,
    compare_bytes,
    format_bytes,
    parse_quantity,
    read_percent,
    round_size,
    write_least,
)
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import ScalesPlace, round_up

USUAL_CONTEXT = 4096
LONG_CHUNK_SHARE = 1 / 128
"""Part of the budget that a prompt's longer chunks may take: about as much of the cache less is
missed more often."""
MEMORY_SHARE = 0.8
"""Share of the free memory that a plan without a budget takes at most."""
WIDE_HEAD = 128
"""Elements of a head from which on the KV cache loses little in 8 bits."""
_SIZES = tuple(name for name in Segments.model_fields if name != "state")


FindMemory = Callable[[], tuple[int, int]]
"""Tells the installed and the free memory of this machine, in bytes."""


@dataclass
class Completion:
    """The values of a plan, and the reasons for derived ones."""

    values: dict[str, Any]
    reasons: dict[KeyPath, str] = field(default_factory=dict)
    is_sound: bool = True
    """Whether the stated values have the right form; else nothing was derived."""

    def read(self, *path: str) -> Any:
        """The value at ``path``; None if there is none."""
        found: Any = self.values
        for part in path:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def derive(self, path: KeyPath, value: object, reason: str) -> None:
        if self.read(*map(str, path)) is not None:
            return
        table = self.values
        for part in path[:-1]:
            table = table.setdefault(str(part), {})
        table[str(path[-1])] = value
        self.reasons[path] = reason


def leaves_out(values: Mapping[str, Any]) -> bool:
    """Whether a plan's values are tables as they should be, and something may be derived."""
    tables = ("memory", "layers", "bundle", "kv", "prefill", "decode", "experts", "backends")
    if any(not isinstance(values.get(key, {}), dict) for key in tables):
        return False
    memory = values.get("memory", {})
    segments = memory.get("segments", {})
    if not isinstance(segments, dict):
        return False
    return (
        "quality" in values
        or not all(name in segments for name in _SIZES)
        or read_percent(memory.get("budget")) is not None
        or "budget" not in memory
        or "stride" not in values.get("bundle", {})
        or not {"split", "hot"} <= values.get("layers", {}).keys()
        or "context" not in values.get("kv", {})
    )


FAST_PREFERENCE = 0.2
"""``experts.prefer_cached`` that `quality = "fast"` stands for."""


def fill_gaps(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a plan, with arbitrary ones for the values to derive."""
    found = Completion(copy.deepcopy(dict(values)))
    if read_percent(found.read("memory", "budget")) is not None:
        del found.values["memory"]["budget"]
    for path in (("memory", "budget"), ("bundle", "stride")):
        found.derive(path, "1 B", "")
    for name in Segments.model_fields:
        found.derive(("memory", "segments", name), "0 B", "")
    for path, value in ((("layers", "split"), {"cpu": 1.0}), (("layers", "hot"), 0.0)):
        found.derive(path, value, "")
    found.derive(("kv", "context"), 1, "")
    return found.values


def complete_plan(
    values: Mapping[str, Any], device: Device, model: Model, find_memory: FindMemory | None = None
) -> Completion:
    """Derive what ``values`` of a plan leave out; `UserError` P026 for a small budget, P242.

    Nothing is derived from values that the schema refuses."""
    whole = fill_gaps(values)
    try:
        Plan.model_validate_json(json.dumps(whole))
    except (ValidationError, TypeError):
        return Completion(whole, is_sound=False)
    if not has_packable_shape(model):
        raise UserError.of("P242", "the rank of the model's predictors is not a multiple of 32")
    found = Completion(copy.deepcopy(dict(values)))
    unit = next((name for name, item in device.units.items() if item.kind == "cpu"), None)
    if unit is None:
        raise UserError.of(
            "P026",
            f"the device {device.id} has no CPU, and nothing else computes yet",
            help="add a unit of the kind cpu to the device",
        )
    has_predictor = found.read("decode", "predictor") is not None
    for path, value in list(_list_quality(found, model)):
        found.derive(path, value, f'quality = "{found.read("quality")}"')
    context = min(model.shape.context, USUAL_CONTEXT)
    found.derive(("kv", "context"), context, f"the model's, at most {USUAL_CONTEXT}")
    found.derive(("layers", "split"), {unit: 1.0}, "the CPU computes everything")
    _choose_units(found, device)
    if not has_predictor and model.predictor is None:
        own = "gate" if found.read("sparsity") is not None else choose_predictor(model)
        found.derive(("decode", "predictor"), own, "how this model's neurons are found")
        if own == "router":
            found.derive(
                ("decode", "look_ahead"), "layer", "a router that looks ahead loses nothing"
            )
    scales: ScalesPlace = "resident" if found.read("bundle", "scales") == "resident" else "inline"
    used = model.lay_out_bundle(scales=scales).used_bytes
    block = find_block_bytes(device)
    found.derive(
        ("bundle", "stride"),
        format_bytes(round_up(used, block)),
        f"{used} bytes are used, the device's block has {block}",
    )
    _choose_sizes(found, device, model, find_memory)
    return found


def _choose_units(found: Completion, device: Device) -> None:
    splits = [found.read("layers", "split"), *_list_overrides(found.read("layers", "overrides"))]
    splits += [found.read("projections", key) for key in ("attention", "head")]
    names = {name for split in splits if isinstance(split, Mapping) for name in split}
    names |= {found.read("prefill", "unit")} - {None}
    kinds = {device.units[name].kind for name in names if name in device.units}
    if kinds - {"cpu"} or found.read("backends") is not None:
        for kind, backend in choose_backends(kinds).items():
            found.derive(("backends", kind), backend, f"what serves units of the kind {kind}")


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


def _choose_sizes(
    found: Completion, device: Device, model: Model, find_memory: FindMemory | None
) -> None:
    stated = dict(found.read("memory", "segments") or {})
    budget = _read_budget(found, device, model, find_memory)
    has_sizes = all(name in stated for name in _SIZES) and budget is not None
    if has_sizes and found.read("layers", "hot") is not None:
        return
    trial = copy.deepcopy(found.values)
    memory = trial.setdefault("memory", {})
    memory["segments"] = dict.fromkeys(Segments.model_fields, "0 B") | stated
    memory.setdefault("budget", "0 B")
    trial["layers"].setdefault("hot", 1.0)
    if found.read("prefill", "chunk") is None and "workspace" not in stated:
        chunk = _choose_chunk(trial, device, model, budget)
        found.derive(("prefill", "chunk"), chunk, "the most that this model gains from")
        trial["prefill"] = {**trial.get("prefill", {}), "chunk": chunk}
    wanted = resolve_values(trial, device, model)
    if "hot" in stated and found.read("layers", "hot") is None:
        wanted = find_largest_hot(wanted, wanted.plan.memory.segments.hot)
    fitted = _fit(wanted, budget, stated, find_memory)
    _state_sizes(found, wanted, fitted, stated)


def _fit(
    wanted: ResolvedPlan,
    budget: int | None,
    stated: Mapping[str, Any],
    find_memory: FindMemory | None,
) -> ResolvedPlan:
    """``wanted`` within a budget; unchanged if stated sizes take more."""
    segments = wanted.plan.memory.segments
    runtime = segments.runtime if "runtime" in stated else None
    cold = segments.cold if "cold" in stated else None
    # What is stated beyond its need is taken from the rest.
    spare = sum(
        max(0, getattr(segments, name) - round_segment(getattr(find_needs(wanted), name).bytes))
        for name in FIXED
        if name in stated
    )
    try:
        if budget is None:
            fitted = fit_plan(wanted, None, runtime_bytes=runtime, cold_bytes=cold)
            memory = wanted.device.memory
            most = None if memory is None else memory.usable or memory.capacity
            if most is None and find_memory is not None:
                most = find_memory()[1]
            if most is None or fitted.plan.memory.budget <= most * MEMORY_SHARE:
                return fitted
            budget = int(most * MEMORY_SHARE) // MIB * MIB
        return fit_plan(wanted, budget - spare, runtime_bytes=runtime, cold_bytes=cold)
    except Shortage as shortage:
        assert budget is not None
        has, needs = compare_bytes(budget, shortage.needed_bytes + spare)
        raise UserError.of(
            "P026",
            f"{has} is not enough: this plan needs at least {needs}",
            help=f"give it `--memory '{write_least(shortage.needed_bytes + spare)}'`, or a shorter "
            "context, such as kv.context=1024",
            notes=[f"{name}: {approximate_bytes(n)}" for name, n in shortage.sizes.items() if n],
        ) from None


def _state_sizes(
    found: Completion, wanted: ResolvedPlan, fitted: ResolvedPlan, stated: Mapping[str, Any]
) -> None:
    hot = found.read("layers", "hot")
    share = fitted.plan.layers.hot if hot is None else hot
    layers = wanted.plan.layers.model_copy(update={"hot": share})
    final = replace(wanted, plan=wanted.plan.model_copy(update={"layers": layers}))
    segments = fitted.plan.memory.segments
    sizes: dict[str, int] = {name: getattr(segments, name) for name in Segments.model_fields}
    sizes["hot"] = max(sizes["hot"], round_segment(find_needs(final).hot.bytes))
    budget = read_size(found.read("memory", "budget")) or fitted.plan.memory.budget
    for name in stated:
        if name in sizes:
            sizes[name] = getattr(wanted.plan.memory.segments, name)
    if "cold" not in stated:
        others = sum(size for name, size in sizes.items() if name != "cold")
        sizes["cold"] = max(0, min(sizes["cold"], budget - others))
    found.derive(("memory", "budget"), format_bytes(budget), "the need, within the free memory")
    why = "share of neurons that fits" if share < 1.0 else "all neurons fit"
    found.derive(("layers", "hot"), share, f"{why} into {approximate_bytes(budget)}")
    for name, size in sizes.items():
        if name != "state" or size:
            found.derive(("memory", "segments", name), format_bytes(size), SEGMENT_REASONS[name])
    units = write_memory(fitted.plan).get("units")
    if units is not None:
        found.derive(("memory", "units"), units, "what units with memory of their own keep")


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


def _read_budget(
    found: Completion, device: Device, model: Model, find_memory: FindMemory | None
) -> int | None:
    """The budget in bytes; a share of the memory is replaced by its size."""
    stated = found.read("memory", "budget")
    share = read_percent(stated)
    if share is None:
        size = read_size(stated)
        return None if size is None else round_size(size)
    part, of_file = share
    memory, whole = device.memory, None
    if of_file:
        stride = read_size(found.read("bundle", "stride")) or 0
        whole = model.shape.layers * model.layer_neurons * stride
    elif memory is not None:
        whole = memory.usable or memory.capacity
    if whole is None and find_memory is not None:
        whole = find_memory()[0]
    if whole is None:
        message = f"{stated} of what: the device {device.id} states no memory"
        raise UserError.of("P026", message, help="state a size, such as 4 GiB")
    size = int(whole * part) // MIB * MIB
    found.values["memory"] = {**found.values["memory"], "budget": format_bytes(size)}
    found.reasons[("memory", "budget")] = f"{stated} of {approximate_bytes(whole)}"
    return size


def read_size(stated: object) -> int | None:
    """Bytes that a plan states; None if it states none, or what the schema will refuse."""
    try:
        return None if stated is None else int(parse_quantity(str(stated), BYTE_UNITS))
    except ValueError:
        return None


def _choose_chunk(
    values: Mapping[str, Any], device: Device, model: Model, budget: int | None
) -> int:
    """Tokens of a prompt's chunk: the most that are of use to the model, as far as those beyond the
    usual take little of the ``budget``."""
    context: int = values["kv"]["context"]
    usual = min(USUAL_CHUNK, context)

    def resolve(chunk: int) -> ResolvedPlan:
        prefill = {**values.get("prefill", {}), "chunk": chunk}
        return resolve_values({**values, "prefill": prefill}, device, model)

    longest = list_chunks(model, context)[-1]
    if longest == usual:
        return longest
    needs = find_needs(resolve(usual))
    more = find_needs(resolve(longest)).workspace.bytes - needs.workspace.bytes
    whole = sum(need.bytes for _, need in needs.items()) if budget is None else budget
    if more > LONG_CHUNK_SHARE * whole:
        return usual
    if budget is None:
        return longest
    try:
        fit_plan(resolve(longest), budget)
    except Shortage:
        return usual
    return longest


def resolve_values(values: Mapping[str, Any], device: Device, model: Model) -> ResolvedPlan:
    """Put a whole plan's values, its device and its model together."""
    plan = Plan.model_validate_json(json.dumps(values))
    return ResolvedPlan(plan=plan, device=device, model=model, find_source=find_source)
