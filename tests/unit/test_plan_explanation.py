"""`pi2 show` and `pi2 explain KEY`: what a value is, where it comes from, what it costs."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tomli

from pi2.authoring.explanation import describe_path, explain_value, list_keys, parse_path
from pi2.cli import validate as command
from pi2.cli.main import run
from pi2.fitting.check import check_file, check_plan, load_pages
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.reading.compose import trace_value
from pi2.plan.reading.references import DOCUMENTS
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import format_path
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table
from tools import write_rule_docs

ROOT = Path(__file__).parents[2]


PARTS = ROOT / "tests/plans/broken/parts"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, tmp_path)
    path = tmp_path / "my.plan.toml"
    path.write_text(
        'schema_version = 3\nextends = ["base.plan.toml"]\n'
        'inherit.layers.overrides = "append"\n'
        'memory.segments.hot = "17 MiB"\n'
        '[[layers.overrides]]\nselect = "3"\nhot = 0.1\n'
    )
    monkeypatch.chdir(tmp_path)
    return Path("my.plan.toml")


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_key_is_explained_as_the_reference_spells_it(kind: Kind) -> None:
    for path in list_keys(DOCUMENTS[kind]):
        found = describe_path(format_path(path))
        assert any(item.kind == kind and item.doc is not None for item in found), path


def test_a_value_has_a_history(plan: Path) -> None:
    report = check_plan(plan, overrides={"io.threads": 2})
    source = report.files["plan"]
    steps = trace_value(source, ("memory", "segments", "hot"))
    assert [(step.place, step.verb, step.value) for step in steps] == [
        ("base.plan.toml:15:7", "sets", "16 MiB"),
        ("my.plan.toml:4:23", "replaces it by", "17 MiB"),
    ]
    assert [step.verb for step in trace_value(source, ("layers", "overrides"))] == [
        "sets",
        "appends",
    ]
    assert [step.place for step in trace_value(source, ("layers", "overrides", 2, "hot"))] == [
        "my.plan.toml:7:7"
    ]
    steps = trace_value(source, ("io", "threads"))
    assert [(step.file, step.value) for step in steps] == [("base.plan.toml", 4), ("--set", 2)]
    assert trace_value(source, ("sampling", "seed")) == ()


def test_set_has_a_history_in_a_plain_plan(plan: Path) -> None:
    report = check_plan(Path("base.plan.toml"), overrides={"kv.context": 900})
    steps = trace_value(report.files["plan"], ("kv", "context"))
    assert [(step.file, step.verb) for step in steps] == [
        ("base.plan.toml", "sets"),
        ("--set", "replaces it by"),
    ]


def test_a_layer_leads_to_what_sets_it(plan: Path) -> None:
    report = check_plan(plan)
    assert explain_value(report, "plan", parse_path("layers.3.hot")).path == (
        "layers",
        "overrides",
        2,
        "hot",
    )
    split = explain_value(report, "plan", parse_path("layers.3.split.npu"))
    assert (split.path, split.value) == (("layers", "split", "npu"), 0.1)
    neurons = round(0.1 * 2048)
    (cost,) = split.costs
    assert f"{neurons} hot neurons of 4096 bytes, {approximate_bytes(neurons * 4096)}" in cost


def test_what_a_value_costs(plan: Path) -> None:
    report = check_plan(plan)
    assert report.resolved is not None
    needs = dict(report.resolved.needs.items())
    for key, segment in [("kv.context", "kv"), ("decode.predictor", "predictor")]:
        costs = explain_value(report, "plan", parse_path(key)).costs
        assert f"{segment}: needs {approximate_bytes(needs[segment].bytes)} (" in costs[0]
    assert explain_value(report, "plan", parse_path("sampling.top_k")).costs == ()


def test_paths_are_written_in_several_ways() -> None:
    assert parse_path("layers.overrides[0].hot") == ("layers", "overrides", 0, "hot")
    assert parse_path("layers.overrides.0.hot") == ("layers", "overrides", 0, "hot")
    assert parse_path('units."npu.v2".kind') == ("units", "npu.v2", "kind")


@pytest.mark.parametrize("name", ["phone.device.toml", "small.model.toml"])
def test_show_prints_devices_and_models(name: str, plan: Path, ask: Ask) -> None:
    kind = name.split(".")[1]
    text = ask(["show", name]).out
    Path(name).write_text(text)
    assert check_file(Path(name)).diagnostics == ()
    assert ask(["show", "--document", kind, str(plan)]).out == text
    assert tomli.loads(text)["schema_version"] == 2


def test_show_prints_shipped_devices_as_they_are(ask: Ask) -> None:
    for path in sorted((ROOT / "plans/devices").glob("*.toml")):
        document = check_file(path).document
        assert document is not None
        shown = json.dumps(tomli.loads(ask(["show", str(path)]).out))
        assert type(document).model_validate_json(shown) == document


PAGES = load_pages()


def find_used_codes() -> set[str]:
    found: set[str] = set()
    for folder in ("pi2", "pi2/backends", "tools"):  # a walk does not follow the link
        for parent, _, names in os.walk(ROOT / folder):
            for name in names:
                if name.endswith((".py", "stated.toml", "references.toml")):
                    text = (Path(parent) / name).read_text(encoding="utf-8")
                    found.update(re.findall(r"\bP\d{3}\b", text))
    return found


# Pages
def test_codes_in_the_source_are_those_that_have_pages() -> None:
    assert find_used_codes() == set(PAGES)


def test_pages_are_complete_sentences() -> None:
    for page in PAGES.values():
        for text in (page.what, page.why, page.example, page.fix):
            assert text.endswith("."), page.code
            assert "``" not in text, page.code
            assert text.count("`") % 2 == 0, page.code
        assert "\n" not in page.what


def test_lines_of_a_page_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    for code in PAGES:
        assert run(["explain", code]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= command.COLUMNS


def test_explain_lists_all_codes(ask: Ask) -> None:
    lines = ask(["explain"]).out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(PAGES)
    assert "P210  Split shares do not add up to 1." in lines


@in_table
def test_an_unknown_code_gets_near_ones(code: str, near: str, ask: Ask) -> None:
    error = ask(["explain", code], 2).err
    assert error.startswith("error[P018]: there is no code '") and near in error
    assert "\x1b" not in error


def test_terminal_gets_colours_and_same_words(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr(command, "wants_colour", lambda _: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = ask(["explain", "P210"]).out
    assert "\x1b[" in output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert "P210: Split shares do not add up to 1." in plain
    assert "Fix: change one of the shares; 0 leaves a unit out." in plain


def test_documents_are_as_the_rules_say() -> None:
    differing = write_rule_docs.find_differences(write_rule_docs.FOLDER)
    assert differing == [], "run `python tools/write_rule_docs.py`"


def test_the_index_links_to_the_section_of_every_code() -> None:
    index = write_rule_docs.write_index(PAGES)
    links = re.findall(r"^\| \[(P\d+)\]\((P\dxx\.md)#(p\d+)\)", index, re.MULTILINE)
    assert [code for code, _, _ in links] == sorted(PAGES)
    files = write_rule_docs.make_files()
    for code, name, anchor in links:
        assert anchor == code.lower()
        assert f"\n## {code}\n" in files[name]
