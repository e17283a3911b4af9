"""FIFOs, devices and links in the place of files: a diagnostic, and nothing hangs or leaks."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import pi2
from pi2.caches import check_regular, open_regular, read_regular
from pi2.costs import activity
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.conversion_job import read_counts, read_summary
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.measuring.activations import Statistics
from pi2.measuring.ordering import reorder_store
from pi2.store.verification import verify_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import TinyModel, draw_weights, make_model, make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.programs import start_pi2

STORE_FILES = [
    "manifest.json", "dense.arrow", "layers/ffn-001.arrow", "tokenizer.json", "chat_template.jinja",
]  # fmt: skip
CHECKPOINT_FILES = ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


PUTTING = [put_fifo, put_zeros]


@pytest.mark.parametrize("put", PUTTING)
def test_what_is_no_file_is_not_opened(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "x")
    for use in (check_regular, open_regular, read_regular):
        with pytest.raises(OSError, match="not a file"):
            use(tmp_path / "x")


def test_folders_and_sockets_are_no_files_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        read_regular(tmp_path)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(OSError, match="it is a socket"):
            read_regular(Path("socket"))


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_regular(tmp_path / "link") == b"abc"
    descriptor = open_regular(tmp_path / "x")
    assert os.get_blocking(descriptor), "io_uring takes O_NONBLOCK at its word"
    os.close(descriptor)


# Stores
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tiny = make_tiny(tmp_path_factory.mktemp("tiny"), {"shape": {"layers": 2}})
    write_plan(tiny.store.parent, tiny)
    return tiny


def use_model(plan: Path) -> None:
    with pi2.load(plan) as model:
        model.encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("name", STORE_FILES)
@pytest.mark.parametrize("put", PUTTING)
def test_no_command_waits_for_a_store(
    tmp_path: Path, tiny: TinyModel, name: str, put: Callable[[Path], None]
) -> None:
    folder = tmp_path / "plan"
    shutil.copytree(tiny.store.parent, folder)
    put(folder / "store" / name)
    with pytest.raises(UserError) as caught:
        use_model(folder / "tiny.plan.toml")
    assert re.search("not a file|has no manifest.json", str(caught.value))
    if "chat" in name:
        return
    try:
        findings = verify_store(folder / "store")
    except UserError as error:
        findings = list(error.diagnostics)
    assert len(findings) == 1


@pytest.mark.parametrize("put", PUTTING)
def test_counts_and_statistics_that_are_no_files_are_none(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    for name in ("statistics.json", "activations.parquet"):
        put(tmp_path / name)
    assert activity.read_statistics(tmp_path, 2) is None
    assert read_summary(tmp_path, Statistics) is None
    with pytest.raises(UserError, match="P540"):
        read_counts(tmp_path / "activations.parquet", 2, 96)


def test_a_store_written_anew_takes_nothing_from_where_links_lead(
    tmp_path: Path, tiny: TinyModel
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny.store, store)
    (tmp_path / "secret").write_text("swordfish")
    (store / "note").symlink_to(tmp_path / "secret")
    stride = make_model().lay_out_bundle().stride + 512
    reorder_store(store, stride=stride, output=tmp_path / "new")
    kept = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert not any(b"swordfish" in path.read_bytes() for path in kept)


# Checkpoints
@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = make_model({"predictor": None})
    folder = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 64, "hidden_act": "relu"})
    )
    return folder


def convert(folder: Path, output: Path) -> None:
    convert_checkpoint(folder, make_model({"predictor": None}), output)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("put", PUTTING)
def test_no_conversion_waits_for_a_checkpoint(
    tmp_path: Path, checkpoint: Path, name: str, put: Callable[[Path], None]
) -> None:
    put(checkpoint / name)
    with pytest.raises(UserError, match=r"not a file|link out of the checkpoint"):
        convert(checkpoint, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("put", PUTTING)
def test_no_conversion_waits_for_a_gguf_file(tmp_path: Path, put: Callable[[Path], None]) -> None:
    (tmp_path / "folder").mkdir()
    put(tmp_path / "folder/model.gguf")
    for path in (tmp_path / "folder/model.gguf", tmp_path / "folder"):
        with pytest.raises(UserError, match=r"P532|P538|P531"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_link_out_of_a_checkpoint_is_not_followed(
    tmp_path: Path, checkpoint: Path, name: str
) -> None:
    (checkpoint / name).rename(tmp_path / "outside")
    (checkpoint / name).symlink_to("../outside")
    with pytest.raises(UserError, match="P538") as caught:
        convert(checkpoint, tmp_path / "store")
    assert f"{name} is a link out of the checkpoint" in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_template_that_links_to_a_secret_is_not_taken(tmp_path: Path, checkpoint: Path) -> None:
    more = checkpoint / "additional_chat_templates"
    more.mkdir()
    (tmp_path / "secret").write_text("swordfish")
    (more / "rag.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="P538"):
        convert(checkpoint, tmp_path / "store")
    # The folder itself may be such a link, too.
    shutil.rmtree(more)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/rag.jinja").write_text("swordfish")
    more.symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="P538"):
        convert(checkpoint, tmp_path / "store")


def test_links_within_a_checkpoint_are_followed(tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "weights")
    (checkpoint / "model.safetensors").symlink_to("weights")
    # Whoever names a folder by a link means it.
    (tmp_path / "named").symlink_to(checkpoint)
    convert(tmp_path / "named", tmp_path / "store")


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path, checkpoint: Path) -> None:
    repository = tmp_path / "models--somebody--tiny"
    snapshot = repository / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        file.rename(repository / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    describe_checkpoint(snapshot)
    convert(snapshot, tmp_path / "store")
    (tmp_path / "secret").write_text("swordfish")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("../../../secret")
    with pytest.raises(UserError, match="P538"):
        convert(snapshot, tmp_path / "other")


def test_a_device_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").symlink_to("/dev/zero")
    done = start_pi2("convert", tmp_path / "x.gguf", "-o", tmp_path / "store")
    assert done.returncode == 2 and "it is a device, not a file" in done.stderr
