"""What GGUF files say of tokens: their texts, kinds and marks, and chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from pi2.arrays import I64
from pi2.diagnostics import UserError
from pi2.tokens.texts import Texts


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tokenizer cuts text into words."""

    expressions: tuple[str, ...]
    """In the order in which they are applied."""
    whole_words: bool = False
    """Whether a word that is a token is taken whole, before any merges."""
    begins: bool = False
    """Whether texts get a begin token unless the file says otherwise."""
    always_begins: bool = False
    """Whether they get one though the file says otherwise, as Gemma 4's files do."""
    bytes_as_letters: bool = True
    """Whether tokens are written with a letter for each byte, as GPT-2's; else they are text, with
    U+2581 for a space, and bytes have tokens of their own."""


TABLE: Mapping[str, Any] = tomli.loads(
    Path(__file__).with_name("text_cuts.toml").read_text("utf-8")  # importlib.resources takes 10 ms
)


def _write_ranges(ranges: str) -> str:
    """Characters of an expression's class: ``A-F 1E`` as its syntax has them."""
    return re.sub("[0-9A-F]+", r"\\x{\g<0>}", ranges).replace(" ", "")


def _fill(expression: str) -> str:
    def find(name: re.Match[str]) -> str:
        ranges = TABLE["ranges"].get(name[1])
        return _fill(TABLE["parts"][name[1]]) if ranges is None else _write_ranges(ranges)

    return re.sub("<([a-z0-9_]+)>", find, expression)


def _read_cuts() -> Mapping[str, Cut]:
    found: dict[str, Cut] = {}
    for table in TABLE["cuts"]:
        flags = {key: value for key, value in table.items() if key not in ("names", "expressions")}
        cut = Cut(tuple(map(_fill, table["expressions"])), **flags)
        found |= dict.fromkeys(table["names"], cut)
    return found


CUTS = _read_cuts()
"""By the name that a file has for it."""


def write_expression(expression: str) -> str:
    """An expression of a cut for the tokenizer library, whose Unicode is newer than llama.cpp's."""

    def write(found: re.Match[str]) -> str:
        return rf"[\p{{{found[1]}}}&&[^{_write_ranges(TABLE['later'][found[1]])}]]"

    return re.sub(r"\\p\{([LNMPS])\}", write, expression)


ORDINARY, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens: ``tokenizer.ggml.token_type``."""
WHOLE = "tokenizer.huggingface.json"
"""Key of a ``tokenizer.json``, which counts before any lists."""

_ENDS = frozenset(TABLE["marks"]["ends"])
"""Texts of tokens that end an answer."""
_ROLES: Mapping[str, list[str]] = TABLE["marks"]["roles"]
"""Texts of tokens of code that is filled in, by their keys in a file; a key goes before a text."""


@dataclass(frozen=True, slots=True)
class TokenMarks:
    """What the tokens of a file are for."""

    kinds: I64
    begin: int | None
    ends: tuple[int, ...]
    """Tokens after which an answer is over, the file's own end token first."""


def read_marks(metadata: Mapping[str, Any], tokens: Texts, kinds: I64) -> TokenMarks:
    """The marks among ``tokens`` of the ``kinds`` that the file states."""
    wanted = _ENDS.union(*_ROLES.values())
    # The last counts where a file has a text twice.
    places = {text: tokens.numbers.list_all(text) for text in wanted}
    numbers = {text: found[-1] for text, found in places.items() if found}
    found, said = kinds.copy(), TABLE["marks"]

    def read(role: str) -> int | None:
        default = said["defaults"].get(str(metadata.get("tokenizer.ggml.model")), {}).get(role)
        for name in (role, said["old_keys"].get(role, role)):
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
    return TokenMarks(found, read("bos"), tuple(ends))


_MOST_CHARACTERS = 4096
"""In a token: every place where it could be divided is looked at."""

_HELP = "give the tokenizer.json of the original checkpoint, or its folder, with --tokenizer"


@dataclass(frozen=True, slots=True)
class GgufTokens:
    """What a file says of its tokenizer."""

    file: Path
    metadata: Mapping[str, Any]
    tokens: Texts
    marks: TokenMarks

    @classmethod
    def read(cls, file: Path, metadata: Mapping[str, Any]) -> GgufTokens:
        """Read the metadata of ``file``; `UserError` P543 if its lists contradict each other."""
        tokens = _read_tokens(file, metadata)
        marks = read_marks(metadata, tokens, _read_kinds(file, metadata, tokens))
        if tokens.sizes.max(initial=0) > _MOST_CHARACTERS:
            longest = max(map(len, tokens))
            if longest > _MOST_CHARACTERS:
                raise refuse(file, f"a token has {longest} characters")
        return cls(file, metadata, tokens, marks)

    @property
    def kind(self) -> object:
        return self.metadata.get("tokenizer.ggml.model")

    def find_cut(self) -> Cut:
        """How words are cut; `UserError` P543 if that is unknown."""
        name = self.metadata.get("tokenizer.ggml.pre")
        return _find_cut(self.file, "gemma4" if self.kind == "gemma4" else name)

    def list_kinds(self, *kinds: int) -> list[str]:
        found = np.flatnonzero(np.isin(self.marks.kinds, kinds))
        return [self.tokens[number] for number in found.tolist()]

    def frame(self) -> tuple[int | None, int | None]:
        """Tokens before and after a text; `UserError` P543 if the kind is unknown."""
        stated = self.metadata.get("tokenizer.ggml.add_bos_token")
        if self.kind in ("gpt2", "gemma4"):
            cut = self.find_cut()
            begins = cut.always_begins or (cut.begins if stated is None else bool(stated))
        elif self.kind in ("llama", "t5"):
            begins = stated is True or (stated is None and self.kind == "llama")
        else:
            reason = TABLE["refused"].get(str(self.kind), "known are gpt2, gemma4, llama and t5")
            raise refuse(self.file, f"its tokenizer is of the kind {self.kind!r}: {reason}")
        ends = self.metadata.get("tokenizer.ggml.add_eos_token", False) and self.marks.ends
        return self.marks.begin if begins else None, self.marks.ends[0] if ends else None

    def find_mark(self, text: str) -> int | None:
        """The token that is taken as it is out of texts; None if ``text`` is none."""
        number = self.tokens.numbers.get(text)
        if number is None or self.marks.kinds[number] not in (CONTROL, UNKNOWN, OWN):
            return None
        return number


def find_marks(file: Path, metadata: Mapping[str, Any], vocab: int = 0) -> TokenMarks:
    """The marks of ``file``; if it has no usable list of tokens, the marks that its keys name, of
    ``vocab`` tokens: `make_tokenizer` reports that."""
    try:
        tokens = _read_tokens(file, metadata)
        kinds = _read_kinds(file, metadata, tokens)
    except UserError:
        tokens, kinds = Texts.join([""] * vocab), np.ones(vocab, np.int64)
    return read_marks(metadata, tokens, kinds)


def _read_tokens(file: Path, metadata: Mapping[str, Any]) -> Texts:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab") or tokens is None:
        raise refuse(file, "it has no tokenizer")
    if isinstance(tokens, Texts):
        return tokens
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise refuse(file, "tokenizer.ggml.tokens is not a list of texts")
    return Texts.join(tokens)


def _read_kinds(file: Path, metadata: Mapping[str, Any], tokens: Texts) -> I64:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return np.ones(len(tokens), np.int64)
    try:
        if isinstance(kinds, np.ndarray) and kinds.dtype.kind in "iu":
            found = kinds.astype(np.int64)
        else:
            found = np.array([int(number) for number in kinds], np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise refuse(file, str(error)) from None
    if len(found) != len(tokens):
        raise refuse(file, f"{len(tokens)} tokens have {len(found)} types")
    return found


def _find_cut(file: Path, name: object) -> Cut:
    """How ``tokenizer.ggml.pre`` says that words are cut."""
    cut = CUTS.get("" if name is None else str(name))
    if cut is None:
        from difflib import get_close_matches

        near = get_close_matches(str(name), CUTS, 3, 0.5)
        known = f"the nearest of {len(CUTS) - 1} known: {', '.join(near)}" if near else ""
        known = known or f"known are {', '.join(sorted(CUTS)[1:])}"
        raise refuse(file, f"how {name!r} cuts text into words is unknown; {known}")
    return cut


def read_chat_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The chat template and the special tokens that it may name, as a Hugging Face folder has
    them: ``chat_template.jinja`` and ``tokenizer_config.json``."""
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return {}
    # Entries that are no text are refused when the tokenizer is made.
    tokens = _list_texts(metadata.get("tokenizer.ggml.tokens"))
    special = {}
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            special[f"{name}_token"] = tokens[number]
    return {
        "chat_template.jinja": template.encode(),
        "tokenizer_config.json": json.dumps(special, ensure_ascii=False).encode(),
    }


def _list_texts(listed: object) -> Sequence[str]:
    if isinstance(listed, Texts):
        return listed
    found = listed if isinstance(listed, list) else []
    return found if all(isinstance(text, str) for text in found) else []


def read_named_templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    names = _list_texts(metadata.get("tokenizer.chat_templates"))
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    return {
        name: text.encode()
        for name, text in found.items()
        if isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
    }


def refuse(file: Path, problem: str) -> UserError:
    return UserError.of(
        "P543", f"no tokenizer can be made from {file}: {problem}", help=_HELP, file=str(file)
    )
