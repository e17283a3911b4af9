"""A disk that refuses a kind of read costs time only; one that fails is told of, with the place."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pi2
from fuzzing.disks import FAULTS, FailingDisk
from pi2.diagnostics import UserError
from pi2.importing.gguf_file import read_gguf
from pi2.reads import describe_failure, find_mount
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import MIXTURE
from tests.helpers.slow import keep_quick

pytestmark = pytest.mark.usefixtures("quick_kernels")

ENGINES = ("pread", "io_uring")
KINDS = ("dense", "mixture")
SETTINGS: dict[str, Any] = {"kv.context": 64, "prefill.chunk": 32}
HARMLESS = ("none", "direct", "open", "short")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 17 and 38 MiB, whose heads are not the embedding: single rows of it are read."""
    dense = {"hidden": 256, "ffn": 4096, "layers": 5, "context": 512}
    mixture = {"hidden": 256, "ffn": 768, "layers": 4, "context": 512}
    moe = {**MIXTURE, "moe": {"experts": 16, "active_experts": 3}}
    return {
        "dense": write_random_gguf(tmp_path_factory.mktemp("dense"), dense),
        "mixture": write_random_gguf(tmp_path_factory.mktemp("mixture"), mixture, moe),
    }


@cache
def find_least(file: Path) -> int:
    """MiB of the smallest budget, as the message about a smaller one says."""
    with pytest.raises(UserError) as caught:
        pi2.load(file, memory="10 MiB", set=SETTINGS)
    found = re.search(r"--memory '(\d+) MiB", caught.value.diagnostics[0].help or "")
    assert found is not None
    return int(found[1])


def load(file: Path, engine: str) -> Any:
    memory = f"{find_least(file) + 2} MiB"
    return pi2.load(file, memory=memory, set=SETTINGS | {"io.engine": engine})


def generate(model: Any) -> list[int]:
    assert model.plan.file.streamed_bytes or model.plan.file.expert_bytes
    return list(model.generate([1, 5, 9], max_tokens=4, temperature=0.0).result.token_ids)


@pytest.fixture(scope="module")
def expected(files: dict[str, Path]) -> dict[str, list[int]]:
    found = {}
    for kind, file in files.items():
        with load(file, "pread") as model:
            found[kind] = generate(model)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", keep_quick(HARMLESS, list(HARMLESS)[:2]))
def test_reads_that_are_refused_or_short_change_no_token(
    files: dict[str, Path], expected: dict[str, list[int]], engine: str, kind: str, fault: str
) -> None:
    with FailingDisk(files[kind].parent, fault).use(), load(files[kind], engine) as model:
        assert generate(model) == expected[kind]
        assert (model.fallback is not None) == (fault in ("direct", "open"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fault", "code"), [("error", "P546"), ("end", "P532")])
@pytest.mark.parametrize("moment", ["load", "run"])
def test_a_disk_that_fails_is_told_of(
    files: dict[str, Path], engine: str, kind: str, fault: str, code: str, moment: str
) -> None:
    file = files[kind]
    after = read_gguf(file).entries["blk.1.attn_q.weight"].offset
    disk = FailingDisk(file.parent, fault if moment == "load" else "none", after)
    if moment == "load":
        with disk.use(), pytest.raises(UserError) as caught:
            load(file, engine)
    else:
        with disk.use(), load(file, engine) as model:
            disk.fault = fault
            with pytest.raises(UserError) as caught:
                generate(model)
    (item,) = caught.value.diagnostics
    assert item.code == code and str(file) in item.message and item.help
    if fault == "error":
        assert " at byte " in item.message and "Input/output error" in item.message
        assert find_mount(file) is None or f"on {find_mount(file)[1]} (" in item.message  # type: ignore[index]


def test_a_run_goes_on_when_the_disk_is_well_again(
    files: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    file = files["dense"]
    with load(file, "io_uring") as model:
        with FailingDisk(file.parent, "error").use(), pytest.raises(UserError):
            generate(model)
        assert generate(model) == expected["dense"]


@pytest.mark.parametrize("after", [0, 5_000])
def test_a_header_that_cannot_be_read_is_told_of(files: dict[str, Path], after: int) -> None:
    file = files["dense"]
    with FailingDisk(file.parent, "error", after).use(), pytest.raises(UserError, match="P546"):
        read_gguf(file)


def test_a_header_longer_than_the_first_read(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_gguf(files["dense"])
    monkeypatch.setattr("pi2.importing.gguf_file._HEADER_BYTES", 100)
    again = read_gguf(files["dense"])
    assert again.entries == whole.entries and again.spans == whole.spans


def test_the_disk_is_named_as_the_system_mounts_it(tmp_path: Path) -> None:
    file, device = tmp_path / "model.gguf", tmp_path.stat().st_dev
    file.touch()
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF}"
    lines = (
        f"1 0 {number} / / rw - ext4 /dev/sda1 rw",
        f"2 1 {number} / {tmp_path} rw - nfs nas:/m",
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines))
    assert find_mount(file, tmp_path) == ("nfs", "nas:/m")
    assert find_mount(tmp_path / "missing", tmp_path) is None
    text = describe_failure(tmp_path / "missing", 7, OSError(5, "Input/output error"))
    assert text == f"cannot read {tmp_path}/missing at byte 7: Input/output error"


def test_every_fault_is_drawn_by_the_fuzzer() -> None:
    assert {*HARMLESS, "error", "end"} == set(FAULTS)
