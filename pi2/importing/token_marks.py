"""Tokens of a GGUF file that are no text: which begin and end texts, and which are marks.

Files leave much of that out, so that llama.cpp knows tokens by their texts; its rules stand here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ORDINARY, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens: ``tokenizer.ggml.token_type``."""

_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
"""Texts of tokens that end an answer."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of code that is filled in, by their keys in a file; a key goes before a text."""
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2}, "t5": {"eos": 1}}
"""Begin and end tokens where a file names none, by its kind of tokenizer."""


@dataclass(frozen=True, slots=True)
class TokenMarks:
    """What the tokens of a file are for."""

    kinds: tuple[int, ...]
    """The kind of each token."""
    begin: int | None
    ends: tuple[int, ...]
    """Tokens after which an answer is over, the file's own end token first."""


def read_marks(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> TokenMarks:
    """The marks among ``tokens`` of the ``kinds`` that the file states."""
    numbers = {text: number for number, text in enumerate(tokens)}
    found = list(kinds)

    def read(role: str) -> int | None:
        default = _DEFAULTS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(role)
        for name in (role, _OLD_KEYS.get(role, role)):
            number = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
            if type(number) is int and 0 <= number < len(tokens):
                return number
        return None

    named = [read(role) for role in ("eos", "eot", "eom")]
    ends = {number: None for number in named if number is not None}
    for role, texts in _ROLES.items():
        number = read(role)
        if number is None:
            number = next((numbers[text] for text in texts if text in numbers), None)
            if number is not None:
                found[number] = CONTROL
        if number is not None and role in ("fim_pad", "fim_rep", "fim_sep"):
            ends[number] = None
    for number in sorted(numbers[text] for text in _ENDS & numbers.keys()):
        found[number] = CONTROL
        ends[number] = None
    known = {tokens[number] for number in ends}
    calls = known & {"<|call|>", "<|calls|>"}
    if "<|end|>" in known and calls and known & {"<|return|>", "<|flush|>"}:
        # gpt-oss and Solar end each message with it, and the answer with others.
        ends.pop(numbers["<|end|>"])
    if "</s>" in known and known & {"<|tool_response>", "<|plamo:eos|>"}:
        found[numbers["</s>"]] = ORDINARY
        ends.pop(numbers["</s>"])
    return TokenMarks(tuple(found), read("bos"), tuple(ends))
