"""Turns a conversation into a prompt by the chat template that came with the model's tokenizer.

Templates are programs of whoever published the checkpoint.  They run in jinja2's sandbox, where
values cannot be changed and attributes that lead into Python cannot be read; results of ``*`` and
``**`` and the text as a whole are limited in size.  What templates may use beyond plain jinja2 is
what transformers gives them: ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML
characters alone, ``break`` and ``continue``, and ``{% generation %}``, which here marks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pi2.diagnostics import UserError
from pi2.store.manifest import CHAT_TEMPLATE, NAMED_TEMPLATE, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    from pi2.plan.documents.model import Tokenizer as TokenizerSettings

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and whatever else a template reads."""

MAX_TEXT = 1 << 24
"""Characters that a template may write, and items that ``*`` may make."""
MAX_BITS = 1 << 12
"""Bits of a number that ``**`` may make."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and the special tokens that it may name."""

    file: Path
    """Where it was read, for messages."""
    source: str
    tokens: Mapping[str, str]
    """Texts of special tokens, such as ``{"bos_token": "<s>"}``."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, begin token included where the template writes it.

        ``add_generation_prompt`` ends it where the model's answer begins; ``variables`` are what
        else the template reads, such as ``{"enable_thinking": False}``.  Raises `UserError` P608
        if the template fails, refuses the messages or wants to leave its sandbox.
        """
        given = {
            **self.tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in _make_environment().from_string(self.source).generate(given):
                size += len(piece)
                if size > MAX_TEXT:
                    raise OverflowError(f"it writes more than {MAX_TEXT} characters")
                pieces.append(piece)
        except Exception as error:  # a template can fail in every way in which Python can
            raise self._explain(error) from None
        return "".join(pieces)

    def _explain(self, error: Exception) -> UserError:
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        problem = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, TemplateSyntaxError):
            problem = f"line {error.lineno}: {problem}"
        elif isinstance(error, SecurityError):
            problem = f"it wants what no template may have: {problem}"
        return UserError.of(
            "P608",
            f"the chat template {self.file} fails: {problem}",
            help="templates can refuse roles, such as system, or their order; --prompt needs none",
        )


def read_chat_template(
    folder: Path,
    tokenizer: Tokenizer,
    settings: TokenizerSettings,
    name: str | None = None,
) -> ChatTemplate:
    """The chat template in the store ``folder``.

    ``chat_template.jinja`` goes before ``chat_template`` in ``tokenizer_config.json``, which is a
    text or a list of named ones, as do ``chat_template.NAME.jinja`` before those; ``name`` chooses,
    ``default`` by default.  Begin and
    end tokens that the configuration does not state are those of ``settings``.  Raises `UserError`
    P608 if a file is broken, P609 if there is no such template.
    """
    config = _read_config(folder / TOKENIZER_CONFIG)
    tokens = _list_special_tokens(config)
    for key, token in (("bos_token", settings.bos), ("eos_token", next(iter(settings.eos), None))):
        text = None if token is None or key in config else tokenizer.id_to_token(token)
        if text is not None:
            tokens.setdefault(key, text)
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
            f"the model in {folder} has no chat template"
            + (f" called {wanted!r}{known}" if templates or name else ""),
            help="use --prompt, or put the model's chat_template.jinja into that folder",
        )
    return ChatTemplate(file, templates[wanted], tokens)


def _read_text(file: Path) -> str | None:
    """The file's text, None if there is none."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError.of("P608", f"cannot read {file}: {reason}") from None


def _read_config(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    try:
        values = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError.of(
            "P608", f"{file} is not a JSON object", help="copy it from the checkpoint again"
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


@cache
def _make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox; jinja2 is loaded when the first conversation needs it."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which trainers use to find answers: what is inside, as it is."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses at once, and keeps arithmetic small."""

        intercepted_binops = frozenset({"*", "**"})

        def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
            raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                if isinstance(left, int) and isinstance(right, int):
                    if left.bit_length() * right > MAX_BITS:
                        raise SecurityError("a number that is too large")
            elif isinstance(left, int) and not isinstance(right, (int, float)):
                _check_product(left, right)
            elif isinstance(right, int) and not isinstance(left, (int, float)):
                _check_product(right, left)
            return super().call_binop(context, operator, left, right)

    def _check_product(times: int, items: Any) -> None:
        if hasattr(items, "__len__") and times * len(items) > MAX_TEXT:
            raise SecurityError("a text or list that is too long")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        # The user's own date: templates tell the model which day it is.
        return datetime.now().astimezone().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
