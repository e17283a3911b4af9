"""The memory-speed curve of a device and a model: a table, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.pictures import make_figure, save_figure
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, approximate_share
from pi2.planning.planner import PlannedPlan


def write_table(plans: Sequence[PlannedPlan]) -> Iterator[str]:
    """A Markdown table, a plan a row."""
    yield "| memory | tokens/s | in memory | waiting | predictor | keys and values | reads |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for item in plans:
        plan, cost = item.resolved.plan, item.cost
        waits = sum(layer.wait_s for layer in cost.layers) / cost.token_s
        reads = "none"
        if cost.hit_rate < 1.0:
            io = plan.io
            reads = (
                f"io_uring, {io.depth} deep"
                if io.engine == "io_uring"
                else f"pread, {io.threads} threads"
            )
        yield (
            f"| {approximate_bytes(plan.memory.budget)} | {approximate_number(cost.tokens_s)} |"
            f" {cost.hit_rate:.1%} | {approximate_share(waits)} | {plan.decode.predictor} |"
            f" {plan.kv.type} | {reads} |"
        )


def draw_curve(plans: Sequence[PlannedPlan], form: str) -> bytes:
    """The picture's bytes; UserError P632 without matplotlib, P633 for a type of
    picture that it does not draw."""
    wish = plans[0].wish
    figure = make_figure(7.0, 4.0)
    axes = figure.add_subplot()
    memories = [item.resolved.plan.memory.budget / 2**30 for item in plans]
    axes.plot(memories, [item.cost.tokens_s for item in plans], marker="o")
    axes.set_xlabel("memory of the process (GiB)")
    axes.set_ylabel("tokens per second, predicted")
    axes.set_title(f"{wish.model.name or wish.model.id} on {wish.device.name or wish.device.id}")
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    return save_figure(figure, form)
