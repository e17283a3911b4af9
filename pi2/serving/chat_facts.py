"""What a chat template says about its family: how calls are written, and whether it reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.engine.chat import read_chat_template
from pi2.serving.answer_reader import REASONING_MARKS
from pi2.serving.tool_formats import ToolFormat, find_tool_format, knows_tools

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFacts:
    """What a chat template says about its family."""

    tools: ToolFormat
    knows_tools: bool
    reasoning: tuple[str, str] | None
    """Marks of reasoning, where the model reasons."""
    shown_ids: frozenset[int]
    """Special tokens that the marks of calls and of reasoning are."""
    reasoning_end: int | None
    """The token that ends reasoning, where it is one."""


def read_chat_facts(model: LoadedModel) -> ChatFacts:
    """What the chat template of a model says; UserError P608 or P609 if it has none that works."""
    if model.is_dry:
        template = ""
    else:
        settings = model.plan.model.tokenizer
        template = read_chat_template(model.store.path, model.tokenizer, settings).source
    tools = find_tool_format(template)
    reasoning = next((marks for marks in REASONING_MARKS if marks[0] in template), None)
    marks = [*tools.begin, *([] if tools.end is None else [tools.end])]
    ids: Mapping[str, int] = {}
    if not model.is_dry:
        added = model.tokenizer.get_added_tokens_decoder()
        ids = {token.content: number for number, token in added.items()}
    if reasoning is None:
        reasoning = next((pair for pair in REASONING_MARKS if pair[1] in ids), None)
    marks += reasoning or ()
    if tools.name == "brackets":
        marks += ["[ARGS]", "[CALL_ID]"]
    if tools.name == "fenced":
        marks += [mark for mark in ids if "tool▁" in mark]
    return ChatFacts(
        tools=tools,
        knows_tools=knows_tools(template),
        reasoning=reasoning,
        shown_ids=frozenset(ids[mark] for mark in marks if mark in ids),
        reasoning_end=None if reasoning is None else ids.get(reasoning[1]),
    )
