"""A small file of each architecture gives llama.cpp's logits, in memory and in half of its size."""

from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.importing.families import list_families
from pi2.importing.gguf_architectures import list_architectures
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_goldens import UNSAID
from tests.helpers.goldens import measure_error, read_golden
from tests.helpers.peers import FOLDER, PROMPT, TOKENS, hash_file, read_records
from tests.helpers.slow import keep_quick
from tests.helpers.whole_files import MODELS, NEAR, OTHERS, UNROUNDED, WholeFile

pytestmark = pytest.mark.usefixtures("quick_kernels")

RECORDS = read_records()
PLAIN = [name for name, own in MODELS.items() if own.kind == "F32"]
QUANTISED = [name for name in MODELS if name not in PLAIN]
ALONE = {
    "bamboo": "unknown model architecture",
    "opt": "unknown model architecture",
    "phimoe": "llama.cpp has RMSNorm where the model has LayerNorm, and another choice of experts",
}
"""What llama.cpp does not compute, with the reasons; transformers' logits are expected."""
FILES_ONLY = {**dict.fromkeys(("apertus", "step35"), "ffn."), "qwen4exp": "gated_streams"}
"""Architectures with options that no store computes: activations of layers, n-grams."""
ROUNDED = {"prefill.activations": "int8", "decode.activations": "int8"}


def open_known(name: str, folder: Path) -> WholeFile:
    own = WholeFile(name, folder)
    assert hash_file(own.file) == str(RECORDS[f"{name}/sha256"]), "record it again"
    return own


def compute(model: pi2.LoadedModel, tokens: list[int] = TOKENS, count: int = PROMPT) -> list[F32]:
    """Logits of a prompt, and of all tokens one by one."""
    prompt = model.logits(tokens[:count]).copy()
    return [prompt, model.logits(tokens, mode="decode").copy()]


def test_every_architecture_is_compared() -> None:
    assert {*ALONE} == {*OTHERS}
    assert {own.architecture for own in MODELS.values()} | ALONE.keys() == {*list_architectures()}


def test_every_architecture_of_llama_cpp_runs_or_is_refused_in_a_line_of_the_docs() -> None:
    names = (FOLDER / "architectures.txt").read_text().split()
    running, refused = [], list_families().refused_files
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    for name in names:
        running += [name] if name in list_architectures() else []
        says = refused[name] if name not in running else "`"
        lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert any(says in line for line in lines), name
    assert len(running) >= 100


@pytest.mark.parametrize("name", keep_quick(PLAIN, PLAIN[::5]))
def test_a_file_gives_the_logits_of_llama_cpp_and_the_same_bits_in_half_of_its_size(
    name: str, tmp_path: Path
) -> None:
    own = open_known(name, tmp_path)
    assert FileFiller().runs_as_it_is(own.file)
    with own.open(**UNROUNDED) as model:
        whole = compute(model)
        assert model.stats.flash_read_bytes == 0
        # More than is stated would have been refused.
        assert all(use.taken_bytes is not None for use in model.measure_segments().values())
    for found in whole:
        assert measure_error(found, RECORDS[name][: len(found)]) <= NEAR
    with own.stream(**UNROUNDED) as model:
        half = compute(model)
        assert model.stats.flash_read_bytes > 0
    for one, other in zip(whole, half, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", keep_quick(PLAIN, PLAIN[::12]))
def test_numpy_gives_the_logits_of_llama_cpp_from_a_file_and_the_store_that_is_made_of_it(
    name: str, tmp_path: Path
) -> None:
    own = WholeFile(name, tmp_path)
    assert measure_error(own.expected, RECORDS[name]) <= NEAR
    if name in FILES_ONLY:
        with pytest.raises(pi2.UserError, match=f"does not know {FILES_ONLY[name]}"):
            _ = own.of_store
    else:
        assert measure_error(own.of_store, RECORDS[name]) <= NEAR


@pytest.mark.parametrize("name", keep_quick(QUANTISED, QUANTISED[::3]))
def test_quantised_weights_are_those_of_llama_cpp_and_rounded_inputs_as_near_as_its_own(
    name: str, tmp_path: Path
) -> None:
    own, exact, rounded = open_known(name, tmp_path), RECORDS[name], RECORDS[f"{name}/rounded"]
    with own.open(**UNROUNDED) as model:
        for found in compute(model):
            assert measure_error(found, exact[: len(found)]) <= NEAR
    with own.open(**UNROUNDED, **ROUNDED) as model:
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
    with own.open(**UNROUNDED) as model:
        for found in compute(model, golden.prompt, len(golden.prompt)):
            assert measure_error(found, expected) <= NEAR
    assert measure_error(own.expected, expected) <= NEAR
