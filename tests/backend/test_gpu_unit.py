"""What a unit on a GPU does beyond the contract of all units: its memory, and how it fails."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pi2.backends.gpu import launches
from pi2.backends.gpu.arrays import Memory, UnitArrays
from pi2.backends.gpu.dense_unit import GpuUnit
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.units import UnitFailed
from pi2.diagnostics import UserError
from tests.helpers.dense_units import Neurons, make_neurons


@pytest.fixture
def make(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[[Neurons], GpuUnit]:
    """Units on the device, which stays open when they are closed."""
    monkeypatch.setattr(launcher, "close", lambda: None)
    monkeypatch.setattr(launches, "open_unit", lambda unit: launcher)
    return lambda neurons: GpuUnit(neurons.request((30, 7)))


def test_no_more_is_allocated_than_is_counted_and_all_is_given_back(
    launcher: Launcher, make: Callable[[Neurons], GpuUnit]
) -> None:
    neurons, before = make_neurons(), launcher.allocated_bytes
    unit = make(neurons)
    memory = Memory()
    UnitArrays(memory, neurons.request((30, 7)).share)
    own = launcher.allocated_bytes - before
    assert own == memory.device_bytes and neurons.allocated == [memory.bytes]
    assert 37 * neurons.layout.used_bytes < own < memory.bytes
    unit.close()
    assert launcher.allocated_bytes == before


def test_pieces_that_fill_no_tile_wait_for_the_next(make: Callable[[Neurons], GpuUnit]) -> None:
    neurons = make_neurons(count=100)
    unit = make(neurons)
    unit = GpuUnit(neurons.request((97, 7)))
    for first, end in ((0, 5), (5, 40), (40, 41), (41, 96), (96, 97)):
        unit.keep(0, first, neurons.stored[0][first:end])
    unit.keep(1, 0, neurons.stored[1][:7])
    inputs = np.random.default_rng(2).standard_normal((2, neurons.layout.hidden), np.float32)
    for layer, count in ((0, 97), (1, 7)):
        found = unit.finish(unit.start(layer, inputs))
        wanted = neurons.compute(layer, inputs, None, range(count))
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    unit.close()


def test_a_device_without_room_is_a_failure_that_says_so(
    launcher: Launcher, make: Callable[[Neurons], GpuUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "count_free", lambda: 1000)
        with pytest.raises(UnitFailed, match="free, and the plan puts") as caught:
            make(make_neurons())
    assert "layers.split" in str(caught.value.help)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "facts", dataclasses.replace(launcher.facts, max_array_bytes=1000))
        with pytest.raises(UnitFailed, match="in one piece"):
            make(make_neurons())


def test_a_layer_that_does_not_fit_gives_back_what_was_allocated(
    launcher: Launcher, make: Callable[[Neurons], GpuUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, allocate = launcher.allocated_bytes, launcher.allocate

    def refuse(size: int) -> Any:
        if launcher.allocated_bytes - before > 30_000:
            raise UserError.of("P361", "no memory is left", help="give it less")
        return allocate(size)

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "allocate", refuse)
        with pytest.raises(UnitFailed, match="no memory is left"):
            make(make_neurons())
    assert launcher.allocated_bytes == before


def test_a_device_that_is_lost_is_a_failure(
    make: Callable[[Neurons], GpuUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    neurons = make_neurons()
    unit = make(neurons)
    neurons.fill(unit, (30, 7))
    inputs = np.ones((1, neurons.layout.hidden), np.float32)

    def lose(*arguments: Any) -> None:
        raise UserError.of("P362", "the device was lost", help="start again")

    with monkeypatch.context() as patch:
        patch.setattr(type(unit._queue), "launch", lose)
        with pytest.raises(UnitFailed, match="the device was lost"):
            unit.start(0, inputs)
    unit.close()
