"""Plans that refer to devices of other repositories."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.sharing import DEVICE, Repository, Server
from tests.helpers.sharing_user import NAME, User, refer


class TestPlans:
    """What plans make of references: found, or pointed at where they stand."""

    def write_plan(self, user: User, device: str) -> None:
        plan = (Path(__file__).parents[2] / "plans/demo.plan.toml").read_text()
        text = plan.replace('device = "host"', f'device = "{device}"')
        (user.folder / "my.plan.toml").write_text(text)

    def find(self, user: User, *options: str) -> list[tuple[str, str]]:
        _, out, _ = user.run("validate", "my.plan.toml", "--format", "json", *options)
        lines = (user.folder / "my.plan.toml").read_text().split("\n")
        return [
            (item["code"], lines[item["span"]["line"] - 1].partition(" ")[0])
            for item in json.loads(out)
        ]

    def test_what_is_not_locked_is_a_finding_at_its_place(self, bob: User, tap: Repository) -> None:
        self.write_plan(bob, refer(tap))
        assert self.find(bob) == [("P710", "device")]
        bob.succeed("profile", "add", refer(tap, "main"))
        assert self.find(bob) == [("P710", "device")]
        bob.succeed("profile", "add", refer(tap))
        assert self.find(bob) == []
        shutil.rmtree(bob.cache)
        assert self.find(bob) == [("P715", "device")]

    @pytest.mark.parametrize(
        ("reference", "code"),
        [
            ("gh:acme/profiles/x.device.toml@v1", "P701"),
            ("oci:acme/x.device.toml", "P702"),
            ("gh:acme/profiles//../x.device.toml@v1", "P705"),
            ("https://alice:pw@h.example/x.device.toml", "P703"),
        ],
    )
    def test_what_is_no_reference_is_a_finding_at_its_place(
        self, bob: User, tap: Repository, reference: str, code: str
    ) -> None:
        bob.succeed("profile", "add", refer(tap))
        self.write_plan(bob, reference)
        assert (code, "device") in self.find(bob)

    def test_a_model_is_no_device(self, bob: User, tap: Repository) -> None:
        shipped = Path(__file__).parents[2] / "plans/models/pi2-demo.model.toml"
        tap.write("models/pi2-demo.model.toml", shipped.read_text())
        tap.commit()
        reference = refer(tap, "main", "models/pi2-demo.model.toml")
        bob.succeed("profile", "add", reference)
        self.write_plan(bob, reference)
        assert self.find(bob) == [("P014", "device")]

    def test_locked_refuses_what_has_changed(self, bob: User, tmp_path: Path) -> None:
        shared = tmp_path / "shared" / NAME
        shared.parent.mkdir()
        shared.write_text(DEVICE)
        reference = f"file:../../shared/{NAME}"
        bob.succeed("profile", "add", reference)
        self.write_plan(bob, reference)
        assert self.find(bob, "--locked") == []
        shared.write_text(DEVICE + "# changed\n")
        assert self.find(bob) == [] and self.find(bob, "--locked") == [("P714", "device")]
        run_it = ("run", "my.plan.toml", "--set", "backends.cpu=null", "--prompt", "x", "--locked")
        assert bob.fail(*run_it) == ["P714"]
        bob.succeed("profile", "update")
        assert self.find(bob, "--locked") == []

    def test_locked_refuses_a_local_tag_that_has_moved(self, bob: User, tap: Repository) -> None:
        bob.succeed("profile", "add", refer(tap))
        self.write_plan(bob, refer(tap))
        tap.commit("second")
        tap.tag("v1", move=True)
        assert self.find(bob) == [] and self.find(bob, "--locked") == [("P714", "device")]

    def test_a_device_extends_another_of_its_repository(self, bob: User, tap: Repository) -> None:
        tap.write("common/base.device.toml", DEVICE.replace("acme-12", "base"))
        tap.write(
            "devices/acme-13.device.toml",
            'schema_version = 3\nextends = ["../common/base.device.toml"]\nid = "acme-13"\n',
        )
        tap.commit()
        reference = refer(tap, "main", "devices/acme-13.device.toml")
        bob.succeed("profile", "add", reference)
        assert [item["path"] for item in bob.read_lock()] == [
            "common/base.device.toml",
            "devices/acme-13.device.toml",
        ]
        self.write_plan(bob, reference)
        assert self.find(bob, "--locked") == [] and self.find(bob) == []
        bob.succeed("profile", "verify", "--offline")

    def test_a_plan_extends_another_with_its_device(self, bob: User, tap: Repository) -> None:
        plan = (Path(__file__).parents[2] / "plans/demo.plan.toml").read_text()
        tap.write(
            "plans/base.plan.toml", plan.replace('device = "host"', f'device = "../devices/{NAME}"')
        )
        tap.commit()
        reference = refer(tap, "main", "plans/base.plan.toml")
        assert f'use it: extends = ["{reference}"]' in bob.succeed("profile", "add", reference)
        assert len(bob.read_lock()) == 2
        text = f'schema_version = 3\nextends = ["{reference}"]\nname = "Mine"\n'
        (bob.folder / "my.plan.toml").write_text(text)
        shutil.rmtree(tap.folder)
        assert self.find(bob, "--locked") == []

    def test_a_device_that_needs_its_authors_files_is_not_taken(
        self, bob: User, tap: Repository, server: Server
    ) -> None:
        text = 'schema_version = 3\nextends = ["{}"]\nid = "acme-12"\n'
        server.serve(f"/{NAME}", text.format("file:/srv/base.device.toml"))
        assert bob.fail("profile", "add", server.locate(f"/{NAME}")) == ["P732"]
        tap.write(f"devices/{NAME}", text.format("../../base.device.toml"))
        tap.commit()
        assert bob.fail("profile", "add", refer(tap, "main")) == ["P705"]

    def test_documents_that_extend_each_other_end(self, bob: User, tap: Repository) -> None:
        for one, other in (("a", "b"), ("b", "a")):
            tap.write(
                f"devices/{one}.device.toml",
                f'schema_version = 3\nextends = ["{other}.device.toml"]\nid = "{one}"\n',
            )
        tap.commit()
        found = bob.fail("profile", "add", refer(tap, "main", "devices/a.device.toml"))
        assert found[:2] == ["P731", "P021"]
