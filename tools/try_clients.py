"""Ask a running server through clients that others wrote, as many of them as are installed.

    python tools/try_clients.py ADDRESS MODEL [--only NAME]...

Each client asks what people use it for; what comes back is looked at.  Prints a row for each: its
version, and what came of it.  Exits with 1 if one failed.  The model needs a chat template; answers
need not mean anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["number"],
    "additionalProperties": False,
}
LM_EVAL_TASK = """
task: pi2_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
metric_list: [{{metric: {metric}}}]
"""


def main() -> int:
    """Try the clients that are asked for."""
    parser = argparse.ArgumentParser(description="Try a server with clients that others wrote.")
    parser.add_argument("address", help="such as http://127.0.0.1:8000")
    parser.add_argument("model", help="the name of the served plan")
    parser.add_argument("--only", action="append", choices=CLIENTS, help="leave others out")
    options = parser.parse_args()
    failed = False
    print("| client | version | what came of it |\n|---|---|---|")
    for name in options.only or CLIENTS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"| {name} | | not installed |")
            continue
        try:
            found = CLIENTS[name](options.address, options.model)
        except Exception as error:
            failed = True
            found = f"FAILED: {type(error).__name__}: {str(error)[:600]}"
        print(f"| {name} | {version} | {found} |", flush=True)
    return int(failed)


def try_openai(address: str, model: str) -> str:
    """Chats, streams, tools, JSON of a schema, responses."""
    import openai

    client: Any = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200}
    whole = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    parts = client.chat.completions.create(**asked, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    text = client.chat.completions.create(**asked, response_format=form).choices[0].message.content
    check_number(json.loads(text or ""))
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    call = client.chat.completions.create(**asked, tools=[tool], tool_choice="required")
    calls = call.choices[0].message.tool_calls
    check_number(json.loads(calls[0].function.arguments))
    assert client.responses.create(model=model, input="hello", max_output_tokens=20).output_text
    return "chat, stream, schema, tools, responses"


def try_anthropic(address: str, model: str) -> str:
    """Messages, streams, tools."""
    import anthropic

    client: Any = anthropic.Anthropic(base_url=address, api_key="none")
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200}
    assert client.messages.create(**asked).content[0].text
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream)
    tool = {"name": "count", "input_schema": SCHEMA}
    call = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    check_number(next(part.input for part in call.content if part.type == "tool_use"))
    return "messages, stream, tools"


def try_litellm(address: str, model: str) -> str:
    """Both interfaces."""
    import litellm

    for name, base in ((f"openai/{model}", f"{address}/v1"), (f"anthropic/{model}", address)):
        asked: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none"}
        asked |= {"messages": HELLO, "max_tokens": 20}
        assert litellm.completion(**asked).choices[0].message.content
        parts = litellm.completion(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts)
    return "chat and stream, as OpenAI and as Anthropic"


def try_langchain(address: str, model: str) -> str:
    """Chats, streams, structured output by schema and by tool, responses."""
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {"model": model, "base_url": f"{address}/v1", "api_key": "none"}
    chat = ChatOpenAI(**given, max_tokens=200)
    assert chat.invoke("hello").content
    assert "".join(str(part.content) for part in chat.stream("hello"))
    schema = {"title": "count", "description": "A number.", **SCHEMA}
    for method in ("json_schema", "function_calling"):
        check_number(chat.with_structured_output(schema, method=method).invoke("a number"))
    assert ChatOpenAI(**given, max_tokens=20, use_responses_api=True).invoke("hello").content
    return "chat, stream, structured output both ways, responses"


def try_schemathesis(address: str, model: str) -> str:
    """Requests made from the published description, sound and unsound ones."""
    run_program(
        "schemathesis",
        ["run", f"{address}/openapi.json", "--max-examples", "8", "--seed", "1"],
        ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60"],
        ["--checks", "not_a_server_error,status_code_conformance,negative_data_rejection"],
        ["--suppress-health-check", "all"],
    )
    return "no server error, stated status codes only, bad bodies refused"


def try_llm_comply(address: str, model: str) -> str:
    """The tests and schemas of Open Responses, of OpenAI's chats and of Anthropic's messages."""
    told = []
    for form in ("open-responses", "openai-chat", "anthropic"):
        options = ["run", "-u", f"{address}/v1", "-k", "none", "-m", model, "--format", form]
        done = run_program("llm-comply", [*options, "--json"], may_fail=True)
        results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
        bad = [str(one.get("name")) for one in results if one["status"] == "failed"]
        good = sum(one["status"] == "passed" for one in results)
        told.append(f"{form}: {good} passed" + (f", failed: {', '.join(bad)}" if bad else ""))
    return "; ".join(told)


def try_ollama(address: str, model: str) -> str:
    """What models can do, chats, prompts, embeddings."""
    import ollama

    client = ollama.Client(host=address)
    assert "completion" in (client.show(model).capabilities or ())
    options = {"num_predict": 8, "temperature": 0}
    whole = client.chat(model, HELLO, options=options).message.content
    parts = client.chat(model, HELLO, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole
    assert client.generate(model, "hello", options=options).done
    assert client.embed(model, ["a", "b"]).embeddings
    return "show, chat, stream, generate, embed: pass"


def try_lm_eval(address: str, model: str) -> str:
    """A task of its own: generated answers, in both interfaces."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"question": f"{n} and 1 is", "answer": f" {n + 1}"} for n in range(4)]
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
        more = "generation_kwargs: {until: [], max_gen_toks: 8, do_sample: false}"
        task = LM_EVAL_TASK.format(
            data=folder / "data.jsonl", kind="generate_until", metric="exact_match", more=more
        )
        (folder / "pi2_words.yaml").write_text(task, "utf-8")
        for kind, path in (
            ("local-completions", "completions"),
            ("local-chat-completions", "chat/completions"),
        ):
            given = f"model={model},base_url={address}/v1/{path},tokenizer_backend=None"
            options = ["run", "--model", kind, "--model_args", f"{given},num_concurrent=2"]
            chat = ["--apply_chat_template"] if "chat" in kind else []
            run_program(
                "lm_eval", [*options, "--tasks", "pi2_words", "--include_path", name, *chat]
            )
    return "local-completions and local-chat-completions ran a task of four questions"


def run_program(
    name: str, *options: Sequence[str], may_fail: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a client that is a program of this Python; RuntimeError with its last words."""
    command = [str(Path(sysconfig.get_path("scripts")) / name)]
    done = subprocess.run(
        [*command, *(part for row in options for part in row)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode and not may_fail:
        raise RuntimeError((done.stdout + done.stderr).strip()[-600:])
    return done


def check_number(value: Any) -> None:
    """The value keeps to `SCHEMA`."""
    assert list(value) == ["number"] and value["number"] in range(10), value


CLIENTS: Mapping[str, Callable[[str, str], str]] = {
    "openai": try_openai,
    "anthropic": try_anthropic,
    "ollama": try_ollama,
    "litellm": try_litellm,
    "langchain-openai": try_langchain,
    "schemathesis": try_schemathesis,
    "llm-comply": try_llm_comply,
    "lm_eval": try_lm_eval,
}

if __name__ == "__main__":
    sys.exit(main())
