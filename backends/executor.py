"""Contracts of executors: who observes them, and what a program keeps of a context."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pi2.arrays import U8


Method = TypeVar("Method", bound=Callable[..., Any])
_WITHOUT_LAYER = frozenset({"embed", "logits"})


class ExecutorObserver:
    """Is told by the executor that it observes, in the thread that drives it; does nothing
    itself."""

    def note_kernel(self, name: str, layer: int | None, start_s: float, end_s: float) -> None:
        """A compiled function of the executor has run, from when to when
        (`time.perf_counter`), for ``layer`` if it belongs to one.  An executor that has none tells
        of its methods instead."""

    def select_chunk(self, number: int) -> None:
        """What follows is about chunk ``number`` of a prompt."""

    def begin_ffn(self, layer: int) -> None:
        """The FFN of ``layer`` has its input."""

    def add_dense(self, layer: int, bundles: U8, first: int) -> None:
        """The neurons of ``bundles`` [n, stride] are added for all tokens; ``first`` is the stored
        index of the first."""

    def end_ffn(self, layer: int) -> None:
        """All neurons of ``layer`` have been added."""


def noted(method: Method) -> Method:
    """Let the executor's observer be told of every call of ``method``, whose first argument may be
    a layer; noted methods do not call one another."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        observer: ExecutorObserver | None = self._observer
        if observer is None:
            return method(self, *arguments, **keywords)
        start_s = time.perf_counter()
        try:
            return method(self, *arguments, **keywords)
        finally:
            has_layer = name not in _WITHOUT_LAYER
            layer = arguments[0] if has_layer else None
            observer.note_kernel(name, layer, start_s, time.perf_counter())

    return cast(Method, call)


CONTEXT_BLOCK = 16
"""The KV cache is copied in pieces of so many tokens."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The last positions of a sequence that layers with a window keep."""

    window: int
    positions: int

    @property
    def slack(self) -> int:
        """Tokens by which a sequence may be taken back."""
        return self.positions - self.window
