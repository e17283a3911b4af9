"""Programs of random models: chunks, planes, threads; test_peers has their logits, test_goldens
what they allocate."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pi2.backends.blocks.contract import Ring
from pi2.backends.blocks.instructions import FindWeight, Planes, Weight
from pi2.backends.blocks.interpreter import CompiledInterpreter
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Extent
from pi2.backends.protocol import ProgramRequest
from pi2.machine.cpu import detect_cpu
from pi2.plan.documents.model import Model
from tests.helpers.blocks import RandomWeights
from tests.helpers.kernels import allocate_segment

pytestmark = pytest.mark.usefixtures("quick_kernels")


def make_model(**tables: Any) -> Model:
    shape = {"layers": 2, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    shape |= {"vocab": 96, "context": 64}
    values: dict[str, Any] = {
        "schema_version": 3,
        "id": "small",
        "shape": shape | tables.get("shape", {}),
        "ffn": {"activation": "silu"} | tables.get("ffn", {}),
    }
    return Model.model_validate(tables | values)


MODELS: dict[str, dict[str, Any]] = {
    "bitnet": {"attention": {"sub_norm": True}, "ffn": {"activation": "relu2", "sub_norm": True}},
    "mixtral": {"moe": {"experts": 4, "active_experts": 2}, "shape": {"ffn": 256}},
    "qwen2moe": {"moe": {"experts": 8, "active_experts": 3, "normalise_weights": False,
        "shared_experts": 2, "shared_gate": True}, "shape": {"ffn": 96}},
    "gpt-oss": {"moe": {"experts": 4, "active_experts": 2, "router_bias": True}, "ffn":
        {"activation": "silu", "bias": True, "limit": 2.0, "slope": 1.702, "up_offset": 1.0},
        "attention": {"sinks": True, "qkv_bias": True, "output_bias": True, "sliding_window": 6},
        "shape": {"ffn": 160}},
    "glm4moe": {"moe": {"experts": 8, "active_experts": 2, "router": "sigmoid", "choice_bias": True,
        "groups": 4, "active_groups": 2, "scaling": 2.5, "shared_experts": 1, "dense_layers": (0,),
        "dense_ffn": 320}, "shape": {"ffn": 64}, "attention": {"head_norm": True}},
    "llama4": {"moe": {"experts": 4, "active_experts": 1, "router": "sigmoid", "weighs": "input"},
        "multipliers": {"residual": 0.5}},
}  # fmt: skip


def open_model(model: Model, weights: FindWeight, **changes: Any) -> BlockModel:
    cpu = detect_cpu()
    request = ProgramRequest(architecture=cpu.architecture, features=cpu.features, threads=2)
    values = {"threads": 2, "context": 64, "sequences": 2, "step_tokens": 2, "chunk": 32, **changes}
    interpret = partial(CompiledInterpreter, request)
    return BlockModel(
        model, weights, Extent(**values), allocate=allocate_segment, interpret=interpret
    )


def measure_divergence(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of logits beside their spread."""
    return float(np.abs(found - expected).max() / expected.std())


def test_two_equal_experts_with_a_norm_of_activations_are_one_ffn() -> None:
    alone = make_model(**MODELS["bitnet"])
    experts = {"moe": {"experts": 2, "active_experts": 2}}
    mixed = make_model(**{**MODELS["bitnet"], **experts})
    weights = RandomWeights(alone, ("q8_0",))
    routers = RandomWeights(mixed, ("q8_0",))

    def find(key: str, layer: int, mixer: int = 0) -> Weight | None:
        own = weights(key, layer, mixer)
        if key in ("gate", "up", "down"):
            assert own is not None and own.data is not None
            return replace(own, data=np.concatenate([own.data, own.data]), experts=2)
        return routers(key, layer, mixer) if key == "router" else own

    token, found = np.array([5], np.int32), []
    for model, tensors in ((alone, weights), (mixed, find)):
        program = open_model(model, tensors, planes=Planes(3, 3, 3))
        found.append(program.step(token, [0], [0]).copy())
        program.close()
    assert measure_divergence(found[1], found[0]) < 1e-5


def test_tensors_may_lie_elsewhere_and_instructions_are_observed() -> None:
    model = make_model()
    weights = RandomWeights(model, ("q4_k",))
    token = np.array([5], np.int32)
    own = open_model(model, weights, threads=1)
    try:
        expected = own.step(token, [0], [0]).copy()
        seen: list[tuple[str, int | None]] = []
        own.observe(lambda name, layer, begin, end: seen.append((name, layer)))
        moved = []
        own.begin_step(token, [0], [0])
        for number, matrix in enumerate(own.matrices):
            assert matrix.weight.data is not None
            moved.append(matrix.weight.data.copy())
            own.set_tensor(number, moved[-1].ctypes.data)
        own.run(0, own.end)
        assert np.array_equal(own.read_logits(), expected)
        assert ("gate", 1) in seen and ("head", None) in seen
    finally:
        own.close()


def test_chunks_of_long_contexts_see_what_single_tokens_see() -> None:
    attention = {"sliding_window": 300, "window_layers": (1,), "sinks": True, "softcap": 4.0}
    model = make_model(attention=attention, shape={"heads": 6})
    weights = RandomWeights(model, ("f32",))
    tokens = np.random.default_rng(1).integers(0, 96, 620).astype(np.int32)
    own = open_model(model, weights, context=640, chunk=100)
    whole = open_model(model, weights, context=640, chunk=640)
    try:
        # The first keeps what its window and a chunk need, the second the context.
        assert own.ring == Ring(300, 416) and whole.ring is None
        for first in range(0, 620, 100):
            own.prefill(tokens[first : first + 100], 0, first)
        found = own.logits(19).copy()
        for place, token in enumerate(tokens):
            expected = own.step(np.array([token], np.int32), [1], [place])
            assert np.array_equal(expected, whole.step(np.array([token], np.int32), [1], [place]))
        assert measure_divergence(found, expected) < 1e-3
        # So many tokens may be taken back, and another sequence has what was copied.
        place = 620 - own.ring.slack
        again = whole.step(tokens[place : place + 1], [1], [place]).copy()
        own.put_context(1, 0, 624, own.read_context(0, 0, 624))
        for sequence in (0, 1):
            found = own.step(tokens[place : place + 1], [sequence], [place])
            assert measure_divergence(found, again) < 1e-3
    finally:
        own.close()
        whole.close()


def test_steps_and_chunks_have_planes_of_their_own() -> None:
    model = make_model(**MODELS["qwen2moe"])
    weights = RandomWeights(model, ("q4_k", "q4_1", "f16"))
    tokens = np.random.default_rng(1).integers(0, 96, 14).astype(np.int32)
    found: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    for planes in ((1, 1), (2, 2), (1, 2), (2, 1)):
        own = open_model(model, weights, planes=Planes(planes[0], planes[0], planes[1]))
        try:
            own.prefill(tokens, 0, 0)
            chunk = own.logits(0).copy()
            found[planes] = chunk, own.step(tokens[:1], [1], [0]).copy()
        finally:
            own.close()
    for ones, many in ((1, 2), (2, 1)):
        assert np.array_equal(found[ones, many][0], found[many, many][0])
        assert np.array_equal(found[ones, many][1], found[ones, ones][1])
    assert not np.array_equal(found[1, 1][0], found[2, 2][0])


def test_several_models_at_once_have_threads_of_their_own() -> None:
    model, token = make_model(), np.array([5], np.int32)
    opened = [open_model(model, RandomWeights(model, ("q8_0",), seed)) for seed in (0, 1, 0)]
    try:
        found = [[own.step(token, [0], [place]).copy() for own in opened] for place in range(3)]
    finally:
        for own in opened:
            own.close()
    for first, second, third in found:
        assert np.array_equal(first, third) and not np.array_equal(first, second)
