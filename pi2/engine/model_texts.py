"""Tokens of texts, and texts of tokens, for a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.engine.text import (
    ChatTemplate,
    Message,
    TokenDecoder,
    list_chat_tokens,
    make_staying_child,
    read_chat_template,
)
from pi2.sandbox.coding import decode_ids, encode_text, list_endings
from pi2.tokens.table_tokenizer import Coder, TableTokenizer, take_library

if TYPE_CHECKING:
    from tokenizers import AddedToken

    from pi2.engine.answer import Constraint, GenerationRequest
    from pi2.engine.message_shapes import ShapedTemplate, WriteCalls
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.sandbox.child import StayingChild
    from pi2.store.reader import NeuronStore
    from pi2.weights.gguf_weights import FileTexts


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
