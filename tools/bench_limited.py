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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from limited.engines import run_child
from limited.llama_cpp import check_installed
from limited.plans import (
    CONTEXT,
    ROOT,
    find_limit,
    fit_step,
    fit_whole,
    is_routed,
    prepare_store,
    write_limited_plan,
    write_whole_plan,
)
from limited.program import prepare_peer_file, run_limited, run_program, show
from limited.read_ahead import DENSE_KIB, MIXTURE_KIB
from limited.rows import ROWS
from limited.table import report
from pi2.caches import find_cache_folder
from pi2.fitting.check import load_plan
from pi2.machine import detect_machine
from pi2.measuring.contestant import BandwidthLimit
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes, format_bytes


def main() -> int:
    """Measure a row; a child of this program runs one engine once."""
    if sys.argv[1:2] == ["--child"]:
        return run_child(json.loads(sys.argv[2]))
    arguments = parse_arguments()
    if arguments.list:
        for name, row in ROWS.items():
            print(f"{name:16} {row.model:26} {row.goal}")
        return 0
    return run_program(lambda: measure_row(arguments))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Models larger than memory, beside llama.cpp.")
    parser.add_argument("row", nargs="?", choices=ROWS, help="which figure")
    parser.add_argument("--list", action="store_true", help="name the rows and their goals")
    parser.add_argument("--skew", type=float, default=0.26, help="of a store that is made (0.26)")
    parser.add_argument("--cache", type=Path, default=find_cache_folder("peers").parent / "limited")
    parser.add_argument("--model", help="another model document, such as one of fewer layers")
    parser.add_argument("--store", type=Path, help="a store that is there already")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="STORE",
        help="another store of the same model: all steps with it too, within the same limit",
    )
    parser.add_argument("--tokens", type=int, default=64, help="to generate (64)")
    parser.add_argument("--peer-tokens", type=int, help="for llama.cpp to generate (as many)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--only", action="append", metavar="ENGINE", help="leave others out")
    parser.add_argument(
        "--before", default="", help='command that starts every run ("nice -n -20")'
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-o", "--output", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    if arguments.row is None and not arguments.list:
        parser.error("name a row, or give --list")
    return arguments


def measure_row(arguments: argparse.Namespace) -> None:
    """Prepare, run in turns, print."""
    from pi2.plan.toml.source import parse_assignments

    row, settings = ROWS[arguments.row], parse_assignments(tuple(arguments.set))
    if arguments.model is not None:
        row = replace(row, model=arguments.model)
    store, whole = prepare_store(row, arguments)
    limit_bytes = find_limit(row, store, whole)
    plan = write_limited_plan(row, store, whole, limit_bytes)
    resolved = load_plan(plan, overrides=settings)
    tokens = {"prefill": row.prefill, "tokens": 0 if row.prefill else arguments.tokens}
    # Mixtures whose routers choose whole experts run as llama.cpp's file.
    routed = is_routed(resolved.model)
    stored = {} if routed else row.steps
    jobs: dict[str, dict[str, Any]] = {
        name: {
            "kind": "pi2",
            "plan": str(plan),
            "set": {**fit_step(resolved, step, settings), **settings},
            "limit": limit_bytes,
            **tokens,
        }
        for name, step in stored.items()
    }
    if arguments.beside is not None:
        other: Path = arguments.beside
        beside = write_whole_plan(row, other, arguments.cache)
        beside = write_limited_plan(row, other, beside, limit_bytes)
        for name, step in stored.items():
            fitted = fit_step(load_plan(beside, overrides=settings), step, settings)
            jobs[f"{name}, {other.name}"] = {
                **jobs[name],
                "plan": str(beside),
                "set": {**fitted, **settings},
            }
    fits = load_plan(whole).plan.memory.budget < detect_machine().memory.limit_bytes
    if fits and not routed:
        jobs["pi2, all in memory"] = {
            "kind": "pi2",
            "plan": str(whole),
            "set": fit_whole(row, settings),
            "limit": 0,
            **tokens,
        }
    if not arguments.no_peer:
        peer = prepare_peer(resolved, arguments, limit_bytes, tokens)
        kib = DENSE_KIB if resolved.model.moe is None else MIXTURE_KIB
        # What the system has set, and what is best for such files.
        jobs["llama.cpp, mapped"] = peer
        jobs[f"llama.cpp, {kib} KiB ahead"] = {**peer, "read_ahead_kib": kib}
        if fits:
            count = {"tokens": tokens["tokens"], "limit": 0, "repack": True}
            jobs["llama.cpp, all in memory"] = {**peer, **count}
        if routed:
            job = {"kind": "pi2", "plan": str(write_file_plan(resolved, limit_bytes)), "set": {}}
            limited = {**job, "limit": limit_bytes, **tokens}
            jobs |= {name: {**limited, "set": dict(step)} for name, step in row.steps.items()}
            if fits:
                installed = format_bytes(detect_machine().memory.limit_bytes >> 20 << 20)
                whole_job = {**job, "set": {"memory.budget": installed}, "limit": 0, **tokens}
                jobs["pi2, all in memory"] = whole_job
    if arguments.only:
        jobs = {name: job for name, job in jobs.items() if name in arguments.only}
    check_room(limit_bytes)
    disk = measure_disk(resolved, arguments.before.split())
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with BandwidthLimit(2) as meter:
        speeds = meter.measure()
        for _ in range(arguments.repetitions):
            for name, job in jobs.items():
                results[name].append(
                    run_limited(__file__, job, str(job.get("folder", "")), arguments.before.split())
                )
                print(f"# {name}: {results[name][-1].get('tokens_s', 'failed')}", file=sys.stderr)
            speeds += meter.measure()
    lines = list(report(arguments.row, row, limit_bytes, resolved, results, disk, speeds))
    show(lines, arguments.output)


def write_file_plan(resolved: ResolvedPlan, limit_bytes: int) -> Path:
    """A plan that runs llama.cpp's file within the limit, in the folder of the row's plans."""
    path = resolved.path.with_name(
        f"{resolved.path.name.removesuffix('.plan.toml')}-file.plan.toml"
    )
    budget = format_bytes(limit_bytes)
    lines = ("schema_version = 3", f'weights = "{prepare_peer_file(resolved)}"')
    settings = (f'memory.budget = "{budget}"', f"kv.context = {CONTEXT}")
    path.write_text("\n".join((*lines, *settings, "")), "utf-8")
    return path


def check_room(limit_bytes: int) -> None:
    """End with a message if the machine has not got as much free memory as the limit: then the
    system would end whatever is largest."""
    available = detect_machine().memory.available_bytes
    if available < limit_bytes:
        has = f"{approximate_bytes(available)} of memory are free"
        raise SystemExit(f"{has}, the row needs {approximate_bytes(limit_bytes)}")


def prepare_peer(
    resolved: ResolvedPlan, arguments: argparse.Namespace, limit: int, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Write llama.cpp's file of the same shape; what runs it within a limit."""
    check_installed()
    folder = prepare_peer_file(resolved).parent
    count = tokens["tokens"] and (arguments.peer_tokens or tokens["tokens"])
    job = {"kind": "llama.cpp", "plan": str(resolved.path), "folder": str(folder), "limit": limit}
    return {**job, **tokens, "tokens": count}


def measure_disk(resolved: ResolvedPlan, before: Sequence[str]) -> dict[str, float]:
    """Bytes per second of random reads of neurons and of long reads, past the page cache."""
    files = sorted((resolved.store_path / "layers").iterdir())[:8]
    stride, rates = resolved.bundle.stride, {}
    for name, size in (("random", stride), ("sequential", 1 << 20)):
        done = subprocess.run(
            [
                *before,
                sys.executable,
                str(ROOT / "tools" / "bench_io.py"),
                str(files[0].parent.parent),
                *("--stride", str(size), "--batch", "1024" if name == "random" else "32"),
                *("--threads", "4", "--depths", "192"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split("|") for line in done.stdout.splitlines() if "io_uring" in line]
        rates[name] = float(rows[0][5]) * 1e6
    return rates


if __name__ == "__main__":
    sys.exit(main())
