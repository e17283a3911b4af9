"""`pi2 lsp` over its standard input and output, asked by a scripted editor."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.helpers.patience import PATIENCE_S
from tests.helpers.sharing import DEVICE
from tests.helpers.tables import in_table

ROOT = Path(__file__).parents[2]
DEMO = (ROOT / "plans/demo.plan.toml").read_text("utf-8")


class Editor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pi2", "lsp"],
            cwd=folder,
            env={**os.environ, "PI2_CACHE_DIR": str(folder / "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.messages: Queue[dict[str, Any]] = Queue()
        self.number = 0
        self.version = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while header := self.process.stdout.readline():
            length = int(header.partition(b":")[2])
            while self.process.stdout.readline().strip():
                pass
            self.messages.put(json.loads(self.process.stdout.read(length)))

    def send(self, method: str, params: object, **more: object) -> None:
        data = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self.process.stdin.flush()

    def ask(self, method: str, params: object) -> Any:
        self.number += 1
        self.send(method, params, id=self.number)
        while True:
            message = self.messages.get(timeout=PATIENCE_S)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    def wait_for_findings(self, name: str) -> list[dict[str, Any]]:
        while True:
            message = self.messages.get(timeout=PATIENCE_S)
            if message.get("method") == "textDocument/publishDiagnostics":
                if message["params"]["uri"] == self.locate(name):
                    found: list[dict[str, Any]] = message["params"]["diagnostics"]
                    return found

    def locate(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def open(self, name: str, text: str) -> list[dict[str, Any]]:
        """Open a file with a text that is not on disk; return the findings about it."""
        document = {"uri": self.locate(name), "languageId": "toml", "version": 1, "text": text}
        self.send("textDocument/didOpen", {"textDocument": document})
        return self.wait_for_findings(name)

    def change(self, name: str, text: str) -> list[dict[str, Any]]:
        self.version += 1
        document = {"uri": self.locate(name), "version": self.version + 1}
        change = {"textDocument": document, "contentChanges": [{"text": text}]}
        self.send("textDocument/didChange", change)
        return self.wait_for_findings(name)

    def point(self, name: str, text: str, at: str, offset: int = 0) -> dict[str, Any]:
        place = text.index(at) + offset
        before = text[:place]
        line = before.count("\n")
        column = len(before[before.rfind("\n") + 1 :].encode("utf-16-le")) // 2
        position = {"line": line, "character": column}
        return {"textDocument": {"uri": self.locate(name)}, "position": position}

    def complete(self, name: str, marked: str) -> dict[str, dict[str, Any]]:
        """What is offered where ``|`` stands in the text."""
        self.change(name, marked.replace("|", "", 1))
        items = self.ask("textDocument/completion", self.point(name, marked, "|"))["items"]
        return {item["label"]: item for item in items}


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("my plans")
    running = Editor(folder)
    answer = running.ask(
        "initialize", {"processId": None, "rootUri": folder.as_uri(), "capabilities": {}}
    )
    assert answer["serverInfo"]["name"] == "pi2"
    running.send("initialized", {})
    yield running
    running.ask("shutdown", None)
    running.send("exit", None)
    assert running.process.wait(PATIENCE_S) == 0


NAME = "my.plan.toml"
PLAN = DEMO.replace("plans/", "") + '\n[decode]\npredictor = "low-rank"\n'


def test_findings_stand_at_their_places(editor: Editor) -> None:
    assert editor.open(NAME, PLAN) == []
    broken = PLAN.replace('budget = "', 'budgte = "')
    found = editor.change(NAME, broken)
    assert {item["code"] for item in found} == {"P101"}
    (item,) = found
    line = broken[: broken.index("budgte")].count("\n")
    assert item["range"] == {
        "start": {"line": line, "character": 0},
        "end": {"line": line, "character": 6},
    }
    assert "help: did you mean `budget`?" in item["message"]
    assert (item["severity"], item["source"]) == (1, "pi2")
    assert editor.change(NAME, PLAN) == []


def test_a_text_that_is_no_toml_is_a_finding(editor: Editor) -> None:
    (item,) = editor.open(NAME, "schema_version = \n")
    assert item["code"] == "P010"


def test_a_finding_in_the_device_stands_where_the_plan_names_it(editor: Editor) -> None:
    device = editor.folder / "acme-12.device.toml"
    device.write_text(DEVICE.replace('kind = "cpu"', 'kind = "abacus"'))
    text = PLAN.replace('device = "host"', 'device = "./acme-12.device.toml"  # 😀')
    (item,) = editor.open(NAME, text)
    assert item["code"] == "P104" and item["message"].startswith("acme-12.device.toml: ")
    assert item["range"]["start"]["line"] == text[: text.index("device = ")].count("\n")
    (related,) = item["relatedInformation"]
    assert related["location"]["uri"] == device.as_uri()


def test_wide_characters_are_counted_as_editors_do(editor: Editor) -> None:
    (item,) = editor.open(NAME, PLAN.replace("split = {", "split = { '😀😀' = 0.0,"))
    assert item["range"]["end"]["character"] - item["range"]["start"]["character"] == 6


def test_hover_says_what_a_key_means_and_where_its_value_is_from(editor: Editor) -> None:
    (editor.folder / "base.plan.toml").write_text(PLAN)
    text = 'schema_version = 3\nextends = ["base.plan.toml"]\n[kv]\ncontext = 128\n'
    assert editor.open(NAME, text) == []
    answer = editor.ask("textDocument/hover", editor.point(NAME, text, "context"))
    shown = answer["contents"]["value"]
    assert "**`kv.context`** — Context length in tokens, prompt and answer together." in shown
    assert "Derived if it is not stated.\n\na whole number; for example `4096`" in shown
    assert "my.plan.toml:4:11: replaces it by 128" in shown
    assert "base.plan.toml:" in shown and "KiB" in shown
    assert editor.ask("textDocument/hover", editor.point(NAME, text, "= 128")) is None
    assert editor.open(NAME, PLAN) == []
    answer = editor.ask("textDocument/hover", editor.point(NAME, PLAN, "schema_version = "))
    assert "; required" in answer["contents"]["value"]


def test_completion_of_keys_tables_and_values(editor: Editor) -> None:
    editor.open(NAME, PLAN)
    keys = editor.complete(NAME, PLAN.replace("[memory]\n", "[memory]\n|\n"))
    assert "segments" not in keys
    keys = editor.complete(NAME, "schema_version = 3\n[memory.segments]\nco|")
    assert keys["cold"]["textEdit"]["newText"] == "cold"
    assert "on demand" in keys["cold"]["documentation"]["value"]
    assert editor.complete(NAME, "[lay|")["layers"]["detail"].startswith("a table")
    assert set(editor.complete(NAME, "[decode]\npredictor = |")) >= {"none", "gate", "low-rank"}
    offered = editor.complete(NAME, "[decode]\npredictor = |")["gate"]["textEdit"]
    assert offered["newText"] == '"gate"'
    offered = editor.complete(NAME, '[decode]\npredictor = "ga|"')["gate"]["textEdit"]
    assert offered["newText"] == "gate"
    assert offered["range"]["end"]["character"] - offered["range"]["start"]["character"] == 2


def test_completion_of_names(editor: Editor) -> None:
    (editor.folder / "acme-12.device.toml").write_text(DEVICE)
    editor.open(NAME, PLAN)
    devices = editor.complete(NAME, 'schema_version = 3\ndevice = "|')
    assert {"oneplus-12", "host", "acme-12.device.toml"} <= set(devices)
    assert "pi2-demo" in editor.complete(NAME, 'model = "pi|')
    units = editor.complete(NAME, 'device = "oneplus-12"\n[layers]\nsplit = { |')
    assert set(units) == {"cpu", "gpu", "npu"}
    for place in (
        "[units.|",
        "[memory.units.|",
        "[projections]\nattention = { |",
        "[projections]\nhead = { |",
        '[prefill]\nunit = "|',
    ):
        offered = editor.complete(NAME, f'device = "oneplus-12"\n{place}')
        assert set(offered) == {"cpu", "gpu", "npu"}, place


def apply(text: str, edit: dict[str, Any]) -> str:
    """The text after an edit of one line (of plain characters)."""
    lines = text.split("\n")
    start, end = edit["range"]["start"], edit["range"]["end"]
    assert start["line"] == end["line"]
    line = lines[start["line"]]
    lines[start["line"]] = line[: start["character"]] + edit["newText"] + line[end["character"] :]
    return "\n".join(lines)


def ask_fixes(editor: Editor, name: str, finding: dict[str, Any]) -> list[dict[str, Any]]:
    params = {
        "textDocument": {"uri": editor.locate(name)},
        "range": finding["range"],
        "context": {"diagnostics": [finding] if "message" in finding else []},
    }
    found: list[dict[str, Any]] = editor.ask("textDocument/codeAction", params)
    return found


@in_table
def test_a_quick_fix_does_what_the_help_says(
    editor: Editor, old: str, new: str, code: str, title: str | None
) -> None:
    broken = PLAN.replace(old, new)
    assert broken != PLAN
    (item,) = [item for item in editor.open(NAME, broken) if item["code"] == code]
    fixes = ask_fixes(editor, NAME, item)
    if title is not None:
        assert fixes[0]["title"] == title
    for fix in fixes:
        assert fix["kind"] == "quickfix"
        (edits,) = fix["edit"]["changes"].values()
        left = editor.change(NAME, apply(broken, edits[0]))
        assert code not in {other["code"] for other in left}, (fix, left)
        assert [other["code"] for other in fix["diagnostics"]] == [code]
        assert editor.change(NAME, broken)


def test_nothing_is_fixed_where_nothing_is_wrong(editor: Editor) -> None:
    assert editor.open(NAME, PLAN) == []
    place = editor.point(NAME, PLAN, "budget")["position"]
    assert ask_fixes(editor, NAME, {"range": {"start": place, "end": place}}) == []


ADVICE = re.compile(r'^help: .*?write (\w+ = "[^"]+")', re.MULTILINE)


def test_a_plan_written_with_completion_and_messages_alone_is_sound(editor: Editor) -> None:
    """What is offered is taken; what is missing is what the messages name."""
    text = "schema_version = 3\n"
    editor.open(NAME, text)
    values = {"device": '"host"', "model": '"pi2-demo"', "weights": '"stores/pi2-demo"'}
    values |= {"layers.split": "{ cpu = 1.0 }", "layers.hot": "0.1"}
    values |= {"memory.budget": '"1 GiB"', "kv.context": "512", "bundle.stride": '"4 KiB"'}
    for _ in range(40):
        found = editor.change(NAME, text)
        missing = [item for item in found if item["code"] == "P102"]
        wanted = [item for item in found if ADVICE.search(item["message"])]
        if not missing and not wanted:
            break
        lines = text.splitlines(keepends=True)
        item = (missing or wanted)[0]
        number = item["range"]["start"]["line"]
        if not missing:  # a size that is too small: the message says which is enough
            advice = ADVICE.search(item["message"])
            assert advice is not None
            lines[number] = advice[1] + "\n"
        else:
            _, name, _, *rest = item["message"].splitlines()[0].split("`")
            table = rest[0] if rest else ""
            header = f"{table}.{name}" if table else name
            if header in ("memory", "memory.segments", "bundle", "layers", "kv"):
                assert name in editor.complete(NAME, f"{text}[{table and f'{table}.'}|")
                lines.append(f"[{header}]\n")
            else:
                place = lines.index(f"[{table}]\n") + 1 if table else 1
                value = values.get(header, '"64 MiB"')
                lines.insert(place, f"{name} = {value}\n")
        text = "".join(line if line.endswith("\n") else line + "\n" for line in lines)
    assert found == [], (text, found)


def test_definitions_of_documents_and_units(editor: Editor) -> None:
    (editor.folder / "base.plan.toml").write_text(PLAN)
    device = editor.folder / "acme-12.device.toml"
    device.write_text(DEVICE)
    text = (
        'schema_version = 3\nextends = ["base.plan.toml"]\ndevice = "acme-12.device.toml"\n'
        'model = "pi2-demo"\n[layers]\nsplit = { cpu = 1.0 }\n'
    )
    editor.open(NAME, text)

    def find(at: str) -> dict[str, Any]:
        place = editor.point(NAME, text, at, 1)
        found: dict[str, Any] = editor.ask("textDocument/definition", place)
        return found

    assert find("base.plan")["uri"] == (editor.folder / "base.plan.toml").as_uri()
    assert find("acme-12")["uri"] == device.as_uri()
    assert find("pi2-demo")["uri"].endswith("/models/pi2-demo.model.toml")
    unit = find("cpu")
    assert unit["uri"] == device.as_uri()
    assert unit["range"]["start"]["line"] == DEVICE[: DEVICE.index("[units.cpu]")].count("\n")
    assert find("schema_version") is None


def test_other_files_are_left_alone(editor: Editor) -> None:
    document = {"uri": editor.locate("x.toml"), "languageId": "toml", "version": 1, "text": "?"}
    editor.send("textDocument/didOpen", {"textDocument": document})
    assert editor.ask("textDocument/hover", editor.point("x.toml", "?", "?")) is None
