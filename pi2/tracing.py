"""Slices, arrows and counters of a run, and their form for Chrome's and Perfetto's viewers."""

from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from pi2.diagnostics import UserError


def make_figure(width: float, height: float) -> Any:
    """An empty picture, in inches; UserError P632 without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError.of(
            "P632",
            "pictures need matplotlib, which is not installed",
            help="install it with `pip install 'pi2[plot]'`",
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def check_form(form: str) -> None:
    """UserError P632 or P633 if there will be no picture of type ``form``: before a long run."""
    if form not in make_figure(1, 1).canvas.get_supported_filetypes():
        raise _refuse(form, "matplotlib does not know it")


def save_figure(figure: Any, form: str) -> bytes:
    """Its bytes; UserError P633 for a type of picture that it does not draw."""
    stream = BytesIO()
    try:
        figure.savefig(stream, format=form)
    except ValueError as error:
        raise _refuse(form, str(error)) from None
    return stream.getvalue()


def _refuse(form: str, problem: str) -> UserError:
    return UserError.of(
        "P633", f"cannot draw a picture of type {form!r}: {problem}", help="use .png"
    )


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Told apart with any kind of colour vision.  Source: M. Okabe and K. Ito, Color Universal Design;
the last one, for their yellow, which is hardly seen on white, from P. Tol's muted scheme."""
_MARKERS = "os^Dv*PX<>hp"
_LINES = ("-", "--", ":", "-.")


def pick_styles(count: int) -> list[dict[str, str]]:
    """Arguments of ``plot`` for ``count`` series: no two of the first 12 have the same mark, and no
    two of the first 32 the same colour and kind of line."""
    return [
        {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
            "marker": _MARKERS[number % len(_MARKERS)],
        }
        for number in range(count)
    ]


def add_legend(axes: Any, *, title: str | None = None, reverse: bool = False) -> None:
    """Put the legend outside of the axes: it covers no data there."""
    axes.legend(
        title=title,
        reverse=reverse,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize="small",
    )


def pick_colours(count: int) -> Any:
    """Colours [count, 4] from dark to light, for things in an order; after `make_figure`."""
    from matplotlib import colormaps

    return colormaps["viridis"]([0.9 * place / max(1, count - 1) for place in range(count)])


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that a lane did."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from the end of a read to the computation that waited for it."""

    source: str
    ready_s: float
    target: str
    start_s: float


@dataclass(frozen=True, slots=True)
class Counter:
    """Values that stand from a moment on."""

    name: str
    time_s: float
    values: dict[str, float]


@dataclass(slots=True)
class Recorder:
    """What happened, in seconds from ``offset_s``."""

    offset_s: float = 0.0
    slices: list[Slice] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)

    def add_slice(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """A lane did something; nothing shorter than a nanosecond is kept."""
        if end_s - start_s > 1e-9:
            self.slices.append(Slice(lane, name, start_s + self.offset_s, end_s + self.offset_s))

    def add_flow(self, source: str, ready_s: float, target: str, start_s: float) -> None:
        """A computation began that waited for a read."""
        self.flows.append(Flow(source, ready_s + self.offset_s, target, start_s + self.offset_s))

    def add_counter(self, name: str, time_s: float, **values: float) -> None:
        self.counters.append(Counter(name, time_s + self.offset_s, values))


def make_chrome_trace(
    recorder: Recorder, notes: dict[str, str], *, process: str, category: str
) -> dict[str, Any]:
    """Return the trace as the object that Chrome and Perfetto read; times in microseconds."""
    lanes = {
        name: number
        for number, name in enumerate(sorted({s.lane for s in recorder.slices}), start=1)
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}}
    ]
    for name, tid in lanes.items():
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        )
    for item in sorted(recorder.slices, key=lambda item: item.start_s):
        start, end = round(item.start_s * 1e6, 3), round(item.end_s * 1e6, 3)
        events.append(
            {
                "ph": "X",
                "name": item.name,
                "cat": category,
                "pid": 1,
                "tid": lanes[item.lane],
                "ts": start,
                "dur": round(end - start, 3),
            }
        )
    for number, flow in enumerate(recorder.flows, start=1):
        common = {"cat": "read", "name": "read to compute", "pid": 1, "id": number}
        source, target = lanes[flow.source], lanes[flow.target]
        # Viewers tie an arrow to the slice around its end, and a slice's end is not in it.
        ready = round(flow.ready_s * 1e6 - 0.001, 3)
        events.append({"ph": "s", "tid": source, "ts": ready, **common})
        events.append(
            {"ph": "f", "bp": "e", "tid": target, "ts": round(flow.start_s * 1e6, 3), **common}
        )
    for counter in recorder.counters:
        time_us = round(counter.time_s * 1e6, 3)
        events.append(
            {"ph": "C", "name": counter.name, "pid": 1, "ts": time_us, "args": counter.values}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}
