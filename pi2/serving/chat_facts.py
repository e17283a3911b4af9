"""What a chat template says about its family: how answers are written, and whether it reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pi2.engine.chat import read_chat_template
from pi2.serving.answer_reader import AnswerReader, MarkedReader
from pi2.serving.channels import ChannelReader
from pi2.serving.tool_formats import Format, Pair, find_format, find_pairs, knows_tools

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFacts:
    """What a chat template and a vocabulary say about their family."""

    format: Format
    knows_tools: bool
    reasoning: Sequence[Pair] = ()
    """Marks of reasoning."""
    content: Sequence[Pair] = ()
    """Marks around what is said to the user."""
    marks: Mapping[str, int]
    """Tokens that marks are, of those that the tokenizer has beyond its text."""
    shown_ids: frozenset[int]
    """Special tokens that are part of an answer's text: all that do not end it."""

    def make_reader(
        self, *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: str = ""
    ) -> AnswerReader:
        """What divides an answer to ``prompt``; ``tools``: the functions that may be called."""
        named = None if tools is None else {str(tool.get("name")): tool for tool in tools}
        if self.format.is_channels:
            return ChannelReader(tools=named, prompt=prompt)
        return MarkedReader(
            self.format,
            tools=named,
            reasoning=self.reasoning,
            content=self.content,
            prompt=prompt,
        )

    def find_open_reasoning(self, prompt: str) -> Pair | None:
        """The marks of the reasoning that a prompt has begun."""
        ended = prompt.rstrip()
        return next((pair for pair in self.reasoning if ended.endswith(pair[0])), None)


def describe_family(
    template: str, marks: Mapping[str, int], special: frozenset[int], ends: frozenset[int]
) -> ChatFacts:
    """What a template says, with the tokens that are marks, those of them that are special, and
    those that begin or end texts."""
    found = find_format(template, marks)
    wraps = [
        pair for pair in found.content if all(mark in template or mark in marks for mark in pair)
    ]
    return ChatFacts(
        format=found,
        knows_tools=knows_tools(template),
        reasoning=find_pairs(template, marks),
        content=wraps,
        marks=marks,
        shown_ids=special - ends,
    )


def read_chat_facts(model: LoadedModel) -> ChatFacts:
    """What the chat template of a model says; UserError P608 or P609 if it has none that works."""
    if model.is_dry:
        return describe_family("", {}, frozenset(), frozenset())
    settings = model.plan.model.tokenizer
    template = read_chat_template(model.text_folder, model.tokenizer, settings).source
    added = model.tokenizer.get_added_tokens_decoder()
    ends = {*settings.eos, *([] if settings.bos is None else [settings.bos])}
    ends |= {number for number, token in added.items() if token.content in _FILLERS}
    return describe_family(
        template,
        {token.content: number for number, token in added.items()},
        frozenset(number for number, token in added.items() if token.special),
        frozenset(ends),
    )


_FILLERS = ("<pad>", "<|pad|>", "[PAD]", "<unk>")
"""Special tokens that stand for nothing."""
