"""Blocks say what each layer computes, whatever keys of the document it comes from."""

from __future__ import annotations

from pi2.model.blocks import Attention, State
from tests.helpers.models import MIXTURE, make_model


def test_layers_that_compute_the_same_have_equal_blocks() -> None:
    model = make_model({"attention": {"sliding_window": 8, "window_layers": [1]}})
    first, second, third = model.blocks
    assert first == third != second
    assert [block.attention and block.attention.window for block in model.blocks] == [None, 8, None]


def test_a_layer_may_have_several_mixers_and_no_ffn() -> None:
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8}
    model = make_model(
        {
            "layers": {"kinds": ["mamba+attention", "none", "mamba+mamba"]},
            "recurrence": sizes,
            "ffn": {"absent_layers": [1]},
        }
    )
    kinds = [[type(mixer) for mixer in block.mixers] for block in model.blocks]
    assert kinds == [[State, Attention], [], [State, State]]
    assert [block.states for block in model.blocks] == [(0,), (), (0, 1)]
    assert [block.ffn.kind for block in model.blocks] == ["dense", "none", "dense"]


def test_a_dense_layer_of_a_mixture_fills_whole_experts() -> None:
    moe = {**MIXTURE["moe"], "shared_experts": 1, "dense_layers": [0], "dense_ffn": 100}
    model = make_model({**MIXTURE, "moe": moe})
    found = [(block.ffn.kind, block.ffn.active, block.ffn.neurons) for block in model.blocks]
    assert found == [("dense", 2, 100), ("experts", 3, 288), ("experts", 3, 288)]


def test_blocks_follow_what_is_changed() -> None:
    model = make_model()
    assert len(model.blocks) == 3
    shape = model.shape.model_copy(update={"layers": 1})
    assert len(model.model_copy(update={"shape": shape}).blocks) == 1
