"""Neurons of an expert that are cached and read together."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.diagnostics import UserError
from pi2.engine.experts import ExpertNeurons
from pi2.fitting.check import check_file, check_plan
from pi2.importing.conversion_job import group_experts
from pi2.memory.budget import Budget
from pi2.memory.bundle_files import BundleFile
from pi2.memory.expert_slots import ReadAhead
from pi2.memory.flash import FlashReader, ReadSettings
from pi2.memory.granules import choose_granule
from pi2.plan.arithmetic.estimates import choose_request_bytes
from pi2.plan.documents.device import Device
from pi2.plan.reading.references import find_document
from pi2.store.reader import NeuronStore
from tests.helpers.mixtures import make_mixture_plan

STRIDE, GRANULE, COUNT, OFFSET = 512, 40, 200, 4096
EXPERTS, FFN, CHOSEN = 4, 200, 2


def ids(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


@pytest.fixture
def file(tmp_path: Path) -> BundleFile:
    import zlib

    path = tmp_path / "ffn-000.arrow"
    bundles = np.random.default_rng(0).integers(0, 256, (COUNT, STRIDE), np.uint8)
    path.write_bytes(bytes(OFFSET) + bundles.tobytes())
    checks = np.array([zlib.crc32(bundle) for bundle in bundles], np.uint32)
    return BundleFile(
        path=path, bundles_offset=OFFSET, stride=STRIDE, count=COUNT, bytes=OFFSET + COUNT * STRIDE,
        read_checks=lambda: checks,
    )  # fmt: skip


def open_reader(file: BundleFile, **settings: Any) -> FlashReader:
    arena = Budget({"cold": 4 * GRANULE * STRIDE}).allocate("cold", 4 * GRANULE * STRIDE)
    return FlashReader([file], arena.reshape(4, -1), ReadSettings(**settings))


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
@pytest.mark.parametrize(("request_bytes", "requests"), [(4096, 5), (8192, 2), (1 << 20, 1)])
def test_a_granule_is_read_in_requests_and_taken_as_a_whole(
    file: BundleFile, engine: Any, request_bytes: int, requests: int
) -> None:
    reader = open_reader(file, engine=engine, verify=True, request_bytes=request_bytes, depth=2)
    truth = np.frombuffer(file.path.read_bytes()[OFFSET:], np.uint8).reshape(-1, GRANULE * STRIDE)
    pending = reader.start(0, ids(1, 4), ids(3, 0))
    assert len(pending.clusters) == 2
    for number, (index, slot) in enumerate(((1, 3), (4, 0))):
        assert reader.finish(pending, number).tolist() == [slot]
        np.testing.assert_array_equal(reader._arena[slot], truth[index])
    assert reader.read_bytes == 2 * GRANULE * STRIDE
    assert pending.batch is not None and len(pending.batch.sizes) == 2 * requests
    reader.close()


def test_damage_within_a_granule_is_found(file: BundleFile) -> None:
    with open(file.path, "r+b") as opened:
        opened.seek(OFFSET + (GRANULE + 7) * STRIDE + 9)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    reader = open_reader(file, verify=True)
    pending = reader.start(0, ids(1), ids(0))
    with pytest.raises(UserError, match=f"place {GRANULE + 7} "):
        reader.finish(pending, 0)
    reader.close()


def test_a_granule_is_what_an_expert_has_in_one_stretch() -> None:
    by_expert = np.arange(EXPERTS * FFN, dtype=np.int32)
    assert choose_granule([by_expert], EXPERTS, 512) == FFN
    # 4 MiB have room for 64 of them, and 50 divide an expert.
    assert choose_granule([by_expert], EXPERTS, 65536) == 50
    scattered = np.argsort(np.arange(EXPERTS * FFN) % EXPERTS, kind="stable").astype(np.int32)
    assert choose_granule([by_expert, scattered], EXPERTS, 512) == 1
    order = np.random.default_rng(1).permutation(EXPERTS * FFN).astype(np.int32)
    grouped = group_experts(order, FFN, bands=1)
    stored = np.argsort(grouped // FFN, kind="stable").astype(np.int32)
    assert choose_granule([stored], EXPERTS, 512) == FFN
    halves = ExpertNeurons([stored], EXPERTS).divide(100)
    every = np.arange(EXPERTS, dtype=np.int32)
    assert sorted(halves.list_neurons(0, every).tolist()) == list(range(8))


def test_requests_are_as_large_as_the_storage_wants_them() -> None:
    device = check_file(find_document("cloud-vm-zen5", "device", Path())).document
    assert isinstance(device, Device)
    plan: Any = type("P", (), {"io": type("Io", (), {"request": None})})
    assert choose_request_bytes(plan, device) == 128 << 10
    reads = [
        device.storage.reads[0].model_copy(
            update={"pattern": "random", "block": block << 10, "rate": rate}
        )
        for block, rate in ((64, 9e9), (128, 1e9), (256, 1.95e9), (1024, 2e9), (4096, 3e9))
    ]
    storage = device.storage.model_copy(update={"reads": tuple(reads)})
    device = device.model_copy(update={"storage": storage})
    assert choose_request_bytes(plan, device) == 256 << 10


def test_looking_ahead_stops_where_tokens_are_quicker_without() -> None:
    for without_s, stays in ((0.9, False), (0.99, True), (1.2, True)):
        ahead = ReadAhead()
        for _ in range(32 + 8 + 8):
            ahead.end_token(1.0 if ahead.is_on else without_s)
        assert ahead.is_on == stays
        for _ in range(256 + 8):
            ahead.end_token(1.0)
        # Then it is tried again.
        assert ahead.idle_tokens == (0 if stays else 256) and not ahead.is_on
        for _ in range(8):
            ahead.end_token(1.0 if ahead.is_on else 1.1)
        assert ahead.is_on


@pytest.fixture(scope="module")
def by_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return make_mixture_plan(folder, "silu", {"predictor": None}, order="expert")


def test_a_cache_below_a_tokens_demand_is_warned_of_with_the_arithmetic(by_expert: Path) -> None:
    with NeuronStore.open(by_expert.parent / "store") as store:
        expert_bytes = FFN * store.manifest.bundle.stride
    settings = {"decode.predictor": "router", "layers.hot": 0.0}
    for experts, warns in ((2 * CHOSEN, False), (2 * CHOSEN - 1, True)):
        cold = {"memory.segments.cold": f"{experts * expert_bytes} B"}
        found = check_plan(by_expert, overrides={**settings, **cold}).diagnostics
        messages = [item.message for item in found if item.code == "P204"]
        assert bool(messages) == warns
        if warns:
            assert f"2 layers x {CHOSEN} experts of " in messages[0]


def test_slots_are_used_again_and_given_back_never(by_expert: Path) -> None:
    """Nothing is faulted in twice: minor faults of later tokens are few."""
    import resource

    with NeuronStore.open(by_expert.parent / "store") as store:
        stride = store.manifest.bundle.stride
    settings = {
        "decode.predictor": "router",
        "backends.cpu": "reference",
        "layers.hot": 0.0,
        "memory.segments.cold": f"{CHOSEN * FFN * stride} B",
    }
    with pi2.load(by_expert, set=settings) as model:
        given: list[int] = []
        model._parts.cache._give_back = lambda unused: given.append(unused.size)
        model.logits(list(range(10)), mode="decode")
        before, evicted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, model.stats
        model.logits(list(range(20, 60)), mode="decode")
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        replaced = (model.stats - evicted).cache_evictions * stride // 4096
    assert given == []
    assert replaced > 1000
    assert faults < replaced / 4
