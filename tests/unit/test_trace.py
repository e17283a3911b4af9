"""`pi2 trace`: what the engine did when, as a file that Perfetto opens."""

import errno
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pi2.backends.reference.neurons import ThreadUnit
from pi2.cli.main import run
from pi2.measuring.timeline import record_run
from pi2.orchestrator import load
from tests.helpers.models import TinyModel, make_tiny
from tests.helpers.plans import write_plan

TWO_UNITS = Path(__file__).parents[2] / "plans" / "demo-two-units.plan.toml"


def trace(folder: Path, *settings: str, tiny: TinyModel | None = None) -> dict[str, Any]:
    plan = write_plan(folder, tiny or make_tiny(folder))
    output = folder / "trace.json"
    arguments = ["trace", str(plan), "-o", str(output), "-p", "abc", "-n", "2", "--warm-up", "2"]
    for setting in ("layers.hot=0.25", *settings):
        arguments += ["--set", setting]
    assert run(arguments) == 0
    document: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return document


def list_lanes(document: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    names = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names.values()}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            lanes[names[event["tid"]]].append((event["ts"], event["dur"], event["name"]))
    return lanes


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
def test_a_trace_shows_threads_queues_arrows_and_counters(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = trace(tmp_path, f'io.engine="{engine}"', "pipeline.cluster=4")
    lanes = list_lanes(document)
    assert {"driver", "compute 0"} <= set(lanes)
    assert any(name.startswith(("read ", "queue ")) for name in lanes)
    for name in ("driver", "compute 0"):
        for first, second in pairwise(sorted(lanes[name])):
            assert first[0] + first[1] <= second[0] + 1e-3, (name, first, second)
    calls = [name for _, _, name in sorted(lanes["driver"])]
    assert calls.count("embedding") == 3, "a prompt and two tokens"
    assert {"query 0", "predict_low_rank 1", "add_neurons 1", "head"} <= set(calls)

    events = document["traceEvents"]
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert begins and begins.keys() == ends.keys()
    assert all(begins[number] <= ends[number] for number in begins)
    counters = [event["args"] for event in events if event["name"] == "neuron cache"]
    assert [c["misses"] for c in counters] == sorted(c["misses"] for c in counters)
    assert counters[-1]["misses"] > 0
    assert {event.get("cat") for event in events if event["ph"] == "X"} == {"measured"}

    printed = capsys.readouterr().out
    assert "2 tokens in " in printed and "waiting for reads" in printed
    assert document["otherData"]["plan_digest"]


def test_what_is_recorded_follows_the_tokens_that_warm_up(plan: Path) -> None:
    with load(plan, set={"layers.hot": 0.25}) as model:
        _, summary = record_run(model, [5, 6, 7], 2, warm_up=4)
        assert model._parts.forward.positions[0] == 3 + 4 + 2
    assert summary.tokens == 2


def test_a_trace_counts_the_tokens_of_all_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [name for *_, name in list_lanes(trace(tmp_path, "decode.batch=3"))["driver"]]
    assert calls.count("embedding") == 3 + 2, "each has read its prompt"
    assert calls.count("query 0") == 3 + 2
    assert ": 6 tokens in" in capsys.readouterr().out


def test_a_trace_of_what_is_all_in_memory_has_no_reads(tmp_path: Path) -> None:
    lanes = list_lanes(trace(tmp_path, "layers.hot=1.0"))
    assert not [name for name in lanes if name.startswith(("read ", "queue "))]


def test_a_trace_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, output = write_plan(tmp_path, make_tiny(tmp_path)), tmp_path / "trace.json"
    output.write_text("old", "utf-8")

    def fill(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fill)
    assert run(["trace", str(plan), "-o", str(output), "-p", "a", "-n", "1", "--warm-up", "0"]) == 2
    assert "P003" in capsys.readouterr().err
    assert output.read_text("utf-8") == "old"
    assert not list(tmp_path.glob(".trace*"))


def test_a_trace_has_a_lane_for_a_unit_that_is_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    arguments = ["trace", str(TWO_UNITS), "-o", str(output), "-p", "def ", "-n", "4"]
    assert run(arguments) == 0, capsys.readouterr().err
    lanes = list_lanes(json.loads(output.read_text("utf-8")))
    work = [item for item in sorted(lanes["second"]) if "kept neurons" in item[2]]
    assert len(work) == (1 + 4) * 8, "a prompt and four tokens of eight layers"
    # Both processes read the same clock: work begins when the layer's input is known, and has ended
    # when the engine has waited for it.
    begun, waited = (
        sorted(item for item in lanes["driver"] if item[2].startswith(name))
        for name in ("begin_ffn", "wait for second")
    )
    for place, begin, wait in zip(work[-4 * 8 :], begun[-4 * 8 :], waited[-4 * 8 :], strict=True):
        assert begin[0] <= place[0]
        assert place[0] + place[1] <= wait[0] + wait[1]
    printed = capsys.readouterr().out
    assert "waiting for units" in printed and "second busy" in printed


def test_a_trace_shows_that_two_units_work_at_the_same_time(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "device": "host-two-units",
        "backends": {"cpu": "reference", "npu": "reference"},
        "layers.split": {"second": 0.3, "cpu": 0.7},
        "layers.hot": 0.4,
    }

    compute = ThreadUnit._compute

    def compute_slowly(*arguments: Any) -> Any:
        begin_s = time.perf_counter()
        time.sleep(0.01)
        name, _, end_s = compute(*arguments)
        return name, begin_s, end_s

    monkeypatch.setattr(ThreadUnit, "_compute", compute_slowly)
    with load(plan, set=settings) as model:
        recorder, summary = record_run(model, [5, 6, 7], 4)
        assert record_run(model, [5, 6, 7], 1)[1].busy_s, "it can be observed once more"
    work = [item for item in recorder.slices if item.lane == "second"]
    assert len(work) == (1 + 4) * 3
    kernels = [
        item for item in recorder.slices if item.lane == "driver" and "wait" not in item.name
    ]
    assert any(
        kernel.start_s < item.end_s and item.start_s < kernel.end_s
        for item in work
        for kernel in kernels
    )
    assert 4 * 3 * 0.01 <= summary.busy_s["second"] < summary.total_s
    assert 0.0 < summary.overlap_s <= summary.hidden_s < summary.busy_s["second"]
    assert summary.unit_wait_s > 0.0 and summary.overhead_s > 0.0


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
def test_a_viewer_finds_both_ends_of_every_arrow(tmp_path: Path, engine: str) -> None:
    document = trace(
        tmp_path, f'io.engine="{engine}"', "pipeline.cluster=4", 'decode.look_ahead="layer"'
    )
    check_for_viewers(document)
    runs = [name for name in list_lanes(document) if name.startswith("read runs ")]
    assert runs, "the prompt has read what is not in memory"


def test_arrows_lead_from_long_reads_to_what_they_were_for(tmp_path: Path) -> None:
    document = trace(tmp_path, 'decode.predictor="none"', "layers.hot=0.1")
    check_for_viewers(document)
    assert not [name for name in list_lanes(document) if name.startswith("queue ")]


def check_for_viewers(document: dict[str, Any]) -> None:
    """What Perfetto drops or ties to the wrong place is not there."""
    slices: dict[int, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append(event)
    named = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert slices.keys() == named.keys()
    for tid, own in slices.items():
        own.sort(key=lambda event: event["ts"])
        for first, second in pairwise(own):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3, (named[tid], first, second)

    def find(event: dict[str, Any]) -> str:
        around = [
            item["name"]
            for item in slices[event["tid"]]
            if item["ts"] <= event["ts"] < item["ts"] + item["dur"]
        ]
        assert len(around) == 1, (event, around)
        return str(around[0])

    arrows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    assert arrows
    for event in arrows:
        name = find(event)
        if event["ph"] == "s":
            assert name.startswith("layer ")
        else:
            assert event["bp"] == "e"
            assert not name.startswith("wait"), "an arrow ends where something is computed"
