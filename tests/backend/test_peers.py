"""A small file of each architecture gives llama.cpp's logits, in memory and in half of its size."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.importing.gguf_architectures import list_architectures
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_goldens import UNSAID
from tests.helpers.goldens import measure_error, read_golden
from tests.helpers.peers import (
    PROMPT,
    TOKENS,
    Tiny,
    hash_file,
    read_models,
    read_records,
    write_tiny,
)
from tests.helpers.whole_files import NEAR, WholeFile

FLOATS: dict[str, Any] = {"prefill.activations": "fp32", "decode.activations": "fp32"}
SETTINGS: dict[str, Any] = {"kv.context": 64, "kv.type": "fp32", "prefill.chunk": 32}
MODELS, RECORDS = read_models(), read_records()
PLAIN = [name for name, own in MODELS.items() if own.kind == "F32"]
QUANTISED = [name for name in MODELS if name not in PLAIN]
ALONE = {
    "bamboo": "unknown model architecture",
    "opt": "unknown model architecture",
    "phimoe": "llama.cpp has RMSNorm where the model has LayerNorm, and another choice of experts",
}
"""What llama.cpp does not compute, with the reasons; transformers' logits are expected."""


def write_known(name: str, folder: Path) -> Path:
    file = write_tiny(folder / "tiny.gguf", MODELS[name])
    assert hash_file(file) == str(RECORDS[f"{name}/sha256"]), "record it again"
    return file


def compute(model: pi2.LoadedModel, tokens: list[int] = TOKENS, count: int = PROMPT) -> list[F32]:
    """Logits of a prompt, and of all tokens one by one."""
    prompt = model.logits(tokens[:count]).copy()
    return [prompt, model.logits(tokens, mode="decode").copy()]


def limit(model: Tiny, whole: pi2.LoadedModel) -> tuple[int, int]:
    """A budget that has room for half of the matrices, and the least ring for the others: layers
    and the head have two slots each, of 16 rows and the blocks at their ends."""
    assert whole.plan.file is not None
    segments = whole.plan.plan.memory.segments
    rest = segments.runtime + segments.attention + segments.kv + segments.state
    longest = max(shape[-1] for shape, *_ in model.tensors.values() if len(shape) > 1)
    ring = 4 * (-(-16 * 4 * longest // 4096) + 1) * 4096
    return rest + segments.workspace + whole.plan.file.matrix_bytes // 2, ring


def test_every_architecture_is_compared() -> None:
    found = {own.architecture for own in MODELS.values()} | ALONE.keys()
    assert found == set(list_architectures())


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_gives_the_logits_of_llama_cpp_and_the_same_bits_in_half_of_its_size(
    name: str, tmp_path: Path
) -> None:
    file, settings = write_known(name, tmp_path), {**SETTINGS, **FLOATS}
    assert FileFiller().runs_as_it_is(file)
    with pi2.load(file, set=settings) as model:
        whole, (budget, ring) = compute(model), limit(MODELS[name], model)
        assert model.stats.flash_read_bytes == 0
    for found in whole:
        assert measure_error(found, RECORDS[name][: len(found)]) <= NEAR
    patches = (
        patch("pi2.weights.file_plan.LEAST_RING", ring),
        patch("pi2.weights.file_plan.USUAL_RING", ring),
        patch("pi2.engine.file_loading.PIECE_BYTES", 1024),
    )
    with patches[0], patches[1], patches[2]:
        limited = {**settings, "memory.budget": f"{budget} B"}
        with pi2.load(file, set=limited) as model:
            half = compute(model)
            assert model.stats.flash_read_bytes > 0
    for one, other in zip(whole, half, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_are_those_of_llama_cpp_and_rounded_inputs_as_near_as_its_own(
    name: str, tmp_path: Path
) -> None:
    file, exact, rounded = write_known(name, tmp_path), RECORDS[name], RECORDS[f"{name}/rounded"]
    with pi2.load(file, set={**SETTINGS, **FLOATS}) as model:
        for found in compute(model):
            assert measure_error(found, exact[: len(found)]) <= NEAR
    with pi2.load(file, set=SETTINGS) as model:
        for found in compute(model):
            count = len(found)
            # Two that are rounded alone are as far from each other as both are from the exact one.
            bound = 2**0.5 * np.std(rounded[:count] - exact[:count])
            assert np.std(found - rounded[:count]) <= bound


@pytest.mark.parametrize("name", ALONE)
def test_a_file_that_llama_cpp_does_not_compute_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    own, golden = WholeFile(name, tmp_path), read_golden(name)
    # Of Phi-3.5-MoE a file cannot say all; the reference has transformers' logits of the rest.
    expected = own.of_store if name in UNSAID else golden.logits
    with own.open(**{"kv.type": "fp32"}) as model:
        for found in compute(model, golden.prompt, len(golden.prompt)):
            assert measure_error(found, expected) <= NEAR
