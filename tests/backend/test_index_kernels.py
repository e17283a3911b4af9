"""Kernels of an index: which keys it chooses, and attention to them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.blocks.contract import MOST_TOGETHER
from pi2.backends.blocks.sizes import (
    LIST_HEAD,
    PARTIAL,
    PARTS,
    count_attention_bytes,
    count_list_numbers,
    count_lists,
)
from pi2.backends.reference.instructions.attention import choose_keys
from pi2.plan.documents.model_mixing import Index
from tests.helpers.blocks import Kernels
from tests.helpers.instruction_cases import Case
from tests.helpers.kernels import allocate, list_runnable_isas

ISAS = [name for name in list_runnable_isas() if name in ("avx2", "avx512vnni")]
CONTEXT, TOKENS = 320, 3
POSITIONS = (11, 150, 301)
INDEXES = {
    "tokens": Index(kind="tokens", heads=11, width=24, chosen=12),
    "tokens-one": Index(kind="tokens", heads=1, width=16, chosen=70),
    "blocks": Index(kind="blocks", heads=3, width=16, chosen=4, block=5, local=1),
    "blocks-far": Index(kind="blocks", heads=2, width=32, chosen=3, block=16),
}


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels("index_fp16_4_2", request.param, tmp_path_factory.mktemp("index"))


def draw(index: Index, *, ties: bool) -> dict[str, Any]:
    """Queries, weights of heads and keys of a sequence; with ``ties`` of few whole numbers."""
    generator = np.random.default_rng(7)

    def take(*shape: int) -> F32:
        values = generator.standard_normal(shape).astype(np.float32)
        return np.round(values * 0.6) if ties else values

    keys = allocate("float16", 1, CONTEXT, index.width)
    keys[:] = take(*keys.shape)
    return {
        "queries": take(TOKENS, index.heads, index.width),
        "weights": take(TOKENS, index.heads),
        "keys": keys,
    }


def list_chosen(kernels: Kernels, index: Index, drawn: dict[str, Any], parts: int) -> I32:
    """Lists of each token; with one part tokens are those of a chunk."""
    lists, stride = count_lists(index), count_list_numbers(index)
    chosen = allocate("int32", TOKENS, lists, stride)
    of_tokens = index.kind == "tokens"
    values: dict[str, Any] = {
        "queries": drawn["queries"], "query_stride": index.heads * index.width,
        "weights": drawn["weights"], "weights_stride": index.heads,
        "has_weights": int(of_tokens), "heads": index.heads, "width": index.width, "lists": lists,
        "key_cache": drawn["keys"], "key_sequence_stride": CONTEXT * index.width,
        "sequences": np.zeros(TOKENS, np.int32), "positions": np.array(POSITIONS, np.int32),
        "scores": allocate("float32", TOKENS, lists, CONTEXT), "scores_stride": CONTEXT,
        "chosen": chosen, "list_stride": stride, "count": index.chosen, "block": index.block,
        "local": index.local, "reach": index.reach, "parts": parts,
        "scratch": allocate("float32", index.width * 16), "scratch_stride": 4 * index.width * 16,
    }  # fmt: skip
    kernels.run(Case(kernel="rank", items=TOKENS * parts, values=values))
    kernels.run(Case(kernel="choose", items=TOKENS, values=values))
    return chosen


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("parts", [PARTS, 1])
@pytest.mark.parametrize("name", INDEXES)
def test_the_best_keys_are_chosen_and_the_first_of_equal_ones(
    name: str, parts: int, ties: bool, kernels: Kernels
) -> None:
    index = INDEXES[name]
    drawn = draw(index, ties=ties)
    chosen = list_chosen(kernels, index, drawn, parts)
    for token, position in enumerate(POSITIONS):
        keys = drawn["keys"][0, : position + 1].astype(np.float64)
        scores = drawn["queries"][token].astype(np.float64) @ keys.T
        if index.kind == "tokens":
            scores = (drawn["weights"][token].astype(np.float64) @ np.maximum(scores, 0))[None]
        options = {"chosen": index.chosen, "block": index.block, "local": index.local}
        wanted = choose_keys(scores[:, None].astype(np.float32), position, **options)[:, 0]
        for number, own in enumerate(wanted):
            found = chosen[token, number]
            if position < index.reach:
                assert not found.any()  # all keys are attended
                continue
            places = found[LIST_HEAD : LIST_HEAD + found[0]]
            np.testing.assert_array_equal(places, np.flatnonzero(own))


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_attention_to_a_list_of_all_keys_has_the_bits_of_attention_to_all(
    kind: str, tmp_path: Path
) -> None:
    """And to some of them, those of a KV cache that has only these."""
    isa, width, heads, group = ISAS[-1], 40, 6, 3
    plain, listed = (Kernels(f"{own}_{kind}_3", isa, tmp_path) for own in ("attention", "index"))
    common = Kernels("common", isa, tmp_path)
    generator = np.random.default_rng(3)
    groups, dtype = heads // group, {"fp16": "float16", "int8": "int8"}[kind]
    caches = [allocate(dtype, groups, CONTEXT, width) for _ in range(2)]
    scales = [allocate("float16", groups, CONTEXT) for _ in range(2)]
    for cache, scale in zip(caches, scales, strict=True):
        factor = 40 if kind == "int8" else 1
        cache[:] = generator.standard_normal(cache.shape) * factor
        scale[:] = generator.uniform(0.01, 0.03, scale.shape)
    queries = generator.standard_normal((1, heads, width)).astype(np.float32)
    some = np.sort(generator.choice(300, 290, replace=False)).astype(np.int32)

    def attend(
        kernel: str, own: Kernels, positions: I32 | None, end: int, arrays: list[Any]
    ) -> F32:
        y: F32 = np.zeros((1, heads, width), np.float32)
        listing = allocate("int32", LIST_HEAD + CONTEXT + 64)
        if positions is not None:
            listing[0], listing[LIST_HEAD : LIST_HEAD + len(positions)] = len(positions), positions
        size = count_attention_bytes(width, width)
        values: dict[str, Any] = {
            "queries": queries, "query_stride": heads * width, "heads": heads, "group": group,
            "key_width": width, "value_width": width, "value_stride": width,
            "key_cache": arrays[0], "value_cache": arrays[1],
            "key_scales": arrays[2], "value_scales": arrays[3],
            "sequences": np.zeros(1, np.int32), "positions": np.array([end - 1], np.int32),
            "key_sequence_stride": 0, "value_sequence_stride": 0,
            "key_head_stride": CONTEXT * width, "value_head_stride": CONTEXT * width,
            "window": 0, "is_chunked": 0, "scale": 0.3, "cap": 0.0, "sinks": 0, "has_sinks": 0,
            "slopes": 0, "has_slopes": 0,
            "reach": 0 if positions is None else 1, "chosen": listing, "lists": 1,
            "list_stride": listing.size, "y": y, "y_stride": heads * width, "tokens": 1, "tile": 1,
            "parts": PARTS, "scratch": allocate("uint8", size), "scratch_stride": size,
            "partials": allocate(
                "float32", max(PARTS * heads, MOST_TOGETHER), width + PARTIAL
            ),
        }  # fmt: skip
        own.run(Case(kernel=kernel, items=groups * PARTS, values=values))
        common.run(Case(kernel="join", items=heads, values=values))
        return y

    arrays = [*caches, *scales]
    whole = attend("attend", plain, None, 300, arrays)
    every = np.arange(300, dtype=np.int32)
    assert np.array_equal(attend("attend_chosen", listed, every, 310, arrays), whole)
    kept = [allocate(array.dtype.name, *array.shape) for array in arrays]
    for own, array in zip(kept, arrays, strict=True):
        own[:, : len(some)] = array[:, some]
    expected = attend("attend", plain, None, len(some), kept)
    assert np.array_equal(attend("attend_chosen", listed, some, 310, arrays), expected)
    assert not np.array_equal(expected, whole)
