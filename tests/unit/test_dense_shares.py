"""Two units compute a layer at the same time, and give what one gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.backends.executor import Executor, ExecutorObserver
from pi2.backends.protocol import BuildRequest
from pi2.backends.units import UnitFailed
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.fitting.check import load_plan
from pi2.measuring.ordering import reorder_store
from pi2.plan.reading.references import find_shipped_folder
from pi2.store.manifest import read_manifest
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import TinyModel, make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import mark_slow
from tests.helpers.tables import in_table

IDS = [5, 6, 7, 8, 9, 250, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 17, 99, 23, 41]
SAME = 2e-6
"""Of the largest logit: the order of additions differs."""
EVERYTHING = {"decode.threshold": -1e9}
"""Predictors name all neurons, so that it does not matter who computes which."""
TWO = {
    "device": "host-two-units",
    "backends": {"cpu": "reference", "npu": "reference"},
    "layers.split": {"second": 0.3, "cpu": 0.7},
    "layers.hot": 0.4,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def plan(tiny: TinyModel) -> Path:
    return write_plan(tiny.store.parent, tiny)


def compute(model: LoadedModel) -> tuple[F32, F32]:
    return model.logits(IDS), model.logits(IDS, mode="decode")


def run(plan: Path, settings: Mapping[str, Any]) -> tuple[F32, F32]:
    with pi2.load(plan, set=settings) as model:
        found = compute(model)
        check_at_rest(model)
        return found


def check_at_rest(model: LoadedModel) -> None:
    cache = model._parts.cache
    assert not cache._tables.held.any() and cache.free_capacity == cache.cold_capacity


def check(found: Sequence[F32], expected: Sequence[F32], error: float = SAME) -> None:
    for ours, truth in zip(found, expected, strict=True):
        assert float(np.abs(ours - truth).max()) <= error * float(np.abs(truth).max())


@pytest.fixture(scope="module")
def alone(plan: Path) -> tuple[F32, F32]:
    return run(plan, {"decode.predictor": "none"})


@pytest.mark.parametrize("prompts", ["cpu", "second"])
@pytest.mark.parametrize("share", [mark_slow(0.0), 0.3, mark_slow(0.4)])
def test_any_share_of_the_hot_neurons_gives_the_same_logits(
    plan: Path, alone: tuple[F32, F32], share: float, prompts: str
) -> None:
    settings = {
        **TWO,
        "layers.split": {"second": share, "cpu": round(1 - share, 6)},
        "prefill.unit": prompts,
        "decode.predictor": "gate",
    }
    check(run(plan, settings), alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"decode.predictor": "none"},
        {"decode.predictor": "low-rank", **EVERYTHING},
        {"decode.predictor": "low-rank", "decode.look_ahead": "attention", **EVERYTHING},
        {"decode.predictor": "low-rank", "decode.look_ahead": "layer", **EVERYTHING},
        {"decode.predictor": "low-rank", "decode.missing_threshold": -1e8, **EVERYTHING},
        {"decode.predictor": "gate", "pipeline.prefill": "layers-first"},
        {"decode.predictor": "gate", "pipeline.prefill": "layers-first", "prefill.unit": "second"},
        {"decode.predictor": "gate", "memory.segments.cold": "96 KiB"},
        {"decode.predictor": "gate", "cache.policy": "lru", "kv.lend": True},
        {"decode.predictor": "gate", "layers.hot": 1.0},
        {"decode.predictor": "gate", "layers.hot": 1.0, "layers.split": {"second": 1, "cpu": 0}},
    ],
    ids=lambda settings: " ".join(f"{key.split('.')[-1]}={settings[key]}" for key in settings),
)
def test_every_way_of_decoding_goes_with_two_units(
    plan: Path, alone: tuple[F32, F32], settings: Mapping[str, Any]
) -> None:
    check(run(plan, {**TWO, **settings}), alone)


def test_what_changes_a_run_changes_the_digest(plan: Path) -> None:
    base: dict[str, Any] = {**TWO, "decode.batch": 3}
    changes: list[dict[str, Any]] = [
        {},
        {"layers.batches": BATCHES},
        {"layers.batches": [{**BATCHES[0], "sequences": 3}]},
        {"prefill.unit": "second"},
        {"units": {"second": {"on_failure": "cpu"}}},
    ]
    digests = [load_plan(plan, overrides={**base, **change}).digest for change in changes]
    assert len(set(digests)) == len(changes)
    spelt = {"layers.batches": [*BATCHES, {**BATCHES[0], "sequences": 3}]}
    assert load_plan(plan, overrides={**base, **spelt}).digest == digests[1]


@pytest.mark.parametrize("hot", [0.5, 0.8])
def test_the_context_lends_no_more_than_can_be_used(hot: float) -> None:
    settings = {
        "backends": {"cpu": "null", "npu": "null"},
        "units": {"second": {"on_failure": "stop"}},
        "kv.lend": True,
        "layers.hot": hot,
        "memory.segments.cold": "150 KiB",
    }
    with pi2.load(find_shipped_folder() / "demo-two-units.plan.toml", set=settings) as model:
        for _ in range(2):
            list(model.generate([1, 2, 3], max_tokens=4))
            cache = model._parts.cache
            # All but the hot neurons, and the 307 of each layer that the unit keeps.
            assert cache.cold_capacity <= cache.absent_capacity - 8 * 307


def test_layers_may_be_divided_otherwise(plan: Path, alone: tuple[F32, F32]) -> None:
    others = [{"select": "1", "split": {"cpu": 1.0}}, {"select": "2", "hot": 0.3}]
    check(run(plan, {**TWO, "decode.predictor": "gate", "layers.overrides": others}), alone)


def test_compiled_kernels_take_the_sum_of_another_unit(plan: Path, alone: tuple[F32, F32]) -> None:
    exact = {
        "decode.activations": "fp32",
        "prefill.activations": "fp32",
        "kv.type": "fp32",
        "backends": {"cpu": "cpu", "npu": "reference"},
    }
    for predictor, rows in (("none", {}), ("gate", {}), ("gate", ROWS)):
        settings = {**TWO, **exact, **rows, "decode.predictor": predictor}
        check(run(plan, settings), alone, error=1e-5)


def test_scales_may_be_resident(tiny: TinyModel, plan: Path, alone: tuple[F32, F32]) -> None:
    apart = tiny.store.parent / "apart"
    reorder_store(tiny.store, scales="resident", output=apart)
    settings = {
        **TWO,
        "weights": str(apart),
        "bundle": {"stride": f"{read_manifest(apart).bundle.stride} B", "scales": "resident"},
        "decode.predictor": "gate",
    }
    check(run(plan, settings), alone)


@pytest.mark.parametrize("predictor", ["none", "gate"])
def test_a_mixture_is_divided_too(tmp_path: Path, predictor: str) -> None:
    plan = make_mixture_plan(tmp_path, "relu")
    room = {"memory.budget": "2 GiB", "memory.segments.hot": "16 MiB"}
    room |= {"memory.segments.predictor": "16 MiB", "memory.segments.cold": "700 KiB"}
    expected = run(plan, {**room, "decode.predictor": predictor, "backends.cpu": "reference"})
    for prompts in ("cpu", "second"):
        settings = {**TWO, **room, "decode.predictor": predictor, "prefill.unit": prompts}
        check(run(plan, settings), expected)


ROWS = {
    "projections.attention": {"second": 0.5, "cpu": 0.5},
    "projections.head": {"second": 0.7, "cpu": 0.3},
}
BATCHES = [{"sequences": 2, "split": {"second": 0.1, "cpu": 0.9}}]


@pytest.mark.parametrize("rows", [{}, ROWS], ids=["whole", "rows divided"])
@pytest.mark.parametrize("batches", [[], BATCHES], ids=["one split", "a split by sequences"])
def test_several_sequences_are_computed_as_each_alone(
    plan: Path, batches: list[dict[str, Any]], rows: dict[str, Any]
) -> None:
    prompts = ([5, 6, 7, 8, 9], [250], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    base = {"decode.predictor": "gate", "decode.batch": 3}
    found = []
    for settings in (base, {**TWO, **base, **rows, "layers.batches": batches}):
        logits = []
        with pi2.load(plan, set=settings) as model:
            forward = model._parts.forward
            for place, ids in enumerate(prompts):
                forward.reset(place)
                forward.prefill(np.array(ids, np.int32), sequence=place)
            for members in ([0, 1, 2], [2, 0], [1]):
                logits.append(forward.step([7 + place for place in members], members).copy())
            check_at_rest(model)
            if settings is not base:
                share = model.plan.layers[0].dense
                assert share is not None
                assert share.by_sequences == ((29, 10, 10) if batches else (29, 29, 29))
        found.append(logits)
    check(found[1], found[0])


@in_table
def test_rows_of_projections_and_head_may_be_another_units(
    plan: Path, alone: tuple[F32, F32], rows: dict[str, Any]
) -> None:
    settings = {**TWO, "decode.predictor": "gate"}
    check(run(plan, {**settings, **rows}), alone)


class Failing:
    """Fails a unit's call number ``after`` of a method."""

    def __init__(self, model: LoadedModel, method: str, after: int) -> None:
        self.unit: Any = model._parts.feed_forward.shares.units["second"].unit
        self.call, self.left = getattr(self.unit, method), after
        setattr(self.unit, method, self)

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise UnitFailed("the device is lost")
        return self.call(*arguments)


@pytest.mark.parametrize(
    ("prompts", "look_ahead"),
    [("cpu", "layer"), *map(mark_slow, (("second", "none"), ("cpu", "none"), ("second", "layer")))],
)
@pytest.mark.parametrize(("method", "after"), [("start", 0), ("start", 4), ("finish", 4)])
def test_a_run_goes_on_without_a_lost_unit(
    plan: Path, alone: tuple[F32, F32], method: str, after: int, look_ahead: str, prompts: str
) -> None:
    settings = {
        **TWO,
        **EVERYTHING,
        "units": {"second": {"on_failure": "cpu"}},
        "prefill.unit": prompts,
        "decode.look_ahead": look_ahead,
    }
    for logits, mode in zip(alone, ("prefill", "decode"), strict=True):
        with pi2.load(plan, set=settings) as model:
            Failing(model, method, after)
            for _ in range(2):
                check([model.logits(IDS, mode=mode)], [logits])  # type: ignore[arg-type]
            assert model.lost_units == {"second": "the device is lost"}
            check_at_rest(model)


@pytest.mark.parametrize("method", ["add", "wait"])
def test_a_unit_may_be_lost_while_a_prompt_is_sent_to_it(
    plan: Path, alone: tuple[F32, F32], method: str
) -> None:
    settings = {**TWO, "units": {"second": {"on_failure": "cpu"}}, "prefill.unit": "second"}
    with pi2.load(plan, set=settings) as model:
        Failing(model, method, 2)
        check([model.logits(IDS)], alone[:1])
        assert model.lost_units


@pytest.mark.parametrize("prompts", ["cpu", "second"])
@pytest.mark.parametrize(("method", "after"), [("start", 0), ("start", 4), ("finish", 1)])
def test_what_a_lost_unit_owned_is_computed_for_every_chunk_of_a_prompt(
    plan: Path, alone: tuple[F32, F32], method: str, after: int, prompts: str
) -> None:
    settings = {
        **TWO,
        "units": {"second": {"on_failure": "cpu"}},
        "prefill.unit": prompts,
        "pipeline.prefill": "layers-first",
    }
    with pi2.load(plan, set=settings) as model:
        Failing(model, method, after)
        found = model._parts.forward.prefill(np.array(IDS, np.int32), all_logits=True)
        check([found], alone[:1])
        assert model.lost_units


EVERYTHING_BESIDE: Mapping[str, Any] = {
    **TWO, "layers.hot": 1.0, "layers.split": {"second": 1, "cpu": 0}, "decode.predictor": "gate",
}  # fmt: skip


ROWS_BESIDE: Mapping[str, Any] = {
    **TWO,
    "projections.attention": {"second": 0.5, "cpu": 0.5},
    "decode.predictor": "gate",
}


@pytest.mark.parametrize(
    "settings", [{**TWO, "decode.predictor": "gate"}, EVERYTHING_BESIDE, ROWS_BESIDE]
)
def test_a_lost_unit_ends_this_run_and_later_ones_unless_the_plan_says_otherwise(
    plan: Path, settings: Mapping[str, Any]
) -> None:
    with pi2.load(plan, set=settings) as model:
        Failing(model, "finish", 2)
        for mode in ("decode", "decode", "prefill"):
            with pytest.raises(UserError) as caught:
                model.logits(IDS, mode=mode)
            (finding,) = caught.value.diagnostics
            assert (finding.code, "the device is lost" in finding.message) == ("P614", True)
            assert finding.help is not None and 'units.second.on_failure = "cpu"' in finding.help
            check_at_rest(model)


def test_executor_that_is_observed_computes_everything(plan: Path, alone: tuple[F32, F32]) -> None:
    def observe(executor: Executor, request: BuildRequest) -> ExecutorObserver:
        return ExecutorObserver()

    with pi2.load(plan, set=EVERYTHING_BESIDE, make_observer=observe) as model:
        assert not model._parts.feed_forward.shares.units
        check(compute(model), alone)


@pytest.mark.parametrize("method", ["start", "finish", "add"])
def test_a_run_may_be_interrupted_in_any_call_of_a_unit(
    plan: Path, alone: tuple[F32, F32], method: str
) -> None:
    settings = {**TWO, "prefill.unit": "second", "decode.predictor": "gate"}
    with pi2.load(plan, set=settings) as model:
        unit: Any = model._parts.feed_forward.shares.units["second"].unit
        call = getattr(unit, method)

        def interrupt(*arguments: Any) -> Any:
            setattr(unit, method, call)
            if method != "finish":
                call(*arguments)
            raise KeyboardInterrupt

        for _ in range(3):
            setattr(unit, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.logits(IDS)
        check(compute(model), alone)


def test_an_interrupt_leaves_nothing_under_way(plan: Path, alone: tuple[F32, F32]) -> None:
    with pi2.load(plan, set={**TWO, "decode.predictor": "gate"}) as model:
        executor: Any = model._parts.executor
        add, calls = executor.add_neurons, []

        def interrupt(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 5:
                raise KeyboardInterrupt
            add(*arguments)

        executor.add_neurons = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.logits(IDS, mode="decode")
        assert not model._parts.feed_forward.shares.units["second"].unit._jobs  # type: ignore[attr-defined]
        check(compute(model), alone)


def test_what_units_compute_is_counted(plan: Path) -> None:
    with pi2.load(plan, set={**TWO, "decode.predictor": "gate"}) as model:
        before = model.stats
        model.logits(IDS, mode="decode")
        done = model.stats - before
        assert done.dense_neurons == len(IDS) * 3 * 29
        assert done.possible_neurons == len(IDS) * 3 * 96
        assert done.predicted_share is not None and done.predicted_share >= 29 / 96
