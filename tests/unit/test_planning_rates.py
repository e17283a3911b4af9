"""Rates between two widths that were measured: `pi2.costs.rates`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pi2.costs.rates import Rates, read_rates
from pi2.costs.settings import Settings
from pi2.costs.terms import time_weight
from pi2.plan.documents.device import Device

ORIGIN = {"status": "estimated", "source": "a test"}


def make_device(
    *, small: bool = True, others: tuple[tuple[str, int, float, int, str, str], ...] = ()
) -> Device:
    """A processor whose kernels were measured with models 4096 and 256 wide; ``others``: kernel,
    size, microseconds, bytes, and what keys, values and activations were."""
    kernels: list[dict[str, Any]] = [
        {
            "kernel": name,
            "size": size,
            "time": f"{time_us} us",
            "bytes": f"{size_bytes} B",
            "width": 4096,
            "kv": kv,
            "activations": activations,
            **ORIGIN,
        }
        for name, size, time_us, size_bytes, kv, activations in others
    ]
    for width, scale in ((4096, 1.0), (256, 1 / 16)) if small else ((4096, 1.0),):

        def kernel(
            name: str,
            size: int,
            time_us: float,
            size_bytes: int | None = None,
            giga_ops: float | None = None,
            width: int = width,
        ) -> None:
            found: dict[str, Any] = {"kernel": name, "size": size, "time": f"{time_us:.3f} us"}
            found |= {"width": width, **ORIGIN}
            if size_bytes is not None:
                found["bytes"] = f"{size_bytes} B"
            if giga_ops is not None:
                found["giga_ops"] = giga_ops
            kernels.append(found)

        # 20 GB/s after 10 us, whatever the width.
        for name in ("multiply", "project", "predict"):
            size = round(20_000_000 * scale**2)
            kernel(name, 1024, 10 + size / 20e3, size)
        kernel("attend", 256, 400 * scale, round(8_000_000 * scale))
        # A neuron takes 0.05 us, and its bytes at 18 GB/s.
        for count in (64, 1024):
            kernel(
                "gather",
                count,
                4 + count * (0.05 + 6912 * scale / 18e3),
                round(count * 6912 * scale),
            )
        kernel("norm", width, 2 + 8 * scale)
        kernel("look-up", 0, 30)
        kernel("look-up", 8, 78)
        kernel("look-up", 32, 90)
        kernel("engine", 4, 100 * scale)
        for count in (10, 110):
            kernel("engine-cached", count, 40 + 0.1 * count + 100 * scale)
        for tokens in (8, 128):
            # 0.5 ns of a weight for a pass, and 0.01 ns for each token.
            weights = 6_000_000 * scale
            seconds = weights * (0.5e-9 + tokens * 0.01e-9)
            kernel("dense", tokens, seconds * 1e6, None, 2.0 * tokens * weights / seconds / 1e9)
    values = {
        "schema_version": 2,
        "id": "box",
        "units": {
            "cpu": {
                "kind": "cpu",
                "clusters": [{"id": "cores", "cores": 2}],
                "read_bandwidth": {"value": "24 GB/s", **ORIGIN},
                "kernels": kernels,
            }
        },
        "storage": {},
    }
    return Device.model_validate_json(json.dumps(values))


def read(width: int | None, *, small: bool = True) -> Rates:
    return read_rates(make_device(small=small), width)


def test_two_widths_tell_a_call_s_fixed_part_from_its_bytes() -> None:
    rates = read(1024)
    for kernel in (rates.multiply, rates.project, rates.predict):
        assert kernel.call_s == pytest.approx(10e-6, rel=0.02)
        assert kernel.bytes_s == pytest.approx(20e9, rel=0.02)


def test_what_grows_with_the_width_is_in_proportion_between_two() -> None:
    small, middle, large = (read(width).norm_s for width in (256, 2176, 4096))
    assert middle == pytest.approx((small + large) / 2)
    assert read(64).norm_s == small, "nothing is known of smaller ones"
    assert read(None).norm_s == large


def test_a_neuron_takes_some_time_beside_its_bytes() -> None:
    for width in (256, 1024, 4096):
        neuron_bytes = 6912 * width / 4096
        seconds = neuron_bytes / read(width).gather.bytes_s
        assert seconds == pytest.approx(0.05e-6 + neuron_bytes / 18e9, rel=0.03)


def test_any_miss_costs_a_look_up_more_than_each_further_one() -> None:
    rates = read(256)
    assert 1.0 / rates.look_up.bytes_s == pytest.approx(0.5e-6)
    assert rates.place_s == pytest.approx(74e-6, rel=0.01)
    assert rates.look_up.call_s == pytest.approx(40e-6), "the whole engine's, not the cache's alone"
    assert rates.touch_s == pytest.approx(0.1e-6)


def test_few_tokens_pay_for_the_pass_over_the_weights() -> None:
    many = read(4096).dense_many
    assert many is not None
    assert many == pytest.approx((0.5e-9, 0.01e-9), rel=0.02)


def test_a_device_with_one_width_has_its_figures_for_all() -> None:
    rates = read(256, small=False)
    assert rates.norm_s == pytest.approx(10e-6)
    assert rates.python_s == pytest.approx(100e-6)


def test_kernels_of_other_types_have_times_of_their_own() -> None:
    others = (
        ("attend", 256, 100.0, 4_000_000, "int8", "int16"),
        ("attend", 256, 1600.0, 16_000_000, "fp32", "fp32"),
        ("project", 1024, 4000.0, 20_000_000, "fp32", "fp32"),
        ("predict", 1024, 2500.0, 20_000_000, "fp32", "fp32"),
    )
    rates = read_rates(make_device(others=others), None)
    usual, eight = rates.choose("fp16"), rates.choose("int8")
    exact = rates.choose("fp32", "fp32")
    assert usual == rates
    assert eight.attend.bytes_s == pytest.approx(40e9)
    assert eight.project == rates.project, "it was not measured, and depends on activations"
    assert exact.attend.bytes_s == pytest.approx(10e9)
    assert exact.predict.time(20_000_000) == pytest.approx(2500e-6)
    assert rates.choose("fp16", "fp32").predict == exact.predict
    assert rates.choose("fp16", "fp32").attend == rates.attend
    assert exact.gather == rates.gather


def test_gates_have_a_time_of_their_own_where_they_were_measured() -> None:
    plain = read(4096)
    assert plain.gate == plain.predict and plain.open == plain.gather
    assert plain.find_hot_s == 0.0 and plain.wake_s == 0.0
    others = (
        ("predict-gate", 14336, 1400.0, 30_000_000, "int8", "int16"),
        ("gather-open", 64, 20.0, 64 * 4608, "int8", "int16"),
        ("gather-open", 1024, 320.0, 1024 * 4608, "int8", "int16"),
        ("find", 0, 3.0, 1, "int8", "int16"),
        ("find", 1000, 40.0, 1, "int8", "int16"),
        ("wake", 2000, 55.0, 1, "fp16", "int16"),
    )
    rates = read_rates(make_device(others=others), 4096)
    assert rates.gate.time(30_000_000) == pytest.approx(1400e-6)
    assert rates.predict == plain.predict
    assert rates.open.time(1024 * 4608) == pytest.approx(320e-6)
    assert (rates.find_hot_s, rates.find_s) == pytest.approx((3e-6, 40e-6))
    assert rates.wake_s == pytest.approx(55e-6)


def make_estimated(peak_gb_s: float, cores: int, architecture: str = "aarch64") -> Rates:
    """A device of which only the memory's peak bandwidth is known."""
    values = {
        "schema_version": 2,
        "id": "box",
        "units": {
            "cpu": {
                "kind": "cpu",
                "architecture": architecture,
                "clusters": [{"id": "cores", "cores": cores}],
            }
        },
        "memory": {"peak_bandwidth": {"value": f"{peak_gb_s} GB/s", **ORIGIN}},
    }
    return read_rates(Device.model_validate_json(json.dumps(values)))


def test_classes_of_processors_reach_different_parts_of_a_peak() -> None:
    board, pc = make_estimated(34.0, 8), make_estimated(34.0, 8, "x86-64")
    wide, server = make_estimated(256.0, 16, "x86-64"), make_estimated(256.0, 64, "x86-64")
    shares = [x.bandwidth_bytes_s / 34e9 for x in (board, pc)]
    shares += [x.bandwidth_bytes_s / 256e9 for x in (wide, server)]
    assert shares == pytest.approx([0.62, 0.70, 0.42, 0.65])


def test_arithmetic_is_a_second_bound_and_barriers_grow_with_cores() -> None:
    few, many = make_estimated(34.0, 8), make_estimated(300.0, 192)
    assert few.core_ops_s == few.constants.arm_core_ops_s
    assert many.norm_s > 5 * few.norm_s
    settings = Settings(
        predictor="none", kv="fp16", threads=8, look_ahead="none", policy="lru", reads=None
    )
    assert time_weight(few, settings) == pytest.approx(2.0 / (8 * few.constants.arm_core_ops_s))


def test_cores_with_fast_memory_compute_fast() -> None:
    """A board's memory gives 2 to 7 GB/s for each core, a phone's 10, an Apple laptop's 25."""
    board, laptop = make_estimated(34.0, 8), make_estimated(100.0, 4)
    assert laptop.core_ops_s is not None and board.core_ops_s is not None
    assert laptop.core_ops_s > 3 * board.core_ops_s
