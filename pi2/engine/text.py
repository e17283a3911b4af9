"""Text pieces out of token ids: whole characters, and nothing of a stop string."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.sandbox.child import MIB, ChildFailed, Limits, StayingChild, run_child
from pi2.tokens import CHAT_TEMPLATE, NAMED_TEMPLATE, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from pi2.plan.documents.model_parts import Tokenizer as TokenizerSettings
    from pi2.tokens.table_tokenizer import Coder


Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and other fields that a template reads."""

_LIMITS, _MEMORY_FACTOR = Limits(cpu_s=1.0, memory_mib=512), 32
"""Of a template's process, and memory in addition for the bytes of template and conversation."""
_STAYING_BYTES = MIB
"""Largest conversation for a process that stays."""


def make_staying_child() -> StayingChild:
    return StayingChild("template", _LIMITS.add_input(_STAYING_BYTES, _MEMORY_FACTOR))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and the special tokens that it may name."""

    file: Path
    """Its file, for findings."""
    source: str
    tokens: Mapping[str, str]
    """Texts of special tokens, such as ``{"bos_token": "<s>"}``."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        child: StayingChild | None = None,
    ) -> str:
        """The prompt, begin token included where the template writes it.

        ``add_generation_prompt`` ends it where the model's answer begins; ``variables`` are what
        else the template reads, such as ``{"enable_thinking": False}``; ``child`` is a process that
        stays, for those who render often.  Raises `UserError` P608
        if the template fails, refuses the messages, wants to leave its sandbox, or takes more than
        a second of processor time."""
        given = {
            **self.tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps([self.source, given]).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise self._explain(f"its input cannot be written as JSON: {error}") from None
        try:
            if child is not None and len(request) <= _STAYING_BYTES:
                answer = child.run(request)
            else:
                limits = _LIMITS.add_input(len(request), _MEMORY_FACTOR)
                answer = run_child("template", request, limits)
            return answer.decode("utf-8", "surrogatepass")
        except ChildFailed as error:
            raise self._explain(str(error)) from None

    def _explain(self, problem: str) -> UserError:
        return UserError.of(
            "P608",
            f"the chat template fails: {problem}",
            file=str(self.file),
            help="templates can refuse roles, such as system, or their order; --prompt needs none",
        )


def read_chat_template(
    folder: Path,
    tokenizer: Coder,
    settings: TokenizerSettings,
    name: str | None = None,
    file_of: Path | None = None,
) -> ChatTemplate:
    """The chat template in the store ``folder``, or in a folder that was made of ``file_of``.

    ``chat_template.jinja`` goes before ``chat_template`` in ``tokenizer_config.json``, which is a
    text or a list of named ones; ``chat_template.NAME.jinja`` files go before named ones. ``name``
    chooses, ``default`` by default. ``settings`` have begin and end tokens that the configuration
    does not state. Raises `UserError` P608 if a file is broken, P609 if there is no such
    template."""
    config = _read_config(folder / TOKENIZER_CONFIG)
    tokens = list_chat_tokens(folder, tokenizer, settings)
    file = folder / CHAT_TEMPLATE
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        templates |= {
            item["name"]: item["template"]
            for item in stated
            if isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get("template"), str)
        }
    own = _read_text(file)
    if own is not None:
        templates["default"] = own
    else:
        file = folder / TOKENIZER_CONFIG
    wanted = name or "default"
    places = {
        named[1]: other
        for other in sorted(folder.glob("chat_template.*.jinja"))
        if (named := NAMED_TEMPLATE.fullmatch(other.name))
    }
    templates |= {label: _read_text(other) or "" for label, other in places.items()}
    file = places.get(wanted, file)
    if wanted not in templates:
        known = f"; it has {', '.join(sorted(templates))}" if templates else ""
        raise UserError.of(
            "P609",
            "the model has no chat template"
            + (f" called {wanted!r}{known}" if templates or name else ""),
            file=str(file_of or folder),
            help=f"a base model continues texts: use `pi2 run {file_of or 'PLAN'} --prompt TEXT`"
            + (
                ""
                if file_of is not None
                else "; the chat_template.jinja of a chat model goes into that folder"
            ),
        )
    return ChatTemplate(file, templates[wanted], tokens)


def list_chat_tokens(folder: Path, tokenizer: Coder, settings: TokenizerSettings) -> dict[str, str]:
    """Texts of special tokens that a chat template may name; UserError P608."""
    config = _read_config(folder / TOKENIZER_CONFIG)
    tokens = _list_special_tokens(config)
    for key, token in (("bos_token", settings.bos), ("eos_token", next(iter(settings.eos), None))):
        text = None if token is None or key in config else tokenizer.id_to_token(token)
        if text is not None:
            tokens.setdefault(key, text)
    return tokens


def _read_text(file: Path) -> str | None:
    try:
        return read_regular(file).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError.of(
            "P608", f"a file of the chat template cannot be read: {reason}", file=str(file)
        ) from None


def _read_config(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    try:
        values = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError.of(
            "P608",
            "the tokenizer's configuration is not a JSON object",
            file=str(file),
            help="copy it from the checkpoint again",
        )
    return values


def _list_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens that the configuration names; one may be a table with its text."""
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


_CUT = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers make of bytes that are no character, or not yet."""
MAX_HELD = 16
"""Tokens whose text is held back: a character has at most four bytes, so these will be none."""


class TokenDecoder:
    """Turns one token after the other into text, whole characters at a time.

    Tokens are decoded together with the piece before, because the text of a token can depend on its
    neighbours (spaces, bytes of one character). The first tokens continue a prompt: their text
    includes a leading space, such as Llama 2's, that decoders leave out at the start of a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` gives the text of token ids."""
        self._decode = decode
        self._before: list[int] = []
        self._held: list[int] = []

    def read_token(self, token: int) -> str:
        return self._decode([token])

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._read_held()
        if text.endswith(_CUT) and len(self._held) < MAX_HELD:
            return ""
        if text:
            self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the remaining text at the end; bytes that are no character become U+FFFD."""
        text, self._held = self._read_held(), []
        return text

    def _read_held(self) -> str:
        # At the beginning, the tokens themselves stand for what comes before them.
        before = self._before or self._held
        return self._decode([*before, *self._held])[len(self._decode(before)) :]


def find_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``marks``."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most


class StopFilter:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that has appeared."""
        self.stopped = False
        """Whether a stop string has appeared; text after it is dropped."""

    def push(self, piece: str) -> str:
        """Take ``piece`` and return the text that is certain."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            first, self.found = min(found)
            self.stopped = True
            self._held = ""
            return text[:first]
        cut = len(text) - find_overlap(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


def read_prompt(file: Path | None) -> str:
    """The prompt in a file, or on standard input; UserError P603 or P607."""
    try:
        if file is not None:
            data = file.read_bytes()
        elif sys.stdin.isatty() or not (data := sys.stdin.buffer.read()):
            raise UserError.of(
                "P603", "there is no prompt", help="give --prompt TEXT, -f FILE, or standard input"
            )
        return data.decode("utf-8")
    except OSError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of("P607", f"cannot read the prompt {place}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: byte {error.start} of {place}",
            help="save the text as UTF-8",
        ) from None
