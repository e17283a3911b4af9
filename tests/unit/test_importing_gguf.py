"""GGUF files: the store is that of the checkpoint which the file was made from."""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.backends.reference.neurons import widen
from pi2.diagnostics import UserError
from pi2.formats import find_format
from pi2.importing.checkpoint import open_checkpoint, use_tokenizer
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.requirements import describe_rounded, keep_bits
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import unpack_part
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers import peers
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.gguf_tensors import list_settings, translate
from tests.helpers.goldens import EXACT, write_plan
from tests.helpers.models import draw_weights, make_model
from tests.helpers.slow import keep_quick


def expect_same_stores(tmp_path: Path, checkpoint: Path, *sources: Path) -> None:
    tokenizer = checkpoint / "tokenizer.json"
    stores = [tmp_path / name for name in "ab"]
    one, other = (
        convert(source, store, tokenizer, EXACT)
        for source, store in zip(sources, stores, strict=True)
    )
    assert forget_names(one) == forget_names(other)
    assert one.tokenizer.eos == other.tokenizer.eos
    expect_same_weights(*stores)


@pytest.mark.parametrize("part", ["k", "v"])
def test_matrices_of_heads_that_do_not_belong_together(tmp_path: Path, part: str) -> None:
    model = peers.read_models()["deepseek-v3"]
    tensors, name = dict(model.list_tensors()), f"blk.1.attn_{part}_b.weight"
    for wrong in (tensors[name][:-1], tensors[name][0]):
        file = peers.write_tiny(tmp_path / "tiny.gguf", model, tensors | {name: wrong})
        with pytest.raises(UserError, match=r"P534.*attn_[kv]_b\.weight.*shape"):
            open_checkpoint(file)


# Quantised files
def write_tiny(
    tmp_path: Path, kind: str = "F32", kinds: Mapping[str, str] | None = None, **options: Any
) -> tuple[Path, Path]:
    model = make_model({"predictor": None, "ffn": {"activation": "silu"}, **options})
    weights = draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "hidden_act": "silu"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    settings, tensors = list_settings(model), translate(model, weights)
    file = write_gguf(tmp_path / f"{kind}.gguf", "llama", settings, tensors, kind, kinds)
    return file, checkpoint


def read_file_values(file: Path) -> dict[str, F32]:
    reader = gguf.GGUFReader(file)
    return {
        tensor.name: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in reader.tensors
    }


@pytest.mark.parametrize(("kind", "precision"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_codes_of_the_same_kind_are_taken_over(tmp_path: Path, kind: str, precision: str) -> None:
    """Nothing is rounded a second time, but for down, whose groups lie the other way."""
    file, checkpoint = write_tiny(tmp_path, kind)
    values = read_file_values(file)
    chosen = dict.fromkeys(EXACT, precision)
    model = convert(file, tmp_path / "store", checkpoint / "tokenizer.json", chosen)
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        for layer, stored in enumerate(store.layers):
            for place, part in enumerate(("gate", "up")):
                found = unpack_part(stored.bundles, store.bundle, place)
                np.testing.assert_array_equal(found, values[f"blk.{layer}.ffn_{part}.weight"])
            down = unpack_part(stored.bundles, store.bundle, 2)
            wrong = np.abs(down - values[f"blk.{layer}.ffn_down.weight"].T)
            assert 0 < wrong.max() <= 0.2 * np.abs(down).max()
            found = widen(store.tensors[f"layers.{layer}.output"])
            np.testing.assert_array_equal(found, values[f"blk.{layer}.attn_output.weight"])


def keep(file: Path, store: Path, checkpoint: Path) -> Model:
    """Convert a file with no fewer bits than it has, for another activation."""
    source = use_tokenizer(open_checkpoint(file), checkpoint / "tokenizer.json")
    model = describe_checkpoint(source, "golden").model
    ffn = model.ffn.model_copy(update={"activation": "relu"})
    model = keep_bits(source, model.model_copy(update={"ffn": ffn}))
    convert_checkpoint(source, model, store)
    return model


@pytest.mark.parametrize("kind", keep_quick(["Q4_K", "Q6_K", "Q5_1"], ["Q4_K"]))
def test_gate_and_up_rows_stay_whole_blocks(tmp_path: Path, kind: str) -> None:
    kinds = {"ffn_gate.weight": kind, "ffn_up.weight": kind, "ffn_down.weight": "Q8_0"}
    file, checkpoint = write_tiny(tmp_path, "F16", kinds, shape={"hidden": 256, "head_dim": 64})
    model = keep(file, tmp_path / "store", checkpoint)
    assert (model.quantization.gate_up, model.quantization.ffn) == (kind.lower(), "int8")
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    values = read_file_values(file)
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        for layer, stored in enumerate(store.layers):
            for place, part in enumerate(("gate", "up")):
                rows = raw[f"blk.{layer}.ffn_{part}.weight"]
                first = store.bundle.parts[place].weights_offset
                assert np.array_equal(stored.bundles[:, first : first + rows.shape[1]], rows)
            down = values[f"blk.{layer}.ffn_down.weight"].T
            wrong = np.abs(unpack_part(stored.bundles, store.bundle, 2) - down)
            # Half a step of 127 in a group, and what its fp16 scale is off.
            assert wrong.max() <= 0.51 * np.abs(down).max() / 127
    assert verify_store(tmp_path / "store") == []
    plan = write_plan(tmp_path, model, {"decode": {"predictor": "gate"}})
    logits = []
    for backend in ("reference", "cpu"):
        with pi2.load(plan, set={"backends.cpu": backend}) as loaded:
            logits.append(np.array(loaded.logits([256, 1, 2, 3, 4])))
    assert np.abs(logits[1] - logits[0]).max() < 1e-2 * np.abs(logits[0]).max()


def test_rows_of_several_formats_get_eight_bits(tmp_path: Path) -> None:
    kinds = {"ffn_gate.weight": "Q4_K", "ffn_up.weight": "Q6_K"}
    file, checkpoint = write_tiny(tmp_path, "Q4_0", kinds, shape={"hidden": 256, "head_dim": 64})
    model = keep(file, tmp_path / "store", checkpoint)
    assert (model.quantization.gate_up, model.quantization.ffn) == (None, "int8")
    assert "q4_k, q6_k" in describe_rounded(open_checkpoint(file), model)[0]


def test_a_block_without_a_finite_scale_is_refused(tmp_path: Path) -> None:
    kinds = {"ffn_gate.weight": "Q4_K", "ffn_up.weight": "Q4_K"}
    file, checkpoint = write_tiny(tmp_path, "F16", kinds, shape={"hidden": 256, "head_dim": 64})
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file, "r+").tensors}
    tensors["blk.1.ffn_gate.weight"].data[3, :2] = 0, 0x7C
    del tensors
    with pytest.raises(UserError, match=r"P539.*blk\.1\.ffn_gate\.weight.*finite"):
        keep(file, tmp_path / "store", checkpoint)


def test_codes_are_taken_over_beside_rows_that_fill_no_group(tmp_path: Path) -> None:
    shape = {"hidden": 48, "heads": 2, "kv_heads": 1, "head_dim": 32}
    file, checkpoint = write_tiny(tmp_path, "Q8_0", shape=shape)
    values = read_file_values(file)
    chosen = dict.fromkeys(EXACT, "int8")
    model = convert(file, tmp_path / "store", checkpoint / "tokenizer.json", chosen)
    with NeuronStore.open(tmp_path / "store", model=model) as store:
        found = widen(store.tensors["layers.1.output"])
        np.testing.assert_array_equal(found[:48], values["blk.1.attn_output.weight"])
        assert found.shape == (64, 64) and not found[48:].any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_file_computes_what_its_numbers_say(tmp_path: Path, kind: str) -> None:
    """In fp16, its store is that of a float32 file with the numbers that it stands for."""
    file, checkpoint = write_tiny(tmp_path, kind)
    settings = list_settings(describe_checkpoint(file).model)
    plain = write_gguf(tmp_path / "plain.gguf", "llama", settings, read_file_values(file))
    expect_same_stores(tmp_path, checkpoint, file, plain)


# Split files
def test_any_file_of_a_split_stands_for_all(tmp_path: Path) -> None:
    whole, checkpoint = write_tiny(tmp_path)
    settings = list_settings(describe_checkpoint(whole).model)
    values = read_file_values(whole)
    write_gguf(tmp_path / "split.gguf", "llama", settings, values, split_max_tensors=10)
    (tmp_path / "parts").mkdir()
    parts = [path.rename(tmp_path / "parts" / path.name) for path in tmp_path.glob("split-*.gguf")]
    assert len(parts) == 3
    expect_same_stores(tmp_path, checkpoint, whole, sorted(parts)[1])
    # So does the folder that they lie in.
    assert len(open_checkpoint(tmp_path / "parts").files) == 3
    sorted(parts)[2].unlink()
    with pytest.raises(UserError, match=r"P533.*split-00003-of-00003\.gguf"):
        open_checkpoint(parts[0])


# PowerInfer
def test_a_file_of_powerinfer_runs_with_its_predictors(tmp_path: Path) -> None:
    model = make_model({"ffn": {"activation": "relu"}})
    weights = draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    settings, tensors = list_settings(model), translate(model, weights)
    ends = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}
    for name in [name for name in tensors if name.endswith(".ffn_down.weight")]:
        tensors[name.replace("ffn_down", "ffn_down_t")] = np.ascontiguousarray(tensors.pop(name).T)
    # PowerInfer's predictors read what the norm reads: columns are those of the norm's output
    # times its weights.
    for layer in range(model.shape.layers):
        norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        tensors[f"blk.{layer}.fc1.weight"] = tensors[f"blk.{layer}.fc1.weight"] * norm
    file = write_gguf(tmp_path / "tiny.powerinfer.gguf", "llama", settings | ends, tensors)
    with file.open("r+b") as stream:
        stream.write(b"PWRI")
    tokenizer = checkpoint / "tokenizer.json"
    made = convert(file, tmp_path / "store", tokenizer, EXACT)
    assert made.ffn.activation == "relu"
    assert made.predictor is not None and made.predictor.rank == 32
    for layer in range(model.shape.layers):
        weights[f"model.layers.{layer}.mlp.predictor.bias"][:] = 0
    write_checkpoint(tmp_path / "same", model, weights)
    convert_checkpoint(
        tmp_path / "same", made.model_copy(update={"tensors": model.tensors}), tmp_path / "other"
    )
    for layer in range(model.shape.layers):
        name = f"layers/ffn-{layer:03d}.arrow"
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    logits = {}
    for name in ("store", "other"):
        changes = {"weights": name, "decode": {"predictor": "low-rank"}}
        with pi2.load(write_plan(tmp_path, made, changes)) as loaded:
            logits[name] = loaded.logits([1, 2, 3])
            text = loaded.generate([1, 2, 3], max_tokens=4, temperature=0.0, ignore_eos=True)
            for _ in text:
                pass
            logits[f"{name} tokens"] = np.array(text.result.token_ids)
    np.testing.assert_allclose(logits["store"], logits["other"], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(logits["store tokens"], logits["other tokens"])


def test_older_files_call_the_longer_blocks_of_two_bits_as_the_shorter_ones(tmp_path: Path) -> None:
    model = replace(peers.read_models()["llama-q2_0"], kind="PQ2_0")
    expected = read_gguf(peers.write_tiny(tmp_path / "new.gguf", model)).entries
    assert "pq2_0" in {entry.block.name for entry in expected.values()}
    old, short = peers.write_tiny(tmp_path / "old.gguf", model), find_format("q2_0")
    start = min(entry.offset for entry in expected.values())
    raw = old.read_bytes()
    header = raw[:start].replace(struct.pack("<I", 142), struct.pack("<I", short.number))
    old.write_bytes(header + raw[start:])
    assert read_gguf(old).entries == {n: replace(e, file=old) for n, e in expected.items()}
    cut = peers.write_tiny(tmp_path / "cut.gguf", peers.read_models()["llama-q2_0"])
    assert short in {entry.block for entry in read_gguf(cut).entries.values()}
    cut.write_bytes(cut.read_bytes()[:-64])
    with pytest.raises(UserError, match="it is cut"):
        read_gguf(cut)
