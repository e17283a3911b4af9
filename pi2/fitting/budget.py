"""A plan fitted to a memory budget: sizes of segments and units, and shares that stay in memory.

Everything that writes a plan, or changes a plan's budget, asks `fit_plan`. It takes a plan that
states the most that may stay in memory, and spends the budget in this order:

1. A unit with memory of its own owns as much of its shares as fit there.
2. ``runtime``, ``attention``, ``kv``, ``state``, ``predictor`` and ``workspace`` have what they
   need.
3. Hot neurons, and units that use main memory, get the plan's shares, if these fit next to the
   smallest cache that works.  Else the hot shares become smaller in proportion, and take `HOT_PART`
   of the rest: all of it if every neuron is computed and nothing is cached; none of it if a router
   chooses, because the cache finds out which experts a text needs.  The neurons of units stay hot:
   memory does not decide who computes.  Only if all hot neurons belong to units, and are still too
   many, do the shares of units in main memory become smaller.
4. The cache of cold neurons has the rest, and no more than the neurons that are not hot.

More budget never makes fewer neurons hot, or less memory for neurons."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from types import MappingProxyType
from typing import Any, TypeVar

from pi2.diagnostics import UserError
from pi2.fitting import count_unit_needs
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan, Segments, UnitMemory
from pi2.plan.documents.plan_units import LayerOverride, Layers
from pi2.plan.documents.quantities import approximate_bytes, write_least
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import round_up

MIB = 1 << 20
LIBRARY_BYTES = 78 << 20
"""Python, pi2, numpy, the tokenizer library and TVM's runtime, once tokens have been generated."""
PROGRAM_BYTES = 2 << 20
"""Kernels and instructions of the program that computes a store's dense tensors."""
LAYER_BYTES = 100 << 10
"""Python's objects of a layer, and pages of which it uses a part."""
VOCABULARY_BYTES = 700
"""Bytes of memory of each token of a tokenizer with merges: 560 to 750 were found."""
TOKENIZER_FILE_PART = 12.5
"""The same for each byte of ``tokenizer.json``: 9 to 18."""
TABLE_BYTES = 160
"""What a compact table has of each token while it is made: 90 to 170 of 49 to 256 thousand."""
NEURON_TABLE_BYTES = 41
"""Facts about a neuron: its check, slot and owner, its use count, and copies of it. From the
resident set of a 7B's run, minus the demo model's."""
PAGE_TABLE_PART = 512
"""The system takes 8 bytes for each page of 4 KiB and counts them as the process's."""
SPARE_BYTES = 4 << 20
"""By how much other versions of Python and of libraries may be larger."""
UNIT_BYTES: Mapping[UnitKind, int] = {"cpu": 0, "gpu": 736 << 20, "npu": 64 << 20}
"""Main memory of a unit's library, driver and buffers, by kind.  Assumed: the demo's GPU plans peak
76 to 92 MiB higher with emulating drivers."""


def count_libraries(model: Model, tokenizer_bytes: int | None = None) -> int:
    """Bytes that are expected to be resident in addition to the segments; ``tokenizer_bytes``: size
    of the file ``tokenizer.json``, if it is known."""
    shape = model.shape
    tokenizer = VOCABULARY_BYTES * shape.vocab
    if tokenizer_bytes is not None:
        tokenizer = int(TOKENIZER_FILE_PART * tokenizer_bytes)
    tables = NEURON_TABLE_BYTES * shape.layers * model.layer_neurons
    return LIBRARY_BYTES + PROGRAM_BYTES + LAYER_BYTES * shape.layers + tokenizer + tables


def count_file_runtime(model: Model, *, has_table: bool) -> int:
    """Bytes that a run of a GGUF file has resident in addition to its segments: no neuron has a
    table. ``has_table``: its tokenizer has a compact one."""
    token = TABLE_BYTES if has_table else VOCABULARY_BYTES
    shape = model.shape
    return LIBRARY_BYTES + LAYER_BYTES * shape.layers + token * shape.vocab + SPARE_BYTES


def count_runtime(model: Model, budget_bytes: int, *, units: Iterable[UnitKind] = ()) -> int:
    """Size of the segment ``runtime`` in whole MiB: libraries, page tables, ``units``, reserve."""
    tables = budget_bytes // PAGE_TABLE_PART
    spare = SPARE_BYTES - PROGRAM_BYTES + sum(UNIT_BYTES[kind] for kind in units)
    return round_up(count_libraries(model) + tables + spare, MIB)


HOT_PART = Fraction(1, 2)
"""Hot neurons' part of the memory for neurons, if not all that may be hot fit."""
SHARE_STEPS = 1000
"""Shares that are computed are multiples of the inverse."""
FIXED = ("attention", "kv", "state", "predictor", "workspace")
"""Segments other than ``runtime`` that do not depend on the hot neurons."""
_LARGE_BYTES = 16 * MIB
_PAGE_BYTES = 4096

_Table = TypeVar("_Table", Layers, LayerOverride)


class Shortage(Exception):
    """A budget is too small for any plan of its kind."""

    def __init__(self, sizes: Mapping[str, int], needed_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes are needed")
        self.sizes = sizes
        """Smallest sizes that work, by segment; ``units.NAME`` for a unit's memory."""
        self.needed_bytes = needed_bytes
        """Smallest budget that has room for them."""


def explain_shortage(code: str, shortage: Shortage, budget_bytes: int) -> UserError:
    """Which parts a plan has, and the command that gives it room for them."""
    sizes = {name: size for name, size in shortage.sizes.items() if size}
    parts = [f"{name}: {approximate_bytes(size)}" for name, size in sizes.items()]
    if all(name.startswith("units.") for name in sizes):
        return UserError.of(
            code,
            f"the memory of a unit is not enough: this plan needs at least {', '.join(parts)}",
            help="set a shorter kv.context, or a smaller decode.batch",
        )
    has, least = approximate_bytes(budget_bytes), write_least(shortage.needed_bytes)
    return UserError.of(
        code,
        f"a budget of {has} is not enough for this plan: it needs at least {least}",
        help=f"give it `--memory '{least}'`, a shorter kv.context, or a smaller prefill.chunk",
        notes=parts,
    )


def round_segment(size_bytes: int) -> int:
    """Round up to whole MiB, and small sizes to whole pages."""
    return round_up(size_bytes, _find_step(size_bytes))


def round_share(share: Fraction | float) -> float:
    """Round down to a multiple of the smallest step; a hair below one counts as that step."""
    return floor(share * SHARE_STEPS + 1e-9) / SHARE_STEPS


def add_runtime(model: Model, other_bytes: int, units: Collection[UnitKind] = ()) -> int:
    """Smallest budget, in whole MiB, with ``other_bytes`` in addition to the segment ``runtime``.
    That segment grows with the budget itself, and has room for the drivers of ``units``."""
    budget = 0
    while True:
        needed = round_up(other_bytes + count_runtime(model, budget, units=units), MIB)
        if needed <= budget:
            return budget
        budget = needed


def fit_plan(
    resolved: ResolvedPlan,
    budget_bytes: int | None,
    *,
    stated: Mapping[str, int] = MappingProxyType({}),
) -> ResolvedPlan:
    """Fit segments, unit memories, hot shares and splits of a plan that states the most.
    ``budget_bytes`` None: the least that holds all; ``stated``: sizes of ``runtime`` and `FIXED`
    that are kept if they are enough, and the most of ``cold``. Raises `Shortage`."""
    model = resolved.model
    resolved = _fit_own_memories(resolved)
    fixed = _size_fixed(resolved, stated)
    runtime_bytes, cold_bytes = stated.get("runtime"), stated.get("cold")
    if budget_bytes is None:
        neurons = sum(_size_neurons(resolved, MIB).values())
        neurons += _size_cold(resolved, cold_bytes, MIB)
        budget_bytes = add_runtime(model, sum(fixed.values()) + neurons, resolved.list_unit_kinds())
    usable = budget_bytes
    if counts_runtime := runtime_bytes is None:
        usable = budget_bytes // MIB * MIB  # as coarse as what the runtime takes of it
        runtime_bytes = count_runtime(model, usable, units=resolved.list_unit_kinds())
    room = usable - runtime_bytes - sum(fixed.values())
    step = _find_step(room)
    room = room // step * step
    fitted = _fit_neurons(resolved, room, step)
    if fitted is None:
        raise _find_shortage(resolved, {"runtime": runtime_bytes, **fixed}, counts_runtime)
    sizes = _size_neurons(fitted, step)
    sizes["cold"] = min(_size_cold(fitted, cold_bytes, step), room - sum(sizes.values()))
    return _set_memory(fitted, budget_bytes, {"runtime": runtime_bytes, **fixed, **sizes})


def find_room(resolved: ResolvedPlan, budget_bytes: int, runtime_bytes: int) -> int:
    """Bytes of a budget that are left for neurons; negative where the other segments need more."""
    return budget_bytes - runtime_bytes - sum(_size_fixed(resolved).values())


def write_memory(plan: Plan) -> dict[str, Any]:
    """The budget, segments and units of a plan as values of its table ``[memory]``."""
    keys = {"budget", "segments"} | ({"units"} if plan.memory.units else set())
    return plan.memory.model_dump(include=keys, exclude_none=True)


def _find_step(size_bytes: int) -> int:
    return MIB if size_bytes >= _LARGE_BYTES else _PAGE_BYTES


def _size_fixed(
    resolved: ResolvedPlan, stated: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Sizes of the segments that do not depend on the hot neurons, ``runtime`` left out: as
    ``stated``; else rounded needs, or the plan's sizes if they are in between."""
    sizes = {}
    for name in FIXED:
        need = getattr(resolved.needs, name).bytes
        rounded, own = round_segment(need), getattr(resolved.plan.memory.segments, name)
        size = stated.get(name, min(own, rounded))
        sizes[name] = size if size >= need else rounded
    return sizes


def _size_neurons(resolved: ResolvedPlan, step: int) -> dict[str, int]:
    """Sizes of ``hot``, and of units in main memory that have an entry of their own."""
    sizes = {"hot": round_up(resolved.needs.hot.bytes, step)}
    needs = count_unit_needs(resolved)
    for name in resolved.plan.memory.units:
        if name in resolved.device.units and resolved.shares_main_memory(name):
            sizes[f"units.{name}"] = round_up(needs[name].bytes, step) if name in needs else 0
    return sizes


def _size_cold(resolved: ResolvedPlan, most_bytes: int | None, step: int) -> int:
    """Size of the cache that is wanted; none where nothing is put into it."""
    if resolved.plan.decode.predictor == "none":
        return 0
    neurons = resolved.model.layer_neurons
    size = sum(neurons - layer.hot_neurons for layer in resolved.layers) * resolved.bundle.stride
    if most_bytes is not None:
        size = min(size, max(most_bytes, resolved.needs.cold.bytes))
    return round_up(size, step)


def _fit_neurons(resolved: ResolvedPlan, room: int, step: int) -> ResolvedPlan | None:
    """The plan with as many hot neurons as ``room`` allows; None if it is too small."""

    def count(candidate: ResolvedPlan) -> int:
        return sum(_size_neurons(candidate, step).values())

    if count(resolved) + resolved.needs.cold.bytes <= room:
        return resolved
    # Of no larger part does the cache need more.
    least = _scale_hot(resolved, Fraction(0))
    most = room - least.needs.cold.bytes
    if count(least) > most:
        return _fit_units(resolved, most, count)
    if resolved.plan.decode.predictor == "router":
        return least
    if resolved.plan.decode.predictor != "none":
        most = max(min(floor(room * HOT_PART), most), count(least))
    part = _find_largest(most, lambda part: count(_scale_hot(resolved, part)))
    return _scale_hot(resolved, part)


def _fit_units(
    resolved: ResolvedPlan, most_bytes: int, count: Callable[[ResolvedPlan], int]
) -> ResolvedPlan | None:
    """The plan with as much for units in main memory as there is; None if nothing is too much."""
    if count(_scale_units(resolved, Fraction(0))) > most_bytes:
        return None
    part = _find_largest(most_bytes, lambda part: count(_scale_units(resolved, part)))
    return _scale_units(resolved, part)


def _fit_own_memories(resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan with the shares of every unit with memory of its own made to fit there, and with
    the sizes of these memories."""
    units = dict(resolved.plan.memory.units)
    for name in count_unit_needs(resolved):
        if resolved.shares_main_memory(name):
            continue
        own = resolved.device.units[name].memory
        limit = units[name].budget if name in units else own.capacity if own is not None else None
        whole, part = resolved, Fraction(1)

        def count(part: Fraction, name: str = name, whole: ResolvedPlan = whole) -> int:
            need = count_unit_needs(_scale_splits(whole, {name: part})).get(name)
            return 0 if need is None else need.bytes

        if limit is not None and count(part) > limit:
            if (least := count(Fraction(0))) > limit:
                raise Shortage({f"units.{name}": least}, least)
            part = _find_largest(limit, count)
            resolved = _scale_splits(whole, {name: part})
        if name not in units:
            size = round_segment(count(part))
            units[name] = UnitMemory.model_construct(budget=min(size, limit or size))
    memory = resolved.plan.memory.model_copy(update={"units": units} if units else {})
    return replace(resolved, plan=resolved.plan.model_copy(update={"memory": memory}))


def _find_largest(most_bytes: int, count: Callable[[Fraction], int]) -> Fraction:
    """The largest part below 1, in steps, of which there are no more bytes; 0 is taken to fit."""
    low, high = 0, SHARE_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        if count(Fraction(middle, SHARE_STEPS)) <= most_bytes:
            low = middle
        else:
            high = middle
    return Fraction(low, SHARE_STEPS)


def find_largest_hot(resolved: ResolvedPlan, most_bytes: int) -> ResolvedPlan:
    """The plan with as many hot neurons as that many bytes hold; units keep their shares."""
    if resolved.needs.hot.bytes <= most_bytes:
        return resolved
    part = _find_largest(most_bytes, lambda part: _scale_hot(resolved, part).needs.hot.bytes)
    return _scale_hot(resolved, part)


def _scale_hot(resolved: ResolvedPlan, part: Fraction) -> ResolvedPlan:
    """The plan with ``part`` of what its hot shares are beyond the shares of units."""
    kept: dict[KeyPath, float] = {}
    for layer in resolved.layers:
        if layer.dense is not None:
            steps = ceil(layer.dense.kept * SHARE_STEPS / resolved.model.layer_neurons)
            share = min(layer.hot, steps / SHARE_STEPS)
            kept[layer.hot_path] = max(share, kept.get(layer.hot_path, 0.0))

    def scale(hot: float, path: KeyPath) -> float:
        least = kept.get(path, 0.0)
        return round(least + round_share((hot - least) * part), 6)

    return _scale_splits(resolved, {}, scale)


def _scale_units(resolved: ResolvedPlan, part: Fraction) -> ResolvedPlan:
    """The plan with ``part`` of the shares of units in main memory, and no other hot neurons."""
    mine = [name for name in resolved.dense_units if resolved.shares_main_memory(name)]
    return _scale_hot(_scale_splits(resolved, dict.fromkeys(mine, part)), Fraction(0))


def _scale_splits(
    resolved: ResolvedPlan,
    parts: Mapping[str, Fraction],
    scale_hot: Callable[[float, KeyPath], float] | None = None,
) -> ResolvedPlan:
    """The plan with these parts of the shares of dense units, by name; the sparse unit has the
    rest. ``scale_hot`` changes every hot share and its key."""
    sparse = resolved.sparse_unit

    def scale(split: Mapping[str, float]) -> Mapping[str, float]:
        if not any(split.get(name) for name in parts):
            return split
        dense = {
            name: round_share(share * parts[name]) if parts.get(name, 1) < 1 else share
            for name, share in split.items()
            if name != sparse
        }
        return {**dense, sparse: round(1.0 - sum(dense.values()), 6)}

    def change(table: _Table, path: KeyPath) -> _Table:
        changes: dict[str, Any] = {}
        if table.split is not None:
            changes["split"] = scale(table.split)
        if table.hot is not None and scale_hot is not None:
            changes["hot"] = scale_hot(table.hot, (*path, "hot"))
        if table.batches:
            changes["batches"] = tuple(
                item.model_copy(update={"split": scale(item.split)}) for item in table.batches
            )
        return table.model_copy(update=changes)

    layers = change(resolved.plan.layers, ("layers",))
    if layers.overrides:
        overrides = tuple(
            change(item, ("layers", "overrides", number))
            for number, item in enumerate(layers.overrides)
        )
        layers = layers.model_copy(update={"overrides": overrides})
    return replace(resolved, plan=resolved.plan.model_copy(update={"layers": layers}))


def _set_memory(
    resolved: ResolvedPlan, budget_bytes: int, sizes: Mapping[str, int]
) -> ResolvedPlan:
    memory = resolved.plan.memory
    names = Segments.model_fields
    segments = memory.segments.model_copy(update={name: sizes[name] for name in names})
    units = {
        name: unit.model_copy(update={"budget": sizes.get(f"units.{name}", unit.budget)})
        for name, unit in memory.units.items()
    }
    changes: dict[str, Any] = {"budget": budget_bytes, "segments": segments}
    if units:
        changes["units"] = units
    plan = resolved.plan.model_copy(update={"memory": memory.model_copy(update=changes)})
    return replace(resolved, plan=plan)


def _find_shortage(
    resolved: ResolvedPlan, fixed: Mapping[str, int], counts_runtime: bool
) -> Shortage:
    least = _scale_units(resolved, Fraction(0))
    neurons = {name: size for name, size in _size_neurons(least, MIB).items() if size}
    sizes = {**fixed, **neurons, "cold": least.needs.cold.bytes}
    needed = sum(sizes.values())
    if counts_runtime:
        other = needed - fixed["runtime"] + MIB
        needed = add_runtime(resolved.model, other, resolved.list_unit_kinds())
    return Shortage(sizes, needed)
