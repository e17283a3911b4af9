"""Documents that extend others: what is merged, replaced, joined and removed, and from where."""

import shutil
from pathlib import Path

import pytest

from pi2.authoring.writing import write_plan
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.check import check_file, load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.reading.references import Located, has_scheme
from pi2.plan.toml.source import Kind

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests/plans/broken/parts"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "common"
    folder.mkdir()
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, folder)
    return folder / "base.plan.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"schema_version = 3\n{text}")
    return path


def extend(base: Path, text: str) -> ResolvedPlan:
    head = 'extends = ["common/base.plan.toml"]\n'
    return load_plan(write(base.parents[1] / "my.plan.toml", head + text))


def find(path: Path) -> tuple[Diagnostic, ...]:
    return check_file(path).diagnostics


def test_paths_begin_where_they_are_written(base: Path, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    deep = write(tmp_path / "a/deep.plan.toml", 'extends = ["../common/base.plan.toml"]\n')
    mine = load_plan(write(tmp_path / "b/my.plan.toml", 'extends = ["../a/deep.plan.toml"]\n'))
    assert mine.plan.device == "../a/../common/phone.device.toml"
    assert mine.store_path.resolve() == (base.parent / "store").resolve()
    shown = write(tmp_path / "b/shown.plan.toml", "")
    shown.write_text(write_plan(mine))
    assert load_plan(shown).digest == mine.digest
    assert deep.exists()


class Lock:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, reference: str, kind: Kind) -> Located | None:
        if not has_scheme(reference):
            return None
        name = reference.removeprefix("lock:")
        if not (self.folder / name).exists():
            raise UserError.of("P015", f"{reference} is not locked")
        path = self.folder / name
        return Located(path=path, file_name=name, name=reference, reference=reference)

    def join(self, reference: str, relative: str) -> str:
        return f"lock:{relative.removeprefix('./')}"


def test_references_with_a_scheme_are_found_by_a_resolver(base: Path) -> None:
    lock = Lock(base.parent)
    path = write(base.parents[1] / "my.plan.toml", 'extends = ["lock:base.plan.toml"]\n')
    assert load_plan(path, resolver=lock).plan.device == "lock:phone.device.toml"
    path = write(base.parents[1] / "my.plan.toml", 'extends = ["lock:gone.plan.toml"]\n')
    (finding,) = check_file(path, resolver=lock).diagnostics
    assert (finding.code, finding.message) == ("P015", "lock:gone.plan.toml is not locked")
    assert finding.span is not None and (finding.span.line, finding.span.column) == (2, 12)
    assert [item.code for item in find(path)] == ["P020"]
