"""Formats of answers, their marks as tokens, and what readers make of texts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pi2.serving.answer_reader import AnswerReader, Format, Fragment, list_formats
from pi2.serving.call_patterns import ToolCall
from pi2.serving.chat_facts import ChatFacts, describe_family

FORMATS = {found.name: found for found in list_formats() if found.calls}
Kind = Literal["special", "added", "plain"]
END = "<|end_of|>"
TOOL: Mapping[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zip": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "deep": {
                "type": "object",
                "properties": {"k": {"type": "string"}, "n": {"type": ["integer", "null"]}},
                "required": ["k"],
            },
            "on": {"type": "boolean"},
            "list": {"type": "array", "items": {"type": "string"}},
            "ref": {"$ref": "#/$defs/R"},
        },
        "required": ["city"],
        "$defs": {"R": {"type": "number"}},
    },
}
OTHER: Mapping[str, Any] = {"name": "other"}
ARGUMENTS: Mapping[str, Any] = {
    "city": 'Paris "x" <b> é', "zip": "12345", "days": 2, "unit": "F",
    "deep": {"k": "v", "n": None}, "on": True, "list": ["a", "b"], "ref": 1.5,
}  # fmt: skip


def write_template(format: Format) -> str:
    pairs = [mark for pair in (*format.reasoning, *format.content) for mark in pair]
    if not format.reasoning:
        pairs += ["<think>", "</think>"]
    return "\n".join([*format.known_by[0], *format.template_has, "tools", *pairs])


def describe(format: Format, vocabulary: Mapping[str, int] | None = None) -> ChatFacts:
    """What is known of a format's family; ``vocabulary``: marks that are special tokens."""
    marks = vocabulary or {}
    return describe_family(write_template(format), marks, frozenset(marks.values()), frozenset())


def write_reasoning(facts: ChatFacts, text: str) -> str | None:
    if facts.format.is_channels:
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    if not facts.reasoning:
        return None
    begin, end = facts.reasoning[0]
    return f"{begin}{text}{end}{''.join(facts.format.skip[:1])}"


def list_marks(format: Format) -> list[str]:
    form = format.calls[0]
    pairs = [mark for pair in (*format.reasoning, *format.content) for mark in pair]
    texts = [form.begin, form.end, form.call, form.parameter, form.quote, *pairs, *format.skip]
    if format.is_channels:
        texts.append("<|channel|><|message|><|constrain|><|end|><|start|><|call|>")
    pattern = re.compile(r'<\|"\|>|</?[^<>\s"$]+[|>]?>|\[[A-Z_/]+\]')
    return sorted({mark for text in texts for mark in pattern.findall(text)})


def make_tokenizer(marks: Sequence[str], kind: Kind) -> Tokenizer:
    """A tokenizer of bytes, with ``marks`` as special tokens, as added ones, or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: n for n, sign in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokens = [AddedToken(mark, special=kind == "special", normalized=False) for mark in marks]
    if kind == "special":
        made.add_special_tokens(tokens)
    elif kind == "added":
        made.add_tokens(tokens)
    return made


def read(reader: AnswerReader, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of ``text`` that comes in pieces."""
    items = []
    for start in range(0, len(text), size):
        items += reader.push(text[start : start + size])
    items += reader.flush()
    parts = {"reasoning": "", "content": ""}
    for item in items:
        if isinstance(item, Fragment):
            parts[item.part] += item.text
    calls = [
        (item.name, json.loads(item.arguments)) for item in items if isinstance(item, ToolCall)
    ]
    return parts["reasoning"], parts["content"], calls
