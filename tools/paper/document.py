"""The tables of docs/howto/simulate.md and of tools/results/simulator.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from paper.comparison import Comparison, Prediction, summarise
from paper.freedoms import write_freedoms
from pi2.costs.constants import FIGURES, Constants

END = "<!-- end -->"
MEMORY = {"half": "half of the FFN", "full": "everything"}
DEVICES = {"oneplus-12": "OnePlus 12", "oneplus-ace-2": "OnePlus Ace 2"}


def render_document(text: str, tables: Mapping[str, Iterable[str]]) -> str:
    """``text`` with new tables between each ``<!-- name -->`` and the next end marker.

    A document holds the tables that it has markers for; ``find_tables`` names them.  Other programs
    write those that ``tables`` has not.
    """
    for name in find_tables(text):
        if name not in tables:
            continue
        start, table = f"<!-- {name} -->\n", tables[name]
        before, rest = text.split(start, 1)
        after = rest[rest.index(END) :]
        text = "".join([before, start, *(f"{row}\n" for row in table), after])
    return text


def find_tables(text: str) -> list[str]:
    """Names of the tables that a document has markers for, in its order."""
    return [
        name for name in re.findall(r"^<!-- ([\w-]+) -->$", text, re.MULTILINE) if name != "end"
    ]


def make_tables(
    rows: list[Comparison],
    held_out: list[Comparison],
    predictions: list[Prediction],
    constants: Constants,
) -> dict[str, list[str]]:
    """All tables by name."""
    return {
        "summary": list(write_summary(rows)),
        "comparison": list(write_comparison(rows)),
        "held-out-summary": list(write_summary(held_out)),
        "held-out": list(write_rows(held_out)),
        "unscored": list(write_rows([row for row in rows if not row.point.scored])),
        "predictions": list(write_predictions(predictions)),
        "constants": list(write_constants(constants)),
        "by-model": list(write_by_model([*rows, *held_out])),
        "freedoms": list(write_freedoms()),
    }


def write_by_model(rows: list[Comparison]) -> Iterator[str]:
    """Errors of speeds by device, system and model: means of all hide errors of opposite sign."""
    yield "| device | system | model | points | mean | lowest | highest |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        scenario, single = row.point.scenario, row.point.measure.endswith("tokens/s")
        if row.point.scored and single and row.error is not None:
            key = (DEVICES[scenario.device], scenario.system, scenario.model)
            found.setdefault(key, []).append(row.error)
    for (device, system, model), errors in sorted(found.items()):
        mean = sum(map(abs, errors)) / len(errors)
        yield (
            f"| {device} | {system} | {model} | {len(errors)} | {mean:.0%} | {min(errors):+.0%} | "
            f"{max(errors):+.0%} |"
        )


def write_summary(rows: list[Comparison]) -> Iterator[str]:
    """Errors by group."""
    scored = [row for row in rows if row.point.scored]
    yield "| points | number | mean error | worst error |"
    yield "| --- | ---: | ---: | ---: |"
    for group in dict.fromkeys(row.point.group for row in scored):
        yield _summarise_row(group, [row for row in scored if row.point.group == group])
    yield _summarise_row("**all**", scored)
    missing = [row for row in scored if row.error is None]
    if missing:
        yield f"\n{len(missing)} points have no simulated figure: {missing[0].reason}."


def _summarise_row(name: str, rows: list[Comparison]) -> str:
    summary = summarise(rows)
    if summary is None:
        return f"| {name} | 0 | - | - |"
    return f"| {name} | {summary.count} | {summary.mean:.1%} | {summary.worst:.1%} |"


def write_comparison(rows: list[Comparison]) -> Iterator[str]:
    """Every scored point, group by group."""
    scored = [row for row in rows if row.point.scored]
    for group in dict.fromkeys(row.point.group for row in scored):
        yield f"## {group[0].upper()}{group[1:]}"
        yield ""
        yield from write_rows([row for row in scored if row.point.group == group])
        yield ""


def write_rows(rows: list[Comparison]) -> Iterator[str]:
    """A table of points."""
    yield "| device | system | model | memory | measure | published | simulated | error | source |"
    yield "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |"
    for row in rows:
        point, scenario = row.point, row.point.scenario
        measure: str = point.measure
        if measure == "prefill tokens/s":
            measure = f"prefill tokens/s, {point.prompt} tokens"
        if point.rival:
            measure = f"{measure} over {point.rival}"
        if scenario.batch > 1:
            measure = f"{measure}, {scenario.batch} sequences"
        simulated = "-" if row.simulated is None else _write_number(row.simulated)
        error = "-" if row.error is None else f"{row.error:+.0%}"
        cells = [
            DEVICES[scenario.device],
            scenario.system,
            scenario.model,
            _write_memory(scenario.memory),
            measure,
            _write_number(point.published),
            simulated,
            error,
            point.source,
        ]
        yield "| " + " | ".join(cells) + " |"


def write_predictions(predictions: list[Prediction]) -> Iterator[str]:
    """Settings of the paper whose published figures were not used."""
    yield "| device | system | model | memory | tokens/s |"
    yield "| --- | --- | --- | --- | ---: |"
    for item in predictions:
        scenario = item.scenario
        yield (
            f"| {DEVICES[scenario.device]} | {scenario.system} | {scenario.model} | "
            f"{_write_memory(scenario.memory)} | {_write_number(item.tokens_s)} |"
        )


def write_constants(constants: Constants) -> Iterator[str]:
    """All constants."""
    yield "| constant | value | origin | meaning |"
    yield "| --- | ---: | --- | --- |"
    for name, own in FIGURES.items():
        value = _write_value(float(getattr(constants, name)), own["unit"])
        yield f"| `{name}` | {value} | {own['kind']} | {own['meaning']}; {own['devices']} |"


def _write_memory(memory: str | float) -> str:
    return MEMORY.get(memory, str(memory)) if isinstance(memory, str) else f"{memory:g} GB in all"


def _write_number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _write_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.3g} us"
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "B":
        return f"{value / 1024:g} KiB"
    return f"{value:.3g}" if unit in ("share", "ratio", "sigma") else f"{value:.3g} {unit}"
