"""Chat templates: the prompts that transformers makes, and nothing outside of the sandbox."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

import pi2
from pi2.cli.run import run_command as command
from pi2.diagnostics import UserError
from pi2.engine.model_texts import ChatTemplate, read_chat_template
from pi2.importing.convert import convert_checkpoint
from pi2.plan.documents.model_parts import Tokenizer as Settings
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model, make_tiny, make_tokenizer
from tests.helpers.patience import PATIENCE_S
from tests.helpers.plans import write_plan
from tests.helpers.tables import in_table

GOLDEN = Path(__file__).resolve().parents[1] / "golden/chat"
CONVERSATIONS = json.loads((GOLDEN / "conversations.json").read_text("utf-8"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
HELLO = [{"role": "user", "content": "Hello"}]
SIMPLE = "{% for m in messages %}<begin>{{ m.role }}:{{ m.content }}\n{% endfor %}"


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    template = ChatTemplate(Path("chat_template.jinja"), source, TOKENS)
    return template.render(messages, variables=variables)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["brackets", "chatml", "headers"])
def test_prompts_are_those_of_transformers(name: str, conversation: str) -> None:
    source = (GOLDEN / f"{name}.jinja").read_text("utf-8")
    stated = CONVERSATIONS[conversation]
    expected = GOLDEN / f"{name}.{conversation}.txt"
    if expected.exists():
        prompt = render(source, stated["messages"], tools=stated.get("tools"))
        assert prompt == expected.read_bytes().decode()
    else:
        refusal = expected.with_suffix(".refused").read_text("utf-8")
        with pytest.raises(UserError, match="P608") as error:
            render(source, stated["messages"])
        assert refusal in error.value.diagnostics[0].message


def test_templates_read_variables_and_the_date() -> None:
    source = (GOLDEN / "chatml.jinja").read_text("utf-8")
    assert render(source, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert render("{{ strftime_now('%Y') }}") >= "2024"
    without = ChatTemplate(Path("t"), source, TOKENS).render(HELLO, add_generation_prompt=False)
    assert without.endswith("Hello<|im_end|>\n")


@in_table
def test_a_template_that_fails_or_leaves_the_sandbox_is_a_finding(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        render(source)
    assert [finding.code for finding in error.value.diagnostics] == ["P608"]
    assert time.monotonic() - start < PATIENCE_S


# Where templates come from
def read(folder: Path, name: str | None = None, **settings: Any) -> ChatTemplate:
    tokenizer = Tokenizer.from_buffer(make_tokenizer(288))
    return read_chat_template(folder, tokenizer, Settings(**settings), name)


def write_config(folder: Path, config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def test_special_tokens_are_texts_or_tables_and_else_those_of_the_model(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        {
            "chat_template": "{{ bos_token }}{{ pad_token }}{{ eos_token }}",
            "bos_token": {"content": "<s>", "special": True},
            "pad_token": "<pad>",
        },
    )
    assert read(tmp_path, bos=256, eos=(257, 256)).render(HELLO) == "<s><pad><end>"
    # What is stated as null is none.
    write_config(tmp_path, {"chat_template": "[{{ bos_token }}]", "bos_token": None})
    assert read(tmp_path, bos=256).render(HELLO) == "[]"


def test_named_templates_and_the_file_that_goes_first(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_config(tmp_path, {"chat_template": named})
    assert read(tmp_path).render(HELLO) == "a"
    assert read(tmp_path, "tool_use").render(HELLO) == "b"
    with pytest.raises(UserError, match="P609") as error:
        read(tmp_path, "rag")
    assert "default, tool_use" in error.value.diagnostics[0].message
    (tmp_path / "chat_template.jinja").write_text("c")
    assert read(tmp_path).render(HELLO) == "c"
    (tmp_path / "chat_template.tool_use.jinja").write_text("d")
    assert read(tmp_path, "tool_use").render(HELLO) == "d"


def test_no_template_and_broken_files_are_findings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="P609") as error:
        read(tmp_path)
    # Servers tell clients the message, and nothing of the machine.
    (finding,) = error.value.diagnostics
    assert str(tmp_path) not in finding.message
    assert finding.span is not None and finding.span.file == str(tmp_path)
    write_config(tmp_path, ["no object"])
    with pytest.raises(UserError, match="P608"):
        read(tmp_path)
    write_config(tmp_path, {"chat_template": 7})
    with pytest.raises(UserError, match="P609"):
        read(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="P608"):
        read(tmp_path)


def test_conversion_keeps_templates(tmp_path: Path) -> None:
    model = make_model()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    write_config(checkpoint, {"bos_token": "<begin>"})
    (checkpoint / "chat_template.jinja").write_text(SIMPLE)
    more = checkpoint / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text(SIMPLE)
    manifest = convert_checkpoint(checkpoint, model, tmp_path / "store")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert manifest.find_file(name) is not None
        assert (tmp_path / "store" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert manifest.find_file("chat_template.rag.jinja") is not None
    assert read(tmp_path / "store", "rag").render(HELLO) == "<begin>user:Hello\n"


# Running
def test_a_conversation_is_encoded_with_one_begin_token_and_answered(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    plan = write_plan(tmp_path, tiny)
    runner = CliRunner()
    with pytest.raises(UserError, match="P609"):
        runner.invoke(command, [str(plan), "--chat", "ab"], catch_exceptions=False)
    (tiny.store / "chat_template.jinja").write_text(SIMPLE)
    with pi2.load(plan) as model:
        ids = model.encode_chat([{"role": "user", "content": "ab"}])
        # The template's begin token is one token, and the model's own is not put before it.
        assert ids[0] == 256 and ids.count(256) == 1
        expected = model.generate(ids, max_tokens=4, temperature=0).result
    arguments = [str(plan), "--chat", "ab", "--max-tokens", "4", "--temperature", "0", "--json"]
    done = runner.invoke(command, arguments)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert answer["prompt_tokens"] == len(ids)
    longer = runner.invoke(command, [*arguments, "--system", "cd"])
    assert json.loads(longer.stdout)["prompt_tokens"] == len(ids) + len("\x00system:cd\n")


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("wants", [True, False])
def test_a_conversation_begins_once(wants: bool, writes: bool, tmp_path: Path) -> None:
    """As llama.cpp's server: the begin token that the model wants, or its template writes."""
    tiny = make_tiny(tmp_path, {"tokenizer": {"bos": 256, "eos": [257], "add_bos": wants}})
    start = "{{ bos_token }}" if writes else ""
    (tiny.store / "chat_template.jinja").write_text(start + "{{ messages[0].content }}")
    with pi2.load(write_plan(tmp_path, tiny)) as model:
        ids = model.encode_chat([{"role": "user", "content": "hi"}])
        assert ids.count(256) == int(wants or writes)
        assert (ids[0] == 256) is (wants or writes)


@pytest.mark.parametrize("options", [["--system", "a"], ["--chat", "a", "--prompt", "b"]])
def test_options_that_do_not_go_together_are_refused(options: list[str]) -> None:
    assert CliRunner().invoke(command, ["demo", *options]).exit_code == 2
