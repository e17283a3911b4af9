"""Deviations from a mixture's routing: each dial's effect and counters, and none unasked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import measure_dials
import pi2
from pi2.arrays import F32
from pi2.cli.main import run as cli
from pi2.engine.experts import DialCounters, RoutingDials
from pi2.engine.statistics import RunStatistics
from pi2.plan.documents.plan_units import Experts
from pi2.plan.documents.quantities import parse_size
from pi2.refit import read_plan
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import MIXTURE, make_model
from tests.helpers.tables import in_table

EXPERTS = 6
SCORES = np.array([3.0, 2.9, 1.0, 0.5, 0.0, -1.0], np.float32)


def turn(there: list[int], chosen: int = 2, **settings: Any) -> tuple[F32, DialCounters]:
    """Routes [experts] of a token with `SCORES`, ``chosen`` of which compute, and what is
    counted."""
    model = make_model({**MIXTURE, "moe": {"experts": EXPERTS, "active_experts": chosen}})
    dials = RoutingDials(Experts.model_validate_json(json.dumps(settings)), model)
    own, weights = np.arange(chosen, dtype=np.int32), np.exp(SCORES[:chosen])
    weights /= weights.sum()
    known = np.zeros(EXPERTS, bool)
    known[there] = True
    dials.apply(0, SCORES, own, weights, known)
    routes = np.zeros(EXPERTS, np.float32)
    np.add.at(routes, own, weights)
    return routes, dials.counters


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


def test_factors_of_experts_stay_with_them() -> None:
    model = make_model({**MIXTURE, "moe": {"experts": 3, "active_experts": 2}})
    scales = np.array([1.0, 2.0, 4.0], np.float32)
    dials = RoutingDials(Experts(prefer_cached=1.0), model, lambda layer: scales)
    chosen, weights = np.array([0, 1], np.int32), np.array([0.6, 0.8], np.float32)
    scores = np.array([0.5, 0.4, 0.4], np.float32)
    dials.apply(0, scores, chosen, weights, np.array([False, False, True]))
    shares = np.exp(scores[[0, 2]])
    assert chosen.tolist() == [0, 2]
    np.testing.assert_allclose(weights, shares / shares.sum() * scales[[0, 2]], rtol=1e-6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 16 experts, three of which compute a token."""
    shape = {"hidden": 256, "ffn": 768, "layers": 4, "context": 512}
    changes = {**MIXTURE, "moe": {"experts": 16, "active_experts": 3}}
    return write_random_gguf(tmp_path_factory.mktemp("dials"), shape, changes)


FAST = {"quality": "fast", "kv.context": 256}
MEMORY, SETTINGS = "110 MiB", {"kv.context": 256, "prefill.chunk": 32}


def run(file: Path, **settings: Any) -> tuple[F32, RunStatistics]:
    dials = {f"experts.{name}": value for name, value in settings.items()}
    tokens = [7, 100, 8, 290, 3, 3, 41, 250, 12, 77, 5] * 2
    with pi2.load(file, memory=MEMORY, set={**SETTINGS, **dials}) as model:
        exact = model.logits(tokens).copy()
        logits = model.logits(tokens, mode="decode").copy()
        assert exact.shape == logits.shape
        return logits, model.stats


@in_table
def test_dials_read_less_and_say_what_they_replaced(
    file: Path, settings: dict[str, Any], share: str
) -> None:
    exact, before = run(file)
    assert before.replaced_share is None
    logits, stats = run(file, **settings)
    assert stats.flash_read_bytes < before.flash_read_bytes
    assert 0.0 < getattr(stats, share) < 0.8
    assert np.isfinite(logits).all() and np.abs(logits - exact).max() > 1e-4
    np.testing.assert_array_equal(logits, run(file, **settings)[0])


def test_fast_files_of_mixtures_prefer_experts_in_memory(file: Path) -> None:
    for memory, preference in ((parse_size(MEMORY), 0.2), (None, 0.0)):
        found = read_plan(file, memory_bytes=memory, overrides=FAST)
        assert found.resolved.plan.experts.prefer_cached == preference


def test_dials_that_find_nothing_change_no_bit(file: Path) -> None:
    exact, _ = run(file)
    logits, stats = run(file, most_reads=3)
    np.testing.assert_array_equal(logits, exact)
    assert (stats.replaced_share, stats.left_out_share) == (0.0, 0.0)


def test_an_evaluation_says_what_dials_cost_and_save(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 12)
    command = ["evaluate", str(file), "--text", str(text), "--context", "32", "--memory", MEMORY]
    assert cli([*command, "--set", "experts.prefer_cached=0.5"]) == 0
    said = capsys.readouterr().out
    assert "of the experts' weight replaced by experts in memory, 0.0% left out" in said
    # The tool that compares dials, with one of its settings.
    dials: Any = {"most_reads": [{"most_reads": 0}]}
    exact, fewer = measure_dials.measure(file, [text.read_text()], MEMORY, 32, 2, dials)
    assert fewer.read_bytes_token < exact.read_bytes_token and fewer.left_out > 0
    assert measure_dials.draw([exact, fewer], "svg").startswith(b"<?xml")
