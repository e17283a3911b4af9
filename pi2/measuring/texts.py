"""Texts as token ids, windows that models run over, scores, and a file of results so far."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pi2.arrays import F32, F64, I64
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.plan.documents.model import Model
from pi2.sandbox.coding import encode_text
from pi2.sharing.fetching import write_atomically
from pi2.tokens.table_tokenizer import Coder


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are run as a sequence of their own."""

    tokens: tuple[int, ...]
    """Ids, the begin token first where the model wants one."""
    first_scored: int
    """Index of the first token that counts; those before it are context."""


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read UTF-8 files; UserError P660 if one cannot be read or has no text."""
    texts = []
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except OSError as error:
            raise UserError.of("P660", f"cannot read the text {file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError.of(
                "P660",
                f"the text {file} is not UTF-8: byte {error.start}",
                help="save the text as UTF-8",
            ) from None
        if not text.strip():
            raise UserError.of("P660", f"the text {file} is empty", help="give a few pages of text")
        texts.append(text)
    return texts


HELD_OUT = 0.1
"""Share of every text, its end, that nothing is learned from."""


@dataclass(frozen=True, slots=True)
class Passages:
    """Texts, and how they are cut into windows."""

    texts: Sequence[str]
    context: int | None = None
    """Most tokens of a window; None: what the plan holds, at most 512."""
    count: int | None = None
    """Number of windows, spread evenly; None: all."""
    stride: int | None = None
    """Tokens from the start of a window to the start of the next; None: the whole window."""
    held_out: int | None = None
    """Windows of the texts' ends that something learned is judged on."""

    @property
    def learned(self) -> Passages:
        """The texts without their ends."""
        return replace(self, texts=[text[: _find_end(text)] for text in self.texts])

    def hold_out(self, count: int) -> Passages:
        """The ends of the texts: so many windows where `held_out` is None."""
        texts = [text[_find_end(text) :] for text in self.texts]
        return replace(self, texts=texts, count=self.held_out or count)

    def cut(self, model: LoadedModel) -> list[Window]:
        """The windows; UserError P660 if no token is scored, P661 for context or stride."""
        room = model.plan.plan.kv.context
        size = min(512, room) if self.context is None else self.context
        step = size if self.stride is None else self.stride
        if not 2 <= size <= room or not 1 <= step <= size:
            raise UserError.of(
                "P661",
                f"a context of {size} tokens and a stride of {step} do not fit kv.context = {room}",
                help="the context is at most kv.context, the stride at most the context",
            )
        return self.cut_for(model.coder, model.plan.model, size, step)

    def cut_for(self, coder: Coder, model: Model, size: int, step: int) -> list[Window]:
        """Windows of ``size`` tokens, ``step`` apart; UserError P660."""
        begin = model.tokenizer.bos if model.tokenizer.add_bos else None
        ids = (encode_text(coder, text) for text in self.texts)
        windows = [
            window for x in ids for window in cut_windows(x, begin=begin, context=size, stride=step)
        ]
        if not windows:
            raise UserError.of(
                "P660", "the text has fewer than two tokens", help="give a few pages of text"
            )
        if self.count is None or self.count >= len(windows):
            return windows
        chosen = np.linspace(0, len(windows) - 1, self.count).round().astype(int)
        return [windows[index] for index in chosen]


def _find_end(text: str) -> int:
    return round(len(text) * (1 - HELD_OUT))


def cut_windows(
    ids: Sequence[int], *, begin: int | None, context: int, stride: int
) -> list[Window]:
    """Windows over ``ids``, each headed by ``begin``; a later one scores its last ``stride``
    tokens. A shorter last piece is left out unless it is the only one."""
    head = () if begin is None else (begin,)
    body = context - len(head)
    step = min(stride, body)
    windows = []
    for start in range(0, max(1, len(ids) - body + 1), step):
        tokens = (*head, *ids[start : start + body])
        first = 1 if start == 0 else max(1, len(tokens) - step)
        if first < len(tokens):
            windows.append(Window(tokens, first))
    return windows


def run_windows(
    model: LoadedModel,
    windows: Sequence[Window],
    progress: Callable[[float], None] = lambda share: None,
    *,
    first: int = 0,
) -> Iterator[int]:
    """Compute all tokens of ``windows`` from the ``first`` on, for observers; yield the number of
    computed ones after each."""
    for number, window in enumerate(windows[first:], first):
        progress(number / len(windows))
        for _ in model.iterate_logits(window.tokens):
            pass
        yield number + 1


PAUSE_S = 20.0
"""Least time between two writes while windows are computed."""
_WORK = 20
"""Time for the work relative to a write's."""


class Unfinished:
    """What a job has found so far, as arrays in a file that a later call of it goes on from."""

    def __init__(
        self,
        file: Path | None,
        write: Callable[[Path, bytes], None] = write_atomically,
        *,
        compresses: bool = True,
    ) -> None:
        """None keeps nothing; ``compresses`` arrays with many zeros."""
        self._file, self._write = file, write
        self._save = np.savez_compressed if compresses else np.savez
        self.arrays: dict[str, Any] = {}
        self._job, self._written_s, self._pause_s = "", time.monotonic(), PAUSE_S

    def begin(self, job: str) -> int:
        """Read what the same job found; return the number of windows that it computed."""
        self._job, self._written_s, self._pause_s = job, time.monotonic(), PAUSE_S
        damage = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
        if self._file is not None:
            with suppress(*damage), np.load(self._file, allow_pickle=False) as found:
                if str(found["job"]) == job:
                    self.arrays = {name: found[name] for name in found.files}
        return int(self.arrays.get("windows", 0))

    def keep(self, found: Mapping[str, Any]) -> None:
        """Write ``found`` in addition to earlier results."""
        self.arrays |= found
        if self._file is None:
            return
        content, start_s = io.BytesIO(), time.monotonic()
        self._save(content, **{**self.arrays, "job": self._job})
        self._write(self._file, content.getvalue())
        self._written_s = time.monotonic()
        self._pause_s = max(PAUSE_S, _WORK * (self._written_s - start_s))

    def keep_windows(
        self, windows: int, list_found: Callable[[], Mapping[str, Any]], *, is_last: bool = False
    ) -> None:
        """Write what the ``windows`` computed have shown; not after each, for it takes a moment."""
        if is_last or time.monotonic() - self._written_s > self._pause_s:
            self.keep({"windows": windows, **list_found()})

    def drop(self) -> None:
        """Remove the file: everything is done."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


Mode = Literal["prefill", "decode"]
_ROWS = 16
"""Tokens whose logits are widened to float64 together."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a run said of the scored tokens of all windows, in order."""

    losses: F64
    """Negative log-likelihood of every scored token, in nats [tokens]."""
    choices: I64
    """The most likely token in its place [tokens]."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def join_scores(pieces: Sequence[Scores]) -> Scores:
    return Scores(
        np.concatenate([piece.losses for piece in pieces]),
        np.concatenate([piece.choices for piece in pieces]),
    )


def score_windows(
    model: LoadedModel,
    windows: Sequence[Window],
    mode: Mode,
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score ``windows`` densely (``prefill``) or as a generation does (``decode``)."""
    losses, choices = [], []
    for number, window in enumerate(windows):
        for logits, targets in iterate_scored(model, window, mode):
            for start in range(0, len(logits), _ROWS):
                rows = slice(start, start + _ROWS)
                losses.append(compute_losses(logits[rows], targets[rows]))
                choices.append(logits[rows].argmax(-1))
        progress((number + 1) / len(windows))
    return Scores(np.concatenate(losses), np.concatenate(choices))


def iterate_scored(model: LoadedModel, window: Window, mode: Mode) -> Iterator[tuple[F32, I64]]:
    """Logits [n, vocab] of the scored tokens of ``window``, and these tokens [n], in order."""
    tokens, done = np.array(window.tokens, np.int64), 0
    # The last token has nothing to predict.
    for logits in model.iterate_logits(window.tokens[:-1], mode=mode):
        first = max(0, window.first_scored - 1 - done)
        yield logits[first:], tokens[done + first + 1 : done + 1 + len(logits)]
        done += len(logits)


def compute_losses(logits: F32, targets: I64) -> F64:
    """Negative log-likelihoods [n], in nats, of ``targets`` [n] under ``logits`` [n, vocab]."""
    return np.asarray(-compute_log_chances(logits)[np.arange(len(targets)), targets])


def compute_log_chances(logits: F32) -> F64:
    """Logarithms of the chances [n, vocab] that ``logits`` [n, vocab] give."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return scores
