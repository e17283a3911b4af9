"""Profiles, traces and statistics look at an executor in one way, and see the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.executor import ExecutorObserver
from pi2.engine.layer_model import DenseObserver, Routing
from pi2.measuring.contestant import Profile, observe_parts
from pi2.measuring.timeline import DRIVER, _Tape
from pi2.memory.bundle_files import ReadObserver
from pi2.orchestrator import load
from pi2.tracing import Recorder

pytestmark = pytest.mark.usefixtures("quick_kernels")


class Both(ExecutorObserver):
    """Tells two observers of the same kernels."""

    def __init__(self, *observers: ExecutorObserver) -> None:
        self.observers = observers

    def note_kernel(self, *arguments: Any) -> None:
        for observer in self.observers:
            observer.note_kernel(*arguments)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_profile_and_a_trace_of_a_run_have_same_time_in_kernels(plan: Path, backend: str) -> None:
    with load(plan, set={"layers.hot": 0.25, "backends.cpu": backend}) as model:
        parts = model._parts
        tape, times = _Tape(Recorder(), 1, 0.0), Profile()
        with observe_parts(parts, Both(times, tape), ReadObserver()):
            parts.forward.prefill(np.array([5, 6, 7], np.int32))
            for token in range(4):
                parts.forward.decode(token)
    profiled_s = sum(seconds for _, seconds in times.calls.values())
    slices = [item for item in tape.recorder.slices if item.lane == DRIVER]
    drawn_s = sum(item.end_s - item.start_s for item in slices)
    assert profiled_s == pytest.approx(tape.kernels_s, rel=1e-6)
    assert profiled_s == pytest.approx(drawn_s, rel=1e-3)
    names = Counter(item.name.split()[0] for item in slices)
    assert names == {name: count for name, (count, _) in times.calls.items()}


def test_kernels_are_seen_wherever_the_executor_keeps_them(plan: Path) -> None:
    with load(plan, set={"layers.hot": 0.25, "backends.cpu": "cpu"}) as model:
        parts, times = model._parts, Profile()
        parts.forward.prefill(np.array([5, 6, 7], np.int32))
        with observe_parts(parts, times, times):
            for token in range(4):
                parts.forward.decode(token)
        layers = len(model.plan.layers)
        # What is not observed any more is not counted.
        parts.forward.decode(1)
    counts = {name: count for name, (count, _) in times.calls.items()}
    for name in ("attend", "begin_ffn", "predict_low_rank", "end_ffn"):
        assert counts[name] == 4 * layers, name
    assert counts["add_neurons"] >= 4 * layers and counts["embedding"] == counts["head"] == 4


def test_the_steps_of_several_sequences_are_seen(plan: Path) -> None:
    with load(plan, set={"layers.hot": 0.25, "backends.cpu": "cpu", "decode.batch": 3}) as model:
        parts, times = model._parts, Profile()
        for sequence in range(3):
            parts.forward.prefill(np.array([5, 6, 7], np.int32), sequence=sequence)
        with observe_parts(parts, times, ReadObserver()):
            parts.forward.step([1, 2, 3], range(3))
        layers = len(model.plan.layers)
    counts = {name: count for name, (count, _) in times.calls.items()}
    assert counts["attend"] == counts["output"] == counts["begin_ffn"] == layers


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("chunk", [4, 12])
def test_activations_of_prompts_are_seen_chunk_by_chunk(
    plan: Path, backend: str, chunk: int
) -> None:
    seen: dict[int, list[Any]] = {}

    def note(layer: int, inputs: F32, values: F32, routing: Routing | None) -> None:
        assert len(inputs) == len(values) and routing is None
        seen.setdefault(layer, []).append(values.copy())

    settings = {"prefill.chunk": chunk, "backends.cpu": backend, "layers.hot": 0.25}
    prompt = np.arange(5, 17, dtype=np.int32)
    with load(
        plan,
        set={**settings, "pipeline.prefill": "layers-first"},
        make_observer=lambda executor, request: DenseObserver(executor, request, note),
    ) as model:
        forward: Any = model._parts.forward
        assert forward._piece >= len(prompt)
        model._parts.forward.prefill(prompt)
        layers = len(model.plan.layers)
    assert {layer: len(values) for layer, values in seen.items()} == dict.fromkeys(
        range(layers), len(prompt) // chunk
    )
    first = np.concatenate(seen[0])
    expected = observe_first_layer(plan, prompt)
    assert first.shape == expected.shape
    assert np.abs(first - expected).max() < 1e-2 * np.abs(expected).max()


def observe_first_layer(plan: Path, prompt: I32) -> F32:
    """Activations [T, neurons] of the reference, one token at a time."""
    rows = []
    with load(
        plan,
        set={"prefill.chunk": 1, "backends.cpu": "reference"},
        make_observer=lambda executor, request: DenseObserver(
            executor, request, lambda layer, _, values, __: rows.append((layer, values.copy()))
        ),
    ) as model:
        model._parts.forward.prefill(prompt)
    return np.concatenate([values for layer, values in rows if layer == 0])
