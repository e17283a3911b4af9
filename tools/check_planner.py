"""Does a plan keep what `pi2 plan` promised?  Plans are made, run, and compared with others.

    python tools/check_planner.py stores/bamboo-7b --memory 3GiB,4GiB --random 20
    python tools/check_planner.py plans/stores/pi2-demo --memory 125MiB --device ./my.device.toml

Measures this machine first (`pi2 probe`), unless a device is named.  For every memory: makes the
planner's plan, the one that `pi2 new plan` drafts, and random plans that fit, all filling the
memory; predicts each with the cost model and with the simulator; runs each in a process of its own;
and prints both.  The planner's plan runs first and last, so that a machine whose speed drifts shows
it.  Before and after every run, the rates of memory and storage are measured again, because
machines that are shared change by the minute: "at the run's rates" is the prediction with the
probe's figures scaled to these.  ``--turns`` runs all of it again, one plan after the other.
``--wrap`` is put before every measurement, such as ``--wrap 'taskset -c 0,1'``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.authoring.drafting import Wish as DraftWish
from pi2.authoring.drafting import draft_plan
from pi2.authoring.writing import write_document
from pi2.costs.cost import cost_plan, count_memory
from pi2.costs.cost_layer import PROMPT
from pi2.costs.rates import read_rates
from pi2.diagnostics import UserError, texts
from pi2.fitting.budget import (
    MIB,
    Shortage,
    count_runtime,
    find_room,
    fit_plan,
    round_share,
    write_memory,
)
from pi2.fitting.check import load_plan
from pi2.fitting.completion import resolve_values
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import BYTE_UNITS, format_bytes, parse_quantity
from pi2.planning.planner import plan
from pi2.planning.search import Problem, pose_problem
from pi2.planning.text import write_planned
from pi2.planning.wish import Wish, read_document
from planner_run import scale_rates

CLUSTERS = (16, 64, 256)
SPEED_BOUND, MEMORY_BOUND = 0.15, 0.03
PROMPTS = ("prefill", "prefill scaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan: what was predicted, and what happened."""

    memory_bytes: int
    name: str
    settings: str
    predicted: Mapping[str, float | None]
    measured: Mapping[str, Any]

    def compare(self, key: str) -> float | None:
        """Relative error: predicted / measured - 1."""
        predicted, measured = self.predicted.get(key), self.measured.get(key)
        return None if not predicted or not measured else predicted / measured - 1.0


def main() -> int:
    """Check and print; exit code 1 where a promise is broken."""
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = check_all(arguments, arguments.work or Path(folder))
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    return print_verdict(rows)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Predicted and measured plans.")
    parser.add_argument("store", type=Path, help="neuron store")
    parser.add_argument("--model", help="short name or path [that of the store's manifest]")
    parser.add_argument("--memory", required=True, help="limits, such as 3GiB,4GiB")
    parser.add_argument("--device", help="device file of this machine [a new probe]")
    parser.add_argument("--random", type=int, default=20, help="random plans (20)")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("-n", "--tokens", type=int, default=32, help="generated, timed (32)")
    parser.add_argument("-p", "--prompt", type=int, default=128, help="0 for none (128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--turns", type=int, default=1, help="times that plans take turns (1)")
    parser.add_argument("--group", type=int, default=4, help="runs behind one --wrap (4)")
    parser.add_argument("--no-rates", action="store_true", help="measure no rates around runs")
    parser.add_argument("--wrap", default="", help="put before every measurement")
    parser.add_argument("--work", type=Path, help="keep plans and device here")
    parser.add_argument("-o", "--output", type=Path, help="write every row as JSON")
    parser.add_argument("--text", type=Path, help="take tokens from this text [the vocabulary]")
    return parser.parse_args()


def check_all(arguments: argparse.Namespace, work: Path) -> list[Row]:
    """Probe, plan, predict, run."""
    work.mkdir(parents=True, exist_ok=True)
    device_path = arguments.device or str(probe(arguments, work))
    device = read_document(device_path, "device").document
    name = arguments.model or read_store_model(arguments.store)
    model = read_document(name, "model").document
    assert isinstance(device, Device)
    assert isinstance(model, Model)
    rows: list[Row] = []
    print(HEADER, flush=True)
    for text in arguments.memory.split(","):
        wish = Wish(
            device=device,
            model=model,
            memory_bytes=int(parse_quantity(text, BYTE_UNITS)),
            context=min(arguments.context, model.shape.context),
            exact=arguments.exact,
            store=arguments.store,
        )
        references = (str(Path(device_path).absolute()), name, str(arguments.store.absolute()))
        plans = list(write_plans(wish, references, work, arguments))
        plans += plans[1:] * (arguments.turns - 1)
        for first in range(0, len(plans), arguments.group):
            for row in check_plans(wish, plans[first : first + arguments.group], arguments):
                rows.append(row)
                print(write_row(row), flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps([describe(row) for row in rows], indent=1))
    return rows


def read_store_model(store: Path) -> str:
    """The model's short name, as the manifest has it."""
    from pi2.store.manifest import read_manifest

    return read_manifest(store).model.id


def probe(arguments: argparse.Namespace, work: Path) -> Path:
    """Measure this machine."""
    path = work / "machine.device.toml"
    command = [sys.executable, "-m", "pi2", "probe", "--force", "-o", str(path)]
    subprocess.run(
        [*shlex.split(arguments.wrap), *command, "--disk", str(arguments.store)], check=True
    )
    return path


def write_plans(
    wish: Wish, references: tuple[str, str, str], work: Path, arguments: argparse.Namespace
) -> Iterator[tuple[str, Path]]:
    """Write the plans one after the other, and give their names and paths."""
    device, model, store = references
    assert wish.memory_bytes is not None
    size = f"{wish.model.id}-{wish.memory_bytes // MIB}"
    planned = plan(wish)
    text = write_planned(planned, device=device, model=model, store=store, name="planned")
    best = work / f"{size}.plan.toml"
    best.write_text(text)
    yield "planner", best
    draft = DraftWish(
        device=device,
        model=model,
        store=store,
        budget_bytes=wish.memory_bytes,
        context=wish.context,
        name="default",
    )
    path = work / f"{size}-default.plan.toml"
    try:
        path.write_text(draft_plan(draft, wish.device, wish.model))
        yield "default", path
    except UserError as error:
        print(f"no default plan: {error}")
    problem = pose_problem(wish, read_rates(wish.device, wish.model.shape.hidden))
    random = np.random.default_rng(arguments.seed)
    for number in range(arguments.random):
        values = draw_values(problem, planned.values, random)
        values |= {"device": device, "model": model, "weights": store, "name": "random"}
        path = work / f"{size}-random-{number}.plan.toml"
        path.write_text(write_document(Plan.model_validate_json(json.dumps(values))))
        yield f"random {number}", path
    yield "planner again", best


def draw_values(
    problem: Problem, values: Mapping[str, Any], random: np.random.Generator
) -> dict[str, Any]:
    """A random plan that fills the memory: other ways to find neurons, to read, to share."""
    wish = problem.wish
    assert wish.memory_bytes is not None
    while True:
        found: dict[str, Any] = json.loads(json.dumps(values))
        mode = problem.predictors[random.integers(len(problem.predictors))]
        ahead = problem.look_aheads[random.integers(len(problem.look_aheads))]
        io = problem.ios[random.integers(len(problem.ios))]
        found["kv"]["type"] = problem.kv_types[random.integers(len(problem.kv_types))]
        found["decode"]["predictor"] = mode
        found["decode"]["look_ahead"] = ahead if mode == "low-rank" else "none"
        found["io"] = {"engine": io.engine, "threads": io.threads, "depth": io.depth}
        found["pipeline"] = {"cluster": int(random.choice(CLUSTERS))}
        found["prefill"]["chunk"] = problem.chunks[random.integers(len(problem.chunks))]
        part = float(random.uniform(0.0, 1.0))
        cpu = next(name for name, unit in wish.device.units.items() if unit.kind == "cpu")
        found["layers"] = {"split": {cpu: 1.0}, "hot": 0.0}
        bare = resolve_values(found, wish.device, wish.model)
        dense = problem.rates.dense
        kinds = [] if dense is None else [wish.device.units[dense.name].kind]
        runtime_bytes = count_runtime(wish.model, wish.memory_bytes, units=kinds)
        room = find_room(bare, wish.memory_bytes, runtime_bytes)
        whole = problem.layer_bytes * wish.model.shape.layers
        most = max(room, 0) / whole
        found["layers"]["hot"] = round_share(min(1.0, most if mode == "none" else part * most))
        try:
            wanted = resolve_values(found, wish.device, wish.model)
            fitted = fit_plan(wanted, wish.memory_bytes).plan
        except Shortage:
            continue
        found["memory"] |= write_memory(fitted)
        found["layers"]["hot"] = fitted.layers.hot
        return found


def check_plans(
    wish: Wish, plans: Sequence[tuple[str, Path]], arguments: argparse.Namespace
) -> Iterator[Row]:
    """Run plans, and predict them."""
    command = [sys.executable, str(Path(__file__).with_name("planner_run.py"))]
    command += [str(path) for _, path in plans]
    command += ["--tokens", str(arguments.tokens), "--prompt", str(arguments.prompt)]
    command += ["--no-rates"] * arguments.no_rates
    if arguments.text is not None:
        command += ["--text", str(arguments.text)]
    done = subprocess.run(
        [*shlex.split(arguments.wrap), *command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"plans did not run:\n{done.stderr}")
    for (name, path), line in zip(plans, done.stdout.splitlines(), strict=True):
        yield predict_plan(wish, name, path, json.loads(line), arguments)


def predict_plan(
    wish: Wish, name: str, path: Path, measured: Mapping[str, Any], arguments: argparse.Namespace
) -> Row:
    """Put the predictions for a plan beside what happened."""
    from pi2.simulate import read_inputs, simulate

    resolved = load_plan(path)
    # What runs does: tokens with nothing in the context before them, and one prompt.
    work = {"position": arguments.tokens // 2, "prompt": arguments.prompt or PROMPT}
    cost = cost_plan(resolved, **work)
    rates = read_rates(wish.device, wish.model.shape.hidden)
    now = scale_rates(rates, wish.device, measured)
    scaled = cost_plan(resolved, now, **work)
    tokens = max(arguments.tokens, 64)
    simulated, simulated_now = (
        simulate(read_inputs(resolved, item), prompt_tokens=1, tokens=tokens).tokens_s
        for item in (rates, now)
    )
    used = max(arguments.tokens, 0 if measured["prefill"] is None else arguments.prompt)
    predicted: dict[str, float | None] = {
        "decode": cost.tokens_s,
        "spread": cost.range_tokens_s.high - cost.tokens_s,
        "scaled": scaled.tokens_s,
        "simulated": simulated,
        "simulated scaled": simulated_now,
        "prefill": cost.prefill_tokens_s,
        "prefill scaled": scaled.prefill_tokens_s,
        "peak": float(count_memory(resolved, used)),
        "hits": cost.hit_rate,
    }
    chosen = resolved.plan
    reads = f"{chosen.io.engine} {chosen.io.threads}/{chosen.io.depth}"
    settings = (
        f"{chosen.decode.predictor}, {chosen.kv.type}, {reads}, {chosen.pipeline.cluster} a "
        f"cluster, ahead {chosen.decode.look_ahead}, chunk {chosen.prefill.chunk}, "
        f"hot {chosen.memory.segments.hot // MIB} + {chosen.memory.segments.cold // MIB} MiB"
    )
    assert wish.memory_bytes is not None
    return Row(
        memory_bytes=wish.memory_bytes,
        name=name,
        settings=settings,
        predicted=predicted,
        measured={
            **measured,
            "simulated": measured["decode"],
            "simulated scaled": measured["decode"],
            "scaled": measured["decode"],
            "prefill scaled": measured["prefill"],
        },
    )


COLUMNS = (
    *("memory", "plan", "settings", "tokens/s predicted", "measured", "error"),
    *("at the run's rates, error", "simulated, error", "at the run's rates, error"),
    *("prompt predicted", "measured", "error"),
    *("at the run's rates, error", "peak MiB predicted", "measured", "error", "hits predicted"),
    *("measured", "reads MB/s", "stream MB/s"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def write_row(row: Row) -> str:
    """A line of the table."""
    cells = [format_bytes(row.memory_bytes), row.name, row.settings]
    cells += _pair(row, "decode", 1.0)
    for key in ("scaled", "simulated", "simulated scaled"):
        cells.append(f"{row.predicted[key]:.3g}, {_percent(row.compare(key))}")
    cells += _pair(row, "prefill", 1.0)
    cells.append(_percent(row.compare("prefill scaled")))
    cells += _pair(row, "peak", MIB)
    hits = row.measured["hits"]
    cells += [f"{row.predicted['hits']:.1%}", "-" if hits is None else f"{hits:.1%}"]
    for name in ("read_bytes_s", "stream_bytes_s"):
        rate = row.measured.get(name)
        cells.append("-" if rate is None else f"{rate / 1e6:.0f}")
    return f"| {' | '.join(cells)} |"


def _pair(row: Row, key: str, unit: float) -> list[str]:
    predicted, measured = row.predicted[key], row.measured[key]
    shown = ["-" if value is None else f"{value / unit:.4g}" for value in (predicted, measured)]
    return [*shown, _percent(row.compare(key))]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def describe(row: Row) -> dict[str, Any]:
    """Everything about the rows, for programs."""
    names = ("memory_bytes", "name", "settings", "predicted", "measured")
    return {name: getattr(row, name) for name in names}


def print_verdict(rows: Sequence[Row]) -> int:
    """Say of each promise whether it was kept; 1 where one was not."""
    broken = 0
    print()
    for memory in dict.fromkeys(row.memory_bytes for row in rows):
        own = [row for row in rows if row.memory_bytes == memory]
        first = [row for row in own if row.name.startswith("planner")]
        others = [row for row in own if not row.name.startswith("planner")]
        speeds = [row.measured["decode"] for row in first]
        # The machine's own drift is no fault of the plan.
        drift = max(speeds) / min(speeds) - 1.0
        print(
            f"{format_bytes(memory)}: the planner's plan, measured {len(speeds)} times, differs by "
            f"{drift:.1%}"
        )
        spread = first[0].predicted["spread"] or 0.0
        print(
            f"  promised {first[0].predicted['decode']:.4g} ± {spread:.2g} tokens/s, measured "
            f"{statistics.fmean(speeds):.4g} ({min(speeds):.4g} to {max(speeds):.4g})"
        )
        bounds = (("decode", SPEED_BOUND), ("scaled", SPEED_BOUND), ("peak", MEMORY_BOUND))
        for key, bound in bounds:
            expected = statistics.fmean(row.predicted[key] or 0.0 for row in first)
            off = expected / statistics.fmean(row.measured[key] for row in first) - 1.0
            broken += (verdict := abs(off) > bound)
            print(f"  {key}: {off:+.1%}, {'NOT ' if verdict else ''}within {bound:.0%}")
        for name in ("decode", "scaled", "simulated", "simulated scaled", *PROMPTS, "peak"):
            errors = [abs(error) for row in own if (error := row.compare(name)) is not None]
            if errors:
                mean, worst = statistics.fmean(errors), max(errors)
                print(f"  {name}, all {len(errors)} runs: mean {mean:.1%}, worst {worst:.1%}")
        if others:
            best = max(others, key=lambda row: row.measured["decode"])
            ratio = max(speeds) / best.measured["decode"]
            broken += (slower := ratio < 1.0 - max(drift, 0.02))
            print(
                f"  of {len(others)} other plans the fastest is {best.name} with "
                f"{best.measured['decode']:.3g} tokens/s ({best.settings}); the planner's makes "
                f"{ratio:.2f} times that{': SLOWER' if slower else ''}"
            )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
