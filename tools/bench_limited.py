"""Models larger than memory: pi2 and llama.cpp under the same memory limit, in turns.

    python tools/bench_limited.py 7b-60             a row; --list names them
    python tools/bench_limited.py 7b-50 --store /data/bamboo-7b --repetitions 1

Makes the row's synthetic store once, in a cache folder (tools/synthesize.py); writes a plan for the
limit; then, for every repetition and engine: drops the page cache, starts a process in a control
group with that limit (page cache counted, no swap), takes a prompt of 16 tokens, and times every
token that follows.  The rates of disk and memory are measured in the same run.  Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pi2.benchmarks.bandwidth import BandwidthLimit
from pi2.benchmarks.gguf_file import find_gguf, write_gguf
from pi2.benchmarks.llama_cpp import check_installed, find_peer_folder
from pi2.cli.progress import ProgressBar
from pi2.diagnostics import UserError, render
from pi2.machine import detect_machine
from pi2.machine.memory_group import GroupUnavailable, MemoryGroup
from pi2.plan.quantities import approximate_bytes, format_bytes
from pi2.plan.resolve import ResolvedPlan, load_plan

PROMPT_TOKENS = 16
CONTEXT = 1024
"""Tokens that the KV caches of all engines hold."""
RUNTIME_BYTES = 128 << 20
ROOT = Path(__file__).resolve().parents[1]
NO_CACHE = {"layers.hot": 0.0, "memory.segments.hot": "0 B", "cache.fill": False}
ALONE = {"pipeline.cluster": 1 << 20, "decode.look_ahead": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table of goals."""

    model: str
    """Short name of a model document."""
    limit: float
    """Share of the store (below 1), share of the FFN in memory (negative), or bytes."""
    goal: str
    prefill: int = 0
    """Tokens of a prompt to time instead of generating."""
    steps: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"pi2": {}})
    """Settings to compare, by name."""


ROWS: Mapping[str, Row] = {
    "7b-60": Row(model="bamboo-7b", limit=0.6, goal=">= 25 x llama.cpp, >= 60 % of in memory"),
    "7b-40": Row(model="bamboo-7b", limit=0.4, goal=">= 15 x llama.cpp"),
    "7b-50": Row(model="bamboo-7b", limit=-0.5, goal="I/O wait <= 15 %, P99/mean <= 1.8"),
    "llama2-7b-50": Row(model="relullama-7b", limit=-0.5, goal=">= 20 x llama.cpp"),
    "47b-19": Row(
        model="turbosparse-mixtral-47b", limit=19e9, goal=">= 11.68 tokens/s, >= 20 x llama.cpp"
    ),
    "47b-10.5": Row(model="turbosparse-mixtral-47b", limit=10.5e9, goal=">= 3.6 tokens/s"),
    "47b-7": Row(model="turbosparse-mixtral-47b", limit=7e9, goal=">= 2.13 tokens/s"),
    "prefill-7b-50": Row(
        model="bamboo-7b", limit=-0.5, goal=">= 70 % of the prefill in memory", prefill=512
    ),
    "ablation-7b-50": Row(
        model="bamboo-7b",
        limit=-0.5,
        goal="each step faster than the one before",
        steps={
            "mmap": {**NO_CACHE, **ALONE, "io.engine": "mmap", "cache.policy": "lru"},
            "bundles": {**NO_CACHE, **ALONE, "io.engine": "pread", "cache.policy": "lru"},
            "cache": {**ALONE, "io.engine": "pread"},
            "pipeline": {},
        },
    ),
}


def main() -> int:
    """Measure a row; a child of this program runs one engine once."""
    if sys.argv[1:2] == ["--child"]:
        return run_child(json.loads(sys.argv[2]))
    arguments = parse_arguments()
    if arguments.list:
        for name, row in ROWS.items():
            print(f"{name:16} {row.model:26} {row.goal}")
        return 0
    try:
        measure_row(arguments)
    except UserError as error:
        sys.stderr.write(render.full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    except GroupUnavailable as reason:
        print(f"no memory limit can be set here: {reason}", file=sys.stderr)
        return 2
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Models larger than memory, beside llama.cpp.")
    parser.add_argument("row", nargs="?", choices=ROWS, help="which figure")
    parser.add_argument("--list", action="store_true", help="name the rows and their goals")
    parser.add_argument("--skew", type=float, default=0.26, help="of a store that is made (0.26)")
    parser.add_argument("--cache", type=Path, default=find_peer_folder().parent / "limited")
    parser.add_argument("--store", type=Path, help="a store that is there already")
    parser.add_argument("--tokens", type=int, default=64, help="to generate (64)")
    parser.add_argument("--peer-tokens", type=int, help="for llama.cpp to generate (as many)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-o", "--output", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    if arguments.row is None and not arguments.list:
        parser.error("name a row, or give --list")
    return arguments


def measure_row(arguments: argparse.Namespace) -> None:
    """Prepare, run in turns, print."""
    from pi2.plan.overrides import parse_assignments

    row, settings = ROWS[arguments.row], parse_assignments(tuple(arguments.set))
    store, whole = prepare_store(row, arguments)
    limit_bytes, plan = write_limited_plan(row, store, whole)
    resolved = load_plan(plan, overrides=settings)
    tokens = {"prefill": row.prefill, "tokens": 0 if row.prefill else arguments.tokens}
    jobs: dict[str, dict[str, Any]] = {
        name: {
            "kind": "pi2",
            "plan": str(plan),
            "set": {**fit_step(resolved, step), **settings},
            "limit": limit_bytes,
            **tokens,
        }
        for name, step in row.steps.items()
    }
    if load_plan(whole).plan.memory.budget < detect_machine().memory.limit_bytes:
        jobs["pi2, all in memory"] = {
            "kind": "pi2",
            "plan": str(whole),
            "set": settings,
            "limit": 0,
            **tokens,
        }
    if not arguments.no_peer:
        jobs["llama.cpp, mapped"] = prepare_peer(resolved, arguments, limit_bytes, tokens)
    disk = measure_disk(resolved)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with BandwidthLimit(2) as meter:
        speeds = meter.measure()
        for _ in range(arguments.repetitions):
            for name, job in jobs.items():
                results[name].append(run_limited(job))
                print(f"# {name}: {results[name][-1].get('tokens_s', 'failed')}", file=sys.stderr)
            speeds += meter.measure()
    lines = list(report(arguments.row, row, limit_bytes, resolved, results, disk, speeds))
    print("\n".join(lines))
    if arguments.output is not None:
        with arguments.output.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


def prepare_store(row: Row, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Make the store unless it is there; returns it, and a plan with everything in memory."""
    store: Path = arguments.store or arguments.cache / f"{row.model}-skew-{arguments.skew:g}"
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if not (store / "manifest.json").is_file():
        command = [sys.executable, str(ROOT / "tools" / "synthesize.py"), row.model, str(store)]
        command += ["--skew", str(arguments.skew), "--tokens", "32"]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    plan = arguments.cache / f"{store.name}.plan.toml"
    write_row_plan(row, store, plan, None)
    return store, plan


def write_row_plan(row: Row, store: Path, plan: Path, memory: int | None) -> None:
    """Write a plan for ``memory`` bytes, or with everything in memory."""
    from pi2.importing.synthesis.plan_file import PlanWish, write_plan
    from pi2.plan.check import check_file
    from pi2.plan.device import Device
    from pi2.plan.model import Model
    from pi2.plan.references import find_document
    from pi2.store.manifest import read_manifest

    model_file = find_document(row.model, "model", Path())
    model = check_file(model_file).document
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(model, Model) and isinstance(device, Device)
    write_plan(
        plan,
        model=model,
        model_file=model_file,
        device=device,
        store=store,
        bundle=read_manifest(store).bundle.layout,
        store_bytes=count_bytes(store),
        wish=PlanWish(memory=memory, context=CONTEXT),
    )


def count_bytes(store: Path) -> int:
    """Size of a store."""
    return sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


def write_limited_plan(row: Row, store: Path, whole: Path) -> tuple[int, Path]:
    """The limit in bytes, and a plan with that budget."""
    resolved = load_plan(whole)
    segments = resolved.plan.memory.segments
    if row.limit < 0:
        limit = resolved.plan.memory.budget + int(segments.hot * (-row.limit - 1))
    else:
        limit = int(row.limit * count_bytes(store)) if row.limit < 1 else int(row.limit)
    limit = limit >> 20 << 20
    plan = whole.with_name(f"{store.name}-{limit >> 20}.plan.toml")
    write_row_plan(row, store, plan, limit)
    # What this program's libraries take was measured; all else of a margin is for neurons.
    written = load_plan(plan).plan.memory.segments
    saved = max(0, written.runtime - RUNTIME_BYTES)
    absent = resolved.needs.hot.bytes - written.hot
    cold = min(written.cold + saved, absent)
    text = plan.read_text("utf-8")
    for name, before, after in (
        ("runtime", written.runtime, RUNTIME_BYTES),
        ("cold", written.cold, cold),
    ):
        text = text.replace(
            f'{name} = "{format_bytes(before)}"', f'{name} = "{format_bytes(after)}"'
        )
    plan.write_text(text, "utf-8")
    return limit, plan


def fit_step(resolved: ResolvedPlan, step: Mapping[str, object]) -> dict[str, object]:
    """A step without a cache keeps the least that a layer works with."""
    if "layers.hot" not in step:
        return dict(step)
    least = resolved.model.layer_neurons * resolved.bundle.stride
    return {**step, "memory.segments.cold": f"{least} B"}


def prepare_peer(
    resolved: ResolvedPlan, arguments: argparse.Namespace, limit: int, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Write llama.cpp's file of the same shape."""
    check_installed()
    folder = find_peer_folder()
    path = find_gguf(resolved.model, folder)
    if not path.exists():
        with ProgressBar() as progress:
            write_gguf(resolved.model, path, progress)
    count = tokens["tokens"] and (arguments.peer_tokens or tokens["tokens"])
    job = {"kind": "llama.cpp", "plan": str(resolved.path), "folder": str(folder), "limit": limit}
    return {**job, **tokens, "tokens": count}


def measure_disk(resolved: ResolvedPlan) -> dict[str, float]:
    """Bytes per second of random reads of neurons and of long reads, past the page cache."""
    files = sorted((resolved.store_path / "layers").iterdir())[:8]
    stride, rates = resolved.bundle.stride, {}
    for name, size in (("random", stride), ("sequential", 1 << 20)):
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "tools" / "bench_io.py"),
                str(files[0].parent.parent),
                *("--stride", str(size), "--batch", "128" if name == "random" else "32"),
                *("--threads", "4", "--depths", "128"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split("|") for line in done.stdout.splitlines() if "io_uring" in line]
        rates[name] = float(rows[0][5]) * 1e6
    return rates


def run_limited(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one engine once with an empty page cache; a limit of 0 is none."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    command = [sys.executable, "-B", str(Path(__file__).resolve()), "--child", json.dumps(job)]
    with ExitStack() as cleanup:
        if job["limit"]:
            group = cleanup.enter_context(MemoryGroup(job["limit"], name="pi2-bench"))
            process = group.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        else:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        out, err = process.communicate()
        if process.returncode:
            killed = bool(job["limit"]) and group.kills > 0
            why = "killed for lack of memory" if killed else err.strip()[-300:]
            return {"failed": why or f"exit status {process.returncode}"}
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        if job["limit"]:
            result["group_peak_bytes"] = group.peak_bytes
    return result


def run_child(job: Mapping[str, Any]) -> int:
    """Run an engine and print its figures as JSON."""
    result = run_peer(job) if job["kind"] == "llama.cpp" else run_pi2(job)
    print(json.dumps(result))
    return 0


def run_pi2(job: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, then tokens one by one."""
    import pi2.orchestrator
    from pi2.benchmarks.workloads import TokenSource
    from pi2.engine.statistics import read_peak_rss_bytes

    model = pi2.orchestrator.load(job["plan"], set=job["set"])
    parts, shape = model._parts, model.plan.model.shape
    source = TokenSource.walk_vocabulary(shape.vocab, model.plan.model.tokenizer.eos)
    if job["prefill"]:
        parts.forward.reset()
        start = time.perf_counter()
        parts.forward.prefill(source.take(job["prefill"]))
        seconds = time.perf_counter() - start
        return {"tokens_s": job["prefill"] / seconds, "peak_rss_bytes": read_peak_rss_bytes()}
    waited, finish = [0.0], parts.reader.finish

    def finish_timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        slots = finish(*arguments)
        waited[0] += time.perf_counter() - start
        return slots

    parts.reader.finish = finish_timed  # type: ignore[method-assign, assignment]
    parts.forward.reset()
    parts.forward.prefill(source.take(PROMPT_TOKENS))
    before, waited[0] = model.stats, 0.0
    times = []
    for token in source.take(job["tokens"]).tolist():
        start = time.perf_counter()
        parts.forward.decode(token)
        times.append(time.perf_counter() - start)
    counters = model.stats - before
    result = {
        "tokens_s": len(times) / sum(times),
        "p99_over_mean": float(np.quantile(times, 0.99) / np.mean(times)),
        "wait_share": waited[0] / sum(times),
        "active": counters.active_share,
        "predicted": counters.predicted_share,
        "hits": counters.hit_rate,
        "flash_bytes_token": counters.flash_read_bytes / len(times),
        "routing": counters.routing_recall,
        "peak_rss_bytes": read_peak_rss_bytes(),
        "load_s": model.load_s,
    }
    model.close()
    return result


def run_peer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The same with llama.cpp; its own count of tokens, which may be smaller."""
    from pi2.benchmarks.llama_cpp import LlamaRecipe
    from pi2.benchmarks.workloads import Workload
    from pi2.engine.statistics import read_peak_rss_bytes

    resolved = load_plan(job["plan"])
    recipe = LlamaRecipe(
        model=resolved.model,
        context=CONTEXT,
        threads=2,
        folder=Path(job["folder"]),
        repack=False,
    )
    peer = recipe(lambda label, share: None)
    if job["prefill"]:
        sample = peer.run(Workload("pp", job["prefill"], 0))
    else:
        sample = peer.run(Workload("tg", job["tokens"], PROMPT_TOKENS))
    return {"tokens_s": sample.tokens_s, "peak_rss_bytes": read_peak_rss_bytes()}


def report(
    name: str,
    row: Row,
    limit_bytes: int,
    resolved: ResolvedPlan,
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    disk: Mapping[str, float],
    speeds: Sequence[float],
) -> Iterator[str]:
    """Lines of the table, and what was measured beside it."""
    recipe = json.loads((resolved.store_path / "synthesis.json").read_text("utf-8"))
    yield (
        f"**{name}**: {row.model}, skew {recipe.get('skew', '?')}, limit "
        f"{approximate_bytes(limit_bytes)}; goal: {row.goal}. Plan {resolved.digest[:12]}."
    )
    yield ""
    yield (
        "| engine | t/s | P99 / mean | I/O wait | active | named | hits | flash MB/token "
        "| peak MiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    medians = {}
    for engine, runs in results.items():
        good = [run for run in runs if "tokens_s" in run]
        if not good:
            yield f"| {engine} | {runs[0]['failed']} | | | | | | | |"
            continue
        medians[engine] = statistics.median(run["tokens_s"] for run in good)
        spread = max(run["tokens_s"] for run in good) - min(run["tokens_s"] for run in good)

        def show(key: str, form: str, scale: float = 1.0, runs: Sequence[Any] = good) -> str:
            values = [run[key] for run in runs if run.get(key) is not None]
            return format(statistics.median(values) * scale, form) if values else "-"

        peak = show("group_peak_bytes", ".0f", 2**-20)
        yield (
            f"| {engine} | {medians[engine]:.2f} ± {spread / 2:.2f} "
            f"| {show('p99_over_mean', '.2f')} "
            f"| {show('wait_share', '.1%')} | {show('active', '.1%')} | {show('predicted', '.1%')} "
            f"| {show('hits', '.1%')} | {show('flash_bytes_token', '.1f', 1e-6)} "
            f"| {show('peak_rss_bytes', '.0f', 2**-20)} RSS, {peak} group |"
        )
    yield ""
    memory_gb_s = statistics.median(speeds) / 1e9
    yield (
        f"Disk: {disk['random'] / 1e6:.0f} MB/s in random neurons, "
        f"{disk['sequential'] / 1e6:.0f} MB/s in reads of 1 MiB. Memory: {memory_gb_s:.1f} GB/s. "
        f"Load average at the end {os.getloadavg()[0]:.1f}."
    )
    first = next(iter(row.steps)) if len(row.steps) == 1 else "pipeline"
    for other in ("llama.cpp, mapped", "pi2, all in memory"):
        if first in medians and other in medians:
            yield f"{first} / {other}: {medians[first] / medians[other]:.3g}."
    ahead = [run["routing"] for run in results[first] if run.get("routing") is not None]
    if ahead:
        yield f"Looking ahead named {statistics.median(ahead):.1%} of the experts that computed."
    missed = [run["flash_bytes_token"] for run in results[first] if "flash_bytes_token" in run]
    if missed:
        bound_s = statistics.median(missed) / disk["random"]
        yield f"Reading what was missed takes {bound_s * 1e3:.0f} ms per token at that rate."


if __name__ == "__main__":
    sys.exit(main())
