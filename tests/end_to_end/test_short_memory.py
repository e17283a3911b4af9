"""Work without progress, whose pages go out as they come in, ends with a code; other work goes on.

Major faults are real: a mapped file's pages are given back, and read from the disk again."""

from pathlib import Path

import pytest

import pi2
from pi2.backends.faults import shortage
from pi2.orchestrator import describe_shortage
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.programs import start_python
from tests.helpers.slow import mark_slow

PROGRAM = """
import mmap, os, sys, time
import numpy as np
from pi2.backends.faults import shortage
from pi2.diagnostics import UserError
shortage.STALL_S = 2
name, how = sys.argv[1:]
watch = shortage.MemoryWatch(lambda: UserError.of("P696", "memory is short", help="--memory X"))
weights = np.ones(1 << 22, np.uint8)
watch.protect([weights])
size = 16 << 20 if how == "re-read" or how == "deaf" or how == "idle" else 64 << 20
with open(name, "wb") as file:
    file.write(bytes(size))
    os.fsync(file.fileno())
file = open(name, "rb")
region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
region.madvise(mmap.MADV_RANDOM)  # no page but the one that is touched
pages = np.frombuffer(region, np.uint8)[:: mmap.PAGESIZE]

def take(first, last):
    pages[first:last].sum()

def give_back():
    region.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

give_back()
end, place = time.monotonic() + 12, 0
def go_on():
    global place
    while time.monotonic() < end and watch.error is None:
        if how == "cold":  # a first read of all of a file: memory grows
            if place == len(pages):
                return
            take(place, place + 512)
            place += 512
            time.sleep(0.2)
        else:
            take(0, 64)
            give_back()
            if how == "progress":
                watch.note()
    while how == "deaf":
        time.sleep(0.1)
if how == "idle":
    go_on()
else:
    with watch.work():
        go_on()
try:
    watch.check()
    print("goes on", weights.sum())
except UserError as error:
    time.sleep(0.5)
    print([item.code for item in error.diagnostics], weights[8192:-8192].sum())
watch.close()
"""

needs_watch = pytest.mark.skipif(
    shortage._find_library() is None, reason="nothing watches memory here"
)


@needs_watch
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("re-read", "['P696'] 0\n"),
        *(mark_slow((how, f"goes on {1 << 22}\n")) for how in ("progress", "idle", "cold")),
    ],
)
def test_only_stall_in_which_pages_go_out_is_shortage(tmp_path: Path, how: str, told: str) -> None:
    done = start_python("-c", PROGRAM, str(tmp_path / "file"), how)
    assert (done.returncode, done.stdout) == (0, told), done.stderr


@needs_watch
def test_a_process_that_takes_no_notice_ends_with_the_text(tmp_path: Path) -> None:
    done = start_python("-c", PROGRAM, str(tmp_path / "file"), "deaf")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error[P696]: memory is short" in done.stderr and "--memory X" in done.stderr


def test_the_error_says_what_there_is_what_it_takes_and_the_command() -> None:
    (item,) = describe_shortage(811 << 20).diagnostics
    assert item.code == "P696" and "a budget of 811 MiB needs about 912 MiB" in item.message
    assert item.help is not None and item.help.startswith("--memory '640 MiB' leaves more room")


@needs_watch
def test_a_model_is_watched_until_it_is_closed(tmp_path: Path) -> None:
    file = write_random_gguf(tmp_path, {"hidden": 64, "layers": 1, "context": 64})
    with pi2.load(file) as model:
        assert model.scheduler.watch is not None and model.scheduler.watch._thread is not None
        thread = model.scheduler.watch._thread
        assert thread.is_alive() and model.find_change() is None
        before = model.scheduler.watch._state[shortage._PROGRESS]
        model.generate("hello", max_tokens=4, temperature=0.0).result  # noqa: B018
        assert model.scheduler.watch._state[shortage._PROGRESS] >= before + 4
    assert not thread.is_alive()
