"""Files of git repositories, through git itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import unquote, urlsplit

from pi2.caches import find_home
from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES

RevisionKind = Literal["tag", "branch", "commit"]

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64
_KEPT = frozenset({"GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"})
"""Git variables of the user's configuration; others may name another repository."""
_CONFIGURATION = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.askPass=",
    "credential.interactive=false",
    "fetch.fsckObjects=true",
    "fetch.recurseSubmodules=false",
    "submodule.recurse=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "http.followRedirects=false",
    "http.lowSpeedLimit=100",
    "http.lowSpeedTime=20",
    "protocol.version=2",
)
_SYMLINK, _SUBMODULE, _FOLDER = "120000", "160000", "040000"


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What a revision means at this moment."""

    commit: str
    """All 40 digits, or 64 of a repository with SHA-256."""
    kind: RevisionKind


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A file's bytes, and the commit that they are of if a repository has them."""

    data: bytes
    commit: str = ""
    kind: RevisionKind | None = None


def read_git_file(url: str, path: str, revision: str, *, timeout_s: float) -> Fetched:
    """Fetch ``path`` at ``revision`` of a repository; UserError P720 to P728, P732."""
    with _open_repository(url, timeout_s) as repository:
        found = repository.resolve(revision)
        repository.fetch(found.commit)
        data = repository.read(found.commit, path)
        return Fetched(data=data, commit=found.commit, kind=found.kind)


def resolve_revision(url: str, revision: str, *, timeout_s: float) -> Revision:
    with _open_repository(url, timeout_s) as repository:
        return repository.resolve(revision)


@contextmanager
def _open_repository(url: str, timeout_s: float) -> Iterator[_Repository]:
    program = shutil.which("git")
    if program is None:
        raise UserError.of("P728", "git is not installed", help="install git, then try again")
    try:
        folder = tempfile.TemporaryDirectory(prefix="pi2-git-", ignore_cleanup_errors=True)
    except OSError as error:
        message = f"no temporary folder can be made: {error.strerror}"
        raise UserError.of("P003", message, help="is the disk full?") from None
    with folder as name:
        repository = _Repository(program, Path(name), url, timeout_s)
        repository.create()
        yield repository


class _Repository:
    def __init__(self, program: str, folder: Path, url: str, timeout_s: float) -> None:
        self.program = program
        self.folder = folder
        self.url = url
        self.deadline_s = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.environment = self._make_environment()

    def _make_environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k in _KEPT}
        protocol = self.url.partition(":")[0]
        kept |= {
            "GIT_ALLOW_PROTOCOL": protocol,
            "GIT_ASKPASS": "",
            "GIT_TERMINAL_PROMPT": "0",
            "GCM_INTERACTIVE": "never",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "SSH_ASKPASS": "",
            "LC_ALL": "C",
        }
        if protocol == "file":
            kept["GIT_CONFIG_GLOBAL"] = str(self._trust_owner(kept))
        return kept

    def _trust_owner(self, environment: dict[str, str]) -> Path:
        """Let git serve a repository of another owner; only upload-pack runs in it."""
        place = unquote(urlsplit(self.url).path)
        home = find_home(environment)
        config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
        own = environment.get("GIT_CONFIG_GLOBAL")
        files = [Path(own)] if own else [config / "git/config", home / ".gitconfig"]
        lines = [f"[include]\n\tpath = {_quote(str(file))}\n" for file in files]
        for trusted in (place, f"{place}/.git"):
            lines.append(f"[safe]\n\tdirectory = {_quote(trusted)}\n")
        lines.append("[uploadpack]\n\tallowFilter = true\n\tallowAnySHA1InWant = true\n")
        path = self.folder / "global.gitconfig"
        path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
        return path

    def run(self, *arguments: str) -> bytes:
        """Run git and return its output; `UserError` where it fails."""
        done = self.start(*arguments)
        if done.returncode != 0:
            self.explain(done.stderr.decode("utf-8", errors="replace"))
        return done.stdout

    def start(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        left_s = max(0.1, self.deadline_s - time.monotonic())
        settings = [part for item in _CONFIGURATION for part in ("-c", item)]
        command = [self.program, *settings, "--literal-pathspecs", *arguments]
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env={**self.environment, "GIT_DIR": str(self.folder / "bare.git")},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=left_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"{self.url} did not answer within {self.timeout_s:g} seconds"
            raise UserError.of("P721", message, help="try again later") from None

    def create(self, *options: str) -> None:
        place = str(self.folder / "bare.git")
        self.run("init", "--quiet", "--bare", "--template=", *options, place)
        self.run("config", "remote.origin.url", self.url)

    def resolve(self, revision: str) -> Revision:
        """Commit that ``revision`` means; a tag goes before a branch of the same name."""
        if _COMMIT.fullmatch(revision):
            return Revision(commit=revision, kind="commit")
        patterns = ["HEAD"]
        if revision != "HEAD":
            patterns = [f"refs/tags/{revision}", f"refs/tags/{revision}^{{}}"]
            patterns.append(f"refs/heads/{revision}")
        listed = self.run("ls-remote", "--quiet", "--", "origin", *patterns).decode()
        found = {
            name: commit for commit, _, name in (x.partition("\t") for x in listed.split("\n"))
        }
        for name in reversed(patterns[:2]):
            if revision != "HEAD" and name in found:
                return Revision(commit=found[name], kind="tag")
        if patterns[-1] in found:
            return Revision(commit=found[patterns[-1]], kind="branch")
        raise UserError.of(
            "P726",
            f"{self.url} has no tag and no branch `{revision}`",
            help="look at its tags; a commit is written with all of its 40 or 64 digits",
        )

    def fetch(self, commit: str) -> None:
        """Fetch one commit without history, and only files that may be documents."""
        if len(commit) == _SHA256_DIGITS:
            # A repository has commits of one kind, and so has the one that they come from.
            shutil.rmtree(self.folder / "bare.git")
            self.create("--object-format=sha256")
        limit = f"--filter=blob:limit={MAX_BYTES + 1}"
        options = ("--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", "--no-auto-gc")
        self.run("fetch", *options, limit, "origin", commit)
        # What the filter left out is not to be fetched when it is asked for.
        self.run("config", "--remove-section", "remote.origin")

    def read(self, commit: str, path: str) -> bytes:
        """Bytes of a regular file; every folder on the way is a folder."""
        parts = path.split("/")
        places = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        entries = self.list_tree(commit, places)
        for place in places:
            if place not in entries:
                raise UserError.of("P725", f"{self.url} has no file `{path}` at {commit[:12]}")
            mode, name = entries[place]
            if mode == _SYMLINK:
                raise UserError.of(
                    "P724", f"`{place}` is a symbolic link", help="name the file itself"
                )
            if mode == _SUBMODULE:
                raise UserError.of(
                    "P725",
                    f"`{place}` is a submodule",
                    help="name the repository that it stands for",
                )
            if (mode == _FOLDER) != (place != path):
                what = "a folder" if mode == _FOLDER else "a file"
                raise UserError.of("P725", f"`{place}` is {what}")
        return self.read_object(name, path)

    def list_tree(self, commit: str, places: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Mode and object of each of ``places`` that a commit has."""
        listed = self.run("ls-tree", "-z", "-t", "--full-tree", commit, "--", *places)
        found = {}
        for item in listed.decode("utf-8", errors="surrogateescape").split("\0"):
            head, tab, place = item.partition("\t")
            if tab:
                mode, _, name = head.split(" ")
                found[place] = mode, name
        return found

    def read_object(self, name: str, path: str) -> bytes:
        """Bytes of a blob; one that the filter left out is too large."""
        size = self.start("cat-file", "-s", name)
        if size.returncode != 0 or int(size.stdout) > MAX_BYTES:
            raise UserError.of(
                "P722",
                f"`{path}` is larger than {MAX_BYTES:,} bytes",
                help="documents are small texts",
            )
        return self.run("cat-file", "blob", name)

    def explain(self, text: str) -> NoReturn:
        """Raise the finding that explains git's message."""
        lines = [line for line in text.splitlines() if line.strip()]
        said = next((x for x in lines if x.startswith(("fatal:", "error:"))), "git failed")
        said = re.sub(r"^(fatal|error): ", "", said).replace(f"{self.folder}/", "")[:300]
        lower = text.lower()
        if "redirect" in lower or re.search(r"returned error: 3\d\d", lower):
            raise UserError.of(
                "P723",
                f"{self.url} answers with a redirect",
                help="name the repository where it is now",
                notes=[f"git: {said}"],
            )
        if "not our ref" in lower or "unadvertised object" in lower or "find remote ref" in lower:
            raise UserError.of("P726", f"{self.url} has no such commit", notes=[f"git: {said}"])
        if "too slow" in lower or "timed out" in lower:
            raise UserError.of("P721", f"{self.url} is too slow", notes=[f"git: {said}"])
        help_text = "check the address; private repositories need a credential helper of git"
        raise UserError.of(
            "P720", f"{self.url} cannot be fetched", help=help_text, notes=[f"git: {said}"]
        )


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
