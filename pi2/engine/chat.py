"""Turns a conversation into a prompt by the chat template that came with the model's tokenizer.

Templates are programs of whoever published the checkpoint.  They run in a sandbox, in a process of
their own (`pi2.sandbox.template`), with a second of processor time and little memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.regular_file import read_regular
from pi2.sandbox.child import MIB, ChildFailed, Limits, run_child
from pi2.sandbox.staying import StayingChild
from pi2.store.manifest import CHAT_TEMPLATE, NAMED_TEMPLATE, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.plan.documents.model_storage import Tokenizer as TokenizerSettings

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and whatever else a template reads."""

_CPU_S, _CPU_S_PER_MIB = 1.0, 1.0
"""Processor time of a template, and more of it for long conversations."""
_MEMORY_MIB, _MEMORY_FACTOR = 512, 32
"""Memory of the process, and times the bytes of template and conversation besides."""


_STAYING_MIB = 1
"""Largest conversation for a process that stays."""


def make_staying_child() -> StayingChild:
    """A process for templates that stays."""
    return StayingChild(
        "template",
        Limits(_CPU_S + _CPU_S_PER_MIB * _STAYING_MIB, _MEMORY_MIB + _MEMORY_FACTOR * _STAYING_MIB),
    )


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and the special tokens that it may name."""

    file: Path
    """Where it was read: the place of findings."""
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
        a second of processor time.
        """
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
            raise self._explain(f"what it is given cannot be written as JSON: {error}") from None
        size_mib = len(request) / MIB
        limits = Limits(
            _CPU_S + _CPU_S_PER_MIB * size_mib, _MEMORY_MIB + ceil(_MEMORY_FACTOR * size_mib)
        )
        try:
            if child is not None and size_mib <= _STAYING_MIB:
                answer = child.run(request)
            else:
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
            "the model has no chat template"
            + (f" called {wanted!r}{known}" if templates or name else ""),
            file=str(folder),
            help="a base model continues texts: use `pi2 run PLAN --prompt TEXT`; the "
            "chat_template.jinja of a chat model goes into that folder",
        )
    return ChatTemplate(file, templates[wanted], tokens)


def _read_text(file: Path) -> str | None:
    """The file's text, None if there is none."""
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
