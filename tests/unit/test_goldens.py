"""Converted checkpoints compute what Hugging Face transformers computes with them.

The expected values are in tests/golden/models, written by tools/make_goldens.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.goldens import (
    EXACT,
    convert_golden,
    copy_checkpoint,
    list_goldens,
    measure_error,
    read_golden,
    run_golden,
    write_plan,
)

REFERENCE_ERROR = 1e-4


@pytest.mark.parametrize("name", list_goldens())
def test_the_reference_backend_agrees(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    model = convert_golden(checkpoint, tmp_path, EXACT)
    logits, greedy = run_golden(write_plan(tmp_path, model, {}), golden)
    assert measure_error(logits, golden.logits) <= REFERENCE_ERROR
    np.testing.assert_array_equal(greedy, golden.greedy)


CPU_ERROR = 5e-3
"""Activations are 16-bit integers, keys and values fp16; 1e-2 is what the backend promises."""


@pytest.mark.parametrize("name", list_goldens())
def test_the_cpu_backend_agrees(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    model = convert_golden(checkpoint, tmp_path, EXACT)
    plan = write_plan(tmp_path, model, {"backends": {"cpu": "cpu"}})
    logits, greedy = run_golden(plan, golden)
    assert measure_error(logits, golden.logits) <= CPU_ERROR
    np.testing.assert_array_equal(greedy, golden.greedy)
