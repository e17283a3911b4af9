"""`pi2 pull`, `pi2 list` and `pi2 remove`, against a server that speaks the hub's protocol."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
from huggingface_hub import hf_hub_download

from pi2.cli.documents import find_plan_path
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.importing.hub import HubReference, Repository, choose_files, fetch_files, parse_reference
from pi2.pulled_models import find_models_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.compiling import share_kernels
from tests.helpers.hub import COMMIT, Hub, serve_repository
from tests.helpers.models import draw_weights, make_model
from tests.helpers.programs import Ask, start_pi2
from tests.helpers.sharing import start_server
from tests.helpers.slow import keep_quick

FETCH = """
import sys
from huggingface_hub import hf_hub_download
for name in sys.argv[2:]:
    hf_hub_download(sys.argv[1], name)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = make_model()
    folder = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model, 0), shards=2)
    file = folder / "config.json"
    further = {"hidden_act": "silu", "max_position_embeddings": model.shape.context}
    file.write_text(json.dumps({**json.loads(file.read_text()), **further}))
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    with serve_repository(folder, "org/tiny") as served:
        yield served


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folders of the test's own, but for kernels."""
    cache = share_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "PI2_CACHE_DIR": str(cache)}


def pull(environment: dict[str, str], hub: Hub, *words: str, **more: str) -> tuple[int, str]:
    """Exit code and messages of a process of its own: the library reads its environment once."""
    done = start_pi2("pull", *words, env={**environment, "HF_ENDPOINT": hub.address, **more})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def run_command(environment: dict[str, str], *words: str) -> tuple[int, str]:
    done = start_pi2(*words, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_weights_of_a_plan_are_pulled_when_asked_for_and_pinned(
    environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    from tests.unit.test_checkpoint_models import write_model

    (tmp_path / "there").mkdir()
    file = write_model(tmp_path / "there", "tiny", kind="Q4_1")
    plan = tmp_path / "my.plan.toml"
    plan.write_text(
        'schema_version = 3\nweights = "hf:org/tiny@v1/tiny.gguf"\nmemory.budget = "200 MiB"\n'
    )
    run_it = ["run", str(plan), "--prompt", "x", "--max-tokens", "1"]
    code, said = run_command(environment, *run_it)
    assert (code, "was not pulled" in said, f"`pi2 pull {plan}`" in said) == (1, True, True)
    with serve_repository(tmp_path / "there", "org/tiny") as hub:
        code, said = pull(environment, hub, str(plan))
        assert code == 0, said
        entry = (tmp_path / "pi2.lock").read_text().partition("[[weights]]")[2]
        assert f'revision = "{COMMIT}"' in entry
        assert f'sha256 = "{hashlib.sha256(file.read_bytes()).hexdigest()}"' in entry
        asked = len(hub.asked)
        code, said = run_command(environment, *run_it)
        assert code == 0, said
        assert len(hub.asked) == asked, "a run fetches nothing"
        lock = tmp_path / "pi2.lock"
        lock.write_text(re.sub('"[0-9a-f]{64}"', f'"{"0" * 64}"', lock.read_text()))
        code, said = pull(environment, hub, str(plan))
        assert (code, "P729" in said) == (2, True), said


def test_a_pulled_model_is_listed_run_and_removed(
    hub: Hub, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], ask: Ask,
) -> None:  # fmt: skip
    code, said = pull(environment, hub, "hf:org/tiny@v1", "--quantization", "int8")
    assert code == 0, said
    assert "next: pi2 run tiny" in said
    assert not list((tmp_path / "cache/downloads").rglob("*.safetensors"))
    assert hub.list_ranges("pytorch_model.bin") == []
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "cache"))
    store = tmp_path / "cache/models/tiny"
    assert json.loads((store / "source.json").read_bytes()) == {
        "repository": "org/tiny",
        "revision": "v1",
        "commit": COMMIT,
        "quantization": "int8",
        "file": None,
    }
    # The weights are those that the checkpoint itself becomes.
    own = tmp_path / "own"
    assert run(["convert", str(hub.folder), "-o", str(own), "--quantization", "int8"]) == 0
    for file in sorted(own.glob("layers/*")):
        assert (store / "layers" / file.name).read_bytes() == file.read_bytes(), file
    assert list(own.glob("layers/*"))

    assert find_plan_path(Path("tiny")) == store / "default.plan.toml"
    assert run(["show", "tiny"]) == 0 and "model = " in capsys.readouterr().out
    assert run(["simulate", "tinny"]) == 2 and "did you mean tiny" in capsys.readouterr().err
    ask(["validate", str(store / "default.plan.toml")])
    line = ask(["list"]).out
    assert line.startswith("tiny ") and "MiB" in line
    assert f"org/tiny@{COMMIT[:12]} (v1)" in line

    # A second pull fetches nothing, offline too; another model does not take the name.
    before = len(hub.asked)
    code, said = pull(environment, hub, "hf:org/tiny@v1", "--quantization=int8", HF_HUB_OFFLINE="1")
    assert (code, "was pulled already" in said, len(hub.asked)) == (0, True, before)
    code, said = pull(environment, hub, "hf:org/tiny", "--quantization", "fp16")
    assert (code, "P765" in said) == (2, True)
    assert (store / "default.plan.toml").exists()

    assert run(["remove", "tiny"]) == 0
    assert not store.exists()
    assert "P766" in ask(["remove", "tiny"], 2).err


@pytest.mark.parametrize(
    ("is_cached", "parts"), keep_quick([(False, 1), (False, 4), (True, 1), (True, 4)], [(True, 4)])
)
def test_a_gguf_file_of_the_hub_stays_as_it_is(
    parts: int, is_cached: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    """Linked from where it was fetched to, with all its parts; its text is the file's own."""
    pytest.importorskip("gguf")
    from tests.unit.test_checkpoint_models import write_model

    (tmp_path / "there").mkdir()
    write_model(tmp_path / "there", "tiny", "Q8_0", part_tensors=0 if parts == 1 else 8)
    files = sorted((tmp_path / "there").glob("*.gguf"))
    assert len(files) == parts
    (tmp_path / "there" / "mmproj-tiny.gguf").write_bytes(b"an encoder of pictures")
    models = tmp_path / "cache" / "models"
    with serve_repository(tmp_path / "there", "org/tiny") as hub:
        environment |= {"HF_ENDPOINT": hub.address}
        if is_cached:
            fetch = [sys.executable, "-c", FETCH, "org/tiny", *(file.name for file in files)]
            subprocess.run(fetch, check=True, env=environment)
        code, said = pull(environment, hub, "hf:org/tiny")
        assert code == 0, said
        made = sorted((models / "tiny").glob("*.gguf"))
        assert [file.read_bytes() for file in made] == [file.read_bytes() for file in files]
        assert [file.stat().st_nlink for file in made] == [1 + is_cached] * parts
        assert hub.list_ranges("mmproj") == []
        code, said = pull(environment, hub, f"hf:org/tiny/{files[-1].name}", "--name", "named")
        assert code == 0, said
        assert len(list((models / "named").glob("*.gguf"))) == parts
    texts = []
    for model in ("tiny", str(models / "tiny"), str(files[0])):
        code, said = run_command(
            environment, "run", model, "--prompt", "ab", "--max-tokens", "6", "--temperature", "0"
        )
        assert code == 0, said
        texts.append(said.splitlines()[0])
    assert len(set(texts)) == 1
    assert "org/tiny@" in run_command(environment, "list")[1]
    assert run_command(environment, "remove", "tiny")[0] == 0
    assert not (models / "tiny").exists() and all(file.exists() for file in files)


def test_a_pulled_model_is_run_by_its_name(hub: Hub, environment: dict[str, str], ask: Ask) -> None:
    own = {name: value for name, value in environment.items() if name != "PI2_CACHE_DIR"}
    code, said = pull(own, hub, "hf:org/tiny", "--name", "mine", XDG_CACHE_HOME=own["HF_HOME"])
    assert code == 0, said
    if "PI2_CACHE_DIR" in os.environ:
        pytest.skip("PI2_CACHE_DIR names the folder of all tests")
    assert ask(["run", "mine", "--prompt", "hello", "--max-tokens", "3"]).out.strip()


def test_a_download_that_was_cut_off_goes_on(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.file_download.time", clock)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (hub.folder / second).write_bytes(os.urandom(21 << 20))  # the library writes 10 MiB at a time
    sizes = {name: (hub.folder / name).stat().st_size for name in ("config.json", first, second)}
    repository = Repository(name=hub.repository, commit=COMMIT, sizes=sizes)
    hub.cut = second
    with pytest.raises(UserError, match="P763"):
        fetch_files(repository, tmp_path / "work")
    # Within the command the file goes on where it was, the library tries again and again.
    assert hub.list_ranges(second)[:3] == [None, *[f"bytes={10 << 20}-"] * 2]
    hub.cut = None
    # So does a call after it, which may be another process.
    left = (tmp_path / "work" / f"{second}.part").stat().st_size
    assert left >= 10 << 20
    before = len(hub.list_ranges(second))
    shares: list[float] = []
    folder = fetch_files(repository, tmp_path / "work", lambda _, share: shares.append(share))
    for name in sizes:
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    assert hub.list_ranges(second)[before:] == [f"bytes={left}-"]
    # What was whole is not fetched again.
    assert len(hub.list_ranges(first)) == 1
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_disk_without_room_is_said_before_anything_comes(hub: Hub, tmp_path: Path) -> None:
    repository = Repository(name=hub.repository, commit=COMMIT, sizes={"config.json": 1 << 60})
    with pytest.raises(UserError, match="P764"):
        fetch_files(repository, tmp_path / "work")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"<html>Log in to the network</html>", "text/html", "it sends a page"),
        (b"[1]", "application/json", "another kind of JSON"),
        (b"{}", "application/json", "another kind of JSON"),
    ],
)
def test_what_is_no_hub_is_named(
    environment: dict[str, str], body: bytes, kind: str, words: str
) -> None:
    """A network that asks to log in answers everything with its page."""
    with start_server() as server:
        headers: dict[str, Any] = {"Content-Type": kind}
        server.serve("/api/models/org/tiny/revision/main?blobs=true", body, **headers)
        there = Hub(Path(), "org/tiny", address=server.locate("").rstrip("/"))
        code, said = pull(environment, there, "hf:org/tiny")
    assert (code, "P763" in said, "Traceback" in said) == (2, True, False)
    assert there.address in said
    assert words in said


def test_a_page_in_the_place_of_a_file_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    repository = Repository(name=hub.repository, commit=COMMIT, sizes={"config.json": 10})
    with pytest.raises(UserError, match=r"P763.*config\.json has \d+ bytes there, 10 were"):
        fetch_files(repository, tmp_path / "work")
    assert not (tmp_path / "work/config.json").exists()


def test_what_the_hubs_own_cache_has_is_converted_offline(
    hub: Hub, environment: dict[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "hf/hub"
    for file in hub.folder.iterdir():
        hf_hub_download(hub.repository, file.name, cache_dir=cache)
    asked = len(hub.asked)
    code, said = pull(environment, hub, "hf:org/tiny", HF_HUB_OFFLINE="1")
    assert code == 0, said
    assert len(hub.asked) == asked
    assert (tmp_path / "cache/models/tiny/source.json").exists()
    assert len(list(cache.rglob("snapshots/*/*.safetensors"))) == 2


def test_an_unknown_family_is_refused_before_the_weights_come(
    hub: Hub, environment: dict[str, str]
) -> None:
    file = hub.folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "unheard"}))
    code, said = pull(environment, hub, "hf:org/tiny")
    assert (code, "P544" in said) == (2, True), said
    assert hub.list_ranges("config.json") == [None]
    assert hub.list_ranges("of-00002.safetensors") == []


def test_what_the_hub_refuses_is_said(hub: Hub, environment: dict[str, str]) -> None:
    for words, changes, expected in [
        (["hf:org/other"], {}, "P761"),
        (["hf:org/tiny@v9"], {}, "P761"),
        (["hf:org/tiny"], {"HF_HUB_OFFLINE": "1"}, "P763"),
        (["hf:org/tiny"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "P763"),
    ]:
        code, said = pull(environment, hub, *words, **changes)
        assert (code, f"error[{expected}]" in said) == (2, True), said
    hub.gated = True
    code, said = pull(environment, hub, "hf:org/tiny")
    assert (code, "error[P762]" in said) == (2, True), said


def test_a_reference_names_a_repository() -> None:
    assert parse_reference("hf:a/b.c") == HubReference("a/b.c", "main")
    assert parse_reference("hf:a/b@refs/pr/1").revision == "refs/pr/1"
    for text in ("a/b", "hf:b", "hf:a/b@", "hf:a/../b", "hf:a/b@../c", "hf:/a/b"):
        with pytest.raises(UserError, match="P760"):
            parse_reference(text)


def test_weights_are_taken_in_one_format() -> None:
    model = HubReference("a/b", "main")
    known = {"config.json": 1, "model.safetensors": 2, "pytorch_model.bin": 2, "x/y.json": 1}
    assert set(choose_files(model, known)) == {"config.json", "model.safetensors"}
    assert set(choose_files(model, {"a.gguf": 1, "README.md": 1})) == {"a.gguf"}
    several = dict.fromkeys(
        ["q/b-Q8-00001-of-00002.gguf", "q/b-Q8-00002-of-00002.gguf", "a.gguf"], 1
    )
    assert set(choose_files(model, several, "a.gguf")) == {"a.gguf"}
    assert len(choose_files(model, several, "q/b-Q8-00002-of-00002.gguf")) == 2
    with pytest.raises(UserError, match="P767"):
        choose_files(model, several, "b.gguf")
    # Encoders of pictures and importance matrices are no models.
    sides = ["q/a.gguf", "mmproj-a-f16.gguf", "a.imatrix.gguf"]
    assert set(choose_files(model, dict.fromkeys(sides, 1))) == {"q/a.gguf"}
    split = [f"a-{kind}-0000{part}-of-00002.gguf" for kind in ("Q4", "Q8") for part in (1, 2)]
    assert set(choose_files(model, dict.fromkeys(split[:2], 1))) == set(split[:2])
    with pytest.raises(UserError, match=r"2 GGUF models.*\n?.*pull hf:a/b/a-Q4-00001"):
        choose_files(model, dict.fromkeys(split, 1))
    for names in (["config.json"], ["a-Q4.gguf", "a-Q8.gguf"], ["x/model.safetensors"]):
        with pytest.raises(UserError, match="P767"):
            choose_files(model, dict.fromkeys(names, 1))


def test_models_lie_where_data_lies() -> None:
    assert find_models_folder({"PI2_CACHE_DIR": "/a"}) == Path("/a/models")
    assert find_models_folder({"XDG_DATA_HOME": "/b"}) == Path("/b/pi2/models")
    assert find_models_folder({"XDG_DATA_HOME": "b"}).parts[-4:] == (
        ".local",
        "share",
        "pi2",
        "models",
    )
