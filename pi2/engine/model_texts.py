"""Tokens of texts, texts of tokens, and prompts of conversations, for a loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.engine.answer import Constraint, GenerationRequest, TokenDecoder
from pi2.sandbox.child import MIB, ChildFailed, Limits, StayingChild, run_child
from pi2.sandbox.coding import decode_ids, encode_text, list_endings
from pi2.tokens import CHAT_TEMPLATE, NAMED_TEMPLATE, TOKENIZER_CONFIG
from pi2.tokens.table_tokenizer import Coder, TableTokenizer, take_library

if TYPE_CHECKING:
    from tokenizers import AddedToken

    from pi2.engine.message_shapes import Message, ShapedTemplate, WriteCalls
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.model_parts import Tokenizer as TokenizerSettings
    from pi2.store.reader import NeuronStore
    from pi2.weights.gguf_weights import FileTexts


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
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
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


class ModelTexts:
    """The texts of a GGUF file's model."""

    advice = ""
    """More help for a model without a chat template."""

    def __init__(
        self, resolved: ResolvedPlan, coder: Coder, folder: FileTexts, file: Path | None = None
    ) -> None:
        """``folder``: of the tokenizer and of chat templates; ``file``: from which it was made."""
        self._resolved, self._settings = resolved, resolved.model.tokenizer
        self._coder, self._folder, self._file = coder, folder, file
        self.is_synthetic = folder.is_synthetic
        """Whether the weights were drawn, and no text means anything."""
        self._child: StayingChild | None = None
        self._shaped: dict[str, ShapedTemplate] = {}

    @property
    def coder(self) -> Coder:
        """The tokenizer; UserError P605 for a run without one."""
        return self._coder

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def store(self) -> NeuronStore:
        """The open neuron store; UserError P605 if the run needs none."""
        raise UserError.of(
            "P605",
            "this run opens no neuron store: it runs a GGUF file as it is, or computes nothing",
            help="`pi2 convert FILE -o STORE` makes a store; the cpu backend computes",
        )

    @property
    def identity(self) -> bytes | None:
        """Bytes that change with the weights; None if prefixes are of no use."""
        return self._folder.identity

    def go_on_with(self, before: ModelTexts) -> None:
        """Keep the tokenizer of ``before``, for answers under way, and its process."""
        self._coder, self._child, self._shaped = before._coder, before._child, before._shaped

    def has_tokens_of(self, other: ModelTexts) -> bool:
        """Whether ``other`` has the same tokens."""
        own, others = self.coder, other.coder
        if isinstance(own, TableTokenizer) and isinstance(others, TableTokenizer):
            return own.has_tokens_of(others)
        return take_library(own).get_vocab() == take_library(others).get_vocab()

    def keep_process(self) -> None:
        """Keep a process that renders chat templates: its start takes longer than rendering."""
        if self._child is None:
            self._child = make_staying_child()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def encode_text(self, text: str) -> list[int]:
        return encode_text(self.coder, text)

    def list_endings(self) -> list[int]:
        """The tokens that end a text that nothing follows."""
        return list_endings(self.coder)

    def list_added_tokens(self) -> Mapping[int, AddedToken]:
        return self.coder.get_added_tokens_decoder()

    def find_token(self, name: str) -> int | None:
        return self.coder.token_to_id(name)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return decode_ids(self.coder, ids, special=special)

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        """`decode` that knows the texts of the last single tokens: streams ask for each again."""
        decode = partial(decode_ids, self.coder)
        keep = lru_cache(1024)(lambda token: decode([token]))
        return lambda ids: keep(ids[0]) if len(ids) == 1 else decode(ids)

    def make_decoder(self, request: GenerationRequest) -> TokenDecoder:
        if not request.shown_ids:
            return TokenDecoder(self._decode)
        added = self.list_added_tokens()
        hidden = {token for token, what in added.items() if what.special} - request.shown_ids
        return TokenDecoder(
            lambda ids: self.decode([token for token in ids if token not in hidden], special=True)
        )

    def constrain(self, make: Callable[[], Callable[[], Constraint]]) -> Any:
        """What ``make`` gives: a grammar of answers, by the vocabulary."""
        return make()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        template: str | None,
        variables: Mapping[str, Any] | None,
        write_calls: WriteCalls | None,
    ) -> str:
        system = self._resolved.plan.chat.system
        if system is not None and all(message.get("role") != "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        from pi2.engine.message_shapes import ShapedTemplate

        found = self.read_chat_template(template)
        shaped = self._shaped.setdefault(found.source, ShapedTemplate(found.source))
        return shaped.render(
            messages,
            lambda given: found.render(
                given,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
                child=self._child,
            ),
            write_calls,
        )

    def read_chat_template(self, name: str | None = None) -> ChatTemplate:
        stated = self._resolved.plan.chat.template
        if stated is not None and name is None:
            tokens = list_chat_tokens(self.folder, self.coder, self._settings)
            return ChatTemplate(self._resolved.path, stated, tokens)
        return read_chat_template(self.folder, self.coder, self._settings, name, self._file)


class StoreTexts(ModelTexts):
    """The texts in a neuron store's folder."""

    advice = "; the chat_template.jinja of a chat model goes into the folder of its store"

    def __init__(self, resolved: ResolvedPlan, coder: Coder, store: NeuronStore) -> None:
        super().__init__(resolved, coder, store)  # type: ignore[arg-type]  # as far as it goes
        self._store = store

    @property
    def store(self) -> NeuronStore:
        return self._store


class DryTexts(ModelTexts):
    """Texts of a run that computes nothing: a token for every four bytes, and no answers."""

    is_synthetic, identity = False, None

    def __init__(self) -> None:
        """There is nothing to open."""

    @property
    def coder(self) -> Coder:
        raise UserError.of(
            "P605",
            "this run has no tokenizer: the null backend opens no neuron store",
            help="use the cpu or the reference backend to work with text",
        )

    @property
    def folder(self) -> Path:
        raise UserError.of("P605", "this run has no texts: the null backend opens no store")

    def go_on_with(self, before: ModelTexts) -> None:
        """There is nothing to keep."""

    def has_tokens_of(self, other: ModelTexts) -> bool:
        return True

    def keep_process(self) -> None:
        """There is nothing to render."""

    def close(self) -> None:
        """There is nothing to end."""

    def encode_text(self, text: str) -> list[int]:
        return [0] * -(-len(text.encode("utf-8", "replace")) // 4)

    def list_endings(self) -> list[int]:
        return []

    def list_added_tokens(self) -> Mapping[int, AddedToken]:
        return {}

    def find_token(self, name: str) -> int | None:
        return None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return ""

    def make_decoder(self, request: GenerationRequest) -> TokenDecoder:
        return TokenDecoder(self.decode)

    def constrain(self, make: Callable[[], Callable[[], Constraint]]) -> Any:
        """Nothing: no answer could follow a grammar."""

    def render_chat(self, messages: Sequence[Message], **given: Any) -> str:
        return "\n".join(str(message.get("content", "")) for message in messages)

    def read_chat_template(self, name: str | None = None) -> ChatTemplate:
        return ChatTemplate(Path(), "", {})
