"""Expected misses agree with those that the neuron cache counts on sampled tokens."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi2.costs.activity import (
    LayerActivity,
    Policy,
    average_chances,
    describe_activity,
    describe_routing,
    make_hotness,
)
from pi2.costs.constants import Constants
from pi2.costs.hotness import CLASSES, _expect_counts
from pi2.importing.conversion_job import group_experts
from pi2.memory.cache import NeuronCache
from pi2.memory.io_engine import BundlePlaces, make_batch
from pi2.memory.policy import expect_uses
from pi2.memory.read_sieve import ReadSieve
from tests.helpers.kernels import make_loops
from tests.helpers.models import MIXTURE, PUBLISHED_HITS, make_model
from tests.helpers.shipped_plans import read_model
from tests.helpers.tables import in_table

NEURONS = 4096
PLANS = Path(__file__).parents[2] / "plans"


def fill_cache(layers: int, hot: float, cold: float, policy: Policy) -> NeuronCache:
    resident = round(hot * NEURONS) + round(cold * NEURONS)
    cache = NeuronCache(
        np.zeros((layers * resident, 1), np.uint8),
        [range(round(hot * NEURONS))] * layers,
        NEURONS,
        make_loops(),
        policy=policy,
        expected=expect_uses(layers, NEURONS),
    )
    for _ in cache.fill():
        pass
    return cache


def count_misses(activity: LayerActivity, hot: float, cold: float, policy: Policy) -> float:
    """Mean misses of a real cache over tokens drawn from the same distribution."""
    random, layers, warm = np.random.default_rng(0), 2, 100
    cache = fill_cache(layers, hot, cold, policy)
    misses = []
    for token in range(300):
        shift = float(random.standard_normal()) * Constants().token_variation
        chances = np.repeat(activity.named.compute_chances(shift), NEURONS // CLASSES)
        for layer in range(layers):
            wanted = np.flatnonzero(random.random(NEURONS) < chances).astype(np.int32)
            found = cache.look_up(layer, wanted)
            if token >= warm:
                misses.append(len(found.missing))
    return float(np.mean(misses))


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@in_table
def test_expected_misses_are_those_that_the_cache_counts(
    active: float, skew: float, hot: float, cold: float, policy: Policy
) -> None:
    activity = LayerActivity(named=make_hotness(active, skew), chosen=1.0, neurons=NEURONS)
    expected = activity.count_missing(hot, cold, policy)
    assert expected == pytest.approx(count_misses(activity, hot, cold, policy), rel=0.15)


def count_reads(activity: LayerActivity, hot: float, cold: float, share: float) -> float:
    """Mean reads of a real cache and sieve over tokens with scores of one distribution."""
    random, layers, warm = np.random.default_rng(0), 2, 100
    cache = fill_cache(layers, hot, cold, "lfu")
    # So large that what lies beside a read costs as much as any other.
    sieve = ReadSieve(0.0, share=share, neuron_bytes=1 << 40)
    normal, reads = NormalDist(), []
    for token in range(260):
        shift = float(random.standard_normal()) * Constants().token_variation
        chances = np.clip(activity.named.compute_chances(shift), 1e-9, 1.0 - 1e-9)
        means = np.repeat([normal.inv_cdf(chance) for chance in chances], NEURONS // CLASSES)
        for layer in range(layers):
            scores = (means + random.standard_normal(NEURONS)).astype(np.float32)
            found = cache.look_up(layer, np.flatnonzero(scores > 0).astype(np.int32), scores, sieve)
            if token >= warm:
                reads.append(len(found.missing))
        sieve.end_step()
    return float(np.mean(reads))


@pytest.mark.parametrize(
    ("active", "skew", "hot", "cold", "share"),
    [(0.14, 0.4, 0.2, 0.15, 0.02), (0.14, 0.4, 0.3, 0.05, 0.03), (0.1, 0.33, 0.2, 0.2, 0.005)],
)
def test_expected_reads_are_those_of_a_sieve(
    active: float, skew: float, hot: float, cold: float, share: float
) -> None:
    activity = LayerActivity(named=make_hotness(active, skew), chosen=1.0, neurons=NEURONS)
    expected = activity.count_missing(hot, cold, "lfu", share)
    assert expected < 0.8 * activity.count_missing(hot, cold, "lfu")
    assert expected == pytest.approx(count_reads(activity, hot, cold, share), rel=0.2)


def count_requests(activity: LayerActivity, hot: float, cold: float, gap: int) -> tuple[int, ...]:
    """Missing neurons, requests and neurons read by a real cache over a store by expert, of which
    a token chooses two of eight."""
    random, experts, warm = np.random.default_rng(0), 8, 150
    ffn = NEURONS // experts
    by_hotness = np.arange(NEURONS) % experts * ffn + np.arange(NEURONS) // experts
    order = group_experts(by_hotness.astype(np.int32), ffn)
    resident = round(hot * NEURONS) + round(cold * NEURONS)
    cache = NeuronCache(
        np.zeros((resident, 1), np.uint8),
        [range(round(hot * NEURONS))],
        NEURONS,
        make_loops(),
        policy="lfu",
        expected=expect_uses(1, NEURONS),
    )
    for _ in cache.fill():
        pass
    missing = requests = read = 0
    chances = np.repeat(average_chances(activity.named), NEURONS // CLASSES)[order % ffn * experts]
    for token in range(400):
        chosen = np.isin(order // ffn, random.permutation(experts)[:2])
        wanted = np.flatnonzero(chosen & (random.random(NEURONS) < chances)).astype(np.int32)
        found = cache.look_up(0, wanted)
        if token >= warm and len(found.missing):
            slots, places = np.zeros(len(found.missing), np.int32), BundlePlaces(0, 1, 0, gap)
            batch = make_batch(0, found.missing, slots, make_loops(), places)
            missing += len(found.missing)
            requests += len(batch.firsts)
            read += int(batch.sizes.sum())
    return missing, requests, read


@pytest.mark.parametrize(("hot", "cold"), [(0.05, 0.06), (0.12, 0.12)])
@pytest.mark.parametrize("gap", [0, 2])
def test_expected_requests_of_a_store_by_expert_are_those_that_are_made(
    hot: float, cold: float, gap: int
) -> None:
    activity = LayerActivity(named=make_hotness(0.2, 0.3), chosen=0.25, neurons=NEURONS)
    merged = activity.merge_reads(hot, cold, gap)
    missing, requests, read = count_requests(activity, hot, cold, gap)
    assert merged.requests == pytest.approx(requests / missing, rel=0.15)
    assert 1.0 + merged.unwanted == pytest.approx(read / missing, rel=0.15)


def test_a_store_s_counts_come_before_the_model_s_document(tmp_path: Path) -> None:
    model = read_model("bamboo-7b")
    layers, neurons = model.shape.layers, model.layer_neurons
    layer = {"active": 0.2, "gate_positive": 0.25, "predicted": 0.3, "skew": 0.3}
    (tmp_path / "statistics.json").write_text(json.dumps({"layers": [layer] * layers}))
    found, source = describe_activity(model, "low-rank", tmp_path)
    assert source == "the store's statistics"
    assert found[0].named.active == 0.3
    table = pa.table(
        {
            "layer": np.repeat(np.arange(layers), neurons).astype(np.int16),
            "neuron": np.tile(np.arange(neurons), layers).astype(np.int32),
            "count": np.tile(np.arange(neurons) % 50, layers),
        }
    ).replace_schema_metadata({"tokens": "100"})
    pq.write_table(table, tmp_path / "activations.parquet")
    found, source = describe_activity(model, "low-rank", tmp_path)
    assert source == "the store's counted activations"
    assert found[0].named.active == pytest.approx(0.3, rel=0.01)


def test_rare_neurons_are_expected_to_be_used_as_other_tokens_use_them() -> None:
    """Of neurons that a sample of 256 tokens never saw, some are used by other tokens."""
    random = np.random.default_rng(0)
    rates = random.beta(0.3, 3.0, 14336)
    seen, others = (random.binomial(256, rates).astype(np.float64) for _ in range(2))
    expected = _expect_counts(seen)
    for count in range(4):
        same = seen == count
        assert expected[same].mean() == pytest.approx(others[same].mean(), rel=0.15)
    assert expected[seen > 10].tolist() == seen[seen > 10].tolist()


def test_the_demo_model_says_how_many_gates_are_open() -> None:
    model = read_model("pi2-demo")
    gates, source = describe_activity(model, "gate", PLANS / "stores/pi2-demo")
    assert source == "the store's counted activations"
    mean = np.mean([layer.named.active for layer in gates])
    assert mean == pytest.approx(0.249, rel=0.02), "a quarter; an activation needs the up row, too"
    assert gates[0].fired == pytest.approx(0.067 / 0.249, rel=0.01)
    named, _ = describe_activity(model, "low-rank", PLANS / "stores/pi2-demo")
    assert np.mean([layer.named.active for layer in named]) == pytest.approx(0.176, rel=0.02)
    alone, source = describe_activity(model, "low-rank")
    assert source.startswith("the model's document") and alone[0].named.active == 0.176


def make_routed(experts: int, chosen: int) -> LayerActivity:
    shape = {"layers": 1, "hidden": 64, "ffn": 32, "vocab": 64, "context": 64}
    moe = {"experts": experts, "active_experts": chosen}
    model = make_model({"shape": shape, **MIXTURE, "moe": moe, "predictor": None})
    return describe_routing(model, Constants())[0][0]


def test_caches_of_experts_hit_as_often_as_was_published() -> None:
    """One law for all mixtures; laws of single ones would be nearer, and say nothing of others."""
    errors = []
    for experts, chosen, held, hits in PUBLISHED_HITS:
        layer = make_routed(experts, chosen)
        errors.append(abs(1.0 - layer.count_missing(0.0, held, "lru") / layer.used - hits))
    assert max(errors) <= 0.10 and np.mean(errors) <= 0.04


def test_a_list_of_hot_experts_helps_little_in_other_texts() -> None:
    """A list of 6 % of the experts hits 10 % (published), where every expert as often hits 6 %."""
    layer = make_routed(512, 10)
    assert layer.count_within(0.06) / layer.used == pytest.approx(0.10, abs=0.03)
    assert 1.0 - layer.count_missing(0.06, 0.0, "lru") / layer.used == pytest.approx(0.1, abs=0.03)
    even = replace(layer, lasting=replace(layer.named, spread=0.0))
    assert even.count_within(0.06) / layer.used == pytest.approx(0.06, abs=0.001)
    cached, listed = (layer.count_missing(hot, 0.3 - hot, "lru") for hot in (0.0, 0.1))
    assert cached < listed, "what a text uses is better kept"
