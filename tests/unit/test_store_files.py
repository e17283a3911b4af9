"""`pi2 convert STORE -o FILE.gguf`: a store's numbers as a file that runs as it is."""

from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.new_model import describe_checkpoint, write_model
from pi2.importing.quantize import Wish, quantize_checkpoint
from pi2.plan.weights.bundles import unpack_part
from pi2.store.reader import NeuronStore
from tests.helpers.goldens import (
    EXACT,
    UNROUNDED,
    convert_golden,
    copy_checkpoint,
    measure_error,
    read_golden,
)
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table
from tests.helpers.whole_files import NEAR
from tests.unit.test_checkpoint_files import FAR
from tests.unit.test_quantized_files import WIDE, write_sources

FILLED = ("mimo-v2-flash",)
"""Stores with heads that zeros fill up have no reverse."""


def make_store(name: str, folder: Path) -> Path:
    model = convert_golden(copy_checkpoint(name, folder / "checkpoint"), folder, EXACT)
    (folder / "store" / "golden.model.toml").write_text(write_model(model, name))
    return folder / "store"


@in_table
def test_files_of_stores_give_the_logits_of_their_checkpoints(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(make_store(name, tmp_path))
    model = describe_checkpoint(source).model
    quantize_checkpoint(source, model, tmp_path / "made.gguf", Wish(keeps=True))
    golden = read_golden(name)
    with pi2.load(tmp_path / "made.gguf", set={**UNROUNDED, "kv.context": 64}) as loaded:
        assert measure_error(loaded.logits(golden.prompt), golden.logits) < FAR.get(name, NEAR)


def test_codes_and_scales_of_a_store_stay(tmp_path: Path, ask: Ask) -> None:
    _, folder = write_sources(tmp_path, WIDE)
    store, made = tmp_path / "store", tmp_path / "made.gguf"
    ask(["convert", str(folder), "-o", str(store), "--quantization", "int4"], 0)
    ask(["convert", str(store), "-o", str(made)], 0)
    file, opened = read_gguf(made), NeuronStore.open(store)
    names = describe_checkpoint(made).model.tensors
    layer = opened.layers[1]
    places = np.argsort(layer.original)
    gates = unpack_part(layer.read_inline(places), layer.layout.inline, 0)
    entry = file.entries[names.gate.replace("{layer}", "1")]
    assert entry.block.name == "q4_0"
    np.testing.assert_array_equal(entry.read(), gates)
    output = opened.tensors["layers.1.output"]
    entry = file.entries[names.output.replace("{layer}", "1")]
    assert entry.block.name == "q4_0" and output.scales is not None
    weights = output.weights.view(np.uint8)
    expected = find_packing("int4").dequantize(weights, output.scales, output.length)
    np.testing.assert_array_equal(entry.read(), expected)
    assert file.entries[names.down.replace("{layer}", "1")].block.name == "q8_0"


def test_a_store_without_its_document_is_refused(tmp_path: Path, ask: Ask) -> None:
    store = make_store("llama", tmp_path)
    (store / "golden.model.toml").unlink()
    found = ask(["convert", str(store), "-o", str(tmp_path / "made.gguf")], 2)
    assert "P707" in found.err and "no model document" in found.err
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize("name", FILLED)
def test_a_layout_without_a_reverse_is_refused(name: str, tmp_path: Path, ask: Ask) -> None:
    store = make_store(name, tmp_path)
    found = ask(["convert", str(store), "-o", str(tmp_path / "made.gguf")], 2)
    assert "P707" in found.err and "-o FILE.gguf" in found.err


def test_a_precision_that_no_file_has_is_refused(tmp_path: Path, ask: Ask) -> None:
    source, made = copy_checkpoint("bitnet", tmp_path / "bitnet"), str(tmp_path / "made.gguf")
    found = ask(["convert", str(source), "-o", made, "--quantization", "ternary"], 2)
    assert "P707" in found.err and "leave --quantization out" in found.err


def test_a_store_becomes_no_other_store(tmp_path: Path, ask: Ask) -> None:
    store = make_store("llama", tmp_path)
    found = ask(["convert", str(store), "-o", str(tmp_path / "other")], 2)
    assert "a neuron store becomes a GGUF file: -o FILE.gguf" in found.err
