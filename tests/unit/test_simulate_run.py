"""Whole simulated runs: reproducible, bounded, and moved by every figure in the right direction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pi2.costs.constants import Constants, describe_constants
from pi2.costs.description import Description
from pi2.simulate import SimulationResult, simulate
from tests.helpers.simulation import make_flash, make_inputs

TOKENS = 64


def run(inputs: Description, seed: int = 0, tokens: int = TOKENS) -> SimulationResult:
    return simulate(inputs, tokens=tokens, seed=seed)


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    first, second, other = run(make_inputs()), run(make_inputs()), run(make_inputs(), seed=1)
    assert first.describe() == second.describe()
    assert np.any(first.decode.token_s != other.decode.token_s)
    assert first.tokens_s == pytest.approx(other.tokens_s, rel=0.05)


def test_no_unit_is_at_work_longer_than_the_token_takes() -> None:
    decode = run(make_inputs()).decode
    for busy in (decode.cpu_s, decode.dense_s, decode.flash_s, decode.waiting_s):
        assert np.all(busy >= 0.0)
        assert np.all(busy <= decode.token_s + 1e-9)


def test_bytes_read_are_those_of_the_missing_neurons() -> None:
    # No token misses so many that it is quicker to read stretches.
    cold = {"cold_neurons": 30000.0}
    inputs = make_inputs(constants=Constants(token_variation=0.03), choices=cold)
    decode = run(inputs).decode
    per_neuron = 4096 * (1 + inputs.rates.constants.up_down_share)
    assert decode.read_bytes == pytest.approx(decode.missing_neurons * per_neuron, rel=1e-6)


def test_active_neurons_are_the_model_s_share() -> None:
    decode = run(make_inputs(), tokens=512).decode
    assert decode.active_neurons.mean() / (8 * 14336) == pytest.approx(0.15, rel=0.03)
    assert np.all(decode.missing_neurons <= decode.active_neurons)


def test_percentiles_are_ordered_and_enclose_the_mean() -> None:
    result = run(make_inputs(), tokens=512)
    p50, p90, p99 = (result.find_percentile_s(percent) for percent in (50, 90, 99))
    assert p50 < p90 < p99
    assert p50 * 0.9 < result.mean_s < p90


def test_later_tokens_take_longer_because_of_their_keys_and_values() -> None:
    inputs = make_inputs(hot=1.0, workload={"kv_token_bytes": 65536})
    token_s = run(inputs, tokens=1024).decode.token_s
    growth = token_s[-64:].mean() - token_s[:64].mean()
    assert growth == pytest.approx(960 * 65536 * 8 / 40e9, rel=0.02)


def double_random() -> Description:
    return make_inputs(machine={"flash": make_flash(random_mb_s=2000.0)})


class TestDoublingAFigure:
    """Speed must rise, and by no more than what doubles."""

    def check(self, changed: Description, low: float, high: float) -> None:
        ratio = run(changed).tokens_s / run(make_inputs()).tokens_s
        assert low <= ratio <= high, ratio

    def test_random_reads(self) -> None:
        self.check(double_random(), 1.15, 2.0)

    def test_cpu_bandwidth(self) -> None:
        self.check(make_inputs(machine={"cpu_bytes_s": 80e9}), 1.0, 1.5)

    def test_bandwidth_of_all_units(self) -> None:
        faster = {"cpu_bytes_s": 80e9, "dense_bytes_s": 100e9, "shared_bytes_s": 120e9}
        self.check(make_inputs(machine=faster), 1.05, 2.0)

    def test_everything(self) -> None:
        # latencies and barriers stay as they are: not quite twice as fast
        faster = {"cpu_bytes_s": 80e9, "dense_bytes_s": 100e9, "shared_bytes_s": 120e9}
        inputs = make_inputs(machine={**faster, "flash": make_flash(random_mb_s=2000.0)})
        self.check(inputs, 1.5, 2.0)

    def test_active_neurons_slow_it_down(self) -> None:
        self.check(make_inputs(workload={"active": 0.3}), 0.3, 0.8)

    def test_memory_for_neurons(self) -> None:
        self.check(make_inputs(hot=0.8), 1.1, 3.0)

    def test_layers_slow_it_down(self) -> None:
        more = {"layers": 16}
        self.check(make_inputs(workload=more), 0.5, 0.56)

    def test_skew_makes_more_neurons_cold(self) -> None:
        self.check(make_inputs(workload={"skew": 0.7}), 0.2, 0.9)


def test_more_memory_is_never_slower() -> None:
    speeds = [run(make_inputs(hot=hot, dense=0.0)).tokens_s for hot in (0.0, 0.2, 0.4, 0.6, 0.8)]
    assert speeds == sorted(speeds)


def test_with_everything_in_memory_nothing_is_read() -> None:
    result = run(make_inputs(hot=1.0))
    assert result.decode.read_bytes.sum() == 0.0
    assert (result.miss_rate, result.waiting_share) == (0.0, 0.0)


def test_experts_that_rest_cost_nothing_but_memory() -> None:
    moe = {"experts": 8, "active_experts": 2, "ffn": 7168}
    cold = {"cold_neurons": 0.1 * 8 * 8 * 7168}
    result = run(make_inputs(workload=moe, choices=cold), tokens=256)
    active = result.decode.active_neurons.mean() / (8 * 2 * 7168)
    assert active == pytest.approx(0.15, rel=0.03)


class TestPrefill:
    def test_it_takes_the_longer_of_reading_and_computing(self) -> None:
        result = simulate(make_inputs(), prompt_tokens=128, tokens=1).prefill
        assert result is not None
        assert max(result.compute_s, result.flash_s) <= result.duration_s
        assert result.duration_s <= result.compute_s + result.flash_s + 0.01

    def test_a_short_prompt_is_bound_by_the_stream_of_weights(self) -> None:
        result = simulate(make_inputs(), prompt_tokens=64, tokens=1).prefill
        assert result is not None
        assert result.read_bytes == pytest.approx(8 * 14336 * 6912)
        assert result.duration_s == pytest.approx(result.read_bytes / 4e9, rel=0.1)

    def test_layers_first_reads_layers_once_and_chunks_first_once_per_chunk(self) -> None:
        def count(order: str) -> float:
            together = 512 if order == "layers-first" else 128
            inputs = make_inputs(choices={"together": together}, hot=0.0)
            result = simulate(inputs, prompt_tokens=512, tokens=1).prefill
            assert result is not None
            return result.read_bytes

        assert count("chunks-first") == pytest.approx(4 * count("layers-first"))

    def test_in_memory_it_is_bound_by_arithmetic(self) -> None:
        inputs = make_inputs(hot=1.0)
        result = simulate(inputs, prompt_tokens=512, tokens=1).prefill
        assert result is not None
        assert result.read_bytes == 0.0
        operations = 2 * 512 * 8 * (42e6 + 14336 * 3 * 4096)
        assert result.duration_s == pytest.approx(operations / 1e13, rel=0.1)

    def test_without_an_arithmetic_rate_it_is_not_simulated(self) -> None:
        inputs = make_inputs(machine={"dense_ops_s": None})
        assert simulate(inputs, tokens=1).prefill is None


def test_energy_is_power_times_time() -> None:
    result = run(make_inputs(hot=1.0))
    assert result.energy is not None
    assert result.energy.token_j == pytest.approx(5.0 * result.mean_s, rel=0.05)
    powers = {"cpu_power_w": None, "power_w": None}
    assert run(make_inputs(machine=powers)).energy is None


def test_results_are_labelled_as_simulated() -> None:
    result = run(make_inputs())
    assert result.describe()["simulated"] is True
    assert result.summarise().startswith("SIMULATED")


def test_every_constant_is_described() -> None:
    for name, value, unit, kind, meaning in describe_constants(Constants()):
        assert name and unit and meaning
        assert kind in ("published", "estimated", "calibrated", "assumed")
        assert value >= 0.0


@pytest.mark.slow
def test_ten_thousand_tokens_of_a_47b_take_less_than_a_minute() -> None:
    import time

    moe = {"layers": 32, "experts": 8, "active_experts": 2, "active": 0.1}
    inputs = make_inputs(workload=moe, choices={"cold_neurons": 0.05 * 32 * 8 * 14336})
    start = time.process_time()
    simulate(inputs, tokens=10_000)
    assert time.process_time() - start < 60.0


def test_hot_neurons_stream_where_more_of_them_is_active_than_gathering_reaches() -> None:
    def find_part(**changes: object) -> float:
        inputs = make_inputs(dense=0.0, **changes)  # type: ignore[arg-type]
        return inputs.find_terms(inputs.kinds[0]).hot_part

    part = find_part()
    assert 0.2 < part <= 1.0
    assert find_part(workload={"batch": 8}) < part, "more of them is active"
    assert find_part(constants=Constants(gather_efficiency=1.0)) == 1.0
    crowd = make_inputs(dense=0.0, workload={"batch": 8})
    probed = replace(crowd, rates=replace(crowd.rates, measured=True))
    assert probed.find_terms(probed.kinds[0]).hot_part == 1.0, "pi2's own engine gathers"


class TestLookingAhead:
    def run(self, mode: str, **changes: object) -> SimulationResult:
        return run(make_inputs(choices={"look_ahead": mode}, **changes))  # type: ignore[arg-type]

    def test_reads_that_begin_earlier_are_waited_for_less(self) -> None:
        none, attention, layer = (self.run(mode) for mode in ("none", "attention", "layer"))
        assert none.tokens_s < attention.tokens_s < layer.tokens_s
        assert none.decode.waiting_s.mean() > layer.decode.waiting_s.mean()
        assert layer.decode.read_bytes.mean() == pytest.approx(none.decode.read_bytes.mean())

    def test_the_flash_is_never_asked_for_more_than_it_gives(self) -> None:
        layer = self.run("layer", hot=0.1)
        assert (layer.decode.flash_s <= layer.decode.token_s).all()

    def test_with_everything_in_memory_it_makes_no_difference(self) -> None:
        assert self.run("layer", hot=1.0).tokens_s == self.run("none", hot=1.0).tokens_s
