"""Slices and arrows of a simulated run, and their form for Chrome's and Perfetto's viewers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROCESS = "pi2 simulate (simulated, not measured)"


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


@dataclass(slots=True)
class Recorder:
    """What happened, in simulated seconds from ``offset_s``."""

    offset_s: float = 0.0
    slices: list[Slice] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)

    def add_slice(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """A lane did something; nothing shorter than a nanosecond is kept."""
        if end_s - start_s > 1e-9:
            self.slices.append(Slice(lane, name, start_s + self.offset_s, end_s + self.offset_s))

    def add_flow(self, source: str, ready_s: float, target: str, start_s: float) -> None:
        """A computation began that waited for a read."""
        self.flows.append(Flow(source, ready_s + self.offset_s, target, start_s + self.offset_s))


def make_chrome_trace(recorder: Recorder, notes: dict[str, str]) -> dict[str, Any]:
    """Return the trace as the object that Chrome and Perfetto read; times in microseconds."""
    lanes = {
        name: number
        for number, name in enumerate(sorted({s.lane for s in recorder.slices}), start=1)
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": PROCESS}}
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
                "cat": "simulated",
                "pid": 1,
                "tid": lanes[item.lane],
                "ts": start,
                "dur": round(end - start, 3),
            }
        )
    for number, flow in enumerate(recorder.flows, start=1):
        common = {"cat": "read", "name": "read to compute", "pid": 1, "id": number}
        source, target = lanes[flow.source], lanes[flow.target]
        events.append({"ph": "s", "tid": source, "ts": round(flow.ready_s * 1e6, 3), **common})
        events.append(
            {
                "ph": "f",
                "bp": "e",
                "tid": target,
                "ts": round(flow.start_s * 1e6, 3),
                **common,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}
