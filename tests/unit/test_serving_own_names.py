"""Names that a server on this machine alone answers to."""

from __future__ import annotations

import pytest

from pi2.serving.application import is_own_name, list_own_names


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "[::1]", "::1"]
    + ["127.0.0.2:8000", "chat.example", "chat.example:8443"],
)
def test_a_server_answers_to_its_own_names(host: str) -> None:
    names = list_own_names("127.0.0.2", has_keys=False, origins=["https://chat.example:8443"])
    assert names is not None
    assert is_own_name(host.encode(), names)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
    + ["", ":8000", "127.0.0.2", "evil@localhost", "\xff"],
)
def test_a_server_answers_to_no_other_name(host: str) -> None:
    names = list_own_names("localhost", has_keys=False)
    assert names is not None
    assert not is_own_name(host.encode("latin-1"), names)


@pytest.mark.parametrize(
    ("address", "has_keys", "origins"),
    [
        ("0.0.0.0", False, []),
        ("::", False, []),
        ("192.0.2.1", False, []),
        ("models.example", False, []),
        ("127.0.0.1", True, []),
        ("127.0.0.1", False, ["*"]),
    ],
)
def test_names_are_free_where_others_reach_the_server_or_keys_guard_it(
    address: str, has_keys: bool, origins: list[str]
) -> None:
    assert list_own_names(address, has_keys=has_keys, origins=origins) is None
