"""Commands about stores, and what makes a store another one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from pi2.cli.main import run
from pi2.fitting.check import check_file
from pi2.plan.documents.model import Model
from pi2.plan.reading.references import find_document
from pi2.store.identity import _OLDEST, _OTHERS, describe_weights
from pi2.store.manifest import read_manifest
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import TinyModel, draw_weights, make_model
from tests.helpers.programs import Ask

MODEL_FILE = """
schema_version = 3
id = "tiny"
tied_head = true

[shape]
layers = 3
hidden = 64
ffn = 96
heads = 4
kv_heads = 2
head_dim = 16
vocab = 288
context = 64

[ffn]
activation = "drelu"

[predictor]
rank = 32
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "tiny.model.toml").write_text(MODEL_FILE)
    model = make_model()
    return write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))


# info


def test_info_says_what_the_store_holds(tiny: TinyModel, ask: Ask) -> None:
    output = ask(["store", "info", str(tiny.store)]).out
    digest = read_manifest(tiny.store).model.digest
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in output.splitlines() if line}
    assert lines["model"].split() == ["tiny"] and lines["digest"].split() == [digest]
    assert "layers 3, hidden 64, neurons per layer 96" in lines["shape"]
    assert "ffn int4" in lines["precision"]
    assert "512 bytes apart, 108 used: gate at 0, up at 36, down at 72" in lines["bundle"]
    assert "most active first" in lines["order"] and "rank 32" in lines["predictor"]
    assert "of a checkpoint" in lines["weights"]
    assert "96 neurons each" in lines["layers/ffn-000.arrow"]
    assert "dense tensors" in lines["dense.arrow"]
    shown = json.loads(ask(["store", "info", "--json", str(tiny.store)]).out)
    assert shown == json.loads((tiny.store / "manifest.json").read_text())


@pytest.mark.parametrize("command", ["info", "verify"])
def test_no_store_is_exit_code_2(tmp_path: Path, command: str, ask: Ask) -> None:
    captured = ask(["store", command, str(tmp_path / "none")], 2)
    assert captured.out == "" and "error[P501]" in captured.err


# verify


def test_verify_names_every_bad_file_and_exits_with_1(tiny: TinyModel, ask: Ask) -> None:
    command = ["store", "verify", str(tiny.store)]
    assert "5 files" in ask(command).out
    flip_byte(tiny.store / "layers/ffn-001.arrow", 5000)
    (finding,) = json.loads(ask([*command, "--json"], 1).out)["findings"]
    assert finding["code"] == "P507" and finding["file"].endswith("layers/ffn-001.arrow")
    flip_byte(tiny.store / "dense.arrow", 0)
    (tiny.store / "tokenizer.json").unlink()
    output = ask(command, 1).out
    assert (output.count("error[P507]"), output.count("error[P506]")) == (2, 1)
    for name in ("ffn-001.arrow", "dense.arrow", "tokenizer.json"):
        assert name in output
    assert "ffn-000.arrow" not in output


def test_verify_notices_manifest_that_points_elsewhere_in_a_file(tiny: TinyModel, ask: Ask) -> None:
    # Hashes agree, but the manifest's offsets are not where Arrow finds the columns.
    file = tiny.store / "manifest.json"
    fields = json.loads(file.read_text())
    layer = next(item for item in fields["files"] if item["path"] == "layers/ffn-000.arrow")
    layer["neurons_offset"] -= 128
    fields["tensors"][0]["scales_offset"] += 64
    file.write_text(json.dumps(fields))
    assert ask(["store", "verify", str(tiny.store)], 1).out.count("error[P510]") == 2


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 255
    path.write_bytes(content)


# convert


def test_convert_by_path_of_the_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    arguments = ["convert", "checkpoint", "--model", "tiny.model.toml", "-o", "out"]
    assert ask(arguments).out == ""
    assert run(["store", "verify", "out"]) == 0
    assert "error[P521]" in ask(arguments, 2).err
    assert run([*arguments, "--force"]) == 0


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("no-such-model", "P015"),
        ("missing.model.toml", "P001"),
        ("broken.model.toml", "P1"),
        ("tiny.plan.toml", "P014"),
    ],
)
def test_convert_with_a_bad_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, model: str, code: str
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    Path("broken.model.toml").write_text(MODEL_FILE.replace("layers = 3", "layers = -3"))
    plans = Path(__file__).resolve().parents[2] / "plans"
    shutil.copy(plans / "demo.plan.toml", "tiny.plan.toml")
    assert run(["convert", "checkpoint", "--model", model, "-o", "out"]) in (1, 2)
    assert f"error[{code}" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["pi2.cli.store", "pi2.cli.convert"])
def test_commands_import_nothing_heavy_before_they_run(command: str) -> None:
    code = (
        f"import sys, {command}\n"
        "heavy = {'numpy', 'pyarrow', 'tvm_ffi', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_state_of_a_first_store_is_still_described_as_it_was() -> None:
    model = check_file(find_document("qwen3-next-80b-a3b", "model", Path())).document
    assert isinstance(model, Model) and model.recurrence is not None
    assert describe_weights(model)["recurrence"] == {
        "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4,
        "convolution_bias": False, "projection_bias": False, "norm_groups": 1, "shortest_step": 0.0,
    }  # fmt: skip


def test_every_table_says_which_options_its_first_stores_had() -> None:
    for part in set(Model.model_fields) - _OTHERS:
        kind = Model.model_fields[part].annotation
        tables = [
            kind
            for kind in get_args(kind) or (kind,)
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        # Of another RoPE only what differs from the defaults is described.
        assert not tables or part in _OLDEST or part == "other_rope", part
