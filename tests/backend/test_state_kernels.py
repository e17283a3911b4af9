"""Kernels of layers with a state, next to numpy, on every processor that runs here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.reference.operators import take_sigmoid, take_silu, take_softplus
from tests.helpers.aarch64 import needs_emulator
from tests.helpers.blocks import ArmKernels, Kernels
from tests.helpers.kernels import list_runnable_isas

ISAS = [name for name in list_runnable_isas() if name in ("avx2", "avx512bw", "avx512vnni")]
DRAWN = np.random.default_rng(5)
SEQUENCES = np.array([0, 1, 0, 0, 1], np.int32)
POSITIONS = np.array([0, 3, 1, 2, 4], np.int32)
"""Tokens of two sequences: one begins, and one goes on."""
TOKENS = len(SEQUENCES)


def draw(*shape: int) -> F32:
    return DRAWN.standard_normal(shape).astype(np.float32)


def number(values: Any) -> Any:
    return np.ascontiguousarray(values, np.int32)


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels("states", request.param, tmp_path_factory.mktemp("states"))


def test_kernels_compute_as_numpy_does(kernels: Kernels) -> None:
    check_all(kernels)


@needs_emulator
def test_kernels_compute_as_numpy_does_on_aarch64(tmp_path: Path) -> None:
    check_all(ArmKernels("states", "dotprod", tmp_path))


def check_all(kernels: Kernels | ArmKernels) -> None:
    for places in (False, True):
        check_convolution(kernels, has_gates=False, has_places=places)
    check_convolution(kernels, has_gates=True, has_places=False)
    check_preparation(kernels)
    for is_delta, of_keys in ((True, False), (True, True), (False, False)):
        check_recurrence(kernels, is_delta=is_delta, of_keys=of_keys)
    check_scan(kernels)
    check_gates(kernels)


def check_convolution(kernels: Kernels | ArmKernels, *, has_gates: bool, has_places: bool) -> None:
    channels, kernel = 37, 4
    x, weights, bias = draw(TOKENS, 3 * channels), draw(kernel, channels), draw(channels)
    before, after = draw(TOKENS, 3 * channels), draw(TOKENS, 3 * channels)
    # A sequence that begins reads nothing of what another one left.
    tails = np.where([[[True]], [[False]]], np.nan, draw(2, kernel - 1, channels))
    tails = np.ascontiguousarray(tails, np.float32)
    places = DRAWN.permutation(channels) if has_places else np.arange(channels)
    kept = [np.zeros((kernel - 1, channels), np.float32), tails[1].copy()]
    expected = np.empty((TOKENS, channels), np.float32)
    for token, sequence in enumerate(SEQUENCES):
        inputs = x[token, places] * (before[token, :channels] if has_gates else 1)
        window = np.concatenate([kept[sequence], inputs[None]])
        kept[sequence] = window[1:]
        total = (window * weights).sum(0) + bias
        expected[token] = total * after[token, :channels] if has_gates else take_silu(total)
    y = np.full((TOKENS, channels), np.nan, np.float32)
    kernels.call(
        "convolve",
        -(-channels // 16),
        x=x,
        x_stride=3 * channels,
        before=before,
        after=after,
        has_gates=int(has_gates),
        y=y,
        y_stride=channels,
        weights=weights,
        bias=bias,
        has_bias=1,
        places=number(places),
        has_places=int(has_places),
        tails=tails,
        sequence_stride=(kernel - 1) * channels,
        channels=channels,
        window=kernel,
        is_silu=int(not has_gates),
        tokens=TOKENS,
        sequences=SEQUENCES,
        positions=POSITIONS,
    )
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(tails, np.array(kept), rtol=1e-6)


def check_preparation(kernels: Kernels | ArmKernels) -> None:
    heads, key_heads, width, floor = 4, 2, 19, -5.0
    entry_of, step_of = DRAWN.permutation(heads), heads + width * np.arange(heads)
    gates = draw(TOKENS, heads * (width + 1))
    rates, bias = -np.abs(draw(heads)), draw(heads * width)
    keys = (draw(TOKENS, key_heads * width), draw(TOKENS, key_heads * width))
    entries = gates[:, entry_of]
    steps = gates[:, heads:].reshape(TOKENS, heads, width)
    of_head, of_key = steps[..., 0] + bias[:heads], steps + bias.reshape(heads, width)
    size = np.clip(take_softplus(entries + bias[:heads]), 0.3, 0.9)
    decays = {
        "heads": np.exp(rates * take_softplus(of_head)),
        "keys": np.exp(rates[:, None] * take_softplus(of_key)),
        "floor": np.exp(floor * take_sigmoid(-rates[:, None] * of_key)),
        "mamba": np.exp(rates * size),
    }
    for kind, expected in decays.items():
        is_delta, of_keys = kind != "mamba", kind in ("keys", "floor")
        found = np.full((TOKENS, heads + expected[0].size), np.nan, np.float32)
        queries, own = keys[0].copy(), keys[1].copy()
        kernels.call(
            "prepare",
            TOKENS * heads,
            queries=queries,
            keys=own,
            x_stride=key_heads * width,
            key_heads=key_heads,
            key_dim=width,
            heads=heads,
            is_delta=int(is_delta),
            of_keys=int(of_keys),
            entries=gates,
            entries_stride=gates.shape[1],
            entry_of=number(entry_of),
            steps=gates,
            steps_stride=gates.shape[1],
            step_of=number(step_of if is_delta else entry_of),
            bias=bias,
            rates=rates,
            floor=floor,
            has_floor=int(kind == "floor"),
            shortest=0.3,
            longest=0.9,
            y=found,
            y_stride=found.shape[1],
        )
        first = take_sigmoid(entries) if is_delta else size
        np.testing.assert_allclose(found[:, :heads], first, rtol=3e-6)
        np.testing.assert_allclose(found[:, heads:], expected.reshape(TOKENS, -1), rtol=3e-6)
        for given, got, factor in ((keys[0], queries, width**-0.5), (keys[1], own, 1.0)):
            vectors = given.reshape(TOKENS, key_heads, width)
            lengths = np.sqrt((vectors**2).sum(-1, keepdims=True) + 1e-6)
            normal = vectors / lengths * factor if is_delta else vectors
            np.testing.assert_allclose(got, normal.reshape(TOKENS, -1), rtol=3e-6)


def check_recurrence(kernels: Kernels | ArmKernels, *, is_delta: bool, of_keys: bool) -> None:
    heads, group, width, depth = 4, 2, 21, 13
    stride = heads * width
    queries, keys = draw(TOKENS, stride) * 0.3, draw(TOKENS, stride) * 0.3
    values, skip = draw(TOKENS, stride), draw(heads)
    value_of = width * DRAWN.permutation(heads)
    shape = (TOKENS, heads, depth if of_keys else 1)
    entries, decays = take_sigmoid(draw(TOKENS, heads)), take_sigmoid(draw(*shape))
    state = draw(heads, depth, width)
    expected, own = np.empty((TOKENS, heads, width), np.float32), [0 * state, state.copy()]
    for token, sequence in enumerate(SEQUENCES):
        for head in range(heads):
            now = own[sequence][head]
            now *= decays[token, head][:, None]
            part = slice(head // group * depth, (head // group + 1) * depth)
            key, query = keys[token, part], queries[token, part]
            value = values[token, value_of[head] : value_of[head] + width]
            added = value - now.T @ key if is_delta else value
            now += np.outer(key, added * entries[token, head])
            expected[token, head] = now.T @ query + (0 if is_delta else skip[head] * value)
    # Blocks of 16 columns, then single columns.
    parts = [
        state[:, :, :16].reshape(heads, -1),
        state[:, :, 16:].swapaxes(1, 2).reshape(heads, -1),
    ]
    memory = np.full((2, heads * depth * width), np.nan, np.float32)
    memory[1] = np.concatenate(parts, axis=1).reshape(-1)
    factors = np.concatenate([entries, decays.reshape(TOKENS, -1)], axis=1)
    y = np.full((TOKENS, heads * width), np.nan, np.float32)
    kernels.call(
        "recur",
        heads * 2,
        queries=queries,
        keys=keys,
        values=values,
        x_stride=stride,
        heads=heads,
        group=group,
        key_dim=depth,
        value_dim=width,
        value_of=number(value_of),
        factors=np.ascontiguousarray(factors),
        factors_stride=factors.shape[1],
        of_keys=int(of_keys),
        is_delta=int(is_delta),
        skip=skip,
        has_skip=int(not is_delta),
        memory=memory,
        sequence_stride=memory.shape[1],
        y=y,
        y_stride=heads * width,
        tokens=TOKENS,
        sequences=SEQUENCES,
        positions=POSITIONS,
    )
    np.testing.assert_allclose(y, expected.reshape(TOKENS, -1), rtol=1e-5, atol=1e-5)
    assert np.isfinite(memory).all()


def check_scan(kernels: Kernels | ArmKernels) -> None:
    width, depth, rank = 37, 5, 3
    x, gates, steps = draw(TOKENS, width), draw(TOKENS, width), draw(TOKENS, width)
    parts = draw(TOKENS, rank + 2 * depth)
    keys, queries = parts[:, rank : rank + depth], parts[:, rank + depth :]
    bias, rates, skip = draw(width), -np.abs(draw(depth, width)), draw(width)
    state = draw(depth, width)
    expected, own = np.empty((TOKENS, width), np.float32), [0 * state, state.copy()]
    for token, sequence in enumerate(SEQUENCES):
        step, now = take_softplus(steps[token] + bias), own[sequence]
        now *= np.exp(rates * step)
        now += keys[token][:, None] * (step * x[token])
        expected[token] = (queries[token] @ now + skip * x[token]) * take_silu(gates[token])
    memory = np.full((2, depth * width), np.nan, np.float32)
    blocks = [state[:, first : first + 16] for first in (0, 16)] + [state[:, 32:].T]
    memory[1] = np.concatenate([np.ascontiguousarray(block).reshape(-1) for block in blocks])
    y = np.full((TOKENS, width), np.nan, np.float32)
    padded = np.zeros((2, TOKENS, width), np.float32)
    padded[0, :, :depth], padded[1, :, :depth] = keys, queries
    kernels.call(
        "scan",
        -(-width // 16),
        x=x,
        x_stride=width,
        gates=gates,
        gates_stride=width,
        steps=steps,
        steps_stride=width,
        keys=padded[0],
        queries=padded[1],
        parts_stride=width,
        bias=bias,
        rates=rates,
        skip=skip,
        memory=memory,
        sequence_stride=depth * width,
        width=width,
        key_dim=depth,
        y=y,
        y_stride=width,
        tokens=TOKENS,
        sequences=SEQUENCES,
        positions=POSITIONS,
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def check_gates(kernels: Kernels | ArmKernels) -> None:
    heads, width, epsilon = 3, 19, 1e-5
    x, gates, weights = draw(TOKENS, 80), draw(TOKENS, 90), draw(heads, width)
    x_of, gate_of, y_of = 20 + 20 * np.arange(heads), 1 + 29 * np.arange(heads), [38, 0, 19]
    taken = np.stack([x[:, place : place + width] for place in x_of], axis=1)
    each = np.stack([gates[:, place : place + width] for place in gate_of], axis=1)

    def normalize(values: F32, weight: F32) -> F32:
        mean = np.mean(values**2, axis=-1, keepdims=True)
        return np.asarray(values / np.sqrt(mean + epsilon) * weight)

    expected = {
        ("", 1, "none"): taken,
        ("sigmoid", 1, "none"): taken * take_sigmoid(each),
        ("softplus", 0, "none"): taken * take_softplus(each[..., :1]),
        ("silu", 1, "before"): normalize(taken, weights[0]) * take_silu(each),
        ("silu", 1, "after"): normalize(taken * take_silu(each), weights),
    }
    for (kind, gate_each, place), values in expected.items():
        y = np.full((TOKENS, heads * width), np.nan, np.float32)
        kernels.call(
            "gate_heads",
            TOKENS * heads,
            x=x,
            x_stride=80,
            x_of=number(x_of),
            gates=gates,
            gates_stride=90,
            gate_of=number(gate_of),
            gate_each=gate_each,
            kind=("silu", "sigmoid", "softplus").index(kind) if kind else -1,
            y=y,
            y_stride=heads * width,
            y_of=number(y_of),
            heads=heads,
            width=width,
            weights=weights,
            weights_step=width if place == "after" else 0,
            norm_place=("none", "before", "after").index(place),
            epsilon=epsilon,
        )
        for head, first in enumerate(y_of):
            found = y[:, first : first + width]
            np.testing.assert_allclose(found, values[:, head], rtol=5e-6, atol=1e-6)
