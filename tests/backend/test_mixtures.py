"""Mixtures of experts: only chosen experts' neurons that a predictor names, in memory or not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
import pi2.orchestrator
from pi2.arrays import F32
from pi2.backends.executor import Executor
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.executor import ReferenceExecutor
from pi2.engine.layer_model import DenseObserver
from pi2.engine.loaded_model import LoadedModel
from pi2.fitting.check import load_plan
from pi2.measuring.ordering import reorder_store
from pi2.measuring.predictors import RecallCounter
from pi2.plan.reading.thresholds import LayerThresholds, Thresholds
from tests.helpers.kernels import measure_error
from tests.helpers.mixtures import make_mixture_plan

pytestmark = pytest.mark.usefixtures("quick_kernels")

TOKENS = [7, 100, 8, 290]


@pytest.fixture(scope="module")
def drelu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture_plan(tmp_path_factory.mktemp("drelu"), "drelu")


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture_plan(tmp_path_factory.mktemp("silu"), "silu")


REFERENCE = {"backends.cpu": "reference"}
FLASH = {"layers.hot": 0.1, "memory.segments.cold": "700 KiB", "memory.budget": "2 GiB"}
"""A tenth of the neurons stays; a layer's may need more than the cache has room for."""


def run(plan: Path, **settings: Any) -> tuple[F32, LoadedModel]:
    """Logits of a prompt's last token and of single tokens; the closed model, for counters."""
    values = {key.replace("__", "."): value for key, value in settings.items()}
    with pi2.load(plan, set=values) as model:
        forward = model._parts.forward
        logits = [forward.prefill(np.array(TOKENS, np.int32))]
        logits += [forward.decode(token).copy()[None] for token in (3, 299, 55, 4, 180)]
        return np.concatenate(logits), model


def list_cases() -> Iterator[Any]:
    for activation in ("drelu", "silu"):
        for name, settings in (("in memory", {}), ("from flash", FLASH)):
            yield pytest.param(activation, settings, id=f"{activation}, {name}")


@pytest.mark.parametrize(("activation", "settings"), list(list_cases()))
def test_predicted_neurons_of_chosen_experts_are_those_of_the_reference(
    request: pytest.FixtureRequest, activation: str, settings: dict[str, Any]
) -> None:
    plan = request.getfixturevalue(activation)
    found, model = run(plan, **settings)
    expected, truth = run(plan, **REFERENCE, **settings)
    assert measure_error(found, expected) < 3e-4
    ours, theirs = model.stats, truth.stats
    assert ours.predicted_neurons == pytest.approx(theirs.predicted_neurons, rel=0.01)
    assert ours.active_neurons == pytest.approx(theirs.active_neurons, rel=0.01)
    assert 0 < ours.predicted_neurons < 5 * 2 * 2 * 200
    assert (ours.cache_misses > 0) == bool(settings)
    if settings:
        in_memory, _ = run(plan)
        assert measure_error(found, in_memory) < 1e-4


LONG = [(17 * n) % 300 for n in range(23)]


@pytest.mark.parametrize("order", ["chunks-first", "layers-first"])
@pytest.mark.parametrize(("activation", "settings"), list(list_cases()))
def test_prompts_compute_what_the_reference_computes(
    request: pytest.FixtureRequest, activation: str, settings: dict[str, Any], order: str
) -> None:
    plan = request.getfixturevalue(activation)
    # The last chunk has 2 tokens, so that most experts compute one or none.
    values = {**settings, "prefill.chunk": 7, "pipeline.prefill": order}
    logits = []
    for changes in (values, {**values, **REFERENCE}):
        with pi2.load(plan, set=changes) as model:
            forward = model._parts.forward
            logits.append(forward.prefill(np.array(LONG, np.int32), all_logits=True))
            logits.append(forward.prefill(np.array(LONG[:1], np.int32)))
    assert measure_error(logits[0], logits[2]) < 3e-4
    # One token alone takes another kernel.
    assert measure_error(logits[1], logits[3]) < 3e-4


def test_prompts_compute_no_expert_for_a_token_that_has_not_chosen_it(drelu: Path) -> None:
    done = []
    with pi2.load(drelu, set={"prefill.chunk": 8}) as model:

        def count(kernel: Callable[..., object], size: int, tokens: int, *rest: Any) -> None:
            done.append(size * tokens)
            kernel(size, tokens, *rest)

        for chunk in model._parts.executor._chunks:  # type: ignore[attr-defined]
            chunk.neighbours[:] = [
                replace(calls, several=partial(count, calls.several)) for calls in chunk.neighbours
            ]
        model._parts.forward.prefill(np.array(LONG[:16], np.int32))
    # Two layers, 16 tokens, two experts of four, with 200 neurons each.
    assert sum(done) == 2 * 16 * 2 * 200


@pytest.mark.parametrize("look_ahead", ["attention", "layer"])
def test_looking_ahead_runs_the_router_too_and_mends_what_it_named_wrongly(
    drelu: Path, look_ahead: str
) -> None:
    settings = {**REFERENCE, **FLASH, "decode.look_ahead": look_ahead}
    found, model = run(drelu, **settings)
    expected, _ = run(drelu, **REFERENCE)
    # Neurons are predicted from another input; which experts compute, and how much, is exact.
    assert measure_error(found, expected) < 2e-2
    assert model.stats.routed_experts == 5 * 2 * 2
    assert model.stats.routing_recall == pytest.approx(1.0, abs=0.2)


def test_experts_that_looking_ahead_has_missed_are_computed(
    drelu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(drelu, **REFERENCE)
    begin = ReferenceExecutor.begin_ffn
    calls: list[int] = []

    def begin_wrongly(self: ReferenceExecutor, layer: int) -> None:
        begin(self, layer)
        if len(self.now.read) == 1:
            calls.append(layer)
            if calls.count(layer) % 2:
                # The first time for a token, as the guess is: two other experts.
                self.now.routes = np.where(self.now.routes > 0, 0, 0.5).astype(np.float32)

    monkeypatch.setattr(ReferenceExecutor, "begin_ffn", begin_wrongly)
    settings = {**REFERENCE, **FLASH, "decode.look_ahead": "attention"}
    found, model = run(drelu, **settings)
    assert model.stats.routing_recall == 0.0
    assert measure_error(found, expected) < 1e-4


def test_a_higher_score_may_be_asked_of_neurons_that_are_not_in_memory(drelu: Path) -> None:
    settings = {**FLASH, "decode.missing_threshold": 0.5}
    found, model = run(drelu, **settings)
    expected, truth = run(drelu, **REFERENCE, **settings)
    assert measure_error(found, expected) < 3e-4
    assert model.stats.cache_skips == pytest.approx(truth.stats.cache_skips, rel=0.05)
    assert model.stats.cache_skips > 0


def test_recall_is_that_of_the_experts_that_compute(drelu: Path) -> None:
    counters: list[RecallCounter] = []

    def observe(executor: Executor, request: BuildRequest) -> DenseObserver:
        counters.append(RecallCounter(request))
        return DenseObserver(executor, request, counters[0])

    with pi2.orchestrator.load(drelu, set=REFERENCE, make_observer=observe) as model:
        model._parts.forward.prefill(np.arange(40, dtype=np.int32))
    for layer in counters[0].describe_layers():
        assert layer.active == pytest.approx(0.3, rel=0.3)
        assert layer.recall is not None and 0.7 < layer.recall <= 1.0
        assert layer.active * layer.recall < layer.predicted < 0.6


def test_gates_of_chosen_experts_give_what_dense_computing_gives(drelu: Path) -> None:
    gates = {"decode.predictor": "gate", "memory.segments.predictor": "119 KiB"}
    found, model = run(drelu, **gates, **FLASH)
    assert measure_error(found, run(drelu, **REFERENCE, decode__predictor="none")[0]) < 3e-4
    assert model.stats.cache_misses > 0


def test_thresholds_of_experts_cut_the_same_gates_as_in_the_reference(silu: Path) -> None:
    layers = tuple(
        LayerThresholds(gate=0.3, experts=experts, computed=0.5, active=0.5)
        for experts in ((0.1, 0.2, 0.4, 0.8), (0.8, 0.4, 0.2, 0.1))
    )
    model = load_plan(silu).model
    thresholds = Thresholds(
        schema_version=3, model=model.id, activation="silu", hidden=model.shape.hidden,
        neurons=model.layer_neurons, method="cats", target=0.5, tokens=1, text="", layers=layers,
    )  # fmt: skip
    assert thresholds.fits(model)
    sparsity = {"method": "cats", "target": 0.5, "thresholds": "none.thresholds.toml"}
    settings = {"decode.predictor": "gate", "sparsity": sparsity, "memory.budget": "2 GiB"}
    logits, named = [], []
    for backend in ("cpu", "reference"):
        chosen = {**settings, "backends.cpu": backend}
        with pi2.orchestrator.load(silu, set=chosen, thresholds=thresholds) as loaded:
            logits.append(loaded.logits(TOKENS, mode="decode"))
            named.append(loaded.stats.predicted_neurons)
    assert measure_error(logits[0], logits[1]) < 3e-4
    assert named[0] == pytest.approx(named[1], rel=0.01) and 0 < named[0] < 4 * 2 * 2 * 200


def test_resident_scales_change_no_bit(tmp_path: Path, drelu: Path) -> None:
    store = tmp_path / "apart"
    stride = reorder_store(drelu.parent / "store", scales="resident", output=store).bundle.stride
    apart = {"weights": str(store), "bundle.scales": "resident", "bundle.stride": f"{stride} B"}
    room = {"memory.segments.attention": "8 MiB", "memory.segments.workspace": "32 MiB"}
    values = {**FLASH, "prefill.chunk": 7}
    logits = []
    for settings in (values, {**values, **apart, **room}):
        with pi2.load(drelu, set=settings) as model:
            forward = model._parts.forward
            logits.append(forward.prefill(np.array(LONG, np.int32), all_logits=True))
            logits += [forward.decode(token).copy()[None] for token in (3, 299, 55)]
            logits.append(forward.prefill(np.array(LONG[:1], np.int32)))
    assert np.array_equal(np.concatenate(logits[:5]), np.concatenate(logits[5:]))
