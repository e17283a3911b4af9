"""Rules about compute units: backends, settings, graphs and memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.plan.arithmetic.sizes import count_unit_needs
from pi2.plan.arithmetic.units import describe_unit
from pi2.plan.checking.findings import (
    Facts,
    Finding,
    Origin,
    list_placed_splits,
    list_row_splits,
    rule,
)
from pi2.plan.documents.backends import (
    find_backend,
    find_executor_backend,
    find_graph_backend,
    find_unit_backend,
    list_backend_names,
)
from pi2.plan.documents.quantities import (
    approximate_bytes,
    compare_bytes,
    format_bytes,
    write_least,
)
from pi2.plan.toml.text import KeyPath


@rule("P265", "error", "resolved")
def check_backends_can_compute(facts: Facts) -> Iterator[Finding]:
    """A unit's backend can compute what the plan gives it.

    Why: backends differ in what they compute: not every one serves a unit beside the sparse one, or
    computes a whole model, and some know no mixtures, or not every activation or precision.  Asking
    them first is better than failing when the model has been loaded.

    Example: ``units.second.backend = "cpu"`` for a dense share.

    Fix: name another backend for the unit, or give its share to another unit.  ``null`` computes
    nothing, and is for all units of a plan or for none.
    """
    resolved = facts.resolved
    names = (resolved.sparse_unit, *resolved.dense_units)
    backends = {unit: resolved.name_backend(unit) for unit in names if resolved.has_backend(unit)}
    idle = [unit for unit, name in backends.items() if not find_backend(name).COMPUTES]
    if idle and len(idle) < len(backends):
        busy = next(unit for unit in backends if unit not in idle)
        yield Finding(
            path=_find_path(facts, idle[0]),
            message=f"backend `{backends[idle[0]]}` of `{idle[0]}` computes nothing, and "
            f"`{backends[busy]}` of `{busy}` does",
            help=f"run the plan dry with `{backends[idle[0]]}` for all units, or name another "
            f"backend for `{idle[0]}`",
        )
        return
    for unit, name in backends.items():
        backend = find_backend(name)
        is_sparse = unit == resolved.sparse_unit
        is_whole = is_sparse and resolved.has_whole_unit
        find = find_executor_backend if is_sparse else find_unit_backend
        if find(name) is None and not is_whole and facts.resolved.file is None:
            able = [other for other in list_backend_names() if find(other)]
            lack = (
                f"computes no whole model, and `{unit}` computes what no other unit does"
                if is_sparse
                else f"serves no unit beside `{resolved.sparse_unit}`, such as `{unit}`"
            )
            yield Finding(
                path=_find_path(facts, unit),
                message=f"backend `{name}` {lack}",
                help=f"backends that do: {', '.join(f'`{other}`' for other in able)}",
            )
            continue
        for limit in backend.find_limits(describe_unit(resolved, unit)):
            yield Finding(
                path=_find_path(facts, unit),
                message=f"backend `{name}` of `{unit}` {limit}",
                help=f"name another backend for `{unit}`, or give its share to another unit",
            )


def _find_path(facts: Facts, unit: str) -> KeyPath:
    settings = facts.resolved.plan.units.get(unit)
    if settings is not None and settings.backend is not None:
        return ("units", unit, "backend")
    return ("backends", facts.resolved.device.units[unit].kind)


@rule("P232", "error", "plan", "device")
def check_backends_for_units(facts: Facts) -> Iterator[Finding]:
    """Every unit that layers use has a backend.

    Why: a backend computes for a kind of unit, or for the unit that `units` names; without one, the
    unit's share of the neurons would not be computed.

    Example: ``split = { npu = 1.0 }`` with ``backends = { cpu = "cpu" }``.

    Fix: name a backend for the kind, or give its share to another unit.
    """
    plan, device = facts.plan, facts.device
    paths: dict[str, KeyPath] = {}
    for placed in (*list_placed_splits(plan), *list_row_splits(plan)):
        for unit, share in placed.split.items():
            if share > 0:
                paths.setdefault(unit, (*placed.path, unit))
    if plan.prefill.unit is not None:
        paths.setdefault(plan.prefill.unit, ("prefill", "unit"))
    for unit, path in paths.items():
        settings = plan.units.get(unit)
        has_own = settings is not None and settings.backend is not None
        if has_own or unit not in device.units or device.units[unit].kind in plan.backends:
            continue
        kind = device.units[unit].kind
        listed = ", ".join(f'{key} = "{value}"' for key, value in plan.backends.items())
        yield Finding(
            path=path,
            at="value" if path == ("prefill", "unit") else "key",
            message=f"no backend is named for units of kind `{kind}`, such as `{unit}`",
            help=f"add a backend for {kind} to `backends`, or give the work to another unit",
            origins=(
                Origin(document="plan", path=("backends",), text=f"backends: {listed or 'none'}"),
            ),
        )


@rule("P414", "warning", "resolved")
def check_settings_reach_units(facts: Facts) -> Iterator[Finding]:
    """Settings of a single unit are given to a unit that heeds them.

    Why: the sparse unit computes in pi2's own process, cannot be lost alone, and has the segments
    of ``[memory.segments]``; ``process``, ``on_failure`` and ``[memory.units.NAME]`` are for the
    units beside it.  A GPU that has the whole model has memory of its own, and nobody else to go
    on.

    Example: ``[memory.units.cpu]`` in a plan whose sparse unit is ``cpu``.

    Fix: take the setting out, or give it to the unit that keeps hot neurons.
    """
    plan, name = facts.resolved.plan, facts.resolved.sparse_unit
    ignored: list[KeyPath] = []
    settings = plan.units.get(name)
    if settings is not None:
        named = settings.model_fields_set & {"process", "on_failure"}
        ignored += [("units", name, key) for key in sorted(named)]
    if name in plan.memory.units and not facts.resolved.has_whole_unit:
        ignored.append(("memory", "units", name))
    for path in ignored:
        yield Finding(
            path=path,
            at="key",
            message=f"does nothing: `{name}` is the sparse unit, which has no such setting",
            help="take it out"
            if path[0] == "units"
            else "take it out: memory.segments are what the sparse unit has",
        )


@rule("P277", "warning", "resolved")
def check_graphs_fit_own_memory(facts: Facts) -> Iterator[Finding]:
    """What a graph keeps while it runs fits into the NPU's own memory.

    Why: an NPU reads its own memory (VTCM) many times as fast as main memory.  A graph keeps the
    values of its neurons for all of its tokens; where they do not fit, main memory holds them, and
    every tile of the second product waits for it.

    Example: graphs of 128 tokens and all of 14,336 neurons, 8.8 MiB, where ``own_memory = "8
    MiB"``.

    Fix: name smaller ``shares`` or ``tokens``: a job that is larger runs several graphs.  Without
    ``shares``, sizes that fit are chosen.
    """
    resolved = facts.resolved
    for name in resolved.dense_units:
        settings, hexagon = resolved.plan.units.get(name), resolved.device.units[name].hexagon
        own = None if hexagon is None else hexagon.own_memory
        backend = find_graph_backend(resolved.name_backend(name))
        if own is None or settings is None or settings.graphs is None:
            continue
        if backend is None:
            continue
        largest = max(
            backend.list_graphs(describe_unit(resolved, name)), key=lambda graph: graph.own_bytes
        )
        if largest.own_bytes > own:
            yield Finding(
                path=("units", name, "graphs"),
                at="key",
                message=f"a graph of {largest.tokens} tokens and {largest.neurons} neurons keeps "
                f"{approximate_bytes(largest.own_bytes)}, and `{name}` has "
                f"{approximate_bytes(own)} of its own",
                help="name smaller shares or fewer tokens: larger jobs run several graphs",
            )


_STEP = 8


@rule("P276", "error", "resolved")
def check_graphs_have_shapes(facts: Facts) -> Iterator[Finding]:
    """A unit's graphs have shapes that its programs can have.

    Why: an NPU's programs have fixed shapes and compute a few tokens in one pass over weights: 1,
    2, 4 or 8.  Graphs of a number that is no multiple of these cannot be compiled, one that is
    named twice would be compiled twice, and units of other kinds have no graphs.

    Example: ``units.npu.graphs.tokens = [1, 3, 128]``, or graphs of a GPU.

    Fix: name 1, 2, 4 and multiples of 8, each once, and shares above 0; a job runs the smallest
    graph that holds it.
    """
    resolved = facts.resolved
    for name, settings in resolved.plan.units.items():
        graphs, path = settings.graphs, ("units", name, "graphs")
        if graphs is None or name not in resolved.device.units:
            continue
        kind = resolved.device.units[name].kind
        if kind != "npu":
            yield Finding(
                path=path,
                at="key",
                message=f"`{name}` is a {kind.upper()}; only programs of an NPU have fixed shapes",
                help="take the table out",
            )
            continue
        for place, tokens in enumerate(graphs.tokens):
            if tokens not in (1, 2, 4) and tokens % _STEP:
                larger = tokens // _STEP * _STEP + _STEP
                yield Finding(
                    path=(*path, "tokens", place),
                    message=f"no graph computes {tokens} tokens",
                    help=f"write {4 if tokens == 3 else larger}: it holds jobs of {tokens} tokens",
                )
        yield from _find_twice(graphs.tokens, (*path, "tokens"))
        for place, share in enumerate(graphs.shares or ()):
            if share == 0:
                yield Finding(
                    path=(*path, "shares", place),
                    message="a graph of no neurons computes nothing",
                    help="take it out",
                )
        yield from _find_twice(graphs.shares or (), (*path, "shares"))


def _find_twice(values: Sequence[float], path: KeyPath) -> Iterator[Finding]:
    for place, value in enumerate(values):
        if value in values[:place]:
            yield Finding(
                path=(*path, place), message=f"{value:g} is named twice", help="take it out"
            )


@rule("P264", "error", "resolved")
def check_units_hold_needs(facts: Facts) -> Iterator[Finding]:
    """Every unit beside the sparse one has memory for what it keeps.

    Why: a unit's neurons lie in its own memory, such as a graphics card's, and its backend says how
    much they take there: a plan that cannot work is known before anything is read.  A unit that
    uses main memory may have a budget, too; without one, what it keeps is part of
    ``memory.segments.hot``.

    Example: a share for ``gpu`` without ``[memory.units.gpu]``, or with less than its neurons take.

    Fix: write ``memory.units.NAME.budget``, or lower the unit's share.
    """
    resolved = facts.resolved
    for name, need in count_unit_needs(resolved).items():
        memory = resolved.plan.memory.units.get(name)
        wanted = write_least(need.bytes)
        if memory is None and resolved.shares_main_memory(name):
            continue
        if memory is None:
            yield Finding(
                path=("memory",),
                at="key",
                message=f"`{name}` has no memory, and needs {approximate_bytes(need.bytes)}: "
                f"{need.explanation}",
                help=f'write units.{name}.budget = "{wanted}" into [memory]',
            )
        elif memory.budget < need.bytes:
            has, needs = compare_bytes(memory.budget, need.bytes)
            yield Finding(
                path=("memory", "units", name, "budget"),
                message=f"`{name}` has {has} and needs {needs}: {need.explanation}",
                help=f'write budget = "{wanted}", or lower the share of `{name}`',
            )
    for name, memory in resolved.plan.memory.units.items():
        unit = resolved.device.units.get(name)
        own = None if unit is None else unit.memory
        if memory.shares_main_memory and own is not None:
            yield Finding(
                path=("memory", "units", name, "shares_main_memory"),
                message=f"the device says that `{name}` has memory of its own",
                help="take the key out",
            )
        elif own is not None and own.capacity is not None and memory.budget > own.capacity:
            yield Finding(
                path=("memory", "units", name, "budget"),
                message=f"`{name}` has {format_bytes(own.capacity)} of memory, less than "
                f"{format_bytes(memory.budget)}",
                help=f'write budget = "{format_bytes(own.capacity)}" at most',
            )
