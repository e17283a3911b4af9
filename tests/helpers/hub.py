"""A hub: a small server of one repository that speaks Hugging Face's protocol."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


@dataclass
class Hub:
    folder: Path
    repository: str
    address: str = ""
    cut: str | None = None
    """A file of which every answer ends after half of what is left."""
    gated: bool = False
    needed_token: str | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of each request."""

    def list_ranges(self, name: str) -> list[str | None]:
        return [part for method, path, part in self.asked if method == "GET" and name in path]


@contextmanager
def serve_repository(folder: Path, repository: str) -> Iterator[Hub]:
    hub = Hub(folder, repository)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            del format, args

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append((self.command, path, self.headers.get("Range")))
            parts = path.strip("/").split("/")
            is_info = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_info else parts[:2])
            if name != hub.repository:
                self.refuse(404 if hub.needed_token is None else 401, "RepoNotFound")
            elif hub.gated:
                self.refuse(403, "GatedRepo")
            elif hub.needed_token not in (None, self.headers.get("Authorization")):
                self.refuse(401, "RepoNotFound")
            elif is_info:
                self.describe(parts[5] if len(parts) > 5 else "main")
            else:
                self.give(parts[3], "/".join(parts[4:]))

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})

        def describe(self, revision: str) -> None:
            if revision not in REVISIONS:
                self.refuse(404, "RevisionNotFound")
                return
            files = [path for path in sorted(hub.folder.iterdir()) if path.is_file()]
            siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in files]
            body = {"id": hub.repository, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def give(self, revision: str, name: str) -> None:
            file = hub.folder / name
            if revision not in REVISIONS or not file.is_file():
                self.refuse(404, "EntryNotFound" if revision in REVISIONS else "RevisionNotFound")
                return
            content = file.read_bytes()
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            part, status, start = self.headers.get("Range"), 200, 0
            if part is not None:
                first, _, last = part.removeprefix("bytes=").partition("-")
                start, status = int(first), 206
                end = min(int(last or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                content = content[: end + 1]
            self.reply(status, content[start:], headers, cut=name == hub.cut)

        def reply(
            self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut and self.command == "GET":
                self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        # The library reads the variable HF_ENDPOINT only once.
        url = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        try:
            with mock.patch.multiple(
                constants, ENDPOINT=hub.address, HUGGINGFACE_CO_URL_TEMPLATE=url
            ):
                yield hub
        finally:
            server.shutdown()
            thread.join()
