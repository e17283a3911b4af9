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

    def test_a_name_alone_is_no_reference(self, bob: User) -> None:
        assert bob.fail("profile", "add", "acme-12") == ["P701"]
        assert bob.fail("profile", "add", "tap:acme-12") == ["P702"]

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

    def test_a_file_of_this_machine(self, bob: User, tmp_path: Path) -> None:
        shared = tmp_path / "shared" / NAME
        shared.parent.mkdir()
        shared.write_text(DEVICE)
        bob.succeed("profile", "add", f"file:../../shared/{NAME}", "--offline")
        (source,) = bob.read_lock()
        assert source["reference"] == source["url"] == f"file:../../shared/{NAME}"

    def test_the_lock_is_found_from_folders_below(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        (bob.folder / "plans").mkdir()
        bob.folder = bob.folder / "plans"
        assert NAME in bob.succeed("profile", "list")


class TestTheLock:
    def test_it_is_same_whatever_order(self, bob: User, tap: Repository, tmp_path: Path) -> None:
        tap.write("devices/b.device.toml", DEVICE.replace("acme-12", "b"))
        tap.commit()
        both = [refer(tap, "main"), refer(tap, "main", "devices/b.device.toml")]
        bob.succeed("profile", "add", *both)
        first = (bob.folder / "pi2.lock").read_bytes()
        (bob.folder / "pi2.lock").unlink()
        for reference in reversed(both):
            bob.succeed("profile", "add", reference)
        assert (bob.folder / "pi2.lock").read_bytes() == first

    def test_adding_again_changes_nothing(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        before = (bob.folder / "pi2.lock").stat()
        assert "unchanged" in bob.succeed("profile", "add", refer(tap), "--locked", "--offline")
        assert (bob.folder / "pi2.lock").stat().st_mtime_ns == before.st_mtime_ns

    def test_empty_cache_is_filled_again_with_same_bytes(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap, "main"))
        tap.write(f"devices/{NAME}", DEVICE + "# newer\n")
        tap.commit()
        shutil.rmtree(bob.cache)
        assert bob.fail("profile", "verify", "--offline") == ["P715"]
        assert "fetched" in bob.succeed("profile", "add", "--locked")
        (blob,) = bob.cache.rglob(NAME)
        assert blob.read_text() == DEVICE

    def test_a_branch_moves_on_only_when_asked(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap, "main"))
        tap.write(f"devices/{NAME}", DEVICE + "# newer\n")
        commit = tap.commit()
        assert bob.fail("profile", "update", "--locked") == ["P714"]
        assert "updated" in bob.succeed("profile", "update")
        assert bob.read_lock()[0]["revision"] == commit

    def test_a_moved_tag_is_refused(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        before = bob.read_lock()
        tap.write(f"devices/{NAME}", DEVICE + "# newer\n")
        tap.commit()
        tap.tag("v1", move=True)
        assert bob.fail("profile", "update") == ["P727"]
        assert bob.fail("profile", "verify") == ["P714"] and bob.read_lock() == before
        bob.succeed("profile", "update", "--accept-moved-tags")
        assert bob.read_lock() != before

    def test_nothing_is_locked_where_one_of_several_fails(self, bob: User, tap: Repository) -> None:
        assert bob.fail("profile", "add", refer(tap), refer(tap, "v9")) == ["P726"]
        assert not (bob.folder / "pi2.lock").exists()

    def test_locked_refuses_to_add(self, bob: User, tap: Repository) -> None:
        assert bob.fail("profile", "add", refer(tap), "--locked") == ["P714"]
        assert not (bob.folder / "pi2.lock").exists()

    @pytest.mark.parametrize(
        ("old", "new", "code"),
        [
            ("lock_version = 1", "lock_version = 2", "P712"),
            ("sha256 =", "sha512 =", "P711"),
            ('sha256 = "', 'sha256 = "x', "P711"),
            ("[[sources]]", "[[sources", "P010"),
            ("[[sources]]", "<<<<<<< mine\n[[sources]]", "P010"),
            (f'path = "devices/{NAME}"', 'path = "devices/other.device.toml"', "P714"),
        ],
    )
    def test_damaged_lock(self, bob: User, tap: Repository, old: str, new: str, code: str) -> None:
        bob.succeed("profile", "add", refer(tap))
        lock = bob.folder / "pi2.lock"
        text = lock.read_text()
        assert old in text
        lock.write_text(text.replace(old, new, 1))
        assert code in bob.fail("profile", "verify", "--offline")

    def test_a_changed_digest_is_noticed(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        lock = bob.folder / "pi2.lock"
        digest = str(bob.read_lock()[0]["sha256"])
        lock.write_text(lock.read_text().replace(digest, "0" * 64))
        assert bob.fail("profile", "verify", "--offline") == ["P715"]
        assert bob.fail("profile", "add") == ["P729"]

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


class TestTampering:
    def test_with_the_cache(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        (blob,) = bob.cache.rglob(NAME)
        blob.write_text(DEVICE.replace("40 GB/s", "80 GB/s"))
        assert bob.fail("profile", "verify", "--offline") == ["P713"]
        assert bob.fail("profile", "add", refer(tap)) == ["P713"]
        blob.unlink()
        bob.succeed("profile", "add")
        assert blob.read_text() == DEVICE

    def test_a_link_in_the_cache_is_not_followed(
        self, bob: User, tap: Repository, tmp_path: Path
    ) -> None:
        bob.succeed("profile", "add", refer(tap))
        (blob,) = bob.cache.rglob(NAME)
        blob.unlink()
        blob.symlink_to("/etc/passwd")
        assert bob.fail("profile", "verify", "--offline") == ["P715"]


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
    def test_a_document_with_errors_is_not(self, bob: User, tap: Repository) -> None:
        tap.write(f"devices/{NAME}", DEVICE.replace('kind = "cpu"', 'kind = "abacus"'))
        tap.commit()
        assert bob.fail("profile", "add", refer(tap, "main"))[0] == "P731"
        assert not (bob.folder / "pi2.lock").exists()

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

    def test_a_name_that_is_not_the_id_is_not(self, bob: User, tap: Repository) -> None:
        tap.write("devices/other.device.toml", DEVICE)
        tap.commit()
        reference = refer(tap, "main", "devices/other.device.toml")
        assert bob.fail("profile", "add", reference) == ["P731", "P244"]


class TestPublish:
    def publish(self, user: User, text: str, *options: str) -> tuple[int, str, str]:
        clone = user.folder / "clone"
        if not clone.exists():
            make_repository(clone, {"README.md": "profiles"})
        (user.folder / NAME).write_text(text)
        return user.run("profile", "publish", NAME, "--into", "clone", *options)

    def test_private_data_is_taken_out_and_comments_stay(self, bob: User) -> None:
        text = DEVICE.replace(
            'source = "four threads reading"',
            'source = "four threads, log in /home/alice/bench"  # by alice@example.com',
        )
        code, _, err = self.publish(bob, f"# my phone\n{text}")
        assert code == 0, err
        written = (bob.folder / "clone/devices" / NAME).read_text()
        assert 'source = "four threads, log in ~/bench"  # by (account)' in written
        assert written.startswith("# my phone\n")
        assert "alice@example.com" not in err and f"{NAME}:17: home folder" in err

    def test_a_device_with_errors_is_not_published(self, bob: User) -> None:
        code, _, err = self.publish(bob, DEVICE.replace("samples = 30", "samples = 0"))
        assert (code, err[:6]) == (1, "error[")
        assert not (bob.folder / "clone/devices").exists()

    def test_another_profile_keeps_its_name(self, bob: User) -> None:
        assert self.publish(bob, DEVICE)[0] == 0
        assert self.publish(bob, DEVICE)[0] == 0
        changed = DEVICE.replace("40 GB/s", "41 GB/s")
        code, _, err = self.publish(bob, changed)
        assert code == 2
        assert "error[P741]" in err
        assert self.publish(bob, changed, "--force")[0] == 0

    def test_the_clone_is_a_clone(self, bob: User) -> None:
        (bob.folder / NAME).write_text(DEVICE)
        (bob.folder / "empty").mkdir()
        assert bob.fail("profile", "publish", NAME, "--into", "empty") == ["P742"]

    def test_a_plan_is_not_published(self, bob: User) -> None:
        (bob.folder / "x.plan.toml").write_text("schema_version = 3\n")
        assert bob.fail("profile", "publish", "x.plan.toml", "--into", ".") == ["P743"]

    def test_its_reports_are_json(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        (row,) = json.loads(bob.succeed("profile", "list", "--json"))
        assert row["state"] == "cached"
        (row,) = json.loads(bob.succeed("profile", "verify", "--json"))
        assert row["codes"] == []


class TestTheGuide:
    TEXT = (Path(__file__).parents[2] / "docs/howto/share-devices.md").read_text("utf-8")

    def test_its_commands_and_options_exist(self) -> None:
        from pi2.cli.profile import profile_command as command

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
