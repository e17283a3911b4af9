"""Tables of docs/reference/performance.md, written from results files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from real.results import RANDOM, RESULTS, Machine, ModelResult, Results, Row, read_results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "performance.md"
_HEAD = (
    "| file | memory | decode, tok/s | ratio | prompts, tok/s | load, s | peak, MiB |\n"
    "|---|---|--:|--:|--:|--:|--:|"
)
ENGINES = ("pi2", "llama.cpp", "ik_llama.cpp")
"""In the order of a cell's figures; the last only where it was measured."""


@dataclass(frozen=True)
class Table:
    """A table of a page, between two markers, and the results that it shows."""

    name: str
    results: Path
    page: Path = PAGE


TABLES = {
    name: Table(name, path) for name, path in (("real models", RESULTS), ("random shapes", RANDOM))
}


def write_documents(table: Table, *, check: bool = False) -> int:
    """Put the table between its page's markers; with ``check`` 1 if that would change the page."""
    text = table.page.read_text(encoding="utf-8")
    begin, end = (f"<!-- {table.name}: {place} -->" for place in ("begin", "end"))
    if begin not in text or end not in text:
        raise SystemExit(f"{table.page}: no markers {begin} and {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    made = f"{before}{begin}\n\n{render_results(read_results(table.results))}\n\n{end}{after}"
    if check:
        return int(made != text)
    table.page.write_text(made, encoding="utf-8")
    return 0


def render_results(results: Results) -> str:
    """Conditions, speeds and quality as Markdown."""
    machine, versions = results.machine, results.versions
    lines = [
        f"{results.date}; {describe_machine(machine)}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + (f". {machine.note}".rstrip(". ") if machine.note else "")
        + f". Medians of turns; cells have {' / '.join(list_engines(results.models))}.",
        "",
        _HEAD,
    ]
    for model in results.models:
        lines += render_rows(model, list_engines(results.models))
    if drafts := render_drafts(results.models):
        lines += ["", *drafts]
    if measured := [model for model in results.models if model.quality is not None]:
        lines += [
            "",
            "Brackets: llama.cpp against itself, tokens one by one.",
            "",
            "| file | perplexity | llama.cpp | KL divergence, nats | same top token | answers |",
            "|---|--:|--:|--:|--:|--:|",
            *map(render_quality, measured),
        ]
    return "\n".join(lines)


def describe_machine(machine: Machine) -> str:
    parts = [machine.processor + (f" ({machine.features})" if machine.features else "")]
    if machine.memory_bytes_s:
        parts.append(f"memory {machine.memory_bytes_s / 1e9:.1f} GB/s")
    return "; ".join([*parts, f"disk {machine.disk_bytes_s / 1e9:.1f} GB/s"])


def list_engines(models: Sequence[ModelResult]) -> Sequence[str]:
    measured = {row.engine for model in models for row in model.rows}
    return ENGINES if ENGINES[-1] in measured else ENGINES[:-1]


def render_rows(model: ModelResult, engines: Sequence[str]) -> list[str]:
    """A row of a file for each limit, all engines in each cell, and the ratio to the best peer."""
    lines = []
    for share in dict.fromkeys(row.share for row in model.rows):
        rows = {row.engine: row for row in model.rows if row.share == share}
        shown = [rows.get(engine) for engine in engines]
        speeds = [row.figures["decode_tokens_s"] if row and row.figures else 0.0 for row in shown]
        best = max(speeds[1:])
        ratio = f"{speeds[0] / best:.2f}x" if best and speeds[0] else ""
        decode, prompts, load, peak = zip(*map(render_figures, shown), strict=True)
        cells = [decode, (ratio,), prompts, load, peak]
        memory = "no limit" if share >= 1 else f"{share:.0%} of the file"
        head = f"| {name_file(model)}, {model.size_bytes / 2**20:,.0f} MiB | {memory} "
        lines.append(head + "".join(f"| {' / '.join(cell)} " for cell in cells) + "|")
    return lines


def name_file(model: ModelResult) -> str:
    return model.file.removesuffix(".gguf")


def render_drafts(models: Sequence[ModelResult]) -> list[str]:
    """Rows whose weights stream: how near the disk's rate they are, and what drafts give."""
    return [
        f"- {name_file(model)} within {row.share:.0%}: {row.figures['of_disk']:.0%} of the disk's "
        f"rate; editing code {row.figures['edit_tokens_s']:.1f} tok/s with drafts, "
        f"{row.figures['edit_plain_tokens_s']:.1f} without."
        for model in models
        for row in model.rows
        if "of_disk" in row.figures
    ]


def render_figures(row: Row | None) -> tuple[str, str, str, str]:
    """Tokens/s, prompts' tokens/s, seconds, MiB; or the failure, or dashes."""
    if row is None or row.failure is not None:
        return ("-" if row is None else str(row.failure), "-", "-", "-")
    figures = row.figures
    prompts = [f"{value:,.0f}" for name, value in figures.items() if name.startswith("prompt_")]
    return (
        f"{figures['decode_tokens_s']:,.1f}",
        ", ".join(prompts),
        f"{figures['load_s']:.2f}",
        f"{figures['peak_bytes'] / 2**20:,.0f}",
    )


def render_quality(model: ModelResult) -> str:
    """Perplexities and distances of a file."""
    quality = model.quality
    assert quality is not None
    steps, own = quality.peer_steps, ["", "", "", ""]
    if steps is not None:
        texts = f"{steps.perplexity:.3f} {steps.kl_nats:.4f} {steps.top_equal:.1%}".split()
        own = [f" ({text})" for text in (*texts, str(steps.answers_equal))]
    return (
        f"| {name_file(model)} | {quality.perplexity:.3f} | {quality.peer_perplexity:.3f}{own[0]} "
        f"| {quality.kl_nats:.4f}{own[1]} | {quality.top_equal:.1%}{own[2]} "
        f"| {quality.answers_equal} of {quality.answers}{own[3]} |"
    )
