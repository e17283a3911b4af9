"""References to documents elsewhere: what is taken, and where a fault is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.sharing.references import MAX_LENGTH, join_reference, parse_reference

COMMIT = "4f0568861877fba9991312b38040614874b5cf15"
D = "devices/acme-12.device.toml"


@pytest.mark.parametrize(
    ("text", "url", "path", "revision"),
    [
        (f"gh:acme/profiles//{D}@v1", "acme/profiles", D, "v1"),
        (f"gh:acme/profiles//acme-12.device.toml@{COMMIT}", "acme/profiles", None, COMMIT),
        (f"git+https://h.example/a/b.git//{D}@main", "https://h.example/a/b.git", D, "main"),
        (f"git+https://h.example:8443/b//{D}@a/b", "https://h.example:8443/b", D, "a/b"),
        (f"git+http://127.0.0.1:80/b//{D}@v1", "http://127.0.0.1:80/b", D, "v1"),
        (f"git+file:///srv/tap//{D}@v1.0", "/srv/tap", D, "v1.0"),
        (f"git+file:../tap//{D}@v1", "../tap", D, "v1"),
        (f"https://h.example/{D}", f"https://h.example/{D}", "", ""),
        (f"http://localhost:1/{D}", f"http://localhost:1/{D}", "", ""),
        (f"file:../{D}", f"../{D}", "", ""),
        (f"file:///srv/{D}", f"/srv/{D}", "", ""),
        (f"git+file:///srv/my tap//{D}@v1", "/srv/my tap", D, "v1"),
        (
            "gh:acme/profiles//my phones/a b.device.toml@v1",
            "acme/profiles",
            "my phones/a b.device.toml",
            "v1",
        ),
        ("file:my phones/a b.device.toml", "my phones/a b.device.toml", "", ""),
    ],
)
def test_its_parts(text: str, url: str, path: str | None, revision: str) -> None:
    found = parse_reference(text)
    assert (found.url, found.revision) == (url, revision)
    assert found.path == ("acme-12.device.toml" if path is None else path)


@pytest.mark.parametrize(
    ("text", "code", "marked"),
    [
        ("acme-12", "P701", "acme-12"),
        (f"gh:acme/profiles//{D} @v1", "P701", " "),
        (f"git+https://h.example/a b//{D}@v1", "P701", " "),
        (f"gh:acme/my profiles//{D}@v1", "P701", " "),
        (f"file: {D}", "P701", " "),
        ("gh:acme/a//my%20phones/acme-12.device.toml@v1", "P705", "my%20phones"),
        (f"gh:acme/profiles/{D}@v1", "P701", f"acme/profiles/{D}@v1"),
        (f"gh:acme//{D}@v1", "P701", "acme"),
        (f"gh:acme/a/b//{D}@v1", "P701", "acme/a/b"),
        (f"GH:acme/a//{D}@v1", "P701", "GH"),
        (f"gh:acme/a//{D}", "P704", ""),
        (f"gh:acme/a//{D}@", "P704", ""),
        (f"gh:acme/a//{D}@-x", "P704", "-x"),
        (f"gh:acme/a//{D}@a..b", "P704", "a..b"),
        (f"gh:acme/a//{D}@4f05688", "P704", "4f05688"),
        (f"gh:acme/a//../{D}@v1", "P705", ".."),
        (f"gh:acme/a//devices/../{D}@v1", "P705", ".."),
        (f"gh:acme/a//.git/{D}@v1", "P705", ".git"),
        (f"gh:acme/a///{D}@v1", "P705", "/"),
        (f"gh:acme/a//-o/{D}@v1", "P705", "-o"),
        ("gh:acme/a//x.toml@v1", "P706", "x.toml"),
        (f"oci:acme/{D}", "P702", "oci"),
        (f"git+ssh://h/a//{D}@v1", "P702", "git+ssh"),
        (f"http://h.example/{D}", "P702", "h.example"),
        (f"git+http://h.example/a//{D}@v1", "P702", "h.example"),
        (f"https://alice:secret@h.example/{D}", "P703", "alice:secret"),
        (f"git+https://alice@h.example/a//{D}@v1", "P703", "alice"),
        (f"https://h.example/a/../{D}", "P705", ".."),
        (f"https://h.example/%2e%2e/{D}", "P705", "%2e%2e"),
        (f"https://h.example/{D}?x=1", "P701", "?"),
        (f"https:///{D}", "P701", f"https:///{D}"),
        (f"git+https:h.example//{D}@v1", "P701", f"h.example//{D}@v1"),
        (f"file://h.example/{D}", "P701", f"//h.example/{D}"),
        ("file:notes.txt", "P706", "notes.txt"),
        ("tap:acme-12", "P702", "tap"),
        (f"gh:acme/a//{D}\n@v1", "P701", "\n"),
        ("gh:acme/a//dev\\ices/x.device.toml@v1", "P701", "\\"),
    ],
)
def test_a_fault_is_pointed_at(text: str, code: str, marked: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_reference(text)
    (found,) = caught.value.diagnostics
    assert found.code == code and found.span is not None
    assert text[found.span.column - 1 : found.span.end_column - 1] == marked
    assert caught.value.sources == {"reference": text}


def test_a_long_one_is_refused() -> None:
    with pytest.raises(UserError, match="P701"):
        parse_reference("gh:a/b//" + "x" * MAX_LENGTH)


PIECES = st.sampled_from(
    ["gh:", "git+file:", "https:", "//", "/", "@", "..", "a", "h.example", ":", "v1", "[",
     ".device.toml", "é", "\0", "%", "?", " "]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join)))
def test_any_text_is_taken_or_refused_with_a_place(text: str) -> None:
    try:
        found = parse_reference(text)
    except UserError as error:
        (item,) = error.diagnostics
        assert item.code.startswith("P70") and item.span is not None
        assert 1 <= item.span.column < item.span.end_column <= max(len(text), MAX_LENGTH) + 2
    else:
        assert found.text == text and ".." not in found.path.split("/")


@pytest.mark.parametrize(
    ("reference", "relative", "joined"),
    [
        (f"gh:acme/a//{D}@v1", "../common/b.device.toml", "gh:acme/a//common/b.device.toml@v1"),
        (f"gh:acme/a//{D}@v1", "b.device.toml", "gh:acme/a//devices/b.device.toml@v1"),
        (f"https://h.example/{D}", "./b.device.toml", "https://h.example/devices/b.device.toml"),
        (f"file:../{D}", "../b.device.toml", "file:../b.device.toml"),
        (f"git+file:../t//{D}@v1", "../b.device.toml", "git+file:../t//b.device.toml@v1"),
    ],
)
def test_a_path_inside_a_document_is_seen_from_there(
    reference: str, relative: str, joined: str
) -> None:
    assert join_reference(reference, relative) == joined


@pytest.mark.parametrize(
    ("reference", "relative"),
    [
        (f"gh:acme/a//{D}@v1", "../../b.device.toml"),
        (f"gh:acme/a//{D}@v1", "/b.device.toml"),
        (f"https://h.example/{D}", "../../b.device.toml"),
    ],
)
def test_a_path_that_leads_out_is_refused(reference: str, relative: str) -> None:
    with pytest.raises(UserError, match="P705"):
        join_reference(reference, relative)
