"""Layers whose heads differ: each keeps and computes what its own heads need."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.importing.config import Config
from pi2.importing.families import describe_family
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.goldens import (
    FOLDER,
    change_config,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
)


@pytest.fixture(scope="module")
def mixture_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("gemma4-moe", tmp_path_factory.mktemp("gemma4-moe"))


def test_several_tokens_take_the_ffn_beside_their_experts(mixture_plan: Path) -> None:
    golden = read_golden("gemma4-moe")
    rounded = {"backends.cpu": "cpu", "decode.batch": 2, "decode.predictor": "router"}
    with pi2.load(mixture_plan, set=rounded) as model:
        forward = model._parts.forward
        for place in (0, 1):
            forward.prefill(np.array(golden.prompt[:9], np.int32), sequence=place)
        for token, logits in zip(golden.prompt[9:], golden.logits[9:], strict=True):
            for row in forward.step([token, token], [0, 1]):
                assert measure_error(row, logits) <= 1e-2


def test_first_releases_state_other_heads_once_for_all_layers(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma4", tmp_path / "checkpoint")
    expected = describe_checkpoint(checkpoint).model
    change_config(
        checkpoint, per_layer_config=None, global_head_dim=36, num_global_key_value_heads=1
    )
    assert describe_checkpoint(checkpoint).model == expected
    assert expected.other_heads is not None and expected.other_heads.layers == (1, 3)


def test_the_last_layer_never_has_a_window() -> None:
    values = json.loads((FOLDER / "gemma4/config.json").read_text())
    values |= {"layer_types": None, "per_layer_config": None, "num_hidden_layers": 8}
    tables = describe_family(Config(FOLDER, values))
    assert tables["other_heads"]["layers"] == [5, 7]
    assert tables["attention"]["window_layers"] == [0, 1, 2, 3, 4, 6]
