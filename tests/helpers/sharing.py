"""Repositories, servers and users for tests of sharing: all local, all real."""

import contextlib
import gzip
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DEVICE = """\
schema_version = 3
name = "Acme 12"
id = "acme-12"

[units.cpu]
kind = "cpu"
architecture = "aarch64"
clusters = [{ id = "big", cores = 4 }]

[memory]
capacity = "8 GiB"

[memory.read_bandwidth]
value = "40 GB/s"
status = "measured"
source = "four threads reading"
samples = 30
spread = 0.02
"""

_PERSON = {
    "GIT_AUTHOR_NAME": "Author",
    "GIT_AUTHOR_EMAIL": "author@example.com",
    "GIT_COMMITTER_NAME": "Author",
    "GIT_COMMITTER_EMAIL": "author@example.com",
}


def run_git(folder: Path, *arguments: str) -> str:
    """Run git in ``folder`` as somebody without a configuration."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *arguments],
        cwd=folder,
        env={**environment, **_PERSON, "GIT_CONFIG_GLOBAL": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@dataclass
class Repository:
    folder: Path

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def write(self, path: str, text: str | bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def commit(self, message: str = "change") -> str:
        run_git(self.folder, "add", "-A")
        run_git(self.folder, "commit", "--quiet", "--allow-empty", "-m", message)
        return run_git(self.folder, "rev-parse", "HEAD")

    def tag(self, name: str, *, move: bool = False) -> None:
        force = ["--force"] if move else []
        run_git(self.folder, "tag", "-m", name, *force, name)


def make_repository(
    folder: Path, files: dict[str, str] | None = None, *, digests: str = "sha1"
) -> Repository:
    """A repository with one commit, tagged ``v1``."""
    folder.mkdir(parents=True)
    run_git(folder, "init", "--quiet", f"--object-format={digests}")
    repository = Repository(folder)
    chosen = {"devices/acme-12.device.toml": DEVICE} if files is None else files
    for path, text in chosen.items():
        repository.write(path, text)
    repository.commit("first")
    repository.tag("v1")
    return repository


Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """A web server of this machine; ``answers`` by path, and the paths that were asked for."""

    port: int
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def locate(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def serve(self, path: str, data: bytes | str, status: int = 200, **headers: str) -> None:
        body = data.encode() if isinstance(data, str) else data

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(body)

        self.answers[path] = answer

    def serve_repositories(self, prefix: str, folder: Path) -> None:
        self.answers[f"{prefix}*"] = lambda handler: _run_git_backend(handler, prefix, folder)

    def find_answer(self, path: str) -> Answer | None:
        """The answer to ``path``, or to a prefix of it."""
        for name, answer in self.answers.items():
            if path == name or (name.endswith("*") and path.startswith(name[:-1])):
                return answer
        return None

    def redirect(self, path: str, target: str) -> None:
        self.serve(path, b"", 302, Location=target)


def _run_git_backend(handler: BaseHTTPRequestHandler, prefix: str, folder: Path) -> None:
    """What a web server does for git: run its program by the rules of CGI."""
    path, _, query = handler.path.partition("?")
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    if handler.headers.get("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        "REQUEST_METHOD": handler.command, "PATH_INFO": "/" + path.removeprefix(prefix),
        "QUERY_STRING": query, "CONTENT_TYPE": handler.headers.get("Content-Type", ""),
        "CONTENT_LENGTH": str(len(body)), "REMOTE_ADDR": "127.0.0.1",
        "GIT_PROJECT_ROOT": str(folder), "GIT_HTTP_EXPORT_ALL": "1",
        "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""), "GIT_CONFIG_GLOBAL": os.devnull,
    }  # fmt: skip
    done = subprocess.run(
        ["git", "http-backend"], input=body, env=environment, capture_output=True, check=True
    )
    head, _, answer = done.stdout.partition(b"\r\n\r\n")
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n")]
    headers = dict(line for line in lines if len(line) == 2)
    handler.send_response(int(headers.pop("Status", "200").split()[0]))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(answer)))
    handler.end_headers()
    handler.wfile.write(answer)


def make_certificate(folder: Path) -> Path:
    """A certificate for ``localhost`` that signs itself, with its key in the same file."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not here")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        + ["-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
        check=True,
    )
    both = folder / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    return both


@contextmanager
def start_server(certificate: Path | None = None) -> Iterator[Server]:
    """A server on a free port; one with a certificate speaks TLS."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.asked.append(self.path)
            answer = server.find_answer(self.path)
            self.close_connection = True
            if answer is None:
                self.send_error(404)
                return
            with contextlib.suppress(OSError):  # the client had enough
                answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
    server = Server(port=listener.server_address[1])
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        listener.shutdown()
        listener.server_close()
        thread.join()
