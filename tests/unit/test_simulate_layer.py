"""One layer under each policy: nothing is lost, nothing takes less time than it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pi2.simulate.constants import Constants
from pi2.simulate.inputs import Policy, SimulationInput
from pi2.simulate.layer import LayerSimulation, LayerTimes
from pi2.simulate.layer_run import LayerWork
from tests.helpers.simulation import make_inputs

WORK = LayerWork(dense=5000.0, resident=300.0, missing=400.0, cold=8000.0)


def run_layer(inputs: SimulationInput, work: LayerWork = WORK) -> LayerTimes:
    return LayerSimulation(inputs).run(work)


def list_works() -> list[LayerWork]:
    return [
        WORK,
        replace(WORK, dense=0.0),
        replace(WORK, missing=0.0),
        replace(WORK, resident=0.0),
        replace(WORK, missing=3000.0, cold=14000.0),
        replace(WORK, dense=0.0, resident=0.0, missing=1.0),
    ]


@pytest.mark.parametrize("work", list_works(), ids=str)
@pytest.mark.parametrize("policy", ["neuron-cluster", "layer-barrier", "mmap"])
def test_nothing_is_at_work_longer_than_the_layer_takes(policy: Policy, work: LayerWork) -> None:
    times = run_layer(make_inputs(choices={"policy": policy}), work)
    meter = times.meter
    for busy in (meter.cpu_s, meter.dense_s, meter.flash_s, meter.waiting_s):
        assert 0.0 <= busy <= times.duration_s + 1e-12
    assert meter.waiting_s <= meter.flash_s


@pytest.mark.parametrize("work", list_works(), ids=str)
def test_clusters_read_the_gate_of_each_missing_neuron_and_the_rest_of_open_ones(
    work: LayerWork,
) -> None:
    inputs = make_inputs()
    read = run_layer(inputs, work).meter.read_bytes
    share = inputs.constants.up_down_share
    assert read == pytest.approx(work.missing * (4096 + share * 4096))


@pytest.mark.parametrize("policy", ["neuron-cluster", "layer-barrier"])
def test_with_one_phase_every_missing_bundle_is_read_once(policy: Policy) -> None:
    one = {"policy": policy, "phases": 1, "gate_read_bytes": 8192, "rest_read_bytes": 0}
    assert run_layer(make_inputs(choices=one)).meter.read_bytes == pytest.approx(400 * 8192)


def test_the_cpu_moves_the_predictor_and_the_gathered_neurons() -> None:
    inputs = make_inputs(choices={"phases": 1, "gate_read_bytes": 8192, "rest_read_bytes": 0})
    moved = run_layer(inputs).meter.cpu_bytes
    gathered = 700 * 6912 / inputs.constants.gather_efficiency
    assert moved == pytest.approx(13e6 + gathered)


def test_the_dense_unit_moves_its_neurons_without_scales() -> None:
    assert run_layer(make_inputs()).meter.dense_bytes == pytest.approx(5000 * 6144)


def test_the_layer_takes_at_least_the_longest_of_its_parts() -> None:
    inputs = make_inputs()
    times = run_layer(inputs)
    dense_s = 5000 * 6144 / 50e9 + inputs.constants.dense_launch_s
    read_s = times.meter.read_bytes / 1e9
    assert times.duration_s >= max(dense_s, read_s)


def test_clusters_are_never_slower_than_waiting_for_the_layer() -> None:
    for work in list_works():
        flowing = run_layer(make_inputs(), work).duration_s
        waiting = run_layer(make_inputs(choices={"policy": "layer-barrier"}), work).duration_s
        assert flowing <= waiting


def test_without_misses_the_flash_rests() -> None:
    meter = run_layer(make_inputs(), replace(WORK, missing=0.0)).meter
    assert (meter.flash_s, meter.waiting_s, meter.read_bytes) == (0.0, 0.0, 0.0)


def test_more_misses_take_longer() -> None:
    inputs = make_inputs()
    durations = [
        run_layer(inputs, replace(WORK, missing=float(missing))).duration_s
        for missing in (0, 50, 200, 800, 3000)
    ]
    assert durations == sorted(durations)
    assert durations[-1] > 3 * durations[0]


def test_where_most_cold_neurons_are_missing_all_are_read_in_one_stream() -> None:
    inputs = make_inputs(constants=Constants(place_s=0.0))
    work = replace(WORK, missing=7000.0)
    times = run_layer(inputs, work)
    assert times.meter.read_bytes == pytest.approx(8000 * 8192)
    assert times.meter.flash_s == pytest.approx(8000 * 8192 / 4e9, rel=0.05)


def test_reading_threads_beyond_the_first_lose_the_penalty_and_hide_latency() -> None:
    work = replace(WORK, missing=2000.0, cold=14000.0)

    def time_reads(threads: int) -> float:
        choices = {"policy": "layer-barrier", "io_threads": threads}
        return run_layer(make_inputs(choices=choices), work).meter.flash_s

    assert time_reads(1) > time_reads(4) > time_reads(8)
    assert time_reads(64) > time_reads(16)  # waking them costs more than they bring


def test_neurons_that_are_kept_take_time_to_place_and_others_do_not() -> None:
    slow = Constants(place_s=10e-6)
    one_pass = {"phases": 1, "gate_read_bytes": 8192, "rest_read_bytes": 0}

    def time_reads(constants: Constants, cold_neurons: float) -> float:
        choices = {**one_pass, "cold_neurons": cold_neurons}
        work = replace(WORK, cold=14000.0)
        return run_layer(make_inputs(choices=choices, constants=constants), work).meter.flash_s

    without = time_reads(Constants(place_s=0.0), 1000.0)
    assert time_reads(slow, 1000.0) == pytest.approx(without + 400 * 10e-6)
    assert time_reads(slow, 0.0) == pytest.approx(without)


def test_equal_work_is_simulated_once() -> None:
    simulation = LayerSimulation(make_inputs())
    assert simulation.run(WORK) is simulation.run(replace(WORK))
