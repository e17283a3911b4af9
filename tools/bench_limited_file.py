"""A GGUF file larger than memory: pi2 and llama.cpp under the same memory limit, in turns.

    python tools/write_random_mixture.py qwen3.6-35b-a3b --routing published FILE.gguf
    python tools/bench_limited_file.py FILE.gguf --memory 8GB

Both are given the same tokens: a prompt of 16, then one after the other.  Page cache counts, and is
dropped before each run; llama.cpp maps the file, with the system's read-ahead and with a short one.
Needs root and llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from limited.engines import PROMPT_TOKENS, run_pi2
from limited.llama_cpp import LlamaRecipe, check_installed
from limited.program import drop_page_cache, run_limited, run_program
from limited.read_ahead import DENSE_KIB, MIXTURE_KIB
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.measuring.contestant import BandwidthLimit
from pi2.measuring.report import Workload
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    approximate_bytes,
    format_bytes,
    parse_quantity,
)
from pi2.progress import ignore_progress
from pi2.refit import read_plan

CONTEXT = 1024
READ_BYTES, READS = 1 << 20, 512


def main() -> int:
    """Measure a file; a child of this program runs one engine once."""
    if sys.argv[1:2] == ["--child"]:
        job = json.loads(sys.argv[2])
        print(json.dumps(run_pi2(job) if job["kind"] == "pi2" else run_peer(job)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--memory", required=True, help="limit of both engines, such as 8GB")
    parser.add_argument("--tokens", type=int, default=64, help="to generate (64)")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=0, help="time a prompt of so many instead")
    arguments = parser.parse_args()
    check_installed()
    return run_program(lambda: measure_file(arguments))


def measure_file(arguments: argparse.Namespace) -> None:
    """Run both engines in turns, and print a table."""
    limit = int(parse_quantity(arguments.memory, BYTE_UNITS)) >> 20 << 20
    with TemporaryDirectory() as folder:
        plan = Path(folder) / "limited.plan.toml"
        lines = ("schema_version = 3", f'weights = "{arguments.file.resolve()}"')
        settings = (f'memory.budget = "{format_bytes(limit)}"', f"kv.context = {CONTEXT}")
        plan.write_text("\n".join((*lines, *settings, "")), "utf-8")
        job = {"plan": str(plan), "tokens": arguments.tokens, "limit": limit}
        job |= {"file": str(arguments.file.resolve()), "prefill": arguments.prompt, "set": {}}
        kib = DENSE_KIB if read_model(plan).moe is None else MIXTURE_KIB
        jobs: dict[str, dict[str, Any]] = {
            "pi2": {**job, "kind": "pi2"},
            "llama.cpp, mapped": {**job, "kind": "llama.cpp"},
            f"llama.cpp, mapped, {kib} KiB ahead": {
                **job,
                "kind": "llama.cpp",
                "read_ahead_kib": kib,
            },
        }
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        disk = measure_disk(arguments.file)
        with BandwidthLimit(2) as meter:
            speed = statistics.median(meter.measure())
        for _ in range(arguments.repetitions):
            for name, own in jobs.items():
                results[name].append(run_limited(__file__, own, own["file"]))
                print(f"# {name}: {results[name][-1]}", file=sys.stderr)
    size = approximate_bytes(arguments.file.stat().st_size)
    print(f"**{arguments.file.name}**, {size}, within {approximate_bytes(limit)}\n")
    print("\n".join(list_rows(results)))
    print(f"\nDisk {disk / 1e6:.0f} MB/s in reads of 1 MiB, memory {speed / 1e9:.1f} GB/s.")


def list_rows(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Lines of the table."""
    yield "| engine | tokens/s | hits | waiting | MB read a token | peak of the group, MiB |"
    yield "|---|---|---|---|---|---|"
    for engine, runs in results.items():
        good = [run for run in runs if "tokens_s" in run]
        if not good:
            yield f"| {engine} | {runs[0]['failed']} | | | | |"
            continue
        rates = [run["tokens_s"] for run in good]
        cells = [f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"]
        for key, form, scale in (
            ("hits", ".0%", 1.0),
            ("wait_share", ".0%", 1.0),
            ("flash_bytes_token", ".1f", 1e-6),
            ("group_peak_bytes", ".0f", 2**-20),
        ):
            values = [run[key] for run in good if run.get(key) is not None]
            cells.append(format(statistics.median(values) * scale, form) if values else "-")
        yield f"| {engine} | {' | '.join(cells)} |"


def read_model(plan: Path) -> Model:
    """The model of a plan; `UserError` with all findings."""
    report = read_plan(plan).report
    if report.resolved is None:
        raise report.make_error()
    return report.resolved.model


def run_peer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run llama.cpp on the file."""
    recipe = LlamaRecipe(
        model=read_model(Path(job["plan"])),
        context=CONTEXT,
        threads=2,
        file=Path(job["file"]),
        repack=False,
    )
    peer = recipe(ignore_progress)
    kinds = {True: Workload("pp", job["prefill"], 0)}
    sample = peer.run(kinds.get(bool(job["prefill"]), Workload("tg", job["tokens"], PROMPT_TOKENS)))
    return {"tokens_s": sample.tokens_s, "peak_rss_bytes": read_peak_rss_bytes()}


def measure_disk(file: Path) -> float:
    """Bytes per second of `READS` reads past the page cache, spread over the file."""
    drop_page_cache()
    places = file.stat().st_size // READ_BYTES
    handle = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def read(number: int) -> int:
        buffer = mmap.mmap(-1, READ_BYTES)
        return os.preadv(handle, [buffer], number * 7919 % places * READ_BYTES)

    try:
        with ThreadPoolExecutor(16) as pool:
            start = time.perf_counter()
            done = sum(pool.map(read, range(READS)))
            return done / (time.perf_counter() - start)
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
