"""Fetching from repositories and servers that behave, and from those that do not."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES
from pi2.sharing.fetching import fetch_url
from pi2.sharing.git import read_git_file, resolve_revision
from tests.helpers.patience import PATIENCE_S
from tests.helpers.sharing import (
    DEVICE,
    Repository,
    Server,
    make_certificate,
    make_repository,
    run_git,
    start_server,
)

PATH = "devices/acme-12.device.toml"
TIMEOUT_S = 30.0


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path / "tap")


@pytest.fixture
def server() -> Iterator[Server]:
    with start_server() as running:
        yield running


def refuse(url: str, path: str = PATH, revision: str = "v1", timeout_s: float = TIMEOUT_S) -> str:
    with pytest.raises(UserError) as caught:
        read_git_file(url, path, revision, timeout_s=timeout_s)
    (found,) = caught.value.diagnostics
    return found.code


class TestGit:
    @pytest.mark.parametrize(
        ("revision", "kind"), [("v1", "tag"), ("main", "branch"), ("HEAD", "branch")]
    )
    def test_reads_file_at_revision(self, repository: Repository, revision: str, kind: str) -> None:
        found = read_git_file(repository.url, PATH, revision, timeout_s=TIMEOUT_S)
        assert found.data.decode() == DEVICE
        assert found.commit == run_git(repository.folder, "rev-parse", "HEAD")
        assert found.kind == kind

    def test_reads_a_repository_of_sha256(self, tmp_path: Path) -> None:
        repository = make_repository(tmp_path / "tap", digests="sha256")
        commit = run_git(repository.folder, "rev-parse", "HEAD")
        assert len(commit) == 64
        for revision, kind in (("v1", "tag"), ("main", "branch"), (commit, "commit")):
            found = read_git_file(repository.url, PATH, revision, timeout_s=TIMEOUT_S)
            assert (found.data.decode(), found.commit, found.kind) == (DEVICE, commit, kind)

    def test_reads_a_file_at_a_commit_that_no_branch_has_at_its_end(
        self, repository: Repository
    ) -> None:
        first = run_git(repository.folder, "rev-parse", "HEAD")
        repository.write(PATH, "changed")
        repository.commit()
        found = read_git_file(repository.url, PATH, first, timeout_s=TIMEOUT_S)
        assert (found.data.decode(), found.kind) == (DEVICE, "commit")

    def test_a_tag_goes_before_a_branch_of_the_same_name(self, repository: Repository) -> None:
        first = run_git(repository.folder, "rev-parse", "HEAD")
        run_git(repository.folder, "branch", "both")
        run_git(repository.folder, "checkout", "-q", "both")
        repository.commit("second")
        run_git(repository.folder, "tag", "both", first)
        assert resolve_revision(repository.url, "both", timeout_s=TIMEOUT_S).commit == first

    def test_reads_a_bare_repository_of_another_user(
        self, repository: Repository, tmp_path: Path
    ) -> None:
        bare = tmp_path / "bare.git"
        run_git(tmp_path, "clone", "-q", "--bare", str(repository.folder), str(bare))
        if os.getuid() == 0:
            for folder, names, files in os.walk(bare):
                for name in [".", *names, *files]:
                    os.chown(os.path.join(folder, name), 1234, 1234)
        assert read_git_file(bare.as_uri(), PATH, "v1", timeout_s=TIMEOUT_S).data.decode() == DEVICE

    def test_no_such_repository(self, tmp_path: Path) -> None:
        assert refuse((tmp_path / "nowhere").as_uri()) == "P720"

    def test_what_is_no_file_of_it_is_refused(self, repository: Repository) -> None:
        repository.write("x.device.toml/a", "a")
        repository.write("big.device.toml", b"#" * (MAX_BYTES + 1))
        (repository.folder / "devices/link.device.toml").symlink_to("/etc/passwd")
        (repository.folder / "linked").symlink_to("devices")
        repository.commit()
        for path, revision, code in (
            (PATH, "v2", "P726"),
            (PATH, "0" * 40, "P726"),
            ("devices/other.device.toml", "v1", "P725"),
            (f"{PATH}/x.device.toml", "v1", "P725"),
            ("x.device.toml", "main", "P725"),
            ("devices/link.device.toml", "main", "P724"),
            ("linked/acme-12.device.toml", "main", "P724"),
            ("big.device.toml", "main", "P722"),
        ):
            assert refuse(repository.url, path, revision) == code, path

    def test_a_submodule_is_refused(self, repository: Repository, tmp_path: Path) -> None:
        commit = run_git(make_repository(tmp_path / "other").folder, "rev-parse", "HEAD")
        run_git(repository.folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},inner")
        run_git(repository.folder, "commit", "-q", "-m", "submodule")
        assert refuse(repository.url, f"inner/{PATH}", "main") == "P725"

    def test_a_slow_repository(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/tap"
            start = time.monotonic()
            assert refuse(url, timeout_s=0.5) == "P721"
            assert time.monotonic() - start < PATIENCE_S

    def test_reads_a_repository_of_a_server(self, repository: Repository, server: Server) -> None:
        repository.write("big.device.toml", b"#" * (MAX_BYTES + 1))
        commit = repository.commit()
        run_git(repository.folder, "config", "uploadpack.allowFilter", "true")
        server.serve_repositories("/git/", repository.folder.parent)
        url = server.locate("/git/tap/.git")
        assert read_git_file(url, PATH, "main", timeout_s=TIMEOUT_S).commit == commit
        assert read_git_file(url, PATH, "v1", timeout_s=TIMEOUT_S).data.decode() == DEVICE
        assert refuse(url, "big.device.toml", "main") == "P722"
        assert refuse(server.locate("/git/other/.git")) == "P720"

    def test_a_server_that_redirects(self, server: Server) -> None:
        other = server.locate("/tap/info/refs?service=git-upload-pack", "localhost")
        server.redirect("/tap/info/refs?service=git-upload-pack", other)
        assert refuse(server.locate("/tap")) == "P723"

    def test_a_server_that_knows_nothing_of_git(self, server: Server) -> None:
        server.serve("/tap/info/refs?service=git-upload-pack", "hello")
        assert refuse(server.locate("/tap")) == "P726"

    def test_a_server_that_wants_a_password(self, server: Server) -> None:
        path = "/tap/info/refs?service=git-upload-pack"
        server.serve(path, "", 401, WWW_Authenticate='Basic realm="tap"')
        assert refuse(server.locate("/tap")) == "P720"

    def test_hooks_and_filters_of_the_user_do_not_run(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hook = tmp_path / "hooks/reference-transaction"
        hook.parent.mkdir()
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        hook.chmod(0o755)
        config = tmp_path / "gitconfig"
        config.write_text(f"[core]\n\thooksPath = {hook.parent}\n")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
        read_git_file(repository.url, PATH, "v1", timeout_s=TIMEOUT_S)
        assert not (tmp_path / "ran").exists()

    def test_the_repository_of_a_running_hook_is_left_alone(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = make_repository(tmp_path / "mine")
        before = sorted(str(p) for p in mine.folder.rglob("*"))
        monkeypatch.setenv("GIT_DIR", str(mine.folder / ".git"))
        monkeypatch.setenv("GIT_INDEX_FILE", str(mine.folder / ".git/index"))
        read_git_file(repository.url, PATH, "v1", timeout_s=TIMEOUT_S)
        assert sorted(str(p) for p in mine.folder.rglob("*")) == before

    def test_without_git(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert shutil.which("git") is None
        assert refuse("file:///x") == "P728"


def refuse_url(url: str, timeout_s: float = 10.0) -> str:
    with pytest.raises(UserError) as caught:
        fetch_url(url, timeout_s=timeout_s)
    (found,) = caught.value.diagnostics
    return found.code


class TestWeb:
    def test_reads_a_file(self, server: Server) -> None:
        server.serve("/a.device.toml", DEVICE)
        assert fetch_url(server.locate("/a.device.toml"), timeout_s=10).decode() == DEVICE

    def test_follows_a_redirect_on_the_same_host(self, server: Server) -> None:
        server.redirect("/a.device.toml", "/b.device.toml")
        server.serve("/b.device.toml", DEVICE)
        assert fetch_url(server.locate("/a.device.toml"), timeout_s=10).decode() == DEVICE

    def test_a_redirect_to_another_host_is_refused(self, server: Server) -> None:
        server.serve("/b.device.toml", DEVICE)
        server.redirect("/a.device.toml", server.locate("/b.device.toml", "localhost"))
        assert refuse_url(server.locate("/a.device.toml")) == "P723"
        assert server.asked == ["/a.device.toml"]

    @pytest.mark.parametrize("target", ["", "file:///etc/passwd", "//[", "http://127.0.0.1:1/"])
    def test_a_redirect_to_anything_else_is_refused(self, server: Server, target: str) -> None:
        server.redirect("/a.device.toml", target)
        assert refuse_url(server.locate("/a.device.toml")) == "P723"

    def test_redirects_in_a_circle_end(self, server: Server) -> None:
        server.redirect("/a.device.toml", "/a.device.toml")
        assert refuse_url(server.locate("/a.device.toml")) == "P723"
        assert len(server.asked) < 10

    def test_a_certificate_that_nobody_trusts_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with start_server(make_certificate(tmp_path)) as server:
            server.serve("/a.device.toml", DEVICE)
            url = f"https://localhost:{server.port}/a.device.toml"
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            assert refuse_url(url) == "P720"
            assert server.asked == []
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
            assert fetch_url(url, timeout_s=10).decode() == DEVICE
            assert refuse_url(url.replace("localhost", "127.0.0.1")) == "P720"

    @pytest.mark.parametrize("proxy", ["nonsense", "http://[", "http://127.0.0.1:1"])
    def test_a_proxy_that_is_none(self, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert refuse_url("https://h.example/a.device.toml") == "P720"

    @pytest.mark.parametrize(("status", "code"), [(404, "P725"), (500, "P720"), (401, "P720")])
    def test_an_error_of_the_server(self, server: Server, status: int, code: str) -> None:
        server.serve("/a.device.toml", "no", status)
        assert refuse_url(server.locate("/a.device.toml")) == code

    def test_a_server_that_is_down(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        assert refuse_url(f"http://127.0.0.1:{port}/a.device.toml") == "P720"

    def test_a_server_that_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.device.toml"
            assert refuse_url(url, timeout_s=0.3) == "P721"

    def test_a_server_that_sends_a_byte_now_and_then(self, server: Server) -> None:
        def drip(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while not server.stopping.wait(0.05):
                handler.wfile.write(b"#")

        server.answers["/a.device.toml"] = drip
        assert refuse_url(server.locate("/a.device.toml"), timeout_s=0.5) == "P721"

    def test_a_connection_that_breaks(self, server: Server) -> None:
        def break_off(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"#")

        server.answers["/a.device.toml"] = break_off
        assert refuse_url(server.locate("/a.device.toml")) == "P720"

    def test_an_oversized_file_is_refused_by_its_length(self, server: Server) -> None:
        server.serve("/a.device.toml", b"#" * (MAX_BYTES + 1))
        assert refuse_url(server.locate("/a.device.toml")) == "P722"

    def test_an_endless_file_is_refused(self, server: Server) -> None:
        def pour(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while not server.stopping.is_set():
                handler.wfile.write(b"#" * 65536)

        server.answers["/a.device.toml"] = pour
        assert refuse_url(server.locate("/a.device.toml")) == "P722"
