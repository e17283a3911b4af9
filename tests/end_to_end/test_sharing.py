"""A device from one user to another: published, added, locked, verified, and used offline."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tomli

from pi2.sharing.fetching import Settings
from pi2.sharing.lock import read_lock
from pi2.sharing.project import Project
from pi2.sharing.references import parse_reference
from tests.helpers.sharing import DEVICE, Repository, Server, make_repository, run_git
from tests.helpers.sharing_user import NAME, User, refer


class TestTheWholeWay:
    def test_published_by_one_used_by_another_offline(
        self, bob: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        alice = User(tmp_path / "alice", monkeypatch, capsys)
        tap = make_repository(tmp_path / "tap", {"README.md": "profiles"})
        clone = alice.folder / "clone"
        run_git(alice.folder, "clone", "-q", str(tap.folder), str(clone))
        (alice.folder / NAME).write_text(f"# measured on serial number R58N70ABCDE\n{DEVICE}")

        out = alice.succeed("profile", "publish", NAME, "--into", "clone")
        published = (clone / "devices" / NAME).read_text()
        assert "R58N70ABCDE" not in published
        assert tomli.loads(published) == tomli.loads(DEVICE)
        assert "sha256" in out
        steps = [line.removeprefix("next: ") for line in out.splitlines() if "next: git" in line]
        for step in steps[:2]:
            subprocess.run(step, shell=True, cwd=alice.folder, check=True)
        run_git(tap.folder, "pull", "-q", str(clone), "profile-acme-12")
        tap.tag("v2")

        bob.succeed("profile", "add", refer(tap, "v2"))
        (source,) = bob.read_lock()
        assert source["revision"] == run_git(tap.folder, "rev-parse", "HEAD")
        assert source["revision_kind"] == "tag"
        bob.succeed("profile", "verify")

        shutil.rmtree(tap.folder)
        bob.succeed("profile", "verify", "--offline")
        plan = (Path(__file__).parents[2] / "plans/demo.plan.toml").read_text()
        plan = plan.replace('device = "host"', f'device = "{refer(tap, "v2")}"')
        (bob.folder / "my.plan.toml").write_text(plan)
        bob.succeed("validate", "--locked", "my.plan.toml")
        ran = bob.succeed(
            *("run", "my.plan.toml", "--locked", "--set", "backends.cpu=null"),
            *("--prompt", "hello", "--max-tokens", "2", "--json"),
        )
        assert json.loads(ran)["dry_run"] is True

    def test_a_github_reference_goes_where_the_setting_says(
        self, bob: User, tap: Repository, tmp_path: Path
    ) -> None:
        (tmp_path / "hub/acme").mkdir(parents=True)
        run_git(tmp_path, "clone", "-q", str(tap.folder), "hub/acme/profiles")
        bob.variables["PI2_GITHUB"] = (tmp_path / "hub").as_uri()
        bob.succeed("profile", "add", f"gh:acme/profiles//devices/{NAME}@v1")
        (source,) = bob.read_lock()
        assert source["url"] == f"{(tmp_path / 'hub').as_uri()}/acme/profiles"

    def test_a_file_of_the_web(self, bob: User, server: Server) -> None:
        server.serve(f"/{NAME}", DEVICE)
        bob.succeed("profile", "add", server.locate(f"/{NAME}"))
        bob.succeed("profile", "verify")
        server.serve(f"/{NAME}", DEVICE + "# changed\n")
        assert bob.fail("profile", "verify") == ["P729"]
        bob.succeed("profile", "verify", "--offline")
        assert "updated" in bob.succeed("profile", "update")
        bob.succeed("profile", "verify")
        server.serve(
            "/x.device.toml", 'schema_version = 3\nextends = ["file:/srv/b.device.toml"]\n'
        )
        assert bob.fail("profile", "add", server.locate("/x.device.toml")) == ["P732"]


class TestTheLock:
    def test_several_at_once_lose_nothing(self, bob: User) -> None:
        bob.succeed("profile", "list")
        project = Project(folder=bob.folder, settings=Settings(cache=bob.cache))
        for number in range(8):
            text = DEVICE.replace("acme-12", f"d{number}")
            (bob.folder / f"d{number}.device.toml").write_text(text)
        with ThreadPoolExecutor(8) as pool:
            names = [[f"file:d{number}.device.toml"] for number in range(8)]
            list(pool.map(project.add, names))
        assert [item["reference"] for item in bob.read_lock()] == [name for (name,) in names]


class TestOffline:
    def test_the_network_is_not_used(self, bob: User, server: Server) -> None:
        server.serve(f"/{NAME}", DEVICE)
        url = server.locate(f"/{NAME}")
        assert bob.fail("profile", "add", url, "--offline") == ["P730"]
        git = f"git+{server.locate('/tap')}//devices/{NAME}@v1"
        assert bob.fail("profile", "add", git, "--offline") == ["P730"]
        bob.succeed("profile", "add", url)
        asked = len(server.asked)
        assert bob.fail("profile", "update", "--offline") == ["P730"]
        bob.succeed("profile", "verify", "--offline")
        bob.succeed("profile", "list")
        assert len(server.asked) == asked


class TestWhatIsTaken:
    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"\0\0\0", "P005"),
            (b"\xff\xfe", "P006"),
            (b"", "P008"),
            (b"a = " + b"[" * 100_000, "P012"),
            (b"extends = " + b"[" * 5000, "P012"),
            (b"schema_version = 99\n", "P107"),
            (b'schema_version = 3\nextends = ["x\\u001b[2J"]\n', "P020"),
            (b"extends = 7\ndevice = 8\nmodel = 9\n", "P103"),
        ],
    )
    def test_hostile_bytes_are_findings(
        self, bob: User, tap: Repository, data: bytes, code: str
    ) -> None:
        tap.write(f"devices/{NAME}", data)
        tap.commit()
        found = bob.fail("profile", "add", refer(tap, "main"))
        assert set(found) & {"P731", "P732"}
        assert code in found or found == ["P732"]


class TestTheGuide:
    TEXT = (Path(__file__).parents[2] / "docs/howto/share-devices.md").read_text("utf-8")

    def test_its_commands_and_options_exist(self) -> None:
        from pi2.cli.models import profile_command as command

        for words in re.findall(r"pi2 profile ([^\n`|]+)", self.TEXT):
            name, *rest = words.split()
            assert name in command.commands, words
            options = {text for item in command.commands[name].params for text in item.opts}
            assert {word for word in rest if word.startswith("--")} <= options, words
        assert all(f"pi2 profile {name}" in self.TEXT for name in command.commands)

    def test_its_references_and_its_lock_are_sound(self, tmp_path: Path) -> None:
        pattern = r"(?:gh|git\+\w+):\S*?\.toml@\w+(?=[\s\"`])"
        for text in re.findall(pattern, self.TEXT):
            assert parse_reference(text).text == text
        blocks = re.findall(r"```toml\n(lock_version.*?)```", self.TEXT, re.DOTALL)
        path = tmp_path / "pi2.lock"
        path.write_text(blocks[0])
        (source,) = read_lock(path).sources
        assert parse_reference(source.reference).path == source.path
