"""Conversations in a terminal."""

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pi2
from pi2.chatting import Session
from pi2.cli import serve

pytest.importorskip("uvicorn", reason="needs the extra serve")
from pi2.serving.answer_reader import Fragment
from tests.helpers.patience import PATIENCE_S
from tests.helpers.servers import make_chat_plan

THINKING = """{%- for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: <think>{% endif %}"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_plan(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def session(plan: Path) -> Iterator[Session]:
    with pi2.load(plan) as model:
        model.keep_prefixes()
        yield Session(model, settings={"max_tokens": 6, "temperature": 0.0})


def say(session: Session, text: str) -> str:
    return "".join(item.text for item in session.ask(text))


def test_a_conversation_goes_on_and_reads_only_what_is_new(session: Session) -> None:
    first = say(session, "hello")
    assert session.turn is not None and session.turn.reused_tokens == 0
    say(session, "and you?")
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1]["content"] == first and session.turn.reused_tokens > 80
    assert "tokens/s" in session.turn.describe()
    assert "known" in session.run_command("/stats")


def test_a_system_message_reaches_a_template_that_refuses_it(tmp_path: Path) -> None:
    template = """{% for m in messages %}{% if m.role == 'system' %}
{{ raise_exception('no system') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
    with pi2.load(make_chat_plan(tmp_path, template=template)) as model:
        session = Session(model, system="Be brief.", settings={"max_tokens": 1})
        say(session, "hello")
        expected = model.begin(model.encode_text("<user>Be brief.<user>hello"))
    assert session.turn is not None and session.turn.prompt_tokens == len(expected)


def test_an_answer_is_read_as_it_was_drawn_and_not_as_its_text_is_encoded(session: Session) -> None:
    session.settings |= {"max_tokens": 120, "temperature": 1.0, "seed": 5}
    answer = say(session, "hello")
    first = session.turn
    assert first is not None and first.finish_reason == "eos"
    assert len(session.model.encode_text(answer)) > first.tokens + 10, "its text is more tokens"
    session.settings["max_tokens"] = 2
    say(session, "and you?")
    second = session.turn
    assert second is not None and second.reused_tokens >= first.prompt_tokens + first.tokens - 1


def test_an_answer_that_is_stopped_is_part_of_the_conversation(session: Session) -> None:
    session.settings["max_tokens"] = 500
    answer = session.ask("hello")
    said = next(answer).text + next(answer).text
    answer.close()  # type: ignore[attr-defined]
    assert session.messages[-1] == {"role": "assistant", "content": said}
    assert session.turn is not None and session.turn.finish_reason == "stopped"
    session.settings["max_tokens"] = 3
    assert say(session, "again")


def test_commands_change_the_conversation(session: Session, tmp_path: Path) -> None:
    assert session.run_command("/set seed 4") == "seed = 4"
    assert "seed = 4" in session.run_command("/set")
    assert session.run_command("/set seed") == "seed is the plan's"
    say(session, "hello")
    file = tmp_path / "talk.json"
    session.run_command(f"/save {file}")
    session.run_command("/system Be kind.")
    assert session.messages == [{"role": "system", "content": "Be kind."}]
    session.run_command("/load " + str(file))
    assert len(session.messages) == 2 and session.system is None
    session.run_command("/new")
    assert session.messages == [] and "/save" in session.run_command("/help")


@pytest.mark.parametrize(
    "line", ["/nothing", "/set warmth 1", "/set seed x", "/save", "/load /nowhere", "/save /no/x"]
)
def test_what_is_not_understood_is_said(session: Session, line: str, tmp_path: Path) -> None:
    with pytest.raises(pi2.UserError, match="P684"):
        session.run_command(line)
    broken = tmp_path / "broken.json"
    broken.write_text('{"messages": 1}')
    with pytest.raises(pi2.UserError, match="P684"):
        session.run_command(f"/load {broken}")
    with pytest.raises(pi2.UserError, match="P604"):
        session.run_command("/set temperature -1")


def test_a_file_that_is_refused_changes_nothing_and_leaves_nothing(
    session: Session, tmp_path: Path
) -> None:
    session.answers = [{"role": "user", "content": "kept"}]
    before = dict(session.settings)
    refused: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([], {"temperature": -1}, "P604"),
        ([], {"max_tokens": 0}, "P604"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], {}, "P684"),
    ]
    for messages, settings, code in refused:
        file = tmp_path / "talk.json"
        file.write_text(json.dumps({"messages": messages, "settings": settings}))
        with pytest.raises(pi2.UserError, match=code):
            session.run_command(f"/load {file}")
        assert [message["content"] for message in session.messages] == ["kept"]
        assert session.settings == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(pi2.UserError, match="P684"):
        session.run_command(f"/save {tmp_path / 'folder'}")
    assert {path.name for path in tmp_path.iterdir()} == {"talk.json", "folder"}


def test_interrupt_in_a_terminal_stops_answer_and_not_program(plan: Path, tmp_path: Path) -> None:
    with pi2.load(plan) as model:
        ids = model.encode_chat([{"role": "user", "content": "hello"}])
        begun = model.generate(ids, max_tokens=6).result.text.encode()
    assert begun.isalnum()
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "pi2", "chat", str(plan)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(tmp_path)},
        preexec_fn=partial(take_terminal, terminal),
    ) as process:
        os.close(terminal)
        shown = b""

        def wait_for(word: bytes) -> None:
            nonlocal shown
            deadline = time.monotonic() + PATIENCE_S
            while word not in shown:
                assert time.monotonic() < deadline, shown[-2000:]
                if select.select([screen], [], [], 0.1)[0]:
                    shown += os.read(screen, 1 << 16)
            shown = shown.partition(word)[2]

        def type_keys(keys: bytes) -> None:
            # Between questions the terminal itself would take keys, and an end of file with them.
            wait_for(b"\x1b[?2004h")
            os.write(screen, keys)

        try:
            wait_for(b"/help lists commands")
            type_keys(b"hello\r")
            wait_for(begun)  # the answer is under way
            os.write(screen, b"\x03")
            wait_for(b"tokens (stopped)")
            type_keys(b"/set max_tokens 2\r")
            wait_for(b"max_tokens = 2")
            type_keys(b"again\r")
            wait_for(b"2 tokens (length)")
            type_keys(b"\x04")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    os.close(screen)


def take_terminal(terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_reasoning_is_told_apart(tmp_path: Path) -> None:
    with pi2.load(make_chat_plan(tmp_path, template=THINKING)) as model:
        session = Session(model, settings={"max_tokens": 4, "temperature": 0.0})
        assert {item.part for item in session.ask("hello")} == {"reasoning"}
        assert session.messages[-1]["content"] == ""


def test_keys_send_break_lines_recall_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = serve.make_prompt()
        keys.send_text("one\x1b\rtwo\r")
        assert read() == "one\ntwo"
        keys.send_text("forget it\x03three\r")
        assert read() == "three"
        read = serve.make_prompt()  # as another run does
        keys.send_text("\x1b[A\r")
        assert read() == "three"
        keys.send_text("\x04")
        assert read() is None


def test_an_answer_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Speaker:
        turn = None

        def ask(self, text: str) -> Iterator[Fragment]:
            yield Fragment("reasoning", "hm\x1b[2J")
            yield Fragment("content", "a\tb\n\x9b31m\u202ec\x7f")

    serve.answer(Speaker(), "?", dim=True)  # type: ignore[arg-type]
    gone = "\ufffd"
    assert capsys.readouterr().out == (
        f"\x1b[2mhm{gone}[2J\x1b[0ma\tb\n{gone}31m{gone}c{gone}\x1b[0m\n"
    )


def test_text_may_be_piped_into_it(plan: Path) -> None:
    lines = "hello\n\n/set max_tokens 2\nagain\n/exit\nnever read\n"
    done = CliRunner().invoke(serve.chat_command, [str(plan), "--max-tokens", "3"], input=lines)
    assert done.exit_code == 0, done.output
    assert [len(line) for line in done.stdout.splitlines()] == [3, 2]
    assert "max_tokens = 2" in done.stderr and done.stderr.count("tokens/s") == 2


def test_a_model_without_a_chat_template_is_refused_at_once() -> None:
    done = CliRunner().invoke(serve.chat_command, ["demo"], input="hello\n")
    assert isinstance(done.exception, pi2.UserError)
    (finding,) = done.exception.diagnostics
    assert finding.code == "P609"
    assert "`pi2 run demo --prompt TEXT`" in (finding.help or "")
