"""Tokenizers and chat templates of strangers: refused with a diagnostic, whatever is in them."""

import json
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pi2
from pi2.caches import find_cache_folder
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine import model_texts
from pi2.engine.loading import read_tokenizer
from pi2.engine.model_texts import ChatTemplate, make_staying_child
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.sandbox import tokenizer as tokenizers
from pi2.sandbox.child import ChildFailed, Limits, run_child
from pi2.sandbox.coding import decode_ids, encode_text
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer, try_tokenizer
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model, make_tiny
from tests.helpers.patience import PATIENCE_S
from tests.helpers.plans import write_plan
from tests.helpers.slow import keep_quick
from tests.helpers.templates import ENDLESS, FAILING, GREEDY
from tests.helpers.tokenizers import HARMLESS, HOSTILE, write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
Captured = pytest.CaptureFixture[str]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(Path("t.jinja"), source, {}).render(HELLO, variables=variables)


# Chat templates
TOO_MUCH = [*ENDLESS.values(), *GREEDY.values(), *FAILING.values()]


@pytest.mark.parametrize("source", keep_quick(TOO_MUCH, TOO_MUCH[::3]))
def test_a_template_that_takes_too_much_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    if source in GREEDY.values():
        # Half a gigabyte of pages takes a slow machine more than the second that there is.
        monkeypatch.setattr(model_texts, "_LIMITS", Limits(cpu_s=15.0, memory_mib=512))
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        render(source)
    (finding,) = caught.value.diagnostics
    assert finding.code == "P608"
    if source in ENDLESS.values():
        assert "1 s of processor time" in finding.message
    if source in GREEDY.values():
        assert "MiB of memory" in finding.message
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Not a limit of speed: without limits these take hours, or all memory.
    assert time.monotonic() - start < PATIENCE_S
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10


@pytest.mark.slow
def test_a_process_that_stays_has_the_same_limits_for_each_template() -> None:
    def render_there(source: str) -> str:
        return ChatTemplate(Path("t.jinja"), source, {}).render(HELLO, child=child)

    with make_staying_child() as child:
        fine = "{{ messages[0].content }}"
        hostile = [next(iter(kind.values())) for kind in (ENDLESS, GREEDY, FAILING)]
        for source in [*hostile, "{{ nothing.at.all }}", "{{ raise_exception('no') }}"]:
            assert render_there(fine) == "Hello"
            with pytest.raises(UserError) as caught:
                render_there(source)
            with pytest.raises(UserError) as alone:
                render(source)
            assert caught.value.diagnostics[0].code == "P608"
            if source == hostile[0]:
                # A process that stays allows as much as the largest of its requests needs.
                assert "2 s of processor time" in str(caught.value)
            elif source != hostile[1]:
                assert str(caught.value) == str(alone.value)
        process = child._process
        assert [render_there(fine) for _ in range(3)] == ["Hello"] * 3
        assert child._process is not process or process is None
        process = child._process
        assert render_there("{{ 1 }}") == "1"
        assert child._process is process, "it stays"
    assert child._process is None


def test_a_template_sees_no_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI2_TEST_SECRET", "swordfish")
    assert b"swordfish" not in run_child("template", b'["{{ 1 }}", {}]', Limits(5, 512))
    source = (Path(pi2.__file__).parent / "sandbox/child.py").read_text("utf-8")
    assert "os.environ[name] for name in _PASSED_ON" in source


def test_what_cannot_be_written_as_json_is_no_message() -> None:
    with pytest.raises(UserError, match="P608"):
        render("{{ x }}", x={1, 2})


def test_half_a_character_in_a_message_is_found(tmp_path: Path, capsys: Captured) -> None:
    tiny = make_tiny(tmp_path)
    plan = write_plan(tmp_path, tiny)
    (tiny.store / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(["run", str(plan), "--chat", "a\udcff"]) == 2
    assert "error[P607]: the prompt is not UTF-8: half a character" in capsys.readouterr().err


def test_a_process_that_cannot_begin_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ChildFailed, match="no process can be started"):
        run_child("template", b"", Limits(1, 512))


# Tokenizers
@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_nobody_should_use_is_refused(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(TokenizerRefused) as caught:
        try_tokenizer(HOSTILE[name])
    assert str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - start < PATIENCE_S


@pytest.mark.parametrize("name", HARMLESS)
def test_texts_are_neither_cut_nor_filled_up(name: str) -> None:
    assert encode_text(open_tokenizer(HARMLESS[name]), "abc" * 50) == [0, 1, 2] * 50


def test_a_hostile_tokenizer_is_refused_at_conversion_and_at_loading(tmp_path: Path) -> None:
    model = make_model({"predictor": None})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "hidden_act": "relu", "bos_token_id": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    for name in ("words of no characters", "pieces of words without an unknown token"):
        (checkpoint / "tokenizer.json").write_bytes(HOSTILE[name])
        # Describing a model looks whether texts begin with a token; it is no reason to refuse it.
        describe_checkpoint(checkpoint)
        with pytest.raises(UserError, match="P543") as caught:
            convert_checkpoint(checkpoint, model, tmp_path / "store")
        assert len(caught.value.diagnostics) == 1
        assert not (tmp_path / "store").exists()
        with pytest.raises(UserError, match="P605"):
            read_tokenizer(checkpoint / "tokenizer.json")


def test_trial_is_kept_for_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    calls = []

    def count(*arguments: Any) -> bytes:
        calls.append(arguments)
        return run_child(*arguments)

    monkeypatch.setattr(tokenizers, "run_child", count)
    content = write_tokenizer()
    first = try_tokenizer(content)
    assert (first.size, first.begin) == (10, 0)
    assert try_tokenizer(content) == first
    assert len(calls) == 1
    try_tokenizer(content + b"\n")
    assert len(calls) == 2
    (kept,) = {*(tmp_path / "tokenizers").iterdir()} - {
        find_cache_folder("tokenizers") / f"{tokenizers._compute_key(content)}.json"
    }
    kept.write_text("garbled")
    try_tokenizer(content + b"\n")
    assert len(calls) == 3
    # Refusals are found again: whoever mends the library wants to hear of it.
    for _ in range(2):
        with pytest.raises(TokenizerRefused):
            try_tokenizer(HOSTILE["no object"])
    assert len(calls) == 5


def test_without_a_place_for_it_a_trial_is_made_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "file"))
    assert try_tokenizer(write_tokenizer()) == try_tokenizer(write_tokenizer())


class PanicException(BaseException):
    """What the library's panics are called; the real one cannot be imported."""


def test_a_panic_at_a_text_is_a_finding() -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise PanicException("no entry found\nfor key")

    broken: Any = SimpleNamespace(encode=fail, decode=fail)
    for use in (lambda: encode_text(broken, "a"), lambda: decode_ids(broken, [1])):
        with pytest.raises(UserError, match="P605") as caught:
            use()
        assert "panic: no entry found for key" in caught.value.diagnostics[0].message


def test_an_interrupt_is_no_panic() -> None:
    def stop(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    broken: Any = SimpleNamespace(encode=stop)
    with pytest.raises(KeyboardInterrupt):
        encode_text(broken, "a")


def test_half_a_character_is_no_prompt(plan: Path, capsys: Captured) -> None:
    assert run(["run", str(plan), "--prompt", "ab\udcff"]) == 2
    assert "error[P607]: the prompt is not UTF-8: half a character at place 2" in (
        capsys.readouterr().err
    )
    assert run(["run", str(plan), "--prompt", "ab\udcff", "--set", 'backends.cpu="null"']) == 0
