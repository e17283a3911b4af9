"""Stores whose scales lie beside the bundles: the same numbers, fewer bytes to read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.fitting.check import load_plan
from pi2.importing.convert import convert_checkpoint
from pi2.measuring.ordering import reorder_store
from pi2.store.manifest import MANIFEST, name_scales_file, read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import TinyModel, draw_weights, make_model, make_tiny
from tests.helpers.plans import write_plan
from tests.unit.test_batch import check
from tests.unit.test_engine_forward import TOKENS

INLINE, RESIDENT = 1536, 1024
"""Bytes of a bundle of int4 of width 672: 3 x (336 + 42), and 3 x 336, in whole blocks; two of them
hold the gate and the rest."""
SHAPE = {"hidden": 672, "ffn": 96, "layers": 2}
FEW = TOKENS[:6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A store ``tiny`` and beside it the same one with resident scales, ``apart``."""
    folder = tmp_path_factory.mktemp("scales")
    tiny = make_tiny(folder, {"shape": SHAPE, "ffn": {"activation": "relu"}})
    reorder_store(tiny.store, scales="resident", output=folder / "apart")
    return tiny


def load(tiny: TinyModel, scales: str, settings: Mapping[str, Any]) -> LoadedModel:
    """Half of the neurons have no room; none is hot."""
    plan = write_plan(tiny.store.parent, tiny, {"layers": {"hot": 0.0}, "pipeline": {"cluster": 8}})
    changes = {"memory.segments.cold": f"{96 * (INLINE if scales == 'inline' else RESIDENT)} B"}
    if scales == "resident":
        changes |= {"weights": "apart", "bundle.stride": f"{RESIDENT} B", "bundle.scales": scales}
    return pi2.load(plan, set={**changes, **settings})


@pytest.mark.parametrize(
    ("predictor", "hot", "phases"),
    [("none", 0.5, 1), ("gate", 0.25, 1), ("low-rank", 0.125, 1), ("low-rank", 0.0, 2)],
)
def test_the_numbers_are_the_same(tiny: TinyModel, predictor: str, hot: float, phases: int) -> None:
    settings = {
        "decode.predictor": predictor,
        "layers.hot": hot,
        "pipeline.phases": phases,
        "cache.fill": phases == 1,
    }
    found = {}
    for scales in ("inline", "resident"):
        with load(tiny, scales, settings) as model:
            logits = [model.logits(FEW, mode="prefill"), model.logits(FEW, mode="decode")]
            found[scales] = np.stack(logits), model.stats
    assert np.array_equal(found["inline"][0], found["resident"][0])
    assert found["resident"][1].flash_read_bytes < found["inline"][1].flash_read_bytes


@pytest.mark.parametrize("phases", [1, 2])
def test_neurons_come_and_go_with_their_scales(tiny: TinyModel, phases: int) -> None:
    """Slots change owners, and the context lends: scales follow stored indices."""
    settings = {
        "layers.hot": 0.25,
        "kv.lend": True,
        "kv.context": 64,
        "pipeline.phases": phases,
        "memory.segments.cold": f"{80 * RESIDENT} B",
    }
    with load(tiny, "resident", settings) as model:
        found = model.logits(TOKENS[:16], mode="decode")
    with load(tiny, "resident", {"layers.hot": 1.0}) as model:
        expected = model.logits(TOKENS[:16], mode="decode")
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("predictor", ["none", "gate", "low-rank"])
def test_several_sequences_have_what_each_has_alone(tiny: TinyModel, predictor: str) -> None:
    plan = write_plan(tiny.store.parent, tiny, {"layers": {"hot": 0.125}})
    apart = {"weights": "apart", "bundle.stride": f"{RESIDENT} B", "bundle.scales": "resident"}
    phases = {"pipeline.phases": 2, "cache.fill": False} if predictor == "low-rank" else {}
    check(plan, {**apart, **phases, "decode.predictor": predictor})


def copy_store(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def list_hashes(store: Path) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in read_manifest(store).files}


def test_there_and_back_changes_no_byte(tmp_path: Path, tiny: TinyModel) -> None:
    store = copy_store(tiny.store.parent / "apart", tmp_path / "store")
    assert run(["store", "repack", str(store), "--scales", "inline"]) == 0
    assert list_hashes(store) == list_hashes(tiny.store)
    assert read_manifest(store).bundle == read_manifest(tiny.store).bundle
    assert run(["store", "repack", str(store), "--scales", "resident", "--stride", "2 KiB"]) == 0
    assert read_manifest(store).bundle.stride == 2048
    assert run(["store", "repack", str(store), "--stride", f"{RESIDENT} B"]) == 0
    assert list_hashes(store) == list_hashes(tiny.store.parent / "apart")
    assert run(["store", "repack", str(store)]) == 2
    order = np.stack([layer.original for layer in NeuronStore.open(store).layers])[:, ::-1]
    reorder_store(store, np.ascontiguousarray(order), "index")
    with NeuronStore.open(store) as turned, NeuronStore.open(tiny.store) as first:
        whole = turned.layers[0].read_inline(slice(None, None, -1))
        assert np.array_equal(whole, first.layers[0].bundles)


def test_damaged_scales_are_found(tmp_path: Path, tiny: TinyModel) -> None:
    store = copy_store(tiny.store.parent / "apart", tmp_path / "apart")
    with load(tiny, "resident", {"weights": str(store), "io.verify": "first-read"}) as model:
        assert len(model.logits(FEW, mode="decode")) == len(FEW)
    file = store / name_scales_file(1)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert [(item.code, name_scales_file(1) in str(item.span)) for item in verify_store(store)] == [
        ("P507", True)
    ]
    with pytest.raises(UserError, match="checksum"):
        load(tiny, "resident", {"weights": str(store), "io.verify": "first-read"})
    before = list_hashes(store)
    with pytest.raises(UserError, match="SHA-256"):
        reorder_store(store, scales="inline")
    assert list_hashes(store) == before, "a damaged store is left as it is"
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match="P506"):
        NeuronStore.open(store)


def test_a_manifest_without_the_scales_is_no_manifest(tmp_path: Path, tiny: TinyModel) -> None:
    store = copy_store(tiny.store.parent / "apart", tmp_path / "apart")
    text = (store / MANIFEST).read_text()
    fields = json.loads(text)
    fields["files"] = [f for f in fields["files"] if f["path"] != name_scales_file(0)]
    (store / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(UserError, match=name_scales_file(0)):
        read_manifest(store)
    fields = json.loads(text)
    fields["bundle"] |= {"scales": "inline", "stride": INLINE}
    (store / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(UserError, match="do not lie as format version 1 says"):
        read_manifest(store)


def test_a_plan_and_its_store_agree_about_scales(tiny: TinyModel) -> None:
    plan = write_plan(tiny.store.parent, tiny, {"layers": {"hot": 0.0}})
    for settings, wanted in (
        ({"weights": "apart"}, "--stride '1536 B' --scales inline"),
        ({"bundle.scales": "resident"}, "--scales resident"),
    ):
        with pytest.raises(UserError) as caught:
            pi2.load(plan, set=settings)
        finding = caught.value.diagnostics[0]
        assert finding.code == "P520" and wanted in str(finding.help)


def test_a_smaller_budget_keeps_the_scales(tiny: TinyModel) -> None:
    plan = write_plan(tiny.store.parent, tiny, {"layers": {"hot": 0.5}})
    changes = {"weights": "apart", "bundle.stride": f"{RESIDENT} B", "bundle.scales": "resident"}
    needed = load_plan(plan, overrides=changes).needs
    inline = load_plan(plan).needs
    scales_bytes = 2 * 96 * 3 * 42
    assert needed.attention.bytes - inline.attention.bytes == scales_bytes
    attention = {"memory.segments.attention": f"{inline.attention.bytes} B"}
    with pytest.raises(UserError, match="scales of neurons"):
        load_plan(plan, overrides={**changes, **attention})
    with pi2.load(plan, set=changes, memory="304 MiB") as model:
        assert model.plan.plan.memory.budget == 304 << 20
        assert model._parts.budget.used_bytes["attention"] == needed.attention.bytes
        assert len(model.logits(FEW)) == len(FEW)


def test_conversion_writes_what_repacking_writes(tmp_path: Path) -> None:
    model = make_model({"shape": SHAPE})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    convert_checkpoint(checkpoint, model, tmp_path / "one", scales="resident")
    convert_checkpoint(checkpoint, model, tmp_path / "two")
    reorder_store(tmp_path / "two", scales="resident")
    assert list_hashes(tmp_path / "one") == list_hashes(tmp_path / "two")
    halves = make_model({"shape": SHAPE, "quantization": {"ffn": "fp16"}})
    with pytest.raises(UserError, match="no scales") as caught:
        convert_checkpoint(checkpoint, halves, tmp_path / "halves", scales="resident")
    assert caught.value.diagnostics[0].code == "P105"


def test_nothing_has_to_be_there_to_count_what_a_plan_reads(tiny: TinyModel) -> None:
    with load(tiny, "resident", {"backends.cpu": "null", "cache.fill": False}) as model:
        model.logits(FEW, mode="decode")
        stats = model.stats
        assert stats.flash_read_bytes == stats.cache_misses * RESIDENT > 0
