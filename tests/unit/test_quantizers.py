"""Quantisers: each errs less than the one before it, where it promises to."""

import json
from pathlib import Path

import numpy as np
import pytest

from pi2.arrays import F32, U8, Scales
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.convert import convert_checkpoint
from pi2.importing.quantizers import (
    Quantizer,
    name_moments,
    prepare_moments,
    quantize_by_search,
    quantize_with_compensation,
)
from pi2.measuring.activations import RecordingOptions, record_activations
from pi2.measuring.texts import Passages
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model, make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.programs import Ask

LENGTH = 128


def draw_rows(count: int = 64) -> F32:
    return np.random.default_rng(1).standard_normal((count, LENGTH), np.float32)


def draw_inputs(tokens: int = 2000) -> F32:
    """Inputs whose channels differ in size and depend on each other, as those of models do."""
    random = np.random.default_rng(2)
    mixing = random.standard_normal((24, LENGTH), np.float32)
    inputs = random.standard_normal((tokens, 24), np.float32) @ mixing
    inputs += 0.3 * random.standard_normal((tokens, LENGTH), np.float32)
    return inputs * np.exp(random.standard_normal(LENGTH, np.float32))


def undo(packed: tuple[U8, Scales | None]) -> F32:
    return find_packing("int4").dequantize(packed[0], packed[1], LENGTH)


def test_a_searched_scale_errs_less_than_the_largest_weights() -> None:
    rows = draw_rows()
    nearest = np.square(undo(find_packing("int4").quantize(rows)) - rows).reshape(-1, 32).sum(1)
    searched = np.square(undo(quantize_by_search(rows, "int4")) - rows).reshape(-1, 32).sum(1)
    assert (searched <= nearest * 1.0001).all()
    assert searched.sum() < 0.9 * nearest.sum()


def test_important_columns_err_less() -> None:
    rows, importance = draw_rows(), np.ones(LENGTH, np.float32)
    importance[::8] = 100.0
    plain = np.square(undo(quantize_by_search(rows, "int4")) - rows)
    aware = np.square(undo(quantize_by_search(rows, "int4", importance)) - rows)
    assert (aware @ importance).sum() < (plain @ importance).sum()
    assert aware[:, ::8].sum() < plain[:, ::8].sum()


def test_compensation_keeps_the_output_on_real_inputs() -> None:
    rows, inputs = draw_rows(), draw_inputs()
    moments = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    importance = np.diag(moments).copy()

    def measure(stored: F32) -> float:
        return float(np.square((stored - rows) @ inputs.T).mean())

    nearest = measure(undo(find_packing("int4").quantize(rows)))
    searched = measure(undo(quantize_by_search(rows, "int4", importance)))
    packed = quantize_with_compensation(rows, "int4", prepare_moments(moments), importance)
    compensated = measure(undo(packed))
    assert searched < nearest
    assert compensated < 0.6 * searched


def test_compensation_without_dependence_is_a_search() -> None:
    rows, ones = draw_rows(), np.ones(LENGTH, np.float32)
    alone = quantize_with_compensation(
        rows, "int4", prepare_moments(np.eye(LENGTH, dtype=np.float32)), ones
    )
    np.testing.assert_array_equal(undo(alone), undo(quantize_by_search(rows, "int4", ones)))


@pytest.mark.parametrize("rows", [np.zeros((2, LENGTH), np.float32),
                                  np.full((2, LENGTH), 1e-9, np.float32),
                                  np.eye(2, LENGTH, dtype=np.float32) * -3])  # fmt: skip
def test_odd_groups_come_back(rows: F32) -> None:
    stored = undo(quantize_by_search(rows, "int4"))
    assert np.abs(stored - rows).max() <= np.abs(rows).max() / 14 + 1e-8


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_what_cannot_be_stored_is_refused_by_every_quantiser(value: float) -> None:
    rows = draw_rows(2)
    rows[1, 5] = value
    for method in ("nearest", "search"):
        with pytest.raises(ValueError, match=r"finite|fp16"):
            Quantizer(method).quantize(rows, "int4", "tensor")


def test_errors_are_reported_by_tensor() -> None:
    quantizer, rows = Quantizer(report=True), draw_rows()
    for piece in (rows[:40], rows[40:]):
        quantizer.quantize(piece, "int4", "a")
    quantizer.quantize(rows, "fp16", "b")
    assert quantizer.errors is not None
    first, second = quantizer.errors.list_errors()
    wrong = undo(find_packing("int4").quantize(rows)) - rows
    assert (first.tensor, first.precision) == ("a", "int4")
    assert first.relative == pytest.approx(np.linalg.norm(wrong) / np.linalg.norm(rows))
    assert first.largest == pytest.approx(np.abs(wrong).max())
    assert second.relative < 1e-3


TEXT = "The quick brown fox jumps over the lazy dog.\n" * 4


def test_a_store_is_quantised_by_what_its_model_was_seen_to_do(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    options = RecordingOptions(samples=4, moments=True)
    record_activations(
        write_plan(tmp_path, tiny),
        Passages([TEXT], context=32),
        tmp_path / "stats",
        options=options,
    )
    moments = np.load(tmp_path / "stats" / name_moments(2))
    assert moments.shape == (64, 64)
    assert np.trace(moments) / 64 == pytest.approx(1.0, rel=0.3)  # an RMS norm's output
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tiny.model, dict(tiny.weights))
    errors = {}
    for method in ("nearest", "search", "compensated"):
        quantizer = Quantizer(method, tmp_path / "stats")
        convert_checkpoint(checkpoint, tiny.model, tmp_path / method, quantizer=quantizer)
        assert verify_store(tmp_path / method) == []
        gate = tiny.weights[tiny.model.tensors.gate.format(layer=2)]
        with NeuronStore.open(tmp_path / method) as store:
            from tests.helpers.bundles import unpack_bundles

            wrong = unpack_bundles(store.layers[2].bundles, store.bundle)[0] - gate
        errors[method] = float(np.einsum("ij,jk,ik", wrong, moments, wrong))
    assert errors["compensated"] < errors["search"] < errors["nearest"]


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    model = make_model({"predictor": None})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    with pytest.raises(UserError) as caught:
        Quantizer("compensated")
    assert caught.value.diagnostics[0].code == "P548"
    (tmp_path / "stats/moments").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        Quantizer("compensated", tmp_path / "stats")
    assert caught.value.diagnostics[0].code == "P548"
    np.save(tmp_path / "stats" / name_moments(0), np.eye(32, dtype=np.float32))
    quantizer = Quantizer("compensated", tmp_path / "stats")
    with pytest.raises(UserError) as caught:
        convert_checkpoint(checkpoint, model, tmp_path / "store", quantizer=quantizer)
    assert caught.value.diagnostics[0].code == "P548"
    assert not (tmp_path / "store").exists()


def test_the_command_writes_the_errors(tmp_path: Path, ask: Ask) -> None:
    model = make_model({"predictor": None})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    command = ["convert", str(checkpoint), "-o", str(tmp_path / "store"), "--quantizer", "search"]
    write_plan(tmp_path, make_tiny(tmp_path / "other", {"predictor": None}))
    command += ["--model", str(tmp_path / "tiny.model.toml")]
    assert "the worst is" in ask([*command, "--errors", str(tmp_path / "errors.json")]).err
    report = json.loads((tmp_path / "errors.json").read_text())
    found = {item["tensor"]: item for item in report["tensors"]}
    assert 0.02 < found["model.layers.0.mlp.gate_proj.weight"]["relative"] < 0.1
    assert found["model.embed_tokens.weight"]["precision"] == "int8"
