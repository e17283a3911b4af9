"""Models of every operator compute the same beyond memory; contradictions are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.backends.gpu.model_arrays import find_alone_limits
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.arithmetic.units import list_unknown_weights
from tests.helpers.goldens import (
    CPU,
    EXACT,
    ROUNDING,
    change_config,
    check_sequences_together,
    compute_decoded,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
)
from tests.helpers.slow import keep_quick
from tests.helpers.tables import in_table

MakePlan = Callable[[str], Path]
BACKENDS = pytest.mark.parametrize("backend", [{}, CPU], ids=["reference", "cpu"])
EXPERTS = ("gemma4-e2b", "gemma4-moe", "laguna", "llama4", "nemotron-h-latent")
"""Layers of different heads, FFNs and widths, and experts that read something of their own."""
INT8_ROUNDING = 1e-2
"""Both backends round what is kept to 8 bits; values that differ a little are rounded apart."""


@in_table
def test_what_is_in_memory_changes_no_bit(
    make_plan: MakePlan, name: str, backend: dict[str, Any]
) -> None:
    golden, plan = read_golden(name), make_plan(name)
    expected = compute_decoded(plan, golden.prompt, {**backend, "layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    with pi2.load(plan, set={**backend, "layers.hot": 0.0}) as model:
        np.testing.assert_array_equal(model.logits(golden.prompt, mode="decode"), expected)
        assert model.stats.flash_read_bytes > 0
        # Of a prompt, chunks may want all experts of one layer and some of the next.
        assert measure_error(model.logits(golden.prompt), golden.logits) <= ROUNDING


@BACKENDS
@pytest.mark.parametrize(
    "name", keep_quick([*EXPERTS, "gemma4", "gemma3n", "deepseek-v3"], ["gemma3n", "deepseek-v3"])
)
def test_sequences_together_compute_what_they_do_alone(
    make_plan: MakePlan, name: str, backend: dict[str, Any]
) -> None:
    several = {**backend, "decode.batch": 2} if name == "gemma3n" else backend
    check_sequences_together(make_plan(name), several)


@pytest.mark.parametrize("backend", [{}, CPU, {"kv.type": "int8"}])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-e2b"])
def test_keys_and_values_that_were_kept_serve_another_sequence(
    make_plan: MakePlan, name: str, backend: dict[str, Any]
) -> None:
    ids = np.random.default_rng(3).integers(3, 96, 20).tolist()
    with pi2.load(make_plan(name), set={**backend, "decode.batch": 2}) as model:
        forward, program = model._parts.forward, model._parts.executor.program
        forward.prefill(np.array(ids, np.int32), sequence=0)
        expected = forward.step([7], [0]).copy()
        forward.prefill(np.array(ids[16:] * 5, np.int32), sequence=1)
        program.put_context(1, 0, 16, program.read_context(0, 0, 16))
        forward.positions[1] = 16
        for token in ids[16:]:
            forward.step([token], [1])
        error = measure_error(forward.step([7], [1]), expected)
    assert error <= (INT8_ROUNDING if "kv.type" in backend else ROUNDING)


@pytest.mark.parametrize("name", ["llama4", "nemotron-h-latent"])
def test_a_dense_unit_reads_what_experts_read(make_plan: MakePlan, name: str) -> None:
    two = {
        "device": "host-two-units",
        "backends": {"cpu": "cpu", "npu": "reference"},
        "layers.split": {"second": 0.3, "cpu": 0.7},
    }
    golden = read_golden(name)
    with pi2.load(make_plan(name), set={**CPU, **two}) as model:
        assert measure_error(model.logits(golden.prompt), golden.logits) <= ROUNDING


@pytest.mark.parametrize("name", ["deepseek-v3", "nemotron-h-latent"])
def test_backends_agree_about_int4_weights(tmp_path: Path, name: str) -> None:
    """Sums are in another order than the elements where weights have 4 bits."""
    golden = read_golden(name)
    plan = make_golden_plan(name, tmp_path, dict.fromkeys(EXACT, "int4"))
    with pi2.load(plan) as model:
        expected = model.logits(golden.prompt)
    for changes in ({}, {"prefill.chunk": 24}):
        with pi2.load(plan, set={**CPU, **changes}) as model:
            assert measure_error(model.logits(golden.prompt), expected) <= ROUNDING


@in_table
def test_what_has_no_kernels_on_a_gpu_is_named(
    make_plan: MakePlan, name: str, keys: list[str]
) -> None:
    resolved = load_plan(make_plan(name))
    limits = find_alone_limits(resolved)
    assert bool(limits) == bool(keys)
    for key in keys:
        assert any(key in limit for limit in limits), key
    unknown = list_unknown_weights(resolved.model)
    assert any("gate_sparsity" in limit for limit in unknown) == (name == "gemma3n")


@in_table
def test_what_no_document_states_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], problem: str
) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    change_config(checkpoint, **changes)
    with pytest.raises(UserError, match="P544") as caught:
        describe_checkpoint(checkpoint)
    assert problem in str(caught.value)


@in_table
def test_what_does_not_belong_together_is_refused(
    make_plan: MakePlan, tmp_path: Path, name: str, before: str, after: str, problem: str
) -> None:
    plan = make_plan(name)
    document = (plan.parent / "golden.model.toml").read_text()
    # What a later line of the table states is stated once.
    for line in ("shared_experts = 0\n", 'router = "sigmoid"\n', 'gate = "silu"\n'):
        document = document.replace(line, "") if line.partition(" ")[0] in after else document
    assert document.count(before) == 1
    (tmp_path / "golden.model.toml").write_text(document.replace(before, after))
    (tmp_path / "golden.plan.toml").write_text(plan.read_text())
    with pytest.raises(UserError, match=problem):
        load_plan(tmp_path / "golden.plan.toml")
