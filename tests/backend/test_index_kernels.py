"""Kernels of an index: which keys it chooses."""

from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.blocks.sizes import LIST_HEAD, PARTS, count_list_numbers, count_lists
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
