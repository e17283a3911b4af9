"""Files of models whose index chooses keys give the logits of transformers."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.costs.settings import measure_sizes
from tests.helpers.goldens import change_config, copy_checkpoint, measure_error, read_golden
from tests.helpers.whole_files import INDEXED, NEAR, SETTINGS, WholeFile, make_file

pytestmark = pytest.mark.usefixtures("quick_kernels")

MODES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
FP32: dict[str, Any] = {"kv.type": "fp32"}
Open = Callable[[str], WholeFile]


@pytest.fixture(scope="module")
def open_file(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return cache(lambda name: WholeFile(name, tmp_path_factory.mktemp(name)))


def compute_pieces(model: Any, tokens: list[int]) -> F32:
    """Logits of tokens that come in chunks and steps of several lengths, in turns."""
    whole, found, first = model._parts.model, [], 0
    for count in (9, 1, 2, 7, 1, 4):
        own = np.array(tokens[first : first + count], np.int32)
        if count > 4:
            whole.prefill(own, 0, first, print)
            found.append(whole.logits(0).copy())
        else:
            places = list(range(first, first + count))
            found.append(whole.step(own, [0] * count, places).copy())
        first += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", INDEXED)
def test_prompts_tokens_and_pieces_of_any_length_agree_with_transformers(
    name: str, open_file: Open
) -> None:
    own, golden = open_file(name), read_golden(name)
    with own.open(**FP32, **{"decode.batch": 6, "prefill.chunk": 32}) as model:
        for mode in MODES:
            assert measure_error(model.logits(own.prompt, mode=mode), golden.logits) <= NEAR
        found = compute_pieces(model, own.prompt)
        assert measure_error(found, golden.logits) <= NEAR
    with own.stream(0.9, **FP32) as model:
        assert measure_error(model.logits(own.prompt), golden.logits) <= NEAR
        result = model.generate(own.prompt, max_tokens=32, temperature=0.0, ignore_eos=True).result
        assert list(result.token_ids) == golden.greedy


@pytest.mark.parametrize("name", INDEXED)
def test_contexts_that_are_attended_as_a_whole_have_the_bits_of_a_larger_choice(
    name: str, open_file: Open, tmp_path: Path
) -> None:
    """And later tokens other logits, or the tests above would not see a choice."""
    own = open_file(name)
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    wider = dict.fromkeys({"index_topk", "index_topk_blocks"} & config.keys(), 64)
    change_config(checkpoint, **wider)
    make_file(checkpoint, tmp_path / "tiny.gguf")
    plan = tmp_path / "file.plan.toml"
    plan.write_text(own.plan.read_text())
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    with own.open() as model, pi2.load(plan, set=SETTINGS) as other:
        index = model.plan.model.attention.index
        pairs = [[each.logits(own.prompt, mode=mode) for each in (model, other)] for mode in MODES]
    assert index is not None
    reach = index.reach
    for few, many in pairs:
        assert np.array_equal(few[:reach], many[:reach])
        assert measure_error(few, many) > 100 * NEAR


def test_costs_know_the_keys_that_a_token_reads(tmp_path: Path) -> None:
    """All three layers have an index, which chooses 6 tokens."""
    with WholeFile("glm-dsa", tmp_path).open() as model:
        resolved = model.plan
    sizes = measure_sizes(resolved.model, "router", "fp16", resolved.bundle)
    kept, keys = 28 * 2, 3 * 64 * 2
    assert (sizes.kv_token, sizes.index_token, sizes.reach) == (kept, keys // 3, 6)
    assert resolved.plan.memory.segments.kv == 64 * (3 * kept + keys)
