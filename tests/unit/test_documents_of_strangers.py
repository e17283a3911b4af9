"""A document of a pull request names a file that holds a secret: nothing of it is shown, in no
format of the report, and files outside of the project are not even opened as documents."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.lsp.checked import Checked
from tests.helpers.broken_plans import BROKEN
from tests.helpers.slow import keep_quick, mark_slow
from tests.helpers.tables import in_table

Capture = pytest.CaptureFixture[str]
PARTS = BROKEN / "parts"

SECRET = "hunter2"
SECRETS = {
    "no TOML": f"token {SECRET}\n",
    "a duplicate": f'token = "{SECRET}"\ntoken = "{SECRET}"\n',
    "TOML": f'token = "{SECRET}"\n[{SECRET}]\n{SECRET} = 0,5\n',
    "sound TOML": f'token = "{SECRET}"\n[{SECRET}]\n{SECRET} = 5\n',
    "JSON": f'{{"model": {{"id": "{SECRET}"}}, "{SECRET}": 1}}\n',
    "binary": f"{SECRET}\0{SECRET}\n",
}
FORMATS = ("full", "concise", "json", "github", "gitlab", "sarif", "junit")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a sound plan, below a folder with files of other programs."""
    folder = tmp_path / "work" / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / "plans").mkdir()
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, folder / "plans")
    return folder


def link(project: Path, name: str, target: Path) -> Path:
    place = project / "plans" / name
    place.symlink_to(target)
    return place


def extend(project: Path, reference: str) -> int:
    text = f'schema_version = 3\nextends = ["base.plan.toml", "{reference}"]\n'
    return (project / "plans" / "p.plan.toml").write_text(text)


def change(project: Path, line: str) -> int:
    text = f'schema_version = 3\nextends = ["base.plan.toml"]\n{line}\n'
    return (project / "plans" / "p.plan.toml").write_text(text)


def replace_weights(project: Path, name: str, secret: Path) -> Path:
    store = project / "plans" / "store"
    store.mkdir()
    (store / name).symlink_to(secret)
    return store


Attack = Callable[[Path, Path], object]


def say(line: str) -> Attack:
    """A line of the plan; SECRET is the file's place."""
    return lambda project, secret: change(project, line.replace("SECRET", str(secret)))


def near(reference: str) -> Attack:
    return lambda project, secret: extend(project, reference.replace("SECRET", secret.name))


def linked(name: str, then: Attack) -> Attack:
    """A link to the secret, and what names it."""
    return lambda project, secret: (link(project, name, secret), then(project, secret))


def inside(name: str, line: str = 'weights = "store"') -> Attack:
    """A store of which one file is a link."""
    return lambda project, secret: (replace_weights(project, name, secret), change(project, line))


ATTACKS: dict[str, Attack] = {
    "a path that is extended": near("../../SECRET"),
    "an absolute path": lambda project, secret: extend(project, str(secret)),
    "a link that is extended": linked("x.plan.toml", near("x.plan.toml")),
    "a link without the ending": linked("x.toml", near("x.toml")),
    "a folder that is a link": lambda project, secret: (
        link(project, "x", secret.parent),
        extend(project, f"x/{secret.name}"),
    ),
    "a device": linked("x.device.toml", say('device = "x.device.toml"')),
    "a model": linked("x.model.toml", say('model = "x.model.toml"')),
    "the path of a model": say('model = "SECRET"'),
    "a device that extends": lambda project, secret: (
        (project / "plans" / "y.device.toml").write_text(
            f'schema_version = 2\nextends = ["../../{secret.name}"]\nid = "y"\n'
        ),
        change(project, 'device = "y.device.toml"'),
    ),
    "a draft's plan": linked(
        "x.plan.toml", say('[decode.speculation]\ndrafts = "plan"\nplan = "x.plan.toml"')
    ),
    "thresholds": lambda project, secret: change(
        project, f'[sparsity]\nmethod = "cats"\nthresholds = "../../{secret.name}"'
    ),
    "the plan itself": lambda project, secret: link(project, "p.plan.toml", secret),
    "the lock": linked("../pi2.lock", say('device = "gh:a/b//c.device.toml@v1"')),
    "weights": say('weights = "SECRET"'),
    "weights as a GGUF file": linked("w.gguf", say('weights = "w.gguf"')),
    "a tokenizer": say('tokenizer = "SECRET"'),
    "a manifest": inside("manifest.json"),
    "a store's model": inside("x.model.toml", 'weights = "store"\nremove = ["model"]'),
}
"""What a pull request changes in a repository, by the secret's place."""


@pytest.mark.parametrize("kind", keep_quick(SECRETS, ["TOML"]))
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("place", ["outside", mark_slow("inside")])
def test_no_report_shows_a_secret(
    attack: str, kind: str, place: str, project: Path, capsys: Capture
) -> None:
    secret = project.parent / "secret.toml" if place == "outside" else project / ".git" / "config"
    secret.write_text(SECRETS[kind])
    if place == "inside":
        (project.parent / "config").symlink_to(secret)
    ATTACKS[attack](project, secret)
    for form in FORMATS if kind == "TOML" else FORMATS[:1]:
        run(["validate", str(project / "plans" / "p.plan.toml"), "--format", form])
    run(["validate", str(project)])
    run(["migrate", "--check", str(project)])
    run(["show", "--origins", str(project / "plans" / "p.plan.toml")])
    run(["explain", "kv.context", str(project / "plans" / "p.plan.toml")])
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert SECRET[:4].encode().hex(" ") not in shown.out + shown.err


@pytest.mark.parametrize(
    "attack", [name for name in ATTACKS if "weights" not in name and "tokenizer" not in name]
)
def test_what_is_outside_is_named_and_refused(attack: str, project: Path, capsys: Capture) -> None:
    """Also if it is a sound document: a reference does not leave its project."""
    secret = project.parent / "secret.toml"
    shutil.copy(PARTS / "base.plan.toml", secret)
    ATTACKS[attack](project, secret)
    assert run(["validate", str(project / "plans" / "p.plan.toml"), "--format", "concise"]) != 0
    found = capsys.readouterr().out
    if attack not in ("a manifest", "the lock"):
        assert "P032" in found
    assert "GiB" not in found and "MiB" not in found


def write_parts(folder: Path, part: str) -> Path:
    """A plan outside of any repository, with a part in another folder of it."""
    for place in ("parts", "devices"):
        (folder / place).mkdir(parents=True)
    shutil.copy(PARTS / "phone.device.toml", folder / "devices")
    shutil.copy(PARTS / "small.model.toml", folder / "parts")
    text = (PARTS / "base.plan.toml").read_text()
    text = text.replace('"phone.device.toml"', '"../devices/phone.device.toml"')
    (folder / "parts" / "base.plan.toml").write_text(text)
    (folder / "parts" / "more.plan.toml").write_text(f"schema_version = 3\n{part}\n")
    plan = folder / "p.plan.toml"
    plan.write_text(
        'schema_version = 3\nextends = ["parts/base.plan.toml", "parts/more.plan.toml"]\n'
    )
    return plan


@in_table
def test_parts_belong_to_the_project_of_the_plan_that_names_them(
    part: str, code: str | None, tmp_path: Path, capsys: Capture
) -> None:
    """Outside of any repository, a part names files of the plan's folder and none above."""
    plan = write_parts(tmp_path / "plans", part)
    (tmp_path / "plans" / "parts" / "linked.plan.toml").symlink_to(tmp_path / "p.plan.toml")
    (tmp_path / "plans" / "parts" / "near.plan.toml").symlink_to(tmp_path / "plans" / "n.plan.toml")
    (tmp_path / "plans" / "n.plan.toml").write_text("schema_version = 3\n[io]\nthreads = 2\n")
    shutil.copy(plan, tmp_path)
    assert run(["validate", str(plan), "--format", "concise"]) == (0 if code is None else 1)
    found = capsys.readouterr().out
    assert not found if code is None else f" {code} " in found or f"error[{code}]" in found
    # The part alone is another document that the user names: its project is its own folder.
    assert run(["validate", str(tmp_path / "plans" / "parts" / "base.plan.toml")]) == 1
    assert "P032" in capsys.readouterr().out


def test_a_device_and_a_draft_belong_to_the_project_of_their_plan(
    tmp_path: Path, capsys: Capture
) -> None:
    plan = write_parts(tmp_path, '[decode.speculation]\ndrafts = "plan"\nplan = "base.plan.toml"')
    device = tmp_path / "devices" / "own" / "own-phone.device.toml"
    device.parent.mkdir()
    device.write_text('schema_version = 3\nextends = ["../phone.device.toml"]\nid = "own-phone"\n')
    more = 'device = "devices/own/own-phone.device.toml"\nmemory.budget = "512 MiB"\n'
    plan.write_text(plan.read_text() + more)
    assert run(["validate", str(plan)]) == 0, capsys.readouterr().out
    assert run(["validate", str(device)]) == 1
    assert "P032" in capsys.readouterr().out


def test_an_editor_shows_none_of_it(project: Path) -> None:
    secret = project.parent / "secret.toml"
    secret.write_text(SECRETS["TOML"])
    link(project, "x.device.toml", secret)
    plan = project / "plans" / "p.plan.toml"
    text = 'schema_version = 3\nextends = ["base.plan.toml"]\ndevice = "x.device.toml"\n'
    checked = Checked(plan, text)
    found = [item for _, item in checked.list_findings()]
    assert any(item.code == "P032" for item in found)
    assert SECRET not in repr(found) + repr(checked.list_units())
