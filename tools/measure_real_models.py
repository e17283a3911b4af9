"""Measure pi2 and its peers on the same GGUF files, in turns, and write what was measured.

    python tools/measure_real_models.py FILE.gguf... --peer PYTHON [--ik PYTHON]
    python tools/measure_real_models.py --docs [--check]

PYTHON is an interpreter that imports `llama_cpp`, or `ik_llama_cpp`, built for this processor.  In
memory a peer's row is the better of mapped and repacked weights; within limits it is mapped, as
repacked weights are a copy in memory.  PI2_CPU makes pi2 one for an older processor.

Results go to tools/results/real-models.json, with ``--random`` to random-shapes.json; ``--docs``
writes the tables of performance.md from both.  Models, rows and quality of the same machine and
versions are kept.  ``--shares`` without a value measures quality only.  Rows below 100 % of a file
run in a memory group of that size (Linux, root), which counts the page cache.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from limited.memory_group import GroupUnavailable, MemoryGroup
from pi2.machine.cpu import detect_cpu
from pi2.measuring.contestant import BandwidthLimit
from real.documents import TABLES, write_documents
from real.engines import Engine, IkLlamaCpp, LlamaCpp, Pi2, Workload, measure_quality
from real.results import (
    Machine,
    ModelResult,
    Results,
    Row,
    keep_others,
    measure_disk,
    write_command,
    write_results,
)

PATIENCE_S = 300
"""Seconds after which a run under a limit is given up."""
GROUP_SLACK = 1.02
"""A memory group is larger than the budget by the pages of the kernel."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf")
    parser.add_argument("--peer", default=sys.executable, help="Python that imports llama_cpp")
    parser.add_argument("--ik", help="Python that imports ik_llama_cpp")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.8, 0.6, 0.4])
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--random", action="store_true", help="files of random weights: speed only")
    parser.add_argument("--docs", action="store_true", help="write documents from the results")
    parser.add_argument("--check", action="store_true", help="fail if documents differ")
    parser.add_argument("--note", default="", help="a remark about the machine's state")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.docs:
        return max(write_documents(table, check=options.check) for table in TABLES.values())
    table = TABLES["random shapes" if options.random else "real models"]
    both = (Pi2(sys.executable), LlamaCpp(options.peer))
    engines = (*both, *([IkLlamaCpp(options.ik)] if options.ik else []))
    work = Workload(options.prompts, options.tokens)
    models = []
    for file in options.files:
        rows = []
        for share in options.shares:
            for engine_row in measure_share(file, share, engines, work, options.turns):
                print(engine_row.describe(), flush=True)
                rows.append(engine_row)
        skipped = options.no_quality or options.random
        quality = None if skipped else measure_quality(file, both)
        models.append(ModelResult(file.name, file.stat().st_size, rows, quality))
    machine = Machine(
        processor=find_processor(),
        kernel=platform.release(),
        features=" ".join(sorted(detect_cpu().features)),
        memory_bytes_s=measure_memory(),
        disk_bytes_s=measure_disk(options.files),
        note=options.note,
    )
    versions = {engine.name: engine.find_version() for engine in engines}
    command = write_command(models, table.results)
    results = Results(datetime.now(UTC).date().isoformat(), machine, versions, command, models)
    write_results(keep_others(results, table.results), table.results)
    print(f"wrote {table.results}")
    return write_documents(table)


def measure_share(
    file: Path, share: float, engines: Sequence[Engine], work: Workload, turns: int
) -> list[Row]:
    """Rows of the engines with ``share`` of the file as the memory limit; 1 means no limit."""
    limit = None if share >= 1 else int(file.stat().st_size * share)
    found = []
    ways = [
        (engine, variant)
        for engine in engines
        for variant in (engine.variants if limit is None else engine.variants[:1])
    ]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    failures: dict[tuple[str, str], str] = {}
    if limit is not None:
        # Compilers would have to share the group's memory.
        run_limited(engines[0].make_command(file, Workload([16], 2), limit), None)
    for _ in range(turns):
        for engine, variant in ways:
            command, way = engine.make_command(file, work, limit, variant), (engine.name, variant)
            outcome = run_limited(command, limit)
            try:
                runs.setdefault(way, []).append(engine.read_figures(outcome))
            except ValueError as error:
                failures[way] = str(error)
    for engine in engines:
        own = [(engine.name, variant) for owner, variant in ways if owner is engine]
        rows = [Row.of(*way, share, runs.get(way, []), failures.get(way)) for way in own]
        found.append(max(rows, key=lambda row: row.figures.get("decode_tokens_s", 0.0)))
    return found


def measure_memory() -> float:
    """Bytes per second that all cores read from memory, the median of some passes."""
    with BandwidthLimit(detect_cpu().cores) as limit:
        return limit.summarise(limit.measure()).bytes_s


def run_limited(command: list[str], limit: int | None) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with cold page cache in a memory group, or as it is without a limit."""
    if limit is None:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    drop_page_cache()
    try:
        with MemoryGroup(int(limit * GROUP_SLACK), name="real-models") as group:
            process = group.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            try:
                out, errors = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return subprocess.CompletedProcess(command, 1, "", f"over {PATIENCE_S} s")
            return subprocess.CompletedProcess(command, process.returncode, out, errors)
    except GroupUnavailable as error:
        raise SystemExit(f"no memory group here: {error}") from error


def drop_page_cache() -> None:
    """Forget cached files, so that the limit decides what is cached."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def find_processor() -> str:
    """Model name of the processor, and its cores."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
