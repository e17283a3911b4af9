"""A GGUF file that is cut or overwritten while it is mapped: an error, no signal, no other text."""

import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2
from pi2.backends.faults.guard import find_guard
from pi2.diagnostics import UserError
from pi2.engine.file_loading import WatchedFiles
from pi2.serving.hosts import ServedPlan
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.patience import PATIENCE_S
from tests.helpers.programs import start_python
from tests.helpers.servers import post, serve
from tests.helpers.slow import keep_quick

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden": 256, "ffn": 2048, "layers": 4, "context": 4096}
    return write_random_gguf(tmp_path_factory.mktemp("sound"), shape)


@pytest.fixture
def file(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path / "model.gguf"))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


def overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(os.urandom(1 << 16))


CHANGES = {"P532": cut, "P547": overwrite}


@pytest.mark.parametrize("weights", ["mapped", "loaded"])
@pytest.mark.parametrize("code", CHANGES)
def test_a_file_that_changes_between_two_texts_is_told_of(
    file: Path, code: str, weights: str
) -> None:
    with pi2.load(file, set={"kv.context": 256, "memory.weights": weights}) as model:
        model.generate("hello", max_tokens=2, temperature=0.0).result  # noqa: B018
        CHANGES[code](file)
        for _ in range(2):
            with pytest.raises(UserError, match=code) as caught:
                model.generate("hello", max_tokens=2, temperature=0.0).result  # noqa: B018
            assert str(file) in caught.value.diagnostics[0].message
            assert caught.value.diagnostics[0].help


CUT_MEANWHILE = """
import os, sys, threading, pi2
from pi2.diagnostics import UserError
with pi2.load(sys.argv[1], set={"kv.context": 4096}) as model:
    pieces = iter(model.generate("hello", max_tokens=4000, temperature=0.0, ignore_eos=True))
    next(pieces)
    cut = threading.Timer(0.05, os.truncate, (sys.argv[1], 1 << 20))
    cut.start()
    try:
        for piece in pieces:
            pass
    except UserError as error:
        print([item.code for item in error.diagnostics])
"""


def test_a_file_that_is_cut_while_a_token_is_computed_ends_no_process(file: Path) -> None:
    done = start_python("-c", CUT_MEANWHILE, str(file))
    assert (done.returncode, done.stdout) == (0, "['P532']\n"), done.stderr


def test_a_file_that_is_replaced_by_another_changes_nothing(file: Path, tmp_path: Path) -> None:
    with pi2.load(file, set={"kv.context": 256}) as model:
        before = model.generate("hello", max_tokens=4, temperature=0.0).result.token_ids
        (tmp_path / "new").write_bytes(bytes(100))
        os.replace(tmp_path / "new", file)
        assert model.generate("hello", max_tokens=4, temperature=0.0).result.token_ids == before


@pytest.mark.parametrize("code", keep_quick(CHANGES, list(CHANGES)[:1]))
def test_a_server_lives_and_answers_again_when_the_file_is_whole(
    file: Path, sound: Path, code: str
) -> None:
    plans = [
        ServedPlan(name=name, path=path, budget_bytes=1 << 28, overrides={"kv.context": 256})
        for name, path in (("one", file), ("two", sound))
    ]

    def ask(name: str) -> tuple[int, str]:
        body = {"model": name, "prompt": "hello", "max_tokens": 4, "temperature": 0}
        found = post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
        return found.status_code, found.text

    with serve(plans) as address:
        assert [ask("one")[0], ask("two")[0]] == [200, 200]
        CHANGES[code](file)
        status, text = ask("one")
        if code == "P532":
            assert status == 500 and "P532" in text
            assert ask("one")[0] == 500
        else:  # what the file has now is a model, or is not
            assert status == 200 or "P539" in text
        assert ask("two")[0] == 200
        shutil.copy(sound, file)
        assert [ask("one")[0], ask("two")[0]] == [200, 200]


FAULTS = """
import mmap, os, sys
import numpy as np
from pi2.backends.faults.guard import find_guard
guard = find_guard()
with open(sys.argv[1], "w+b") as file:
    file.write(bytes([7]) * 8 * mmap.PAGESIZE)
    file.flush()
    whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    if sys.argv[2] == "guarded":
        number = guard.watch(whole.ctypes.data, whole.nbytes)
    file.truncate(3 * mmap.PAGESIZE)
    print(whole[6 * mmap.PAGESIZE + 5], whole[4 * mmap.PAGESIZE], whole[0], flush=True)
    print(guard.find_fault(number) // mmap.PAGESIZE, guard.find_fault(number) % mmap.PAGESIZE)
    guard.forget(number)
    assert guard.watch(whole.ctypes.data, whole.nbytes) == number
    assert guard.find_fault(number) is None
"""


@pytest.mark.skipif(find_guard() is None, reason="nothing handles faults here")
def test_pages_without_a_file_are_zeros_and_the_first_one_is_noted(tmp_path: Path) -> None:
    done = start_python("-c", FAULTS, str(tmp_path / "file"), "guarded")
    assert (done.returncode, done.stdout) == (0, "0 0 7\n6 5\n"), done.stderr


@pytest.mark.skipif(find_guard() is None, reason="nothing handles faults here")
def test_faults_elsewhere_are_what_they_were(tmp_path: Path) -> None:
    """As for a program that is wrong: nothing hides it."""
    done = start_python("-c", FAULTS, str(tmp_path / "file"), "not")
    assert (done.returncode, done.stdout) == (-7, "")


def test_a_disk_that_fails_under_a_map_is_told_of_with_the_place(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = find_guard()
    if guard is None:
        pytest.skip("nothing handles faults here")
    faults: list[int | None] = [None, 5 * PAGE, 5 * PAGE]
    monkeypatch.setattr(type(guard), "find_fault", lambda own, number: faults.pop(0))
    watched = WatchedFiles([file], {0: np.memmap(file, np.uint8, "r")})
    watched.check()
    with pytest.raises(UserError, match=f"P546.*at byte {5 * PAGE}.*Input/output error"):
        watched.check()
    watched.close()
