"""What counts as private in a text, and what is left of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.plan.documents.private import find_matches, find_private, strip_private

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "kind", "left"),
    [
        ("serial R58N70ABCDE", "serial", "serial (serial number)"),
        ("Serial number: 12345-67", "serial", "Serial number: (serial number)"),
        ("S/N=ABC12345", "serial", "S/N=(serial number)"),
        ('serial = "ABC12345"', "serial", 'serial = "(serial number)"'),
        ("IMEI 490154203237518", "serial", "IMEI (serial number)"),
        ("490154203237518", "serial", "(serial number)"),
        ("at 3c:07:54:aa:bb:cc.", "serial", "at (serial number)."),
        ("id 123e4567-e89b-12d3-a456-426614174000", "serial", "id (serial number)"),
        ("on RF8N1234XYZ, quiet", "serial", "on (serial number), quiet"),
        ("by alice@example.com", "account", "by (account)"),
        ("user: alice", "account", "user: (account)"),
        ("hostname=build-7", "account", "hostname=(account)"),
        ("alice@build-7:~$ pi2 bench", "account", "(account):~$ pi2 bench"),
        ("https://alice:pw@h.example/x", "account", "https://(account)h.example/x"),
        ("ghp_0123456789abcdefghij0123", "account", "(account)"),
        ("/home/alice/bench", "home", "~/bench"),
        ("in /Users/alice", "home", "in ~"),
        (r"C:\\Users\\alice\\bench", "home", r"~\\bench"),
        (r"c:\Users\alice", "home", "~"),
    ],
)
def test_what_is_private(text: str, kind: str, left: str) -> None:
    stripped, found = strip_private(text)
    assert [item.kind for item in found] == [kind]
    assert stripped == left
    assert find_private(stripped) == ()


@pytest.mark.parametrize(
    "text",
    [
        "Snapdragon 8 Gen 3 (SM8650-AC), LPDDR5X at 4800 MHz",
        "arXiv 2406.06282v3, sec 2.3.1 and Table 2", "AVX512VNNI and AVX512BF16",
        "4f0568861877fba9991312b38040614874b5cf15", "serial reads, one after another",
        "serial numbers are not in here", "direct reads: 90,000 reads/s",
        "/home/user/bench, /Users/you, ~/bench, $HOME/x",
        "100000000000000 bytes, 123456789012345 reads", "user: you",
        "PowerInfer-2, 10:20:30 on 2026-11-02", "gh:acme/profiles//devices/acme-12.device.toml@v1",
        "git+https://h.example/a//b@v1",
        "gh:acme/profiles//devices/acme-12.device.toml@release.main", "a quiet host",
    ],
)  # fmt: skip
def test_what_is_not(text: str) -> None:
    assert find_private(text) == ()


def test_no_shipped_document_has_anything_private() -> None:
    for path in (ROOT / "plans").rglob("*.toml"):
        assert find_private(path.read_text("utf-8")) == (), path


@given(st.text(alphabet='aA1@./:-_ =\\"~\n', max_size=200))
def test_nothing_is_left_and_nothing_else_is_taken(text: str) -> None:
    stripped, found = strip_private(text)
    for item in found:
        assert text[item.start : item.end] == item.text
    if not found:
        assert stripped == text


@given(st.text(alphabet='aAfZ19@./:-_ =\\"~', max_size=60))
def test_what_needs_no_further_look_has_nothing(text: str) -> None:
    assert bool(find_private(text)) == bool(list(find_matches(text)))


def test_long_texts_take_no_time() -> None:
    for piece in ("A", "1", "a@", "a.", "-", "/home/", "serial ", "A1", "://", "aa:"):
        find_private(piece * (200_000 // len(piece)))
