"""Rules about compute units: backends, settings, graphs and memory of their own."""

from collections.abc import Iterator, Sequence

from pi2.plan.checking.findings import (
    Facts,
    Finding,
    Origin,
    list_placed_splits,
    list_row_splits,
    rule,
)
from pi2.plan.toml.text import KeyPath


@rule("P232", "error", "plan", "device")
def check_backends_for_units(facts: Facts) -> Iterator[Finding]:
    """Unit without a backend.

    Why: a backend computes for a kind of unit, or for the unit that `units` names; without one, the
    unit's share of the neurons would not be computed.

    Example: ``split = { npu = 1.0 }`` with ``backends = { cpu = "cpu" }``.

    Fix: name a backend for the kind, or give its share to another unit."""
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
            path,
            f"no backend is named for units of kind `{kind}`, such as `{unit}`",
            f"add a backend for {kind} to `backends`, or give the work to another unit",
            at="value" if path == ("prefill", "unit") else "key",
            origins=(Origin("plan", ("backends",), f"backends: {listed or 'none'}"),),
        )


@rule("P414", "warning", "resolved")
def check_settings_reach_units(facts: Facts) -> Iterator[Finding]:
    """Unit setting without effect.

    Why: the sparse unit computes in pi2's own process, is lost only with it, and has the segments
    of ``[memory.segments]``; ``process``, ``on_failure`` and ``[memory.units.NAME]`` are for the
    other units. A GPU that has the whole model has memory of its own, and no other unit can go on
    for it.

    Example: ``[memory.units.cpu]`` in a plan whose sparse unit is ``cpu``.

    Fix: remove the setting, or give it to the unit that keeps hot neurons."""
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
            path,
            f"does nothing: `{name}` is the sparse unit, which has no such setting",
            "take it out"
            if path[0] == "units"
            else "take it out: memory.segments are what the sparse unit has",
            at="key",
        )


_STEP = 8


@rule("P276", "error", "resolved")
def check_graphs_have_shapes(facts: Facts) -> Iterator[Finding]:
    """Impossible graph shape.

    Why: an NPU's programs have fixed shapes and compute a few tokens in one pass over weights: 1,
    2, 4 or 8.  Graphs of a number that is no multiple of these cannot be compiled, one that is
    named twice would be compiled twice, and units of other kinds have no graphs.

    Example: ``units.npu.graphs.tokens = [1, 3, 128]``, or graphs of a GPU.

    Fix: name 1, 2, 4 and multiples of 8, each once, and shares above 0; a job runs the smallest
    graph that holds it."""
    resolved = facts.resolved
    for name, settings in resolved.plan.units.items():
        graphs, path = settings.graphs, ("units", name, "graphs")
        if graphs is None or name not in resolved.device.units:
            continue
        kind = resolved.device.units[name].kind
        if kind != "npu":
            yield Finding(
                path,
                f"`{name}` is a {kind.upper()}; only programs of an NPU have fixed shapes",
                "take the table out",
                at="key",
            )
            continue
        for place, tokens in enumerate(graphs.tokens):
            if tokens not in (1, 2, 4) and tokens % _STEP:
                larger = tokens // _STEP * _STEP + _STEP
                yield Finding(
                    (*path, "tokens", place),
                    f"no graph computes {tokens} tokens",
                    f"write {4 if tokens == 3 else larger}: it holds jobs of {tokens} tokens",
                )
        yield from _find_twice(graphs.tokens, (*path, "tokens"))
        for place, share in enumerate(graphs.shares or ()):
            if share == 0:
                yield Finding(
                    (*path, "shares", place),
                    "a graph of no neurons computes nothing",
                    "take it out",
                )
        yield from _find_twice(graphs.shares or (), (*path, "shares"))


def _find_twice(values: Sequence[float], path: KeyPath) -> Iterator[Finding]:
    for place, value in enumerate(values):
        if value in values[:place]:
            yield Finding((*path, place), f"{value:g} is named twice", "take it out")
