"""Figures of real models, as tools/results/real-models.json keeps them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real-models.json"
RANDOM = RESULTS.with_name("random-shapes.json")
"""Results of files with random weights, in the shapes of known models."""
_PIECE = 4 << 20
_DISK_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one engine under one memory limit."""

    engine: str
    variant: str = ""
    """How it ran, if there are several ways: mapped or repacked."""
    share: float
    """Memory limit as a share of the file; 1 means no limit."""
    turns: int
    figures: dict[str, float]
    """``load_s``, ``prompt_N_tokens_s``, ``decode_tokens_s``, ``peak_bytes``; empty on failure."""
    spread: float
    """Largest over smallest decode speed of the turns."""
    ids: list[int]
    """Tokens that were generated."""
    failure: str | None

    @classmethod
    def of(
        cls,
        engine: str,
        variant: str,
        share: float,
        runs: Sequence[dict[str, Any]],
        failure: str | None,
    ) -> Self:
        """Take the medians of ``runs``."""
        ids = list(runs[0]["ids"]) if runs else []
        names = [name for name in runs[0] if name != "ids"] if runs else []
        speeds = [run["decode_tokens_s"] for run in runs]
        return cls(
            engine=engine,
            variant=variant,
            share=share,
            turns=len(runs),
            figures={name: round(median(run[name] for run in runs), 4) for name in names},
            spread=round(max(speeds) / min(speeds), 3) if speeds else 1.0,
            ids=ids,
            failure=failure if not runs else None,
        )

    def describe(self) -> str:
        """A line for the terminal."""
        head = f"{self.share:4.0%} {self.engine:12} {self.variant:8} "
        if self.failure is not None:
            return f"{head} failed: {self.failure}"
        return head + "  ".join(f"{name} {value:,.2f}" for name, value in self.figures.items())


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Distance of llama.cpp, computing tokens one by one, from itself with all at once."""

    perplexity: float
    kl_nats: float
    top_equal: float
    answers_equal: int


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How good both engines' predictions of one text are."""

    perplexity: float
    peer_perplexity: float
    kl_nats: float
    """Mean KL divergence from llama.cpp's distributions to pi2's."""
    top_equal: float
    """Share of tokens for which both predict the same one."""
    answers: int
    """Prompts that both answered greedily."""
    answers_equal: int
    """Answers that are equal token by token."""
    gaps: list[float]
    """Where the others part: how much more probable pi2's token is than llama.cpp's, in nats."""
    peer_steps: Steps | None = None
    """llama.cpp's distance from itself, which no other engine can undercut; None in results of
    before."""


@dataclass(frozen=True)
class ModelResult:
    """All rows of one file."""

    file: str
    size_bytes: int
    rows: list[Row]
    quality: Quality | None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it was measured."""

    processor: str
    kernel: str
    features: str = ""
    """Features of the processor that pi2 used; empty in results of before, as the next."""
    memory_bytes_s: float = 0.0
    """Reads of all cores."""
    disk_bytes_s: float
    """Sequential direct reads of one of the files."""
    note: str


@dataclass(frozen=True)
class Results:
    """One run of the program."""

    date: str
    machine: Machine
    versions: dict[str, str]
    command: str
    models: list[ModelResult]


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Write the results file through a temporary file."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps(asdict(results), indent=1) + "\n")
    os.replace(made, path)


def read_quality(values: dict[str, Any] | None) -> Quality | None:
    """Read a file's quality, if it was measured."""
    if values is None:
        return None
    steps = values.get("peer_steps")
    return Quality(**(values | {"peer_steps": None if steps is None else Steps(**steps)}))


def read_results(path: Path = RESULTS) -> Results:
    """Read the results file."""
    values = json.loads(path.read_text())
    models = [
        ModelResult(
            item["file"],
            item["size_bytes"],
            [Row(**row) for row in item["rows"]],
            read_quality(item["quality"]),
        )
        for item in values["models"]
    ]
    machine = Machine(**values["machine"])
    return Results(values["date"], machine, values["versions"], values["command"], models)


def keep_others(results: Results, path: Path = RESULTS) -> Results:
    """Add rows and models that an earlier run of the same processor and versions measured."""
    if not path.exists():
        return results
    earlier = read_results(path)
    same = earlier.machine.processor == results.machine.processor
    versions = results.versions
    if not same or any(earlier.versions.get(name, own) != own for name, own in versions.items()):
        return results
    versions = earlier.versions | versions
    before = {model.file: model for model in earlier.models}
    models = []
    for model in results.models:
        kept = before.pop(model.file, model)
        rows = {
            (-row.share, row.engine != "pi2", row.engine): row for row in (*kept.rows, *model.rows)
        }
        quality = model.quality or kept.quality
        merged = [rows[key] for key in sorted(rows)]
        models.append(ModelResult(model.file, model.size_bytes, merged, quality))
    models = sorted([*before.values(), *models], key=lambda model: model.size_bytes)
    return replace(results, versions=versions, models=models, command=write_command(models, path))


def write_command(models: Sequence[ModelResult], path: Path) -> str:
    """The command that measures ``models`` again, whose results stand in ``path``."""
    parts = ["python tools/measure_real_models.py", *(model.file for model in models)]
    return " ".join([*parts, "--random"] if path == RANDOM else parts)


def measure_disk(files: Sequence[Path]) -> float:
    """Bytes per second of sequential reads of the largest file, without the page cache."""
    if not files:
        return 0.0
    file = max(files, key=lambda path: path.stat().st_size)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start, done = time.perf_counter(), 0
        while done < _DISK_BYTES and (piece := len(os.pread(descriptor, _PIECE, done))):
            done += piece
        return done / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
