"""Compare predictions with speeds that others measured with other engines.

    python tools/validate_outside.py            # rewrite the tables of docs/howto/simulate.md
    python tools/validate_outside.py --print    # every row by the constants as they are
    python tools/validate_outside.py --check    # exit 1 if the table is out of date
    python tools/validate_outside.py --leave-one-out --print    # without each row's own device
    python tools/validate_outside.py --fit      # the constants that fit all rows best

Devices, models and rows are `tools/outside/rows.toml`. With --leave-one-out, the constants that
rows decide are fitted anew without each device, before its rows are predicted."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from outside.leaving import Sample, fit_all, leave_each_out
from paper.document import render_document
from pi2.costs.constants import Constants, Range
from pi2.costs.cost import Description, cost_description, describe_plan, read_plan_rates
from pi2.costs.kernel_times import Rates
from pi2.costs.settings import POSITION
from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.units import count_state_traffic
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import round_up
from pi2.planning.wish import Wish, make_plan_values, read_document

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/howto/simulate.md"
ROWS = ROOT / "tools/outside/rows.toml"
MIB, GIB = 1 << 20, 1 << 30
ORIGIN = {"status": "published", "source": "tools/outside/rows.toml"}
WORST = 5
"""Rows that the document names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured speed and the predicted one."""

    kind: str
    id: str
    device: str
    model: str
    measured: float
    range: Range

    @property
    def predicted(self) -> float:
        return self.range.expected

    @property
    def is_inside(self) -> bool:
        """Whether the measured speed is within the range."""
        return self.range.low <= self.measured <= self.range.high

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description="Compare predictions with rows of others.")
    parser.add_argument("--print", action="store_true", help="print every row")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if old")
    parser.add_argument("--fit", action="store_true", help="print the constants of the best fit")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="fit without each row's device"
    )
    parser.add_argument("--only", default="", help="rows whose names begin like this")
    options = parser.parse_args(arguments)
    if options.fit:
        samples = [sample for _, _, sample in list_samples()]
        print("\n".join(f"{name} = {x:.3g}" for name, x in fit_all(samples).items()))
        return 0
    predicted = leave_out_rows() if options.leave_one_out else predict_rows()
    rows = [row for row in predicted if row.id.startswith(options.only)]
    if options.print:
        for row in rows:
            print(
                f"{row.id} {row.device:16} {row.model:18} {row.measured:8.3f} "
                f"{row.predicted:8.3f} {row.error:+7.0%}  {row.range.write()}"
                + " outside"
                * (not row.is_inside)
            )
        print("\n".join(write_table(rows)))
        return 0
    old = DOCUMENT.read_text("utf-8")
    new = render_document(old, {"outside": write_table(list(leave_out_rows()))})
    if not options.check:
        DOCUMENT.write_text(new, "utf-8")
    return int(options.check and new != old)


def list_samples() -> Iterator[tuple[str, str, Sample]]:
    """Every row's kind, model and what a fit sees of it; devices of one chip are one."""
    data = read_data()
    for kind in data["kinds"]:
        for name, device, model, file_format, measured in kind["rows"]:
            settings = {"bits": data["formats"][file_format], **data["settings"].get(name, {})}
            plan = make_plan(kind["name"], device, model, settings)
            yield (
                kind["name"],
                model,
                Sample(
                    id=name,
                    device=data["devices"][device].get("chip", device),
                    measured=measured,
                    predict=partial(predict, plan, settings),
                    find_range=partial(find_range, plan, settings),
                ),
            )


def predict_rows() -> Iterator[Row]:
    """Every row with its prediction."""
    for kind, model, sample in list_samples():
        yield _make_row(kind, model, sample, sample.find_range(Constants()))


def leave_out_rows() -> Iterator[Row]:
    """Every row with its prediction by constants that its device had no part in."""
    known = {sample.id: (kind, model) for kind, model, sample in list_samples()}
    for sample, found in leave_each_out([sample for _, _, sample in list_samples()]):
        yield _make_row(*known[sample.id], sample, found)


def _make_row(kind: str, model: str, sample: Sample, found: Range) -> Row:
    return Row(
        kind=kind,
        id=sample.id,
        device=sample.device,
        model=model,
        measured=sample.measured,
        range=found,
    )


def write_table(rows: Sequence[Row]) -> Iterator[str]:
    """Errors by kind, and the worst rows."""
    yield "| kind | rows | mean error | median error | worst | inside the range |"
    yield "| --- | ---: | ---: | ---: | --- | ---: |"
    kinds = {row.kind: [item for item in rows if item.kind == row.kind] for row in rows}
    for name, own in [*kinds.items(), ("**all**", list(rows))]:
        errors = [abs(row.error) for row in own]
        worst = max(own, key=lambda row: abs(row.error))
        yield (
            f"| {name} | {len(own)} | {statistics.fmean(errors):.0%} | "
            f"{statistics.median(errors):.0%} | {worst.error:+.0%} ({worst.id}) | "
            f"{statistics.fmean(row.is_inside for row in own):.0%} |"
        )
    yield ""
    yield "| worst rows | device | model | measured | predicted | error |"
    yield "| --- | --- | --- | ---: | ---: | ---: |"
    for row in sorted(rows, key=lambda row: -abs(row.error))[:WORST]:
        yield (
            f"| {row.id} | {row.device} | {row.model} | {row.measured:g} | {row.range.write()} | "
            f"{row.error:+.0%} |"
        )


@lru_cache(maxsize=1)
def read_data() -> dict[str, Any]:
    """Devices, models, rows and settings."""
    return tomllib.loads(ROWS.read_text("utf-8"))


def find_range(plan: ResolvedPlan, settings: Mapping[str, Any], constants: Constants) -> Range:
    """Tokens per second of a row."""
    rates = read_plan_rates(plan, constants)
    low, expected, high = (
        cost_row(plan, settings, own) for own in (rates.vary("low"), rates, rates.vary("high"))
    )
    return Range(low=low, expected=expected, high=high)


def predict(plan: ResolvedPlan, settings: Mapping[str, Any], constants: Constants) -> float:
    return cost_row(plan, settings, read_plan_rates(plan, constants))


def cost_row(resolved: ResolvedPlan, settings: Mapping[str, Any], rates: Rates) -> float:
    description = describe_plan(resolved, rates, position=settings.get("position", POSITION))
    description = restate(description, resolved.model, settings)
    cost = cost_description(description, settings.get("prompt", 128))
    return cost.tokens_s if "prompt" not in settings else cost.prefill_tokens_s or 0.0


def restate(description: Description, model: Model, settings: Mapping[str, Any]) -> Description:
    """The description with what pi2's plans cannot state: bits of a weight in the row's file, rows
    of neurons that rest, and the length of chunks."""
    old, (neurons, attention, head) = description.settings.sizes, settings["bits"]
    computed = (1.0 + 2.0 * settings.get("fires", 1.0)) / 3.0
    sizes = replace(
        old,
        neuron=round(computed * old.neuron_weights * neurons / 8),
        neuron_weights=round(computed * old.neuron_weights),
        projections=round(old.projection_weights * attention / 8) + count_state_traffic(model),
        head=round(old.head_weights * head / 8),
    )
    chunk = settings.get("chunk", description.prompts.chunk)
    prompts = replace(description.prompts, chunk=chunk, together=chunk)
    kinds = tuple(
        replace(kind, settings=replace(kind.settings, sizes=sizes)) for kind in description.kinds
    )
    return replace(description, kinds=kinds, prompts=prompts)


def make_plan(kind: str, device: str, model: str, settings: Mapping[str, Any]) -> ResolvedPlan:
    """The plan of a row: everything in memory unless it has a cache."""
    wish = Wish(
        device=make_device(device, settings), model=make_model(model, settings), context=1024
    )
    own = wish.model
    # Experts are read as a whole: no neuron fills blocks.
    bundle = own.lay_out_bundle()
    size = round(len(bundle.parts) * own.stored_neuron_width * settings["bits"][0] / 8)
    bundle = own.lay_out_bundle(max(bundle.stride, round_up(size, 64)))
    predictor = "none" if own.moe is None else "router"
    values = make_plan_values(wish, predictor=predictor, kv="fp16", chunk=1024, bundle=bundle)
    expert = own.shape.ffn * bundle.stride
    segments = values["memory"]["segments"]
    if kind.startswith("GPU"):
        values["backends"] = {"gpu": "gpu"}
        values["layers"] = {"split": {"gpu": 1.0}, "hot": 1.0}
    elif "cache" in settings or "cached_experts" in settings:
        cached = settings.get("cached_experts", 0) * expert + settings.get("cache", 0) * MIB
        shared = own.moe.shared_experts * own.shape.layers * expert if own.moe else 0
        segments["cold"] = f"{max(round(cached), expert) + shared} B"
        values["io"] = {"engine": "pread", "threads": settings.get("lanes", 1)}
        if settings.get("queue"):
            values["io"] = {"engine": "io_uring"}
        values["cache"] = {"policy": "lru"}
        if settings.get("ahead"):
            values["decode"]["look_ahead"] = "attention"
    else:
        values["layers"]["hot"] = 1.0
    if "CPU, the rest" in kind:
        values["projections"] = {part: {"gpu": 1.0} for part in ("attention", "head")}
        values["backends"] = {"gpu": "gpu"}
    if "prompt" in settings and settings.get("on") != "cpu":
        values["prefill"]["unit"] = "npu"
        values["pipeline"] = {"prefill": "layers-first"}
        values["backends"] = {"npu": "hexagon"}
    if "threads" in settings:
        values["threads"] = {"compute": settings["threads"]}
    return resolve_values(values, wish.device, own)


def make_model(name: str, settings: Mapping[str, Any]) -> Model:
    """A shipped model, or one of a row's shape."""
    stated = read_data()["models"].get(name)
    if stated is None or "like" in stated:
        found = read_document(name if stated is None else stated["like"], "model").document
        assert isinstance(found, Model)
        values = json.loads(found.model_dump_json(exclude_unset=True))
        for key in ("shape", "recurrence"):
            values[key] = values.get(key, {}) | (stated or {}).get(key, {})
            if not values[key]:
                del values[key]
        if (stated or {}).get("dense"):
            del values["moe"]
            del values["tensors"]
            del values["layers"]["kinds"][values["shape"]["layers"] :]
    else:
        names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
        values = {
            "schema_version": 2,
            "id": name.replace("_", "-"),
            "shape": {**dict(zip(names, stated["shape"], strict=True)), "context": 4096},
            "ffn": {"activation": "silu"},
            "tied_head": stated.get("tied_head", False),
            "moe": stated.get("moe"),
            "attention": {"latent": stated["latent"]} if "latent" in stated else None,
        }
        values = {key: value for key, value in values.items() if value is not None}
    precision = {16.0: "fp16", 8.5: "int8"}.get(settings["bits"][0])
    if precision is not None:
        parts = ("ffn", "attention", "embedding", "head")
        values["quantization"] = dict.fromkeys(parts, precision)
    if "active" in settings:
        values["moe"]["active_experts"] = settings["active"]
    return Model.model_validate_json(json.dumps(values))


def make_device(name: str, settings: Mapping[str, Any]) -> Device:
    """A device document of published figures."""
    stated = read_data()["devices"][name]
    cpu: dict[str, Any] = {"kind": "cpu", "clusters": list(_list_clusters(stated))}
    cpu["architecture"] = "x86-64" if stated.get("x86") else "aarch64"
    memory: dict[str, Any] = {"usable": f"{round(stated['memory'] * GIB)} B"}
    if "read" in stated:
        cpu["read_bandwidth"] = _rate(stated["read"])
    if "cpu_ops" in stated:
        ops = {"giga_ops": stated["cpu_ops"], "precision": "fp32", "peak": True, **ORIGIN}
        cpu["compute"] = [ops]
    if "peak" in stated:
        memory["peak_bandwidth"] = _rate(stated["peak"])
    units = {"cpu": cpu}
    if "card" in stated:
        rate, size = stated["card"]
        own = {"capacity": f"{size} GiB", "peak_bandwidth": _rate(rate)}
        units["gpu"] = {"kind": "gpu", "architecture": "cuda", "memory": own}
    elif "gpu" in stated:
        units["gpu"] = {"kind": "gpu", "architecture": stated["gpu"]}
    if "npu" in stated:
        figure = {"giga_ops": stated["npu"]["giga_ops"], "precision": "int8"}
        figure |= {"peak": True, **ORIGIN}
        units["npu"] = {"kind": "npu", "architecture": "hexagon", "compute": [figure]}
    values: dict[str, Any] = {
        "schema_version": 2,
        "id": name,
        "units": units,
        "memory": memory,
        "storage": {},
    }
    if "reads" in stated:
        block = "4 KiB" if stated["flash"] == "ufs" else "512 B"
        values["storage"] = {"kind": stated["flash"], "block_size": block}
        values["storage"]["reads"] = list(_list_reads(stated["reads"]))
        if settings.get("serial"):
            values["storage"]["overlap"] = {"value": 0.0, **ORIGIN}
    return Device.model_validate_json(json.dumps(values))


def _list_clusters(stated: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, (cores, name, clock) in enumerate(stated["cores"]):
        yield {"id": f"cores-{number}", "cores": cores, "frequency": f"{clock} GHz"} | (
            {"core": name} if name else {}
        )


def _list_reads(stated: Sequence[Sequence[float]]) -> Iterator[dict[str, Any]]:
    for rate, kib, threads in stated:
        for pattern in ("random", "sequential"):
            figure = {"pattern": pattern, "block": f"{kib} KiB", "rate": f"{rate} GB/s", **ORIGIN}
            yield figure | ({"threads": threads} if threads else {})


def _rate(value: float) -> dict[str, Any]:
    return {"value": f"{value} GB/s", **ORIGIN}


if __name__ == "__main__":
    sys.exit(main())
