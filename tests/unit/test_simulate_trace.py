"""Traces open in Chrome's and Perfetto's viewers and say what the simulation did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pi2.fitting.check import load_plan
from pi2.simulate import read_inputs
from pi2.simulate.decode import trace_decode
from pi2.tracing import make_chrome_trace


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    paper = Path(__file__).parents[2] / "tools/paper/plans"
    inputs = read_inputs(load_plan(paper / "oneplus-12/bamboo-7b-half.plan.toml"))
    recorder = trace_decode(inputs, prompt_tokens=16, tokens=2, seed=0)
    return make_chrome_trace(
        recorder,
        {"simulated": "true"},
        process="pi2 simulate (simulated, not measured)",
        category="simulated",
    )


def list_lanes(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def list_slices(trace: dict[str, Any], tid: int) -> list[dict[str, Any]]:
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == tid]
    return sorted(events, key=lambda event: event["ts"])


def test_there_is_a_lane_for_every_thread_unit_and_queue(trace: dict[str, Any]) -> None:
    lanes = set(list_lanes(trace).values())
    assert lanes == {"flash", "dense unit", *(f"cpu thread {number}" for number in range(5))}


def test_every_arrow_goes_from_a_read_that_ended_to_a_computation_that_begins(
    trace: dict[str, Any],
) -> None:
    lanes = list_lanes(trace)
    flash = next(tid for tid, lane in lanes.items() if lane == "flash")
    ends = {round(e["ts"] + e["dur"], 3) for e in list_slices(trace, flash)}
    starts = {(e["tid"], e["ts"]) for tid in lanes for e in list_slices(trace, tid)}
    sources = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    targets = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert sources and sources.keys() == targets.keys()
    for number, source in sources.items():
        target = targets[number]
        assert source["ts"] <= target["ts"]
        assert min(abs(source["ts"] - end) for end in ends) < 2e-3
        assert (target["tid"], target["ts"]) in starts


def test_reads_and_computations_overlap_in_time(trace: dict[str, Any]) -> None:
    lanes = list_lanes(trace)
    by_lane = {lane: list_slices(trace, tid) for tid, lane in lanes.items()}
    reads = by_lane["flash"]
    others = [e for lane, events in by_lane.items() if lane != "flash" for e in events]
    overlapping = [
        read
        for read in reads
        if any(
            e["ts"] < read["ts"] + read["dur"] and read["ts"] < e["ts"] + e["dur"] for e in others
        )
    ]
    assert len(overlapping) > len(reads) / 2


def test_it_says_that_it_is_simulated(trace: dict[str, Any]) -> None:
    process = next(e for e in trace["traceEvents"] if e["name"] == "process_name")
    assert "simulated" in process["args"]["name"]
    assert trace["otherData"]["simulated"] == "true"
