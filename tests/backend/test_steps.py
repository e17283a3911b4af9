"""A step of several sequences gives each what it gets alone."""

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest

from pi2.arrays import F32, I32, U8
from pi2.backends.cpu import backend as cpu
from pi2.backends.executor import Executor
from pi2.backends.reference import backend as reference
from tests.helpers.kernels import (
    DEMO_LIKE,
    ODD,
    X86_FEATURES,
    RandomModel,
    list_runnable_isas,
    measure_error,
)
from tests.helpers.slow import keep_quick

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPTS = ([1, 2, 3, 4, 5], [17], [9, 8, 7, 6, 5, 4, 3, 2, 1])
"""Of different lengths."""

MODELS: dict[str, dict[str, Any]] = {
    "demo-like": DEMO_LIKE,
    "odd": {
        **ODD,
        "hidden": 160,
        "kv_type": "int8",
        # A chunk may hold fewer tokens than a step, and rounds them more.
        "chunk_type": "int8",
        "chunk": 2,
    },
}


def prefill(executor: Executor, model: RandomModel, ids: list[int]) -> None:
    """Run a prompt of the selected sequence through all layers, in chunks of two."""
    for start in range(0, len(ids), 2):
        executor.embed(np.array(ids[start : start + 2], np.int32))
        for layer, bundles in enumerate(model.bundles):
            executor.attend(layer, start)
            executor.begin_ffn(layer)
            executor.add_dense(layer, bundles)
            executor.end_ffn(layer)


def add_neurons(
    executor: Executor, layer: int, bundles: U8, named: list[I32], *, known: bool
) -> None:
    """Add the neurons that each token has named, in two halves of all."""
    if len(named) == 1:
        for half in (named[0][::2].copy(), named[0][1::2].copy()):
            executor.add_neurons(layer, bundles, half, half, known=known)
        return
    every = np.unique(np.concatenate(named)).astype(np.int32)
    for half in (every[::2].copy(), every[1::2].copy()):
        by_token = [np.isin(half, found) << np.int64(token) for token, found in enumerate(named)]
        bits = np.bitwise_or.reduce(by_token)
        executor.add_named_neurons(layer, bundles, half, half, bits, known)


def step(
    executor: Executor, model: RandomModel, tokens: list[int], sequences: list[int],
    positions: list[int], mode: str,
) -> F32:  # fmt: skip
    """Run a token each of some sequences; return their logits.  No sequences: a token of the
    selected one, as a chunk."""
    if sequences:
        executor.begin_step(np.array(tokens, np.int32), sequences, positions)
    else:
        executor.embed(np.array(tokens, np.int32))
    for layer, bundles in enumerate(model.bundles):
        executor.attend(layer, positions[0])
        executor.begin_ffn(layer)
        if mode == "none":
            executor.add_dense(layer, bundles)
        else:
            named = []
            for number in range(len(tokens)):
                executor.select_token(number)
                if mode == "gate":
                    named.append(executor.predict_gate(layer).copy())
                else:
                    named.append(executor.predict_low_rank(layer, 0.2).copy())
            add_neurons(executor, layer, bundles, named, known=mode == "gate")
        executor.end_ffn(layer)
    return np.asarray(executor.logits(0)).copy()


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("name", MODELS)
def test_every_sequence_gets_what_it_gets_alone(name: str, backend: ModuleType) -> None:
    model = RandomModel(**MODELS[name])
    modes = ["none", "gate"] + (["low-rank"] if model.model.predictor is not None else [])
    # In float32 nothing but the order of additions differs; 16-bit activations round, and so does
    # an int8 cache, to the other side now and then.
    most = 1e-6 if backend is reference else 3e-3 if name == "odd" else 3e-4
    request = dataclasses.replace(model.request, sequences=3, step_tokens=4)
    together, alone = backend.build(request), [backend.build(request) for _ in PROMPTS]
    positions = [len(ids) for ids in PROMPTS]
    for number, ids in enumerate(PROMPTS):
        together.select_sequence(number)
        prefill(together, model, ids)
        prefill(alone[number], model, ids)
    for tokens, members, mode in [
        *(([11, 22, 33], [0, 1, 2], mode) for mode in modes),
        # One has ended, and the others go on in another order; then one of them alone.
        ([44, 55], [2, 0], modes[-1]),
        ([66], [2], modes[-1]),
    ]:
        found = step(together, model, tokens, members, [positions[n] for n in members], mode)
        assert found.shape == (len(members), model.model.shape.vocab)
        for row, token, number in zip(found, tokens, members, strict=True):
            expected = step(alone[number], model, [token], [], [positions[number]], mode)[0]
            assert measure_error(row, expected) < most, (name, mode, number)
            positions[number] += 1
    assert together.count_active() == sum(executor.count_active() for executor in alone)
    together.close()


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_sequence_in_step_see_those_before_them(name: str, backend: ModuleType) -> None:
    model = RandomModel(**MODELS[name])
    most = 1e-6 if backend is reference else 3e-3 if name == "odd" else 3e-4
    request = dataclasses.replace(model.request, sequences=2, step_tokens=4)
    together, alone = backend.build(request), [backend.build(request) for _ in range(2)]
    ids, other = PROMPTS[0], PROMPTS[2]
    for executor, number, own in (
        (together, 0, ids),
        (together, 1, other),
        (alone[0], 0, ids),
        (alone[1], 1, other),
    ):
        executor.select_sequence(number)
        prefill(executor, model, own)
    # The second time, what the first has left behind from the second token on does not count.
    for tokens in ([11, 22, 33], [11, 44, 55]):
        found = step(together, model, [*tokens, 66], [0, 0, 0, 1], [5, 6, 7, 9], "gate")
        expected = [
            step(alone[0], model, [token], [0], [5 + number], "gate")[0]
            for number, token in enumerate(tokens)
        ]
        expected.append(step(alone[1], model, [66], [1], [9], "gate")[0])
        assert measure_error(found, np.stack(expected)) < most
    together.close()


@pytest.mark.parametrize(
    ("passes", "isa", "threads"),
    keep_quick([(1, None, 3), (2, None, 3), (2, "avx2", 2)], [(2, None, 3)]),
)
def test_neurons_that_tokens_share_give_each_token_the_bits_that_it_gets_alone(
    passes: Literal[1, 2], isa: str | None, threads: int
) -> None:
    if isa is not None and isa not in list_runnable_isas():
        pytest.skip(f"needs {isa}")
    model = RandomModel(**{**DEMO_LIKE, "ffn": 600, "threads": threads})
    request = dataclasses.replace(model.request, sequences=3, step_tokens=3, passes=passes)
    if isa is not None:
        request = dataclasses.replace(request, features=X86_FEATURES[isa])
    executor = cpu.build(request)
    rng, found = np.random.default_rng(3), []
    slots = np.flatnonzero(rng.random(600) < 0.9).astype(np.int32)
    # The last token has named next to nothing.
    named = rng.random((3, len(slots))) < np.array([[0.9], [0.4], [0.005]])
    bits = (named << np.arange(3)[:, None]).sum(axis=0)
    slots, bits = slots[bits > 0], bits[bits > 0]
    for add in (executor.add_named_neurons, partial(Executor.add_named_neurons, executor)):
        executor.begin_step(np.array([11, 22, 33], np.int32), [0, 1, 2], [0, 0, 0])
        executor.attend(0, 0)
        executor.begin_ffn(0)
        # Twice, as clusters come one after the other.
        for half in (slice(None, 400), slice(400, None)):
            add(0, model.bundles[0], slots[half], slots[half], bits[half], False)
        executor.end_ffn(0)
        found.append((np.asarray(executor.logits(0)).copy(), executor.count_active()))
    (shared, shared_active), (alone, alone_active) = found
    assert shared_active == alone_active > 0
    assert np.array_equal(shared, alone)
    executor.close()


def test_steps_of_several_tokens_may_round_to_8_bits() -> None:
    model = RandomModel(**DEMO_LIKE)
    request = dataclasses.replace(model.request, sequences=7, step_tokens=7)
    rounded = cpu.build(dataclasses.replace(request, step_type="int8"))
    exact = cpu.build(request)
    # A token alone is computed as ever; seven fill one tile, and part of another.
    for count, least, most in ((7, 1e-4, 6e-2), (2, 1e-4, 6e-2), (1, 0, 0)):
        for mode in ("none", "gate", "low-rank"):
            tokens, sequences = list(range(1, count + 1)), list(range(count))
            found, expected = (
                step(executor, model, tokens, sequences, [0] * count, mode)
                for executor in (rounded, exact)
            )
            assert least <= measure_error(found, expected) <= most, (mode, count)
    rounded.close()
    exact.close()
