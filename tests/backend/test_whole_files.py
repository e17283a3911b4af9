"""Small GGUF files that run as they are: numpy, sequences, KV caches, and prefixes."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pi2.backends.compiler import cache
from pi2.diagnostics import UserError
from tests.helpers.goldens import check_sequences_together, measure_error
from tests.helpers.slow import mark_slow
from tests.helpers.whole_files import FLIPPED, MODELS, NEAR, SETTINGS, UNROUNDED, WholeFile

pytestmark = pytest.mark.usefixtures("quick_kernels")

STATES = (
    *("bailing-hybrid", "granite-hybrid", "granite-hybrid-dense", "kimi-linear", "lfm2-moe"),
    *("lfm2-plain", "nemotron-h", "nemotron-h-latent", "nemotron-h-moe", "qwen3-5"),
    *("qwen3-5-moe", "qwen3-next", "qwen4exp"),
)
NAMES = (
    *("deepseek-v2", "deepseek-v3", "deepseek-v3-older", "gemma4", "gemma4-e2b", "gemma4-moe"),
    *("gemma3n", "gpt-oss", "llama4", "opt", "phimoe"),
    *("deepseek32", "glm-dsa", "minimax-m3-blocks"),
    *STATES,
)
Open = Callable[[str], WholeFile]


@pytest.fixture(scope="module")
def open_file(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return functools.cache(lambda name: WholeFile(name, tmp_path_factory.mktemp(name)))


def test_numpy_runs_a_file_that_streams_and_compiles_no_kernels(open_file: Open) -> None:
    own, numpy = open_file("qwen3-5-moe"), {"backends.cpu": "reference", **UNROUNDED}
    expected = own.expected
    with own.stream(**numpy):
        """The loops that read are compiled once, for all models."""
    compiler, modules = patch.object(cache, "start_compiler"), {"tvm": None}
    with compiler as start, patch.dict("sys.modules", modules):
        with own.stream(**numpy) as model:
            assert np.array_equal(model.logits(own.prompt), expected)
            assert model.stats.flash_read_bytes > 0
        with own.open(**numpy) as model:
            found = model.logits(own.prompt, mode="decode")
            assert measure_error(found, expected) <= NEAR
        assert not start.called


@pytest.mark.parametrize("cold", [None, "300 KiB"])
@pytest.mark.parametrize("hot", ["0 B", mark_slow("64 KiB"), "140 KiB"])
@pytest.mark.parametrize("name", ["exaone-moe", "gemma"])
def test_stated_sizes_of_resident_matrices_and_buffers_are_followed(
    name: str, hot: str, cold: str | None, open_file: Open
) -> None:
    own, sizes = open_file(name), {"memory.segments.hot": hot, "memory.budget": "100 MiB"}
    with own.open() as model:
        expected = model.logits(own.prompt)
    with own.open(**sizes, **({} if cold is None else {"memory.segments.cold": cold})) as model:
        assert np.array_equal(model.logits(own.prompt), expected)
        assert model.stats.flash_read_bytes > 0


@pytest.mark.parametrize("name", ["exaone-moe", "gemma"])
def test_buffers_that_hold_too_few_pieces_are_refused(name: str, open_file: Open) -> None:
    with pytest.raises(UserError, match="segment cold has 100 KiB and needs"):
        open_file(name).open(**{"memory.segments.hot": "0 B", "memory.segments.cold": "100 KiB"})


@pytest.mark.parametrize("name", NAMES)
def test_two_sequences_together_compute_what_each_does(name: str, open_file: Open) -> None:
    check_sequences_together(open_file(name).plan, SETTINGS)


def test_queries_and_keys_are_cut_after_their_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MODELS["exaone"]
    norms = {f"blk.*.attn_{part}_norm.weight": [[8], 0.6, 1.4] for part in "qk"}
    clip = {".attention.clamp_kqv": 0.7}
    tensors = {**plain.tensors, **norms}
    changed = replace(plain, settings={**plain.settings, **clip}, tensors=tensors)
    monkeypatch.setitem(MODELS, "exaone", changed)
    own = WholeFile("exaone", tmp_path)
    with own.open(**UNROUNDED) as model:
        for found in (model.logits(own.prompt), model.logits(own.prompt, mode="decode")):
            assert measure_error(found, own.of_store) <= NEAR


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gemma4-moe", "llama4", "qwen3-5"])
def test_a_kv_cache_of_other_numbers_gives_the_logits_of_numpy_with_it(
    name: str, kind: str, open_file: Open
) -> None:
    own = open_file(name)
    expected = own.compute_in_numpy(**{"kv.type": kind})
    # A number that is rounded the other way changes more.
    bound = max(NEAR if kind == "fp16" else 0, FLIPPED * measure_error(expected, own.expected))
    with own.open(**{"kv.type": kind}) as model:
        for mode in ("prefill", "decode"):
            assert measure_error(model.logits(own.prompt, mode=mode), expected) <= bound
        own_bytes = model.plan.plan.memory.segments.kv
    with own.open(**UNROUNDED) as model:
        assert own_bytes < model.plan.plan.memory.segments.kv


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_moves_to_another_sequence(name: str, open_file: Open) -> None:
    own = open_file(name)
    tokens = np.array(own.prompt, np.int32)
    with own.open(**{"decode.batch": 2}) as model:
        whole: Any = model._parts.model
        program = whole.program
        whole.prefill(tokens[:-1], 0, 0, print)
        kept, state = program.read_context(0, 0, len(tokens) - 1), program.read_state(0)
        expected = whole.step(tokens[-1:], [0], [len(tokens) - 1]).copy()
        program.put_context(1, 0, len(tokens) - 1, kept)
        if name in STATES:
            program.put_state(1, state)
        found = whole.step(tokens[-1:], [1], [len(tokens) - 1])
    assert np.array_equal(found, expected)
