"""What a sweep found, as tables and pictures; everything is simulated, not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.pictures import add_legend, make_figure, pick_styles, save_figure
from pi2.plan.documents.quantities import approximate_bytes, approximate_number
from pi2.planning.sweep import Outcome


def write_summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A Markdown table: simulated tokens per second by device and model over memory."""
    memories = sorted({item.memory_bytes for item in outcomes})
    absent = ""
    if len(outcomes) < len(memories) * len({(item.device, item.model) for item in outcomes}):
        absent = "; empty: more than the device has"
    yield f"Simulated tokens/s, not measured; `-`: no plan fits{absent}."
    yield ""
    yield "| device | model | " + " | ".join(approximate_bytes(size) for size in memories) + " |"
    yield "|" + " --- |" * (len(memories) + 2)
    rows: dict[tuple[str, str], dict[int, Outcome]] = {}
    for item in outcomes:
        rows.setdefault((item.device, item.model), {})[item.memory_bytes] = item
    for (device, model), cells in rows.items():
        shown = [_show(cells.get(size)) for size in memories]
        yield f"| {device} | {model} | " + " | ".join(shown) + " |"
    reasons = {item.code: item.reason for item in outcomes if item.code not in (None, "P350")}
    for code, reason in reasons.items():
        yield f"{code}: {reason}"


def _show(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.simulated_tokens_s is None:
        return "-" if outcome.code == "P350" else outcome.code or "-"
    return approximate_number(outcome.simulated_tokens_s)


def write_matrix(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A Markdown table, which device runs what: the fastest cell of each device and model."""
    devices = list(dict.fromkeys(item.device for item in outcomes))
    models = list(dict.fromkeys(item.model for item in outcomes))
    yield "Fastest tokens/s, simulated, and the memory it takes; `-`: no plan fits."
    yield ""
    yield "| device | " + " | ".join(models) + " |"
    yield "|" + " --- |" * (len(models) + 1)
    best = find_fastest(outcomes)
    for device in devices:
        cells = []
        for model in models:
            found = best.get((device, model))
            if found is None or found.simulated_tokens_s is None:
                cells.append("-")
                continue
            speed = approximate_number(found.simulated_tokens_s)
            cells.append(f"{speed} ({approximate_bytes(found.memory_bytes)})")
        yield f"| {device} | " + " | ".join(cells) + " |"


def find_fastest(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Outcome]:
    """The fastest cell of each device and model; of equal ones that with the least memory."""
    found: dict[tuple[str, str], Outcome] = {}
    for item in sorted(outcomes, key=lambda item: item.memory_bytes):
        old = found.get((item.device, item.model))
        speed = item.simulated_tokens_s
        if speed is not None and (old is None or speed > (old.simulated_tokens_s or 0.0) * 1.01):
            found[item.device, item.model] = item
    return found


def draw_matrix(outcomes: Sequence[Outcome], form: str) -> bytes:
    """Draw which device runs what: a field for each device and model, darker where it is faster.

    UserError P632 without matplotlib.
    """
    figure = make_figure(4.0, 1.5)
    devices = list(dict.fromkeys(item.device for item in outcomes))
    models = list(dict.fromkeys(item.model for item in outcomes))
    # Long names lie below and beside the fields, and take nothing of them.
    below, beside = (max(map(len, names), default=0) for names in (models, devices))
    figure.set_size_inches(
        1.8 + 0.08 * beside + 1.6 * len(models), 1.3 + 0.03 * below + 0.5 * len(devices)
    )
    best = find_fastest(outcomes)
    speeds = [[_read_speed(best.get((device, model))) for model in models] for device in devices]
    axes = figure.add_subplot()
    axes.imshow(speeds, cmap="Blues", aspect="auto", vmin=0.0)
    axes.set_xticks(range(len(models)), models, rotation=20, ha="right")
    axes.set_yticks(range(len(devices)), devices)
    most = max((speed for row in speeds for speed in row), default=0.0)
    for y, device in enumerate(devices):
        for x, model in enumerate(models):
            item, speed = best.get((device, model)), speeds[y][x]
            text = "-"
            if item is not None:
                text = f"{approximate_number(speed)}\n{approximate_bytes(item.memory_bytes)}"
            colour = "white" if speed > 0.6 * most else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)
    axes.set_title("Tokens/s, simulated, and the memory they take")
    return save_figure(figure, form)


def _read_speed(outcome: Outcome | None) -> float:
    return 0.0 if outcome is None else outcome.simulated_tokens_s or 0.0


def draw_summary(outcomes: Sequence[Outcome], form: str) -> bytes:
    """Speed over memory, a picture per device; UserError P632 without matplotlib."""
    devices = list(dict.fromkeys(item.device for item in outcomes))
    models = list(dict.fromkeys(item.model for item in outcomes))
    styles = dict(zip(models, pick_styles(len(models)), strict=True))  # the same on every device
    figure = make_figure(9.0, max(3.0, 0.25 * len(models)) * len(devices))
    memories = [item.memory_bytes / 2**30 for item in outcomes]
    room = 0.03 * (max(memories) - min(memories)) or 0.5
    for number, device in enumerate(devices):
        axes = figure.add_subplot(len(devices), 1, number + 1)
        own = [item for item in outcomes if item.device == device]
        for model, style in styles.items():
            points = [
                (item.memory_bytes / 2**30, item.simulated_tokens_s)
                for item in own
                if item.model == model and item.simulated_tokens_s is not None
            ]
            if points:
                axes.plot([x for x, _ in points], [y for _, y in points], label=model, **style)
        axes.set_title(f"{device}, simulated")
        axes.set_xlabel("memory (GiB)")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0.0)
        axes.set_xlim(min(memories) - room, max(memories) + room)
        axes.grid(alpha=0.3)
        if axes.lines:
            add_legend(axes)
    return save_figure(figure, form)
