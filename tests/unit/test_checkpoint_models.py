"""`pi2 run CHECKPOINT`: a folder is converted once, and then found; a GGUF file runs as it is."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.cli.documents import find_plan_path
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.weights.bundles import unpack_part
from pi2.pulled_models import find_model, list_models
from pi2.store.reader import NeuronStore
from pi2.weights.file_reading import FileFiller
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.compiling import use_own_data
from tests.helpers.gguf_files import make_sentence_piece, write_gguf
from tests.helpers.gguf_tensors import list_settings, translate
from tests.helpers.models import draw_weights, make_model
from tests.helpers.programs import Ask
from tests.helpers.slow import keep_quick
from tests.helpers.tables import in_table

Capture = pytest.CaptureFixture[str]
FEW = ["--max-tokens", "3"]
REFERENCE = ["--set", "backends.cpu=reference", *FEW]


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models."""
    use_own_data(tmp_path, monkeypatch)
    return tmp_path / "data/pi2/models"


def write_model(
    folder: Path, name: str, kind: str = "Q8_0", seed: int = 0,
    changes: Mapping[str, Any] | None = None, part_tensors: int = 0,
) -> Path:  # fmt: skip
    """A GGUF file whose answers begin anywhere; split into parts of some tensors if asked for."""
    metadata = make_sentence_piece()
    size = len(metadata["tokenizer.ggml.tokens"])
    model = make_model({"shape": {"vocab": size}, "predictor": None})
    weights = draw_weights(model, seed)
    write_checkpoint(folder / f"checkpoint-{name}-{seed}", model, weights)
    settings = {
        **list_settings(model),
        **metadata,
        "general.sampling.temp": 0.25,
        **(changes or {}),
    }
    return write_gguf(
        folder / f"{name}.gguf", "llama", settings, translate(model, weights), kind,
        split_max_tensors=part_tensors,
    )  # fmt: skip


def write_folder(folder: Path, name: str, seed: int = 0, activation: str = "silu") -> Path:
    """A Hugging Face folder of the same model, which becomes a GGUF file; with ReLU, a store."""
    file = write_model(folder, name, "F32", seed)
    made = folder / f"checkpoint-{name}-{seed}"
    config = json.loads((made / "config.json").read_text())
    further = {"hidden_act": activation, "max_position_embeddings": 64}
    (made / "config.json").write_text(json.dumps(config | further))
    (made / "tokenizer.json").write_bytes(open_checkpoint(file).read_tokenizer() or b"")
    settings = json.dumps({"do_sample": True, "temperature": 0.25})
    (made / "generation_config.json").write_text(settings)
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.move(made, place))


def test_a_gguf_file_runs_as_it_is(tmp_path: Path, models: Path, ask: Ask) -> None:
    file = write_model(tmp_path, "tiny q8")
    before = file.read_bytes()
    texts = []
    for _ in range(2):
        texts.append(
            ask(["run", str(file), "--prompt", "hello", "--max-tokens", "4", "--seed", "1"]).out
        )
    assert texts[0].strip() and texts[0] == texts[1]
    assert not models.exists()
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [file.name]


def test_a_broken_file_is_refused_before_anything_is_said_of_it(
    tmp_path: Path, models: Path, ask: Ask
) -> None:
    file = write_model(tmp_path, "tiny q8")
    file.write_bytes(file.read_bytes()[:3000])
    said = ask(["run", str(file), "--prompt", "hello"], 2).err
    assert said.startswith("error[P532]") and "converted" not in said
    assert not models.exists()


def test_a_file_without_a_template_is_named_not_the_folder_made_of_it(
    tmp_path: Path, models: Path, ask: Ask
) -> None:
    file = write_model(tmp_path, "tiny q8")
    said = ask(["run", str(file), "--chat", "hello"], 2).err
    assert "P609" in said and f"--> {file}\n" in said
    assert f"`pi2 run {file} --prompt TEXT`" in said and "folder" not in said


def test_a_served_file_is_called_without_its_ending(tmp_path: Path, models: Path) -> None:
    from pi2.cli.serve import list_plans

    (plan,) = list_plans((write_model(tmp_path, "tiny q8"),), {})
    assert plan.name == "tiny q8"


@pytest.mark.parametrize(
    ("activation", "said", "planned"),
    [
        ("silu", "MiB (q4_k_m, runs as it is)", 'weights = "model.gguf"'),
        ("relu", "MiB (ffn int4, ", "temperature = 0.25"),
    ],
)
def test_a_folder_is_converted_once(
    activation: str, said: str, planned: str, tmp_path: Path, models: Path, ask: Ask
) -> None:
    file = write_folder(tmp_path, "tiny q8", activation=activation)
    more = FEW if activation == "silu" else REFERENCE  # files choose their own backend
    command = ["run", str(file), "--prompt", "hello", *more]
    first = ask(command)
    assert first.out.strip() and "is converted once" in first.err and said in first.err
    model = find_model("tiny-q8")
    assert model is not None and model.source.name == str(file)
    assert planned in model.plan.read_text()

    made = model.plan.stat().st_mtime_ns
    assert "is converted" not in ask([*command, "--seed", "1"]).err
    assert model.plan.stat().st_mtime_ns == made
    ask(["run", "tiny-q8", "--prompt", "hello", *more])
    assert str(file) in ask(["list"]).out
    assert run(["remove", "tiny-q8"]) == 0
    assert list_models() == []
    assert file.exists()


def test_a_plan_that_did_not_fit_is_written_when_it_does(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Until then the finding says the least memory, and how to write a plan for it."""
    file = write_folder(tmp_path, "tiny", activation="relu")
    with monkeypatch.context() as patch:
        patch.setattr(FileFiller, "find_memory", lambda self: (1 << 40, 1 << 20))
        assert run(["run", str(file), "--prompt", "hello", *REFERENCE]) == 2
    said = capsys.readouterr().err
    assert "P026" in said and "needs at least" in said
    assert f"--store {models / 'tiny'}" in said and "--memory '" in said
    assert run(["run", str(file), "--prompt", "hello", *REFERENCE]) == 0
    assert (models / "tiny/default.plan.toml").exists()


@pytest.mark.parametrize(
    "name",
    keep_quick([b"no-suffix", b"UPPER.GGUF", b"two words.gguf", b"x\xff.gguf"], [b"x\xff.gguf"]),
)
def test_a_gguf_file_is_known_by_its_beginning_whatever_its_name_is(
    name: bytes, tmp_path: Path, ask: Ask
) -> None:
    file = write_model(tmp_path, "tiny").rename(tmp_path / os.fsdecode(name))
    for more in ([], ["--json"], ["-v"]):
        shown = ask(["run", str(file), "--prompt", "hello", "--max-tokens", "3", *more])
        assert shown.out.strip() and "is converted" not in shown.err
    assert run(["show", str(file)]) == 0
    store = tmp_path / os.fsdecode(name + b" store")
    assert run(["convert", str(file), "-o", str(store)]) == 0
    assert run(["run", str(store), "--prompt", "hello", *REFERENCE]) == 0
    broken = tmp_path / os.fsdecode(b"broken " + name)
    broken.write_bytes(b"GGUF and no more")
    shown = ask(["run", str(broken), "--prompt", "hello"], 2)
    assert "P532" in shown.err and "P900" not in shown.err


def test_a_tokenizer_can_be_given(tmp_path: Path, capsys: Capture) -> None:
    """A file or a folder, for a GGUF file whose own kind is unknown."""
    file = write_model(tmp_path, "tiny")
    own = make_tokenizer(file, read_gguf(file).metadata)
    unknown = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen9"}
    unknown_file = write_model(tmp_path, "unknown", changes=unknown)
    command = ["run", str(unknown_file), "--prompt", "hello", "--max-tokens", "3"]
    assert run(command) == 2
    shown = capsys.readouterr().err
    assert "P543" in shown and "qwen2" in shown and "--tokenizer" in shown
    assert run([*command, "--tokenizer", str(tmp_path / "none")]) == 1
    assert "P543" in capsys.readouterr().err

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/tokenizer.json").write_bytes(own)
    assert run([*command, "--tokenizer", str(tmp_path / "folder")]) == 0
    given = tmp_path / "folder/tokenizer.json"
    assert run([*command, "--tokenizer", str(given)]) == 0
    with pi2.load(unknown_file, set={"tokenizer": str(given)}) as model:
        assert model.encode("hello")[0] == 1  # the given tokenizer's begin token
    assert run(["run", "demo", "--prompt", "a", "--tokenizer", str(given)]) == 2
    assert "--tokenizer is for a checkpoint" in capsys.readouterr().err


def test_a_tokenizer_that_was_given_once_counts_for_a_folder_that_is_converted(
    tmp_path: Path, models: Path, ask: Ask
) -> None:
    folder = write_folder(tmp_path, "tiny")
    given = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    command = ["run", str(folder), "--prompt", "hello", *FEW]
    assert "--tokenizer" in ask(command, 2).err
    assert "is converted once" in ask([*command, "--tokenizer", str(given)]).err
    assert "is converted" not in ask(command).err
    assert open_checkpoint(models / "tiny/model.gguf").read_tokenizer() == given.read_bytes()


def test_python_loads_what_a_command_runs(tmp_path: Path, models: Path) -> None:
    """A file, then the model that it became by its name, its folder and its plan."""
    file = write_folder(tmp_path, "tiny")
    texts = []
    for path in (file, str(file), "tiny", models / "tiny", models / "tiny/default.plan.toml"):
        with pi2.load(path, memory="160 MiB") as model:
            assert model.plan.plan.memory.budget == 160 << 20
            texts.append(model.generate("hello", max_tokens=3, temperature=0.0).result.text)
    assert len(set(texts)) == 1
    with pytest.raises(UserError, match="P001"):
        pi2.load("no-such-model")


def test_a_file_that_has_changed_is_converted_again(tmp_path: Path, models: Path) -> None:
    file = write_folder(tmp_path, "tiny")
    plan = find_plan_path(file)
    before = (plan.parent / "model.gguf").read_bytes()
    write_folder(tmp_path, "tiny", seed=1)
    assert find_plan_path(file) == plan
    assert (plan.parent / "model.gguf").read_bytes() != before
    plan.unlink()
    assert find_plan_path(file) == plan and plan.exists()
    assert [path.name for path in models.iterdir()] == ["tiny"]


def test_files_of_one_name_are_two_models(tmp_path: Path, models: Path) -> None:
    (tmp_path / "other").mkdir()
    plans = {
        find_plan_path(write_folder(place, "tiny")) for place in (tmp_path, tmp_path / "other")
    }
    assert len(plans) == len(list_models()) == 2


@pytest.mark.parametrize(
    ("activation", "work"),
    [("silu", "quantize.ByteProgress.add"), ("relu", "convert._Conversion.read_dense")],
)
def test_an_interrupted_conversion_leaves_no_model(
    activation: str, work: str, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_folder(tmp_path, "tiny", activation=activation)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"pi2.importing.{work}", stop)
        with pytest.raises(KeyboardInterrupt):
            find_plan_path(file)
        if activation == "relu":  # what is left can be deleted
            assert run(["remove", "tiny"]) == 0
        assert list(models.iterdir()) == []
        with pytest.raises(KeyboardInterrupt):
            find_plan_path(file)
    assert list_models() == []
    assert find_plan_path(file).exists()
    assert [path.name for path in models.iterdir()] == ["tiny"]


def test_a_store_stands_for_the_plan_in_it_and_a_folder_is_converted_too(
    tmp_path: Path, models: Path
) -> None:
    file = write_model(tmp_path, "tiny")
    assert run(["convert", str(file), "-o", str(tmp_path / "store")]) == 0
    assert find_plan_path(tmp_path / "store") == tmp_path / "store/default.plan.toml"
    assert list_models() == []
    folder = tmp_path / "checkpoint-tiny-0"
    config = json.loads((folder / "config.json").read_text())
    further = {"hidden_act": "silu", "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**config, **further}))
    assert describe_checkpoint(file).model.shape.layers == 3
    os.replace(tmp_path / "store/tokenizer.json", folder / "tokenizer.json")
    assert find_plan_path(folder) == models / "checkpoint-tiny-0/default.plan.toml"


@in_table
def test_a_store_has_no_fewer_bits_than_its_file(
    tmp_path: Path, kind: str, ffn: str, others: str, capsys: Capture
) -> None:
    file = write_model(tmp_path, "tiny", kind)
    assert run(["convert", str(file), "-o", str(tmp_path / "store")]) == 0
    assert f"(ffn {ffn}, attention {others}, embedding {others}" in capsys.readouterr().err
    stored, original = (read_weights(path) for path in (tmp_path / "store", file))
    assert stored.keys() == original.keys()
    for name, weights in original.items():
        wrong = np.abs(stored[name] - weights).max() / np.abs(weights).max()
        is_rounded = kind == "Q4_1" or (name == "down" and kind != "F16")
        assert wrong == 0.0 if not is_rounded else wrong < 0.005, name


def test_fewer_bits_are_taken_where_they_are_asked_for(tmp_path: Path, capsys: Capture) -> None:
    file = write_model(tmp_path, "tiny", "Q8_0")
    assert run(["convert", str(file), "-o", str(tmp_path / "store"), "--quantization", "int4"]) == 0
    assert "(ffn int4, attention int4, embedding int8" in capsys.readouterr().err


def read_weights(path: Path) -> dict[str, F32]:
    """Matrices of the first layer, of a store or of the GGUF file that it was made from."""
    parts = ("gate", "up", "down")
    if path.is_file():
        tensors = open_checkpoint(path).tensors
        layer = "model.layers.0"
        found = {part: tensors[f"{layer}.mlp.{part}_proj.weight"].read() for part in parts}
        found["down"] = found["down"].T
        found["embedding"] = tensors["model.embed_tokens.weight"].read()
        return found | {"output": tensors[f"{layer}.self_attn.o_proj.weight"].read()}
    with NeuronStore.open(path) as store:
        bundles, bundle = store.layers[0].bundles, store.bundle
        found = {part: unpack_part(bundles, bundle, n) for n, part in enumerate(parts)}
        for name, own in (("embedding", "embedding"), ("output", "layers.0.output")):
            tensor = store.tensors[own]
            assert tensor.precision is not None
            packing, weights = find_packing(tensor.precision), tensor.weights.view(np.uint8)
            found[name] = packing.dequantize(weights, tensor.scales, tensor.length)
    return found
