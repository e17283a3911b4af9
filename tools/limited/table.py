"""The table of a row, and what was measured beside it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from limited.plans import is_routed
from limited.rows import Row
from pi2.engine.accounts import count_token_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes

WHOLE, WHOLE_PEER = "pi2, all in memory", "llama.cpp, all in memory"
"""Names of engines that no limit holds."""
_POSITION = 48
"""Tokens in the context while one is computed, about: they take few of the bytes."""


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
        "| engine | t/s | P99 / mean | I/O wait | active | computed | left out "
        "| of the scores | hits | flash MB/token | peak MiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    medians = {}
    for engine, runs in results.items():
        good = [run for run in runs if "tokens_s" in run]
        if not good:
            yield f"| {engine} | {runs[0]['failed']} | | | | | | | | | |"
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
            f"| {show('wait_share', '.1%')} "
            f"| {show('active', '.2%')} | {show('predicted', '.1%')} "
            f"| {show('skips', '.1%')} | {show('scores_left_out', '.2%')} "
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
    if WHOLE in medians:
        yield _describe_whole(row, medians, resolved, results[WHOLE], memory_gb_s)
    for step in row.steps:
        if step not in medians:
            continue
        parts = [f"{step}:"]
        peers = [name for name in medians if name.startswith("llama.cpp") and name != WHOLE_PEER]
        best = max(peers, key=lambda name: medians[name], default="")
        for other in (best, WHOLE):
            if other in medians:
                parts.append(f"{medians[step] / medians[other]:.3g} x {other};")
        found, every = _find(results[step], "active"), _find(results.get(WHOLE, ()), "active")
        if found is not None and every:
            parts.append(f"{found / every:.1%} of the neurons that fire there;")
        routing = _find(results[step], "routing")
        if routing is not None:
            parts.append(f"looking ahead named {routing:.1%} of the experts that computed;")
        missed = _find(results[step], "flash_bytes_token")
        if missed is not None:
            # Experts are read in long requests.
            is_long = bool(row.prefill) or is_routed(resolved.model)
            name = "sequential" if is_long else "random"
            bound_s = missed / disk[name]
            parts.append(f"reading what it missed takes {bound_s * 1e3:.1f} ms per token;")
            if is_long and not row.prefill:
                share = missed * medians[step] / disk[name]
                parts.append(f"reads reached {share:.0%} of the disk's rate;")
        yield "- " + " ".join(parts).rstrip(";") + "."


def _describe_whole(
    row: Row,
    medians: Mapping[str, float],
    resolved: ResolvedPlan,
    runs: Sequence[Mapping[str, Any]],
    memory_gb_s: float,
) -> str:
    """A line about the run with everything in memory."""
    parts = [f"{WHOLE}:"]
    if WHOLE_PEER in medians:
        parts.append(f"{medians[WHOLE] / medians[WHOLE_PEER]:.3g} x {WHOLE_PEER};")
    found = count_token_bytes(resolved, active=_find(runs, "active"), position=_POSITION)
    if found is not None and not row.prefill:
        share = found.total * medians[WHOLE] / memory_gb_s / 1e9
        parts.append(
            f"a token reads {found.total / 1e6:.0f} MB, which is {share:.0%} of what memory gives;"
        )
    return "- " + " ".join(parts).rstrip(";") + "."


def _find(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Median of a figure; None where no run has it."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return statistics.median(values) if values else None
