"""Replay recorded routing through caches of experts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.options import add_json_option, add_path_option
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.statistics.replay import Replay
    from pi2.statistics.routing import RoutingTrace

GROUP = "More commands"

SHARES = ("5%", "10%", "20%", "30%", "50%", "70%")


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["lru", "lfu", "lru-layer", "lfu-layer", "belady", "belady-layer"]),
    help="Cache policy, repeatable: for all layers together, or one cache by layer. Default: all.",
)
@click.option(
    "--memory",
    "sizes",
    multiple=True,
    metavar="SIZE",
    help="Size of the cache, repeatable: '4 GiB', or a share of all experts such as '30%'.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First tokens that fill the cache and are not counted, such as a prompt's.",
)
@add_path_option("--plot", dir_okay=False, text="Write a plot (needs the extra `plot`).")
@add_json_option
def command(
    trace: Path,
    policies: tuple[str, ...],
    sizes: tuple[str, ...],
    skip: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Take the experts of TRACE (routing.parquet of `pi2 activations --routing`) through caches.

    belady knows what comes: no policy can be better.
    """
    from pi2.cli.activations import find_form
    from pi2.pictures import check_form
    from pi2.statistics.replay import POLICIES, replay_trace
    from pi2.statistics.routing import ROUTING, read_trace

    if plot is not None:
        check_form(find_form(plot))
    found = read_trace(trace / ROUTING if trace.is_dir() else trace)
    if skip >= len(found.chosen):
        raise click.BadParameter(f"the trace has {len(found.chosen)} tokens", param_hint="--skip")
    slots = [count_slots(size, found) for size in sizes or SHARES]
    chosen = [policy for policy in POLICIES if not policies or policy in policies]
    rows = [[replay_trace(found, policy, count, skip=skip) for count in slots] for policy in chosen]
    if plot is not None:
        write_plot(plot, rows)
    if as_json:
        click.echo(json.dumps([asdict(item) for row in rows for item in row], indent=2))
    else:
        click.echo(write_table(found, rows, slots))


def count_slots(size: str, trace: RoutingTrace) -> int:
    """Experts that a size has room for; UserError P552 for one that cannot be read, or that has no
    room for one token's."""
    from pi2.plan.documents.quantities import BYTE_UNITS, QuantityError, parse_quantity

    layers, chosen = trace.chosen.shape[1:]
    every = layers * trace.experts
    try:
        if size.strip().endswith("%"):
            count = round(float(size.strip()[:-1]) / 100 * every)
        else:
            size_bytes = int(parse_quantity(size, BYTE_UNITS))
            if not trace.expert_bytes:
                raise QuantityError("the trace does not say how large an expert is")
            count = size_bytes // trace.expert_bytes
    except (QuantityError, ValueError) as error:
        raise UserError.of("P552", f"{size!r}: {error}", help="write '4 GiB' or '30%'") from None
    if count < chosen:
        raise UserError.of(
            "P552",
            f"{size} holds {count} experts, and a layer needs {chosen} for a token",
            help="give a larger --memory",
        )
    return int(min(count, every))


def write_table(trace: RoutingTrace, rows: list[list[Replay]], slots: list[int]) -> str:
    """Hit rates by policy and size, as Markdown, and what a token reads."""
    from pi2.plan.documents.quantities import approximate_bytes

    tokens, layers, chosen = trace.chosen.shape
    demand = layers * chosen
    every = layers * trace.experts
    size = trace.expert_bytes

    def name(count: int) -> str:
        share = f"{count / every:.1%}"
        return f"{approximate_bytes(count * size)} ({share})" if size else share

    lines = [
        f"{tokens} tokens; a token needs {layers} layers x {chosen} experts = {demand} experts"
        + (f", {approximate_bytes(demand * size)}" if size else ""),
        "",
        f"| hits | {' | '.join(map(name, slots))} |",
        "|---|" + "---|" * len(slots),
    ]
    lines += [
        f"| {row[0].policy} | {' | '.join(f'{item.hit_rate:.1%}' for item in row)} |"
        for row in rows
    ]
    small = [name(count) for count in slots if count < demand]
    if small:
        lines += ["", f"Smaller than one token's demand: {', '.join(small)}."]
    if size and rows:
        best = [min(row[place].reads_token for row in rows) for place in range(len(slots))]
        parts = [approximate_bytes(round(count * size)) for count in best]
        lines += ["", f"Least that a token reads: {', '.join(parts)}."]
    return "\n".join(lines)


def write_plot(path: Path, rows: list[list[Replay]]) -> None:
    """Draw hit rates over sizes; UserError P631 if the file cannot be written."""
    from pi2.cli.activations import find_form
    from pi2.pictures import add_legend, make_figure, pick_styles, save_figure

    figure = make_figure(7, 4)
    axes = figure.subplots()
    for row, style in zip(rows, pick_styles(len(rows)), strict=True):
        shares = [100 * item.share for item in row]
        axes.plot(shares, [100 * item.hit_rate for item in row], label=row[0].policy, **style)
    axes.set_xlabel("cache, % of all experts")
    axes.set_ylabel("experts found in memory, %")
    axes.set_ylim(0, 100)
    add_legend(axes)
    try:
        path.write_bytes(save_figure(figure, find_form(path)))
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None
