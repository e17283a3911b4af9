"""Documents that extend others: what is merged, replaced, joined and removed, and from where."""

import shutil
from pathlib import Path

import pytest

from pi2.authoring.writing import write_plan
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.check import check_file, load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
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


def test_a_plan_that_only_extends_is_the_plan_that_it_extends(base: Path) -> None:
    same = extend(base, 'device = "common/phone.device.toml"\nweights = "store"\n')
    assert same.digest == load_plan(base).digest
    mine, theirs = extend(base, ""), load_plan(base)
    assert mine.layers == theirs.layers and mine.plan.memory == theirs.plan.memory
    assert mine.store_path.resolve() == theirs.store_path.resolve()


@pytest.mark.parametrize(
    ("join", "selectors"),
    [(None, ["3"]), ("append", ["0-1", "7", "3"]), ("prepend", ["3", "0-1", "7"])],
)
def test_arrays_are_replaced_or_joined(base: Path, join: str | None, selectors: list[str]) -> None:
    text = f'inherit.layers.overrides = "{join}"\n' if join else ""
    text += '[[layers.overrides]]\nselect = "3"\nhot = 0.1\n'
    assert [item.select for item in extend(base, text).plan.layers.overrides] == selectors


def test_removed_keys_have_their_defaults_again_or_are_written_anew(base: Path) -> None:
    assert load_plan(base).plan.prefill.chunk == 64
    mine = extend(base, 'remove = ["prefill", "layers.overrides"]\n')
    assert mine.plan.prefill.chunk == 128 and mine.plan.layers.overrides == ()
    mine = extend(base, 'remove = ["layers.split"]\nlayers.split = { cpu = 1.0 }\n')
    assert dict(mine.plan.layers.split) == {"cpu": 1.0}


def read_device(path: Path) -> Device:
    report = check_file(path)
    assert report.diagnostics == ()
    assert isinstance(report.document, Device)
    return report.document


def test_entries_with_an_id_merge_by_it(base: Path) -> None:
    head = 'extends = ["common/phone.device.toml"]\nid = "pad"\n'
    path = base.parents[1] / "pad.device.toml"
    cores = '[[units.cpu.clusters]]\nid = "little"\ncores = 7\n'
    cores += '[[units.cpu.clusters]]\nid = "mid"\ncores = 2\n'
    clusters = read_device(write(path, head + cores)).units["cpu"].clusters
    assert [(item.id, item.cores) for item in clusters] == [("big", 1), ("little", 7), ("mid", 2)]
    assert clusters[1].frequency == 2.2e9
    joined = head + 'inherit.units.cpu.clusters = "prepend"\n' + cores
    clusters = read_device(write(path, joined)).units["cpu"].clusters
    assert [item.id for item in clusters] == ["mid", "big", "little"]
    removed = head + 'remove = ["units.cpu.clusters.big", "units.npu"]\n' + cores
    device = read_device(write(path, removed))
    assert [item.id for item in device.units["cpu"].clusters] == ["little", "mid"]
    assert list(device.units) == ["cpu"]


def test_overrides_with_an_id_are_changed_and_removed_by_it(base: Path) -> None:
    folder = base.parents[1]
    text = '[[layers.overrides]]\nid = "{}"\nselect = "{}"\nhot = {}\n'
    entries = text.format("first", "0-1", 0.1) + text.format("last", "7", 0.15)
    head = 'extends = ["common/base.plan.toml"]\n'
    write(folder / "named.plan.toml", head + entries)
    named = 'extends = ["named.plan.toml"]\n'
    change = '[[layers.overrides]]\nid = "last"\nhot = 0.2\n'
    mine = load_plan(write(folder / "my.plan.toml", named + change))
    assert [layer.hot for layer in mine.layers][-2:] == [0.2, 0.2]
    assert [item.select for item in mine.plan.layers.overrides] == ["0-1", "7"]
    mine = load_plan(
        write(folder / "my.plan.toml", named + 'remove = ["layers.overrides.first"]\n')
    )
    assert [item.id for item in mine.plan.layers.overrides] == ["last"]


def test_later_documents_are_stronger(base: Path) -> None:
    folder = base.parents[1]
    write(folder / "slow.toml", "io.threads = 1\nprefill.chunk = 32\n")
    write(folder / "fast.toml", "io.threads = 16\n")
    head = 'extends = ["common/base.plan.toml", "slow.toml", "fast.toml"]\n'
    mine = load_plan(write(folder / "my.plan.toml", head))
    assert (mine.plan.io.threads, mine.plan.prefill.chunk) == (16, 32)


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


def test_shipped_plans_are_extended_by_their_names(tmp_path: Path) -> None:
    mine = load_plan(write(tmp_path / "my.plan.toml", 'extends = ["demo"]\nio.threads = 3\n'))
    assert mine.plan.io.threads == 3 and mine.store_path == ROOT / "plans/stores/pi2-demo"
    path = write(tmp_path / "my.plan.toml", 'extends = ["oneplus-12/bamboo-7b"]\n')
    assert check_file(path).files["plan"].values["device"] == "oneplus-12"


def test_a_file_may_come_by_two_ways(base: Path) -> None:
    folder = base.parents[1]
    for name in ("left", "right"):
        write(folder / f"{name}.toml", f'extends = ["common/base.plan.toml"]\nname = "{name}"\n')
    mine = load_plan(write(folder / "my.plan.toml", 'extends = ["left.toml", "right.toml"]\n'))
    assert mine.plan.name == "right"


def test_many_ways_end_at_a_limit(base: Path) -> None:
    folder = base.parents[1]
    for level in range(7):
        entries = ", ".join(f'"{level + 1}.toml"' for _ in range(16))
        write(folder / f"{level}.toml", f"extends = [{entries}]\n")
    write(folder / "7.toml", "")
    path = write(folder / "my.plan.toml", 'extends = ["0.toml"]\n')
    assert [item.code for item in find(path)] == ["P022"]


def test_set_is_stronger_than_everything(base: Path) -> None:
    extend(base, "io.threads = 9\n")
    path = base.parents[1] / "my.plan.toml"
    assert load_plan(path, overrides={"io.threads": 2}).plan.io.threads == 2
    with pytest.raises(UserError) as caught:
        load_plan(path, overrides={"io.threads": 0})
    assert str(caught.value.diagnostics[0].span) == "--set:1:14"
    with pytest.raises(UserError, match="P017"):
        load_plan(path, overrides={"extends": ["demo"]})


def test_a_finding_says_by_which_way_its_file_came(base: Path) -> None:
    folder = base.parents[1]
    base.write_text(base.read_text().replace("compute = 4", "compute = 0"))
    write(folder / "middle.toml", 'extends = ["common/base.plan.toml"]\n')
    path = write(folder / "my.plan.toml", '\nextends = ["middle.toml"]\n')
    (finding,) = find(path)
    assert finding.span is not None and finding.span.file.endswith("common/base.plan.toml")
    assert finding.notes == (
        f'{path}:3:12: extends "middle.toml"',
        f'{folder / "middle.toml"}:2:12: extends "common/base.plan.toml"',
    )


def test_a_missing_document_hides_no_other_mistake(base: Path) -> None:
    path = write(base.parents[1] / "my.plan.toml", 'extends = ["gone.toml"]\nio.threads = 0\n')
    assert [item.code for item in find(path)] == ["P020", "P104"]


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
