"""What each layer of a model is, and documents that are written as blocks."""

from pathlib import Path

import pytest

from pi2.authoring.writing import write_document
from pi2.cli.main import run
from pi2.fitting.check import check_file
from pi2.importing.new_model import describe_checkpoint
from pi2.model.blocks import Attention, State
from pi2.plan.documents.common import dump_plain, hash_json
from pi2.plan.documents.model import Model
from pi2.plan.reading.block_entries import choose_layers, describe_layers
from pi2.plan.reading.references import list_shipped
from tests.helpers.goldens import copy_checkpoint
from tests.helpers.models import MIXTURE, make_model
from tests.helpers.tables import in_table

SHIPPED = list_shipped("model")
GOLDENS = (
    "gemma3", "gemma3n-narrow", "gemma4-e2b", "gemma4-moe", "gpt-oss", "jamba", "kimi-linear",
    "llama4", "mimo-v2-flash", "nemotron-h-moe", "qwen3-next",
)  # fmt: skip


def read_model(path: Path) -> Model:
    report = check_file(path)
    assert report.is_sound, report.diagnostics
    assert isinstance(report.document, Model)
    return report.document


def check_round_trip(model: Model, folder: Path) -> None:
    text = write_document(model)
    path = folder / f"{model.id}.model.toml"
    path.write_text(text)
    again = read_model(path)
    assert "[[blocks]]" in text
    assert again.blocks == model.blocks
    assert hash_json(dump_plain(again)) == hash_json(dump_plain(model))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_shown_as_blocks_that_mean_the_same(name: str, tmp_path: Path) -> None:
    check_round_trip(read_model(SHIPPED[name]), tmp_path)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_described_checkpoint_is_written_as_blocks_that_mean_the_same(
    name: str, tmp_path: Path
) -> None:
    made = describe_checkpoint(copy_checkpoint(name, tmp_path / "checkpoint"), "golden")
    path = tmp_path / "golden.model.toml"
    path.write_text(made.text)
    assert read_model(path) == made.model
    check_round_trip(made.model, tmp_path)


@in_table
def test_layers_are_numbers_ranges_and_slices(text: str, layers: list[int]) -> None:
    assert choose_layers(text, 10) == layers


@pytest.mark.parametrize("layers", [[0], [0, 1, 2], [1, 3, 5, 7, 9], [2, 3, 4], [0, 4, 5, 9]])
def test_a_choice_of_layers_is_read_as_it_is_written(layers: list[int]) -> None:
    assert choose_layers(describe_layers(layers, 10), 10) == layers


def test_a_later_entry_replaces_the_operators_that_it_states(tmp_path: Path) -> None:
    text = SHIPPED["qwen3-next-80b-a3b"].read_text()
    path = tmp_path / "qwen3-next-80b-a3b.model.toml"
    path.write_text(f'{text}\n[[blocks]]\nlayers = "-1"\nmix = {{ op = "delta" }}\n')
    before, after = read_model(SHIPPED["qwen3-next-80b-a3b"]).blocks, read_model(path).blocks
    assert after[:-1] == before[:-1] and after[-1].attention is None
    assert after[-1].ffn == before[-1].ffn


def test_a_document_that_extends_another_inherits_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss-20b.model.toml"
    path.write_text('schema_version = 3\nextends = ["gpt-oss-20b"]\nshape.context = 1024\n')
    assert read_model(path).blocks == read_model(SHIPPED["gpt-oss-20b"]).blocks


def test_a_plan_is_shown_with_the_blocks_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "demo"]) == 0
    assert '# blocks: mix = { op = "attention" }, ffn = { op = "dense" }' in capsys.readouterr().out


def test_layers_that_compute_the_same_have_equal_blocks() -> None:
    model = make_model({"attention": {"sliding_window": 8, "window_layers": [1]}})
    first, second, third = model.blocks
    assert first == third != second
    assert [block.attention and block.attention.window for block in model.blocks] == [None, 8, None]


def test_a_layer_may_have_several_mixers_and_no_ffn() -> None:
    model = make_model(
        {
            "layers": {"kinds": ["mamba+attention", "none", "mamba+mamba"]},
            "recurrence": {"key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8},
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
