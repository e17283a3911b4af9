"""Tables of docs/reference/performance.md, written from results files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from real.results import RANDOM, RESULTS, ModelResult, Results, Row, read_results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "performance.md"
_HEAD = (
    "| file, memory | engine | decode | ratio | prompts | load | peak |\n"
    "|---|---|--:|--:|--:|--:|--:|"
)


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
        f"{results.date}; {machine.processor}; sequential disk reads "
        f"{machine.disk_bytes_s / 1e9:.1f} GB/s; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". {machine.note}".rstrip(". ")
        + ". Both engines read the same file with a thread for each core, in turns; medians.",
        "",
        _HEAD,
    ]
    for model in results.models:
        lines += render_rows(model)
    if drafts := render_drafts(results.models):
        lines += ["", *drafts]
    if measured := [model for model in results.models if model.quality is not None]:
        lines += [
            "",
            "In brackets: the distance of llama.cpp from itself when it computes the same tokens "
            "one by one.",
            "",
            "| file | perplexity | llama.cpp | KL divergence, nats | same top token | answers |",
            "|---|--:|--:|--:|--:|--:|",
            *map(render_quality, measured),
        ]
    lines += ["", f"```sh\n{results.command}\n```"]
    return "\n".join(lines)


def render_rows(model: ModelResult) -> list[str]:
    """The rows of a file, by limit and engine."""
    lines = []
    for row in model.rows:
        memory = "no limit" if row.share >= 1 else f"{row.share:.0%} of the file"
        head = f"| {model.file} ({model.size_bytes / 2**20:,.0f} MiB), {memory} | {row.engine} |"
        if row.failure is not None:
            lines.append(f"{head} {row.failure} | | | | |")
            continue
        peers = [
            other
            for other in model.rows
            if other.share == row.share and other.engine != row.engine and other.figures
        ]
        ratio = ""
        if row.engine == "pi2" and peers:
            ratio = f"{row.figures['decode_tokens_s'] / peers[0].figures['decode_tokens_s']:.2f}x"
        lines.append(f"{head} {render_figures(row, ratio)} |")
    return lines


def render_drafts(models: Sequence[ModelResult]) -> list[str]:
    """Rows whose weights stream: how near the disk's rate they are, and what drafts give."""
    return [
        f"- {model.file} within {row.share:.0%}: {row.figures['of_disk']:.0%} of the disk's rate; "
        f"editing code {row.figures['edit_tokens_s']:.1f} tok/s with drafts, "
        f"{row.figures['edit_plain_tokens_s']:.1f} without."
        for model in models
        for row in model.rows
        if "of_disk" in row.figures
    ]


def render_figures(row: Row, ratio: str) -> str:
    """Cells of a row: tokens/s, ratio, prompts' tokens/s, seconds, MiB."""
    figures = row.figures
    prompts = [f"{value:,.0f}" for name, value in figures.items() if name.startswith("prompt_")]
    return " | ".join(
        [
            f"{figures['decode_tokens_s']:,.1f} tok/s",
            ratio,
            " / ".join(prompts) + " tok/s",
            f"{figures['load_s']:.2f} s",
            f"{figures['peak_bytes'] / 2**20:,.0f} MiB",
        ]
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
        f"| {model.file} | {quality.perplexity:.3f} | {quality.peer_perplexity:.3f}{own[0]} "
        f"| {quality.kl_nats:.4f}{own[1]} | {quality.top_equal:.1%}{own[2]} "
        f"| {quality.answers_equal} of {quality.answers}{own[3]} |"
    )
