"""Deviations from a mixture's routing: each dial's effect and counters, and none unasked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import measure_dials
import pi2
from pi2.arrays import F32
from pi2.backends.arithmetic import Router
from pi2.cli.main import run as cli
from pi2.engine.experts import DialCounters, RoutingDials
from pi2.engine.routed import RoutedFeedForward
from pi2.engine.statistics import RunStatistics
from pi2.fitting.check import load_plan
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Experts
from tests.helpers.goldens import (
    CPU,
    EXACT,
    ROUNDING,
    change_config,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
    write_plan,
)
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import MIXTURE, make_model

EXPERTS, HIDDEN = 6, 64
SCORES = np.array([3.0, 2.9, 1.0, 0.5, 0.0, -1.0], np.float32)


def make_router(model: Model, rows: F32, bias: F32 | None = None) -> Router:
    """A router of a layer, with ``rows`` [experts, hidden] and a ``bias`` [1, experts]."""
    assert model.moe is not None
    return Router(
        moe=model.moe, weights=rows, bias=bias, experts=model.expert_count, dense_experts=0
    )


def turn(
    there: list[int], moe: dict[str, Any] | None = None, chosen: int = 2, **settings: Any
) -> tuple[F32, DialCounters]:
    """Routes of a token with `SCORES`, ``chosen`` of which compute, and what is counted."""
    shape = {"experts": EXPERTS, "active_experts": chosen, **(moe or {})}
    model = make_model({**MIXTURE, "moe": shape})
    rows = np.zeros((EXPERTS, HIDDEN), np.float32)
    rows[:, 0] = SCORES
    routers = [make_router(model, rows)] if "prefer_cached" in settings else None
    dials = RoutingDials(Experts.model_validate_json(json.dumps(settings)), model, routers)
    inputs = np.zeros((1, HIDDEN), np.float32)
    inputs[0, 0] = 1.0
    routes = np.zeros((1, EXPERTS), np.float32)
    shares = np.exp(SCORES[:chosen])
    routes[0, :chosen] = shares / shares.sum()
    known, counters = np.zeros(EXPERTS, bool), DialCounters()
    known[there] = True
    dials.apply(0, inputs, routes, known, counters)
    return routes[0], counters


def test_experts_in_memory_come_first_where_the_router_is_nearly_indifferent() -> None:
    routes, counters = turn([2], prefer_cached=0.5)
    # 1.0 + 0.5 x 4 is more than 2.9.
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 2])
    shares = np.exp([3.0, 1.0])
    np.testing.assert_allclose(routes[[0, 2]], shares / shares.sum(), rtol=1e-6)
    gone = np.exp(2.9) / np.exp([3.0, 2.9]).sum()
    assert counters.replaced == pytest.approx(gone) and counters.weight == pytest.approx(1.0)
    routes, counters = turn([2], prefer_cached=0.4)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 1])
    assert counters.replaced == 0.0


def test_the_best_experts_are_never_replaced() -> None:
    routes, _ = turn([3, 4], prefer_cached=1.0)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 3])
    routes, _ = turn([3, 4], prefer_cached=1.0, keep_best=2)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 1])


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_cold_expert_of_little_weight_is_left_out(renormalise: bool) -> None:
    weights = np.exp(SCORES[:4]) / np.exp(SCORES[:4]).sum()
    routes, counters = turn([2], chosen=4, least_weight=0.1, renormalise=renormalise)
    # 2 and 3 have less than a tenth, and 2 is in memory.
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 1, 2])
    kept = weights[:3] / (weights[:3].sum() if renormalise else 1.0)
    np.testing.assert_allclose(routes[:3], kept, rtol=1e-5)
    assert counters.left_out == pytest.approx(weights[3], rel=1e-5)


def test_no_more_experts_are_read_than_the_plan_allows() -> None:
    routes, _ = turn([3], chosen=4, most_reads=1)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 3])
    # Something has to compute.
    routes, counters = turn([], chosen=2, most_reads=0)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0])
    assert routes[0] == pytest.approx(1.0) and 0.4 < counters.left_out < 0.5


def test_only_the_best_experts_are_read() -> None:
    routes, counters = turn([3], chosen=4, read_best=2)
    # 2 is neither among the best two nor in memory.
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 1, 3])
    weights = np.exp(SCORES[:4]) / np.exp(SCORES[:4]).sum()
    assert counters.left_out == pytest.approx(weights[2], rel=1e-5)
    routes, _ = turn([], chosen=4, read_best=2, most_reads=1)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0])


def test_some_layers_read_fewer_experts_than_others() -> None:
    fewer = [{"select": "1", "read_best": 1}]
    routes, counters = turn([], chosen=3, read_best=2, layers=fewer)
    np.testing.assert_array_equal(np.flatnonzero(routes), [0, 1])
    assert counters.left_out > 0.0
    experts = Experts.model_validate_json(json.dumps({"read_best": 2, "layers": fewer}))
    assert experts.list_read_best(3) == [2, 1, 2] and experts.is_lossy
    alone = Experts.model_validate_json(json.dumps({"layers": [{"select": "0", "read_best": 0}]}))
    assert alone.list_read_best(2) == [0, None] and alone.is_lossy and alone.leaves_out
    routes, _ = turn([], chosen=3, layers=[{"select": "0", "read_best": 1}])
    np.testing.assert_array_equal(np.flatnonzero(routes), [0])


def test_a_routers_bias_counts_when_experts_are_preferred() -> None:
    model = make_model({**MIXTURE, "moe": {"experts": 3, "active_experts": 1, "router_bias": True}})
    assert model.moe is not None
    rows = np.zeros((3, HIDDEN), np.float32)
    # By rows alone, expert 2 would never come near the others.
    dials = RoutingDials(
        Experts(prefer_cached=0.5, keep_best=1),
        model.model_copy(update={"moe": model.moe.model_copy(update={"active_experts": 2})}),
        [make_router(model, rows, bias=np.array([[1.0, 0.5, 0.4]], np.float32))],
    )
    routes = np.array([[0.6, 0.4, 0.0]], np.float32)
    there = np.array([False, False, True])
    dials.apply(0, np.ones((1, HIDDEN), np.float32), routes, there, DialCounters())
    assert np.flatnonzero(routes[0]).tolist() == [0, 2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dials")
    return make_mixture_plan(folder, "silu", {"predictor": None}, order="expert")


def run(plan: Path, look_ahead: str = "none", **settings: Any) -> tuple[F32, RunStatistics]:
    memory = {"layers.hot": 0.0, "memory.segments.cold": "600 KiB", "cache.fill": False}
    router = {"decode.predictor": "router", "backends.cpu": "reference"}
    router["decode.look_ahead"] = look_ahead
    dials = {f"experts.{name}": value for name, value in settings.items()}
    tokens = [7, 100, 8, 290, 3, 3, 41, 250, 12, 77, 5]
    with pi2.load(plan, set={**router, **memory, **dials}) as model:
        prompt = model.logits(tokens)
        logits = model.logits(tokens, mode="decode")
        assert prompt.shape == logits.shape
        return logits, model.stats


def test_dials_read_less_and_say_what_they_replaced(plan: Path) -> None:
    exact, before = run(plan)
    assert before.replaced_share is None
    for settings, share in (
        ({"prefer_cached": 0.5}, "replaced_share"),
        ({"least_weight": 0.6}, "left_out_share"),
        ({"most_reads": 1, "renormalise": False}, "left_out_share"),
    ):
        for look_ahead in ("none", "layer"):
            logits, stats = run(plan, look_ahead, **settings)
            assert stats.flash_read_bytes < before.flash_read_bytes, (settings, look_ahead)
            assert 0.0 < getattr(stats, share) < 0.8
            assert np.isfinite(logits).all() and np.abs(logits - exact).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "backend"), [("gemma4-moe", CPU), ("smallthinker", {"backends.cpu": "reference"})]
)
def test_routers_that_read_something_else_prefer_experts_by_what_they_read(
    tmp_path: Path, name: str, backend: dict[str, Any]
) -> None:
    plan, tokens = make_golden_plan(name, tmp_path), read_golden(name).prompt
    settings = {**backend, "decode.predictor": "router", "layers.hot": 0.0, "cache.fill": False}
    expert = load_plan(plan).bundle.stride * load_plan(plan).model.shape.ffn
    settings["memory.segments.cold"] = f"{4 * expert} B"
    expected = compute_decoded(plan, tokens, settings)
    # Weights are those of the router where nobody is nearly as good.
    found = compute_decoded(plan, tokens, settings | {"experts.prefer_cached": 1e-7})
    assert measure_error(found, expected) <= ROUNDING
    with pi2.load(plan, set=settings | {"experts.prefer_cached": 0.5}) as model:
        model.logits(tokens, mode="decode")
        replaced = model.stats.replaced_share
    assert replaced is not None and 0.02 < replaced < 0.7


def test_biases_of_experts_follow_the_weights_that_dials_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = copy_checkpoint("gpt-oss", tmp_path / "one/checkpoint")
    change_config(one, num_experts_per_tok=1)
    alone = write_plan(tmp_path / "one", convert_golden(one, tmp_path / "one", EXACT), {})
    plan, tokens = make_golden_plan("gpt-oss", tmp_path / "two"), read_golden("gpt-oss").prompt[:8]
    model = load_plan(plan).model
    assert model.ffn.bias and model.moe is not None and model.moe.active_experts == 2
    settings = {"decode.predictor": "router", "layers.hot": 0.0, "cache.fill": False}
    expected = compute_decoded(alone, tokens, settings)
    # Nothing is in memory, and nothing is read but what has to compute: each token's best expert.
    there = np.zeros(model.moe.experts, np.bool_)
    monkeypatch.setattr(RoutedFeedForward, "_find_there", lambda self, layer: there)
    for backend in ({}, CPU):
        dials = {**settings, **backend, "experts.most_reads": 0}
        assert measure_error(compute_decoded(plan, tokens, dials), expected) <= ROUNDING


def test_an_evaluation_says_what_dials_cost_and_save(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 12)
    settings = ["decode.predictor=router", "layers.hot=0.0", "memory.segments.cold=600 KiB"]
    settings += ["backends.cpu=reference", "experts.prefer_cached=0.5"]
    options = [part for item in settings for part in ("--set", item)]
    assert cli(["evaluate", str(plan), "--text", str(text), "--context", "32", *options]) == 0
    said = capsys.readouterr().out
    assert "of the experts' weight replaced by experts in memory, 0.0% left out" in said
    # The tool that compares dials, with two of its settings.
    dials: Any = {"most_reads": [{"most_reads": 0}]}
    exact, fewer = measure_dials.measure(plan, [text.read_text()], 0.5, 32, 2, dials)
    assert fewer.read_bytes_token < exact.read_bytes_token and fewer.left_out > 0
    assert measure_dials.draw([exact, fewer], "svg").startswith(b"<?xml")


def test_times_do_not_decide_what_dials_find_in_memory(plan: Path) -> None:
    settings = {"decode.predictor": "router", "decode.look_ahead": "layer", "backends.cpu": "null"}
    for dials, stays in (({}, False), ({"experts.most_reads": 1}, True)):
        with pi2.load(plan, set={**settings, **dials}) as model:
            layers = model._parts.layers
            assert layers is not None and isinstance(layers.feed_forward, RoutedFeedForward)
            ahead = layers.feed_forward.read_ahead
            for _ in range(32 + 8 + 8):
                ahead.end_token(1.0 if ahead.is_on else 0.5)
            assert ahead.is_on == stays


def test_dials_that_find_nothing_change_no_bit(plan: Path) -> None:
    exact, _ = run(plan)
    logits, stats = run(plan, most_reads=2)
    np.testing.assert_array_equal(logits, exact)
    assert (stats.replaced_share, stats.left_out_share) == (0.0, 0.0)
