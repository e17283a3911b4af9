"""One layer: nothing is lost, nothing takes less time than it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pi2.costs.constants import Constants
from pi2.costs.description import Description
from pi2.simulate.layer import LayerSimulation, LayerTimes, LayerWork
from tests.helpers.simulation import STRIDE, make_inputs

WORK = LayerWork(resident=300.0, missing=150.0)


def run_layer(inputs: Description, work: LayerWork = WORK) -> LayerTimes:
    return LayerSimulation(inputs, inputs.kinds[0]).run(work)


def list_works() -> list[LayerWork]:
    return [
        WORK,
        replace(WORK, missing=0.0),
        replace(WORK, resident=0.0),
        replace(WORK, missing=100.0),
        replace(WORK, resident=0.0, missing=1.0),
    ]


@pytest.mark.parametrize("work", list_works(), ids=str)
@pytest.mark.parametrize("dense", [0.0, 0.35])
def test_nothing_is_at_work_longer_than_the_layer_takes(dense: float, work: LayerWork) -> None:
    times = run_layer(make_inputs(dense=dense), work)
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
    share = inputs.rates.constants.up_down_share
    assert read == pytest.approx(work.missing * (4096 + share * 4096))


def test_with_one_phase_every_missing_bundle_is_read_once() -> None:
    read = run_layer(make_inputs(choices={"phases": 1})).meter.read_bytes
    assert read == pytest.approx(WORK.missing * STRIDE)


def test_the_cpu_moves_the_predictor_and_the_gathered_neurons() -> None:
    inputs = make_inputs(choices={"phases": 1})
    moved = run_layer(inputs).meter.cpu_bytes
    assert moved == pytest.approx(13e6 + 450 * 6912)


def test_single_neurons_reach_a_part_of_the_bandwidth_only() -> None:
    inputs = make_inputs(dense=0.0)
    less, more = (LayerWork(resident=size, missing=0.0) for size in (300.0, 20300.0))
    added_s = run_layer(inputs, more).duration_s - run_layer(inputs, less).duration_s
    assert added_s == pytest.approx(
        20000 * 6912 / 40e9 / inputs.rates.constants.gather_efficiency, rel=0.05
    )


def test_the_dense_unit_moves_its_neurons_without_scales() -> None:
    inputs = make_inputs(dense=0.35)
    assert run_layer(inputs).meter.dense_bytes == pytest.approx(0.35 * 14336 * 6144)


def test_the_layer_takes_at_least_the_longest_of_its_parts() -> None:
    inputs = make_inputs()
    times = run_layer(inputs)
    dense_s = 0.4 * 14336 * 6144 / 50e9 + inputs.rates.constants.dense_launch_s
    read_s = times.meter.read_bytes / 1e9
    assert times.duration_s >= max(dense_s, read_s)


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
    times = run_layer(inputs, replace(WORK, missing=7000.0))
    absent = 0.6 * 14336
    assert times.meter.read_bytes == pytest.approx(absent * STRIDE, rel=0.02)
    assert times.meter.flash_s == pytest.approx(absent * STRIDE / 4e9, rel=0.05)


def test_equal_work_is_simulated_once() -> None:
    inputs = make_inputs()
    simulation = LayerSimulation(inputs, inputs.kinds[0])
    assert simulation.run(WORK) is simulation.run(replace(WORK))
