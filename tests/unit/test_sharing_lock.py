"""``pi2.lock``: written in one way, read whatever is in it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.sharing.lock import Lock, Source, edit_lock, format_lock, read_lock

Folders = pytest.TempPathFactory
TEXT = """\
# Written by `pi2 profile` and `pi2 pull`; commit it, and let pi2 change it.
lock_version = 1

[[sources]]
reference = "gh:acme/profiles//devices/acme-12.device.toml@v1"
url = "https://github.com/acme/profiles"
path = "devices/acme-12.device.toml"
revision = "4f0568861877fba9991312b38040614874b5cf15"
revision_kind = "tag"
size_bytes = 1234
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"

[[sources]]
reference = "https://h.example/b.device.toml"
url = "https://h.example/b.device.toml"
size_bytes = 1
sha256 = "1111111111111111111111111111111111111111111111111111111111111111"
"""


def test_a_copy_that_an_older_version_kept_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "pi2.lock"
    path.write_text(TEXT + 'vendored = "profiles/b.device.toml"\n')
    assert format_lock(read_lock(path)) == TEXT


sources = st.builds(
    Source,
    reference=st.text(min_size=1, max_size=20),
    url=st.text(min_size=1, max_size=20),
    path=st.text(max_size=20),
    revision=st.sampled_from(["", "a" * 40, "0" * 64]),
    revision_kind=st.sampled_from([None, "tag", "branch", "commit"]),
    size_bytes=st.integers(0, 2**40),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
)


@given(st.lists(sources, max_size=4, unique_by=lambda item: item.reference))
def test_any_lock_is_read_as_it_was_written(tmp_path_factory: Folders, items: list[Source]) -> None:
    path = tmp_path_factory.mktemp("lock") / "pi2.lock"
    path.write_text(format_lock(Lock(path=path, sources=tuple(items))), "utf-8")
    found = read_lock(path)
    assert sorted(item.reference for item in items) == [item.reference for item in found.sources]
    assert set(found.sources) == set(items)
    assert format_lock(found) == path.read_text("utf-8")


PIECES = st.sampled_from([*TEXT.splitlines(), "[[sources]]", "sources = 1", "lock_version = true"])


@given(st.one_of(st.binary(max_size=60), st.lists(PIECES).map(lambda x: "\n".join(x).encode())))
def test_any_bytes_are_read_or_refused(tmp_path_factory: Folders, data: bytes) -> None:
    path = tmp_path_factory.mktemp("lock") / "pi2.lock"
    path.write_bytes(data)
    codes: list[str] = []
    try:
        read_lock(path)
    except UserError as error:
        codes = [item.code for item in error.diagnostics]
    assert all(code[:2] in ("P0", "P7") for code in codes)


def test_a_reference_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pi2.lock"
    path.write_text(TEXT + TEXT.partition("\n\n")[2])
    with pytest.raises(UserError) as caught:
        read_lock(path)
    (found,) = caught.value.diagnostics
    assert found.code == "P711" and found.span is not None
    assert found.span.line == 19


def test_a_change_that_fails_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "pi2.lock"
    path.write_text(TEXT)

    def fail() -> None:
        with edit_lock(path) as edit:
            edit.lock = Lock(path=path)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == TEXT
    assert list(tmp_path.iterdir()) == [path]
