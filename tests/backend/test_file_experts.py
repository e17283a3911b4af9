"""Experts that come from a file into a few slots compute what resident ones do, bit for bit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.blocks.model import BlockModel
from pi2.diagnostics import UserError
from pi2.engine.experts import ExpertCourse
from pi2.memory.direct_files import BLOCK, DirectFiles
from pi2.memory.expert_slots import ExpertMatrix, ExpertSlots, SlotReads, count_least_bytes
from pi2.plan.documents.model import Model
from tests.backend.test_blocks import MODELS, make_model, open_model
from tests.helpers.blocks import RandomWeights
from tests.helpers.kernels import make_loops

pytestmark = pytest.mark.usefixtures("quick_kernels")


def write_experts(model: BlockModel, folder: Path) -> dict[int, list[ExpertMatrix]]:
    """Write experts into two files, each layer's output into the other one."""
    found: dict[int, list[ExpertMatrix]] = {}
    with open(folder / "0", "wb") as first, open(folder / "1", "wb") as second:
        for own in model.routed:
            for place, number in enumerate(own.matrices):
                weight = model.matrices[number].weight
                assert weight.data is not None
                file = (own.layer + int(place == len(own.matrices) - 1)) % 2
                stream = (first, second)[file]
                stream.write(bytes(-stream.tell() % 32 + 96))
                matrix = ExpertMatrix(file, stream.tell(), weight.size_bytes // weight.experts)
                stream.write(weight.data.tobytes())
                found.setdefault(own.layer, []).append(matrix)
    return found


def draw_region(size: int) -> np.ndarray:
    raw = np.frombuffer(bytearray(size + BLOCK), np.uint8)
    begin = -raw.ctypes.data % BLOCK
    region: np.ndarray = raw[begin : begin + size]
    return region


class Streamed:
    """A model whose experts are in ``slots`` slots, more than the fewest."""

    def __init__(
        self,
        model: Model,
        weights: RandomWeights,
        folder: Path,
        more: int,
        *,
        predicts: bool = False,
        **changes: Any,
    ) -> None:
        assert model.moe is not None
        self.own = open_model(model, weights, predicts=predicts)
        layers = write_experts(self.own, folder)
        for item in self.own.routed:
            for number in item.matrices:
                self.own.set_tensor(number, 0)
        active = model.moe.active_experts
        size = count_least_bytes(layers, active)
        size += more * size // max(active, 2)
        reads: dict[str, Any] = {"engine": "io_uring", "depth": 8, "threads": 2, "policy": "lfu"}
        self.files = DirectFiles([folder / "0", folder / "1"])
        self.slots = ExpertSlots(
            self.files,
            layers,
            model.moe.experts,
            draw_region(size),
            SlotReads(active=active, **(reads | changes)),
            make_loops(),
        )
        self.course = ExpertCourse(self.own, self.slots)

    def _run(self) -> None:
        own, at = self.own, 0
        for item in own.routed:
            at = self.course.compute(item, self.course.begin(item, at))
        own.run(at, own.head)

    def prefill(self, tokens: I32, position: int) -> F32:
        self.own.begin_chunk(tokens, 0, position)
        self._run()
        return self.own.logits(0).copy()

    def step(self, tokens: I32, position: int) -> F32:
        places = list(range(position, position + len(tokens)))
        self.own.begin_step(tokens, [0] * len(tokens), places)
        self._run()
        self.own.run(self.own.head, self.own.end)
        return self.own.read_logits().copy()

    def close(self) -> None:
        self.slots.close()
        self.own.close()
        self.files.close()


@contextmanager
def stream(*given: Any, **changes: Any) -> Iterator[Streamed]:
    opened = Streamed(*given, **changes)
    try:
        yield opened
    finally:
        opened.close()


FORMATS = {
    "panels": ("q4_k", "q6_k", "q8_0", "mxfp4"),
    "output in floats": ("q8_0", "q4_0", "f16"),
    "floats": ("bf16", "f32"),
}
STEPS = ((17, 22), *((n, n + 1) for n in range(22, 30)), (30, 33), (33, 34))
TOKENS = np.random.default_rng(1).integers(0, 96, 40).astype(np.int32)


def compute_resident(model: Model, weights: RandomWeights) -> list[F32]:
    """Logits of chunks and steps where all is resident."""
    own = open_model(model, weights)
    try:
        found = []
        for begin, end in ((0, 12), (12, 17)):
            own.prefill(TOKENS[begin:end], 0, begin)
            found.append(own.logits(0).copy())
        for begin, end in STEPS:
            places = list(range(begin, end))
            found.append(own.step(TOKENS[begin:end], [0] * len(places), places).copy())
        return found
    finally:
        own.close()


@pytest.mark.parametrize(("more", "predicts"), [(0, False), (3, True)])
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        *((name, "panels") for name in ("mixtral", "qwen2moe", "gpt-oss", "glm4moe", "llama4")),
        *(("glm4moe", "output in floats"), ("qwen2moe", "floats")),
    ],
)
def test_slots_give_the_bits_of_resident_experts(
    name: str, formats: str, more: int, predicts: bool, tmp_path: Path
) -> None:
    model = make_model(**MODELS[name])
    weights = RandomWeights(model, FORMATS[formats])
    expected = compute_resident(model, weights)
    with stream(model, weights, tmp_path, more, predicts=predicts) as own:
        found = [own.prefill(TOKENS[:12], 0), own.prefill(TOKENS[12:17], 12)]
        found += [own.step(TOKENS[begin:end], begin) for begin, end in STEPS]
        hits, misses, evictions = own.slots.counters
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert hits > 0 and misses > 0 and (evictions > 0 or more > 0)


@pytest.mark.parametrize("name", ["qwen2moe", "glm4moe"])
def test_experts_that_are_read_a_layer_ahead_change_no_bit(name: str, tmp_path: Path) -> None:
    options = MODELS[name]
    moe = options["moe"] | {"experts": 16}
    model = make_model(**options | {"moe": moe, "shape": {"ffn": 96, "layers": 5}})
    weights, steps = RandomWeights(model, ("q8_0",)), range(len(TOKENS))
    resident = open_model(model, weights)
    expected = [resident.step(TOKENS[n : n + 1], [0], [n]).copy() for n in steps]
    resident.close()
    needed = []
    for predicts in (False, True):
        with stream(model, weights, tmp_path, 30, predicts=predicts) as own:
            found = [own.step(TOKENS[n : n + 1], n) for n in steps]
            hits, misses, evictions = own.slots.counters
            assert (own.slots.prefetched > 0) == predicts
        assert np.array_equal(found, expected)
        assert evictions > 0
        needed.append(hits + misses)
    # What was read for nothing is not counted as needed.
    assert needed[0] == needed[1]


@pytest.mark.parametrize("more", [22, 30])
def test_waves_keep_experts_that_were_read_ahead_for_them(more: int, tmp_path: Path) -> None:
    options = MODELS["qwen2moe"]
    moe = options["moe"] | {"experts": 16}
    model = make_model(**options | {"moe": moe, "shape": {"ffn": 256, "layers": 5}})
    weights = RandomWeights(model, ("q8_0",))
    prompts = [np.roll(TOKENS, turn)[:32] for turn in range(4)]
    with stream(model, weights, tmp_path, more, predicts=True) as own:
        found = [own.prefill(tokens, 0) for tokens in prompts]
        assert own.slots.prefetched > 0
    resident = open_model(model, weights)
    expected = []
    for tokens in prompts:
        resident.prefill(tokens, 0, 0)
        expected.append(resident.logits(0).copy())
    resident.close()
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
def test_what_was_read_is_read_no_more_while_it_stays(engine: str, tmp_path: Path) -> None:
    model = make_model(**MODELS["mixtral"])
    with stream(model, RandomWeights(model, ("q4_k",)), tmp_path, 100, engine=engine) as own:
        own.step(TOKENS[:1], 0)
        first = own.slots.reads.read_bytes
        own.step(TOKENS[:1], 0)
        assert own.slots.reads.read_bytes == first > 0
        hits, misses, evictions = own.slots.counters
        layers, active = model.shape.layers, 2
        assert (hits, misses, evictions) == (layers * active, layers * active, 0)


def test_a_file_that_is_cut_is_an_error_and_leaves_the_model_usable(tmp_path: Path) -> None:
    model = make_model(**MODELS["mixtral"])
    weights = RandomWeights(model, ("q4_k",))
    expected = compute_resident(model, weights)[0]
    with stream(model, weights, tmp_path, 1) as own:
        content = (tmp_path / "1").read_bytes()
        os.truncate(tmp_path / "1", 5000)
        with pytest.raises(UserError) as caught:
            own.prefill(TOKENS[:12], 0)
        assert [item.code for item in caught.value.diagnostics] == ["P532"]
        (tmp_path / "1").write_bytes(content)
        assert np.array_equal(own.prefill(TOKENS[:12], 0), expected)
