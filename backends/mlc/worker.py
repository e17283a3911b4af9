"""Runs in mlc_llm's Python: ``PYTHON worker.py``, requests on standard input, answers on descriptor
3.

Only the standard library and mlc_llm are imported. The first line says what to load::

    {"model": FOLDER, "device": "auto", "context": 4096, "chunk": 128}

and every other one what to generate: ``{"prompt": TEXT}`` or ``{"messages": [...]}``, with
``max_tokens``, ``temperature``, ``top_p``, ``seed`` and ``stop``. Answers are ``{"ready": true}``,
``{"text": PIECE}``, ``{"finish": REASON, "prompt_tokens": n, "tokens": n}`` and ``{"error":
...}``."""

import json
import os
import sys
from typing import Any

NOT_INSTALLED = 3
"""Exit status where there is no mlc_llm."""


def load(request: dict[str, Any]) -> Any:
    from mlc_llm import MLCEngine
    from mlc_llm.serve.config import EngineConfig

    settings = EngineConfig(
        max_num_sequence=1,
        max_total_sequence_length=request["context"],
        prefill_chunk_size=request["chunk"],
    )
    return MLCEngine(
        request["model"], request["device"], mode="interactive", engine_config=settings
    )


def answer(engine: Any, request: dict[str, Any], send: Any) -> None:
    options = {
        name: request[name]
        for name in ("max_tokens", "temperature", "top_p", "seed", "stop")
        if request.get(name) is not None
    }
    is_chat = "messages" in request
    if is_chat:
        create, given = engine.chat.completions.create, {"messages": request["messages"]}
    else:
        create, given = engine.completions.create, {"prompt": request["prompt"]}
    reason, usage = None, None
    stream = create(**given, **options, stream=True, stream_options={"include_usage": True})
    for response in stream:
        usage = response.usage or usage
        for choice in response.choices:
            text = choice.delta.content if is_chat else choice.text
            if text:
                send({"text": text})
            reason = choice.finish_reason or reason
    send(
        {
            "finish": reason or "stop",
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "tokens": None if usage is None else usage.completion_tokens,
        }
    )


def main() -> int:
    """Answer until standard input ends."""
    # Libraries print to standard output: what is said to pi2 has a descriptor of its own.
    stream = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def send(value: dict[str, Any]) -> None:
        stream.write(json.dumps(value) + "\n")
        stream.flush()

    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = load(request)
                send({"ready": True})
            else:
                answer(engine, request, send)
        except ImportError as error:
            send({"missing": str(error)})
            return NOT_INSTALLED
        except Exception as error:  # whatever it is, the user is told
            send({"error": f"{type(error).__name__}: {error}"})
    if engine is not None:
        engine.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
