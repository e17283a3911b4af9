"""Compare two plans, devices or models; their memory and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pi2.authoring.difference import (
    Change,
    LayerChange,
    SegmentChange,
    compare_documents,
    compare_layers,
    compare_plans,
    compare_segments,
)
from pi2.cli.documents import find_document_path
from pi2.cli.options import add_json_option, measure_host, print_found, read_sound, suggest_plans
from pi2.diagnostics import UserError
from pi2.fitting.check import Report
from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.arithmetic.sizes import describe_computed
from pi2.plan.documents.quantities import approximate_bytes, approximate_number
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import write_value
from pi2.weights.file_reading import find_kind

TOKENS = 256


@dataclass(frozen=True)
class Speed:
    """Simulated rates of one plan, or why there are none."""

    decode_tokens_s: float | None = None
    prefill_tokens_s: float | None = None
    layers_s: tuple[float, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Difference:
    """What two documents differ in; only of plans more than ``changes``."""

    changes: list[Change]
    layers: Sequence[LayerChange] = ()
    segments: Sequence[SegmentChange] = ()
    speeds: Sequence[Speed] = ()

    @property
    def is_none(self) -> bool:
        return not self.changes and not self.layers


@click.command("diff")
@click.argument("before", metavar="A", shell_complete=suggest_plans)
@click.argument("after", metavar="B", shell_complete=suggest_plans)
@click.option("--simulate/--no-simulate", default=True, help="Simulate the speed of both plans.")
@add_json_option
@click.option("--exit-code", is_flag=True, help="Exit with 1 if there are differences.")
def diff_command(before: str, after: str, simulate: bool, as_json: bool, exit_code: bool) -> int:
    """Compare two plans, devices or models, A and B, with everything resolved.

    For plans, this includes the need of each memory segment and the resident neurons by layer. If
    the device has the figures, it includes the speed: simulated, not measured."""
    paths = [find_document_path(Path(name)) for name in (before, after)]
    kinds = [_read_kind(path) for path in paths]
    if kinds[0] != kinds[1]:
        message = f"{before} is a {kinds[0]} and {after} is a {kinds[1]}"
        raise UserError.of("P014", message, help="compare documents of the same kind")
    reports = [read_sound(path) for path in paths]
    documents = [report.document for report in reports]
    assert documents[0] is not None
    assert documents[1] is not None
    plans = [report.resolved for report in reports]
    if plans[0] is None or plans[1] is None:
        found = Difference(compare_documents(kinds[0], documents[0], documents[1]))
    else:
        found = Difference(
            compare_plans(plans[0], plans[1]),
            compare_layers(plans[0], plans[1]),
            compare_segments(plans[0], plans[1]),
        )
        if simulate and not found.is_none:
            first, second = plans[0].device, plans[1].device
            device = measure_host(first)
            other = device if first == second else measure_host(second)
            measured = replace(plans[0], device=device), replace(plans[1], device=other)
            found = replace(found, speeds=list(map(_simulate, measured)))
    lines = [f"A  {before}", f"B  {after}", *_write(found)]
    print_found(_describe(reports, found), "\n".join(lines), as_json)
    return 1 if exit_code and not found.is_none else 0


def _read_kind(path: Path) -> Kind:
    kind = find_kind(path)
    if kind is None:
        message = "expected a file name that ends in .plan.toml, .device.toml or .model.toml"
        raise UserError.of("P009", message, file=str(path))
    return kind


def _simulate(plan: ResolvedPlan) -> Speed:
    from pi2.simulate import read_inputs, simulate, simulate_layers

    try:
        inputs = read_inputs(plan)
    except UserError as error:
        return Speed(reason=error.diagnostics[0].message)
    result = simulate(inputs, tokens=TOKENS)
    return Speed(
        decode_tokens_s=result.tokens_s,
        prefill_tokens_s=None if result.prefill is None else result.prefill.tokens_s,
        layers_s=simulate_layers(inputs),
    )


def _describe(reports: list[Report], found: Difference) -> dict[str, Any]:
    speeds = found.speeds
    return {
        "digests": [item.resolved.digest if item.resolved else None for item in reports],
        "changes": [
            {"key": item.name, "before": item.before, "after": item.after} for item in found.changes
        ],
        "layers": [
            {
                "first": item.first,
                "last": item.last,
                "split": [dict(item.before.split), dict(item.after.split)],
                "hot": [item.before.hot, item.after.hot],
                "dense": [_describe_dense(item.before), _describe_dense(item.after)],
                "hot_neurons": [item.before.hot_neurons, item.after.hot_neurons],
                "hot_bytes": list(item.hot_bytes),
                "simulated_s": [_find_time(speed, item.first) for speed in speeds] or None,
            }
            for item in found.layers
        ],
        "memory": {
            item.name: {"size_bytes": list(item.sizes), "needed_bytes": list(item.needs)}
            for item in found.segments
        },
        "speed": {
            "simulated": True,
            "decode_tokens_s": [item.decode_tokens_s for item in speeds],
            "prefill_tokens_s": [item.prefill_tokens_s for item in speeds],
            "missing": [item.reason for item in speeds],
        }
        if speeds
        else None,
    }


def _describe_dense(layer: ResolvedLayer) -> dict[str, Any] | None:
    if layer.dense is None:
        return None
    return {"unit": layer.dense.unit, "neurons": list(layer.dense.by_sequences)}


def _show_dense(layer: ResolvedLayer) -> str:
    if layer.dense is None:
        return "(none)"
    return f"{layer.dense.unit} with {describe_computed(layer.dense)}"


def _find_time(speed: Speed, layer: int) -> float | None:
    return speed.layers_s[layer] if layer < len(speed.layers_s) else None


def _write(found: Difference) -> Iterator[str]:
    if found.is_none:
        yield "no differences"
        return
    if found.changes:
        yield "values"
        width = min(44, max(len(item.name) for item in found.changes))
        for change in found.changes:
            values = f"{_show(change.before)} -> {_show(change.after)}"
            yield f"  {change.name:{width}}  {values}"
    if found.layers:
        yield "layers"
        for item in found.layers:
            yield f"  {_write_layer(item, found.speeds)}"
    if found.segments:
        yield "memory needed"
        yield from _write_segments(found.segments)
    if found.speeds:
        yield "speed, SIMULATED and not measured"
        yield from _write_speeds(found.speeds)


def _show(value: Any) -> str:
    if value is None:
        return "(nothing)"
    text = write_value(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _write_layer(item: LayerChange, speeds: Sequence[Speed]) -> str:
    parts = []
    if dict(item.before.split) != dict(item.after.split):
        parts.append(f"split {_show(dict(item.before.split))} -> {_show(dict(item.after.split))}")
    if item.before.dense != item.after.dense:
        parts.append(f"dense unit {_show_dense(item.before)} -> {_show_dense(item.after)}")
    if item.before.hot != item.after.hot or item.before.hot_neurons != item.after.hot_neurons:
        neurons = f"{item.before.hot_neurons} -> {item.after.hot_neurons} neurons"
        parts.append(f"hot {item.before.hot:g} -> {item.after.hot:g}, {neurons}")
    each = " each" if item.last > item.first else ""
    parts.append(f"memory {_show_difference(*item.hot_bytes)}{each}")
    times = [_find_time(speed, item.first) for speed in speeds]
    if len(times) == 2 and times[0] is not None and times[1] is not None:
        shown = f"{approximate_number(times[0] * 1e3)} -> {approximate_number(times[1] * 1e3)} ms"
        parts.append(f"{shown}{each} (simulated)")
    return f"{item.name}: {'; '.join(parts)}"


def _show_difference(before: int, after: int) -> str:
    if before == after:
        return "the same"
    sign = "+" if after > before else "-"
    return f"{sign}{approximate_bytes(abs(after - before))}"


def _write_segments(segments: Sequence[SegmentChange]) -> Iterator[str]:
    rows = [(item.name, item.needs, item.sizes) for item in segments]
    main = [item for item in segments if item.is_main]
    needs = tuple(sum(item.needs[side] for item in main) for side in (0, 1))
    sizes = tuple(sum(item.sizes[side] for item in main) for side in (0, 1))
    rows.append(("all", (needs[0], needs[1]), (sizes[0], sizes[1])))
    for name, (old, new), (size, other) in rows:
        shown = f"{approximate_bytes(old)} -> {approximate_bytes(new)}"
        reserved = "" if size == other else f", reserved {_show_difference(size, other)}"
        yield f"  {name:9}  {shown:24} {_show_difference(old, new)}{reserved}"


def _write_speeds(speeds: Sequence[Speed]) -> Iterator[str]:
    for name, side in zip("AB", speeds, strict=True):
        if side.reason is not None:
            yield f"  {name}: not simulated: {side.reason}"
    rates = {
        "decode": [item.decode_tokens_s for item in speeds],
        "prefill": [item.prefill_tokens_s for item in speeds],
    }
    for name, (old, new) in rates.items():
        if old is not None and new is not None:
            yield (
                f"  {name:9}  {approximate_number(old)} -> {approximate_number(new)} tokens/s "
                f"({new / old - 1:+z.1%})"
            )
