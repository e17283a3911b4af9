"""Converted checkpoints compute what transformers computes: values of tools/make_goldens.py."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.goldens import (
    CPU,
    EXACT,
    UNROUNDED,
    list_goldens,
    make_golden_plan,
    measure_error,
    read_golden,
    run_golden,
)
from tests.helpers.slow import keep_quick, mark_slow

REFERENCE_ERROR = 1e-4
COVERING = {
    "bailing-hybrid", "bitnet", "bloom", "deepseek-v2", "deepseek-v3", "gemma2", "gemma4",
    "gemma4-e2b", "gemma4-moe", "gpt-neox", "gpt-oss", "gptj", "granite-hybrid", "jamba",
    "kimi-linear", "kolibri", "laguna", "lfm2", "llama-longrope-beyond", "llama-yarn-options",
    "llama4", "mimo-v2-flash", "nanochat", "nemotron-h-blocks", "olmo3", "olmoe", "opt",
    "prosparse", "qwen2-moe", "qwen3-moe", "smallthinker", "turbosparse-mixtral",
}  # fmt: skip
"""Models that state every option which the compared models state (test_golden_options)."""


@pytest.mark.parametrize("tokens", [8, mark_slow(32)])
@pytest.mark.parametrize("name", keep_quick(list_goldens(), COVERING))
def test_the_reference_backend_agrees(
    make_plan: Callable[[str], Path], name: str, tokens: int
) -> None:
    golden = read_golden(name)
    logits, greedy = run_golden(make_plan(name), golden, tokens)
    assert measure_error(logits, golden.logits) <= REFERENCE_ERROR
    np.testing.assert_array_equal(greedy, golden.greedy[:tokens])


CPU_ERROR = 5e-3
"""Keys and values are rounded to fp16; fp16 weights are multiplied with activations that are not
rounded.  The largest error of all goldens is 3.7e-3."""


ROUNDED = (
    *("falcon-7b-relu", "gemma2", "granite", "llama-biases", "llama-relu-odd-heads"),
    *("mistral-window", "mixtral", "opt", "qwen3", "stablelm-parallel"),
)
"""Every operator that rounds, once; all goldens are computed below, where nothing is rounded."""


@pytest.mark.parametrize("name", ROUNDED)
def test_the_cpu_backend_agrees(make_plan: Callable[[str], Path], name: str) -> None:
    golden = read_golden(name)
    logits, greedy = run_golden(make_plan(name), golden, settings={"backends.cpu": "cpu"})
    assert measure_error(logits, golden.logits) <= CPU_ERROR
    np.testing.assert_array_equal(greedy, golden.greedy)


COMPUTED_ALIKE = {
    "arcee", "bamba", "dots1", "ernie4-5", "ernie4-5-moe", "falcon-mamba", "gemma3",
    "gemma3n-narrow", "glm4-moe", "glm4-moe-lite", "granite-hybrid-dense", "granite-moe",
    "granite-moe-shared", "hunyuan-moe", "lfm2-moe", "lfm2-plain", "mamba", "mamba2",
    "minimax-m2", "minimax-m3", "mistral4-scaled", "nemotron", "olmo2", "phimoe", "qwen3-5",
    "qwen3-5-moe", "qwen3-moe-dense-layers", "seed-oss",
    # Llama's, with tables of positions that both backends get from one function.
    "llama-linear", "llama-yarn",
    "gemma3n",  # compared in test_residual_streams
    "deepseek-v32", "glm-moe-dsa", "minimax-m3-blocks",  # files only (test_index_attention)
}  # fmt: skip
"""Whose layers are those of other goldens: the reference backend tells the rest."""


COMPARED = sorted({*list_goldens()} - COMPUTED_ALIKE)


@pytest.mark.parametrize("name", keep_quick(COMPARED, COVERING))
def test_the_cpu_backend_agrees_as_the_reference_does_where_nothing_is_rounded(
    make_plan: Callable[[str], Path], name: str
) -> None:
    golden = read_golden(name)
    logits, greedy = run_golden(make_plan(name), golden, settings=CPU)
    assert measure_error(logits, golden.logits) <= REFERENCE_ERROR
    np.testing.assert_array_equal(greedy, golden.greedy)


INT4 = dict.fromkeys(EXACT, "int4")
INT4_ERROR = 5e-3
"""The same, and activations of 16 bits: 3.5e-3 is the largest of those that were measured."""


@pytest.mark.parametrize(
    "name", ["mixtral", "opt", *map(mark_slow, ("llama-relu-odd-heads", "starcoder2-odd-widths"))]
)
def test_backends_agree_about_int4_weights(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    plan = make_golden_plan(name, tmp_path, INT4)
    expected, text = run_golden(plan, golden)
    for settings, limit in ((UNROUNDED, REFERENCE_ERROR), ({}, INT4_ERROR)):
        logits, greedy = run_golden(plan, golden, settings=settings | {"backends.cpu": "cpu"})
        assert measure_error(logits, expected) <= limit
        np.testing.assert_array_equal(greedy, text)
