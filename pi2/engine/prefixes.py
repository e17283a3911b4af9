"""KV cache of earlier prompts, in memory and in files of token blocks. A block is named by a hash
of all tokens up to its end; damaged files are removed, and the oldest go first."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.blocks.contract import CONTEXT_BLOCK, Ring
from pi2.caches import find_cache_folder
from pi2.engine.opening import Parts
from pi2.engine.sequences import Sequences
from pi2.logging import get_logger
from pi2.model.blocks import list_turns
from pi2.plan.weights.layout import round_up

_MAGIC = b"pi2kept3"
_HEAD = len(_MAGIC) + 32 + 8 + 1
_SUFFIX = ".kept"


@dataclass(frozen=True, slots=True)
class Block:
    """The stored data of a block of tokens."""

    context: U8
    """KV caches [n]."""
    state: F32
    """States after its last token [n]; empty for models without, and where they are not known."""
    is_exact: bool
    """Whether it is what any prompt gives that begins with these tokens."""
    is_whole: bool = True
    """Whether layers with a window still had its tokens."""


def name_blocks(identity: bytes, ids: Sequence[int], size: int) -> list[str]:
    """Names of the whole blocks of ``size`` tokens that ``ids`` begin with; ``identity``:
    everything else that their bytes depend on."""
    names, digest = [], hashlib.sha256(identity).digest()
    tokens = np.asarray(ids, np.int64)
    for end in range(size, len(tokens) + 1, size):
        digest = hashlib.sha256(digest + tokens[end - size : end].tobytes()).digest()
        names.append(digest.hex())
    return names


class PrefixFiles:
    """A folder of blocks. Other processes may use it at the same time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """``limit_bytes``: what the files may have together."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of each, least recently used first."""
        self._total = 0
        self._works = True
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            entries = [entry for entry in os.scandir(folder) if entry.name.endswith(_SUFFIX)]
            found = sorted((entry.stat().st_mtime_ns, entry.name) for entry in entries)
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        except OSError as error:
            self._give_up(error)
            return
        for _, name in found:
            self._note(name.removesuffix(_SUFFIX), sizes[name])
        self._evict()

    @property
    def total_bytes(self) -> int:
        return self._total

    def count_known(self, names: Sequence[str]) -> int:
        """How many of ``names`` there are without a gap, from the first."""
        for number, name in enumerate(names):
            if name not in self._sizes:
                return number
        return len(names)

    def read(self, name: str) -> Block | None:
        """The data stored under a name; None if it is damaged or gone, and then it is removed."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            self._remove(name)
            return None
        body = memoryview(data)[_HEAD - 9 :]
        stated = data[len(_MAGIC) : len(_MAGIC) + 32]
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != stated:
            get_logger().warning("a damaged prefix is removed", file=path.name)
            self._remove(name)
            return None
        size = int.from_bytes(data[_HEAD - 9 : _HEAD - 1], "little")
        self._sizes.move_to_end(name)
        values = np.frombuffer(data, np.uint8, offset=_HEAD)
        is_exact, is_whole = (data[_HEAD - 1] & bit > 0 for bit in (1, 2))
        return Block(values[size:], values[:size].view(np.float32), is_exact, is_whole)

    def write(self, name: str, block: Block) -> None:
        """Store a block, unless the folder has it."""
        if name in self._sizes or not self._works:
            return
        state = block.state.tobytes()
        facts = len(state).to_bytes(8, "little") + bytes([block.is_exact + 2 * block.is_whole])
        body = facts + state + block.context.tobytes()
        size = _HEAD - len(facts) + len(body)
        if size > self._limit_bytes:
            return
        head = _MAGIC + hashlib.sha256(body).digest()
        path = self._path(name)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                file.write(head)
                file.write(body)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._give_up(error)
            return
        self._note(name, size)
        self._evict()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _note(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self._total += size

    def _remove(self, name: str) -> None:
        self._total -= self._sizes.pop(name, 0)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def _evict(self) -> None:
        while self._total > self._limit_bytes:
            self._remove(next(iter(self._sizes)))

    def _give_up(self, error: OSError) -> None:
        if self._works:
            get_logger().warning("prefixes are not kept in files", reason=str(error.strerror))
        self._works = False


@dataclass(slots=True)
class _Place:
    """What a sequence's place has."""

    ids: list[int] = field(default_factory=list)
    """Tokens that the KV cache has."""
    exact: int = 0
    """Tokens of these, from the first, that were read as in any prompt that begins with them."""
    saved: int = 0
    """Blocks that are in files."""
    used_at: float = 0.0
    identity: bytes = b""
    """What else the prompt's KV cache depends on."""


class Prefixes:
    """Knows the tokens in the places of sequences, which here are none: every prompt is read from
    its beginning.  One caller at a time."""

    def __init__(self, forward: Sequences) -> None:
        self._forward = forward

    def choose_place(self, free: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Choose one of the places ``free`` for a prompt, and bring the known part of its KV cache
        there; return it, and how many tokens of the prompt need not be read."""
        return self.choose_empty(free), 0

    def choose_empty(self, free: Sequence[int]) -> int:
        self._forward.reset(free[0])
        return free[0]

    def note_copy(self, source: int, target: int) -> None:
        """Take notice that one place has what the other one has."""

    def note_prompt(self, place: int, ids: I32, end: int) -> None:
        """Take notice that the first tokens of a prompt of ``end``, ``ids`` [n], were read into a
        place."""

    def note_token(self, place: int, token: int) -> None:
        """Take notice that a generated token was taken through the model."""

    def note_end(self, place: int) -> None:
        """Take notice that a place's sequence has ended: memory that its context does not use may
        be lent, or its content used again."""
        self._forward.reset(place)

    def forget(self, place: int) -> None:
        """Note that another caller uses a place."""

    def follow(self, forward: Sequences) -> None:
        """Take another model, whose places have what these have."""
        self._forward = forward


class KeptPrefixes(Prefixes):
    """Knows the tokens in the places of sequences, and in files."""

    def __init__(
        self,
        forward: Sequences,
        *,
        block: int,
        identify: Callable[[int], bytes],
        goes_on_from_answers: bool,
        has_states: bool = False,
        files: PrefixFiles | None = None,
    ) -> None:
        """``block``: tokens kept as one; ``identify``: everything else that the KV cache depends
        on, in a prompt of so many tokens; ``goes_on_from_answers``: whether inexact ones serve;
        ``has_states``: whether layers keep states."""
        assert block % CONTEXT_BLOCK == 0
        super().__init__(forward)
        assert forward.program is not None
        self._keeper = forward.program
        self._block = block
        self._identify = identify
        self._from_answers = goes_on_from_answers
        self._has_states = has_states
        self._files = files
        self._places = [_Place() for _ in forward.positions]

    def choose_place(self, free: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        ids = list(prompt_ids)
        most, identity = len(ids) - 1, self._identify(len(ids))
        usable = [
            self._count_usable(place, ids, most) if kept.identity == identity else 0
            for place, kept in enumerate(self._places)
        ]
        sources = free if self._has_states else range(len(self._places))
        source = max(sources, key=lambda place: (usable[place], place in free))
        reused = usable[source]
        if self._files is not None:
            names = name_blocks(identity, ids[:most], self._block)
            known = self._files.count_known(names)
            if known * self._block > reused:
                target = self._find_oldest(free)
                return target, self._load(target, names[:known], ids, identity)
        target = self._choose_target(free, source, reused)
        kept = self._places[source]
        self._forward.go_on_from(target, reused)
        if reused and target != source:
            self._copy(source, target, reused)
            self._forward.earliest[target] = self._forward.earliest[source]
        exact, saved = min(kept.exact, reused), min(kept.saved, reused // self._block)
        self._places[target] = _Place(ids[:reused], exact, saved, time.monotonic(), identity)
        return target, reused

    def choose_empty(self, free: Sequence[int]) -> int:
        place = self._find_oldest(free)
        self._forward.reset(place)
        self.forget(place)
        return place

    def note_copy(self, source: int, target: int) -> None:
        kept = self._places[source]
        self._places[target] = replace(kept, ids=list(kept.ids), used_at=time.monotonic())

    def note_prompt(self, place: int, ids: I32, end: int) -> None:
        kept = self._places[place]
        kept.identity = self._identify(end)
        if kept.exact == len(kept.ids):
            kept.exact = len(ids)
        kept.ids = ids.tolist()
        self._save(place)

    def note_token(self, place: int, token: int) -> None:
        self._places[place].ids.append(token)

    def note_end(self, place: int) -> None:
        kept = self._places[place]
        # What failed or was given up may have been read by some layers only.
        del kept.ids[self._forward.positions[place] :]
        kept.exact = min(kept.exact, len(kept.ids))
        kept.used_at = time.monotonic()
        self._save(place)

    def forget(self, place: int) -> None:
        self._places[place] = _Place()

    def follow(self, forward: Sequences) -> None:
        super().follow(forward)
        assert forward.program is not None
        self._keeper = forward.program

    def _count_usable(self, place: int, ids: list[int], most: int) -> int:
        """Tokens of a prompt that a place has and that may be gone on from."""
        kept = self._places[place]
        common = _count_common(kept.ids, ids[:most])
        count = self._count_known(kept, common)
        return count if count >= self._forward.earliest[place] else 0

    def _count_known(self, kept: _Place, common: int) -> int:
        if self._has_states:
            # A state is that after the last token, and no other.
            whole = common == len(kept.ids)
            exact = kept.exact == common and common % self._block == 0
            return common if whole and (exact or self._from_answers) else 0
        if self._from_answers and common > kept.exact:
            return common
        return min(common, kept.exact) // self._block * self._block

    def _find_oldest(self, free: Sequence[int]) -> int:
        return min(
            free, key=lambda place: (bool(self._places[place].ids), self._places[place].used_at)
        )

    def _choose_target(self, free: Sequence[int], source: int, reused: int) -> int:
        """The place itself if most of it is reused, or nothing can be copied; else the least
        recently used place, which leaves the others to be continued."""
        if reused and source in free:
            if self._has_states or 2 * reused >= len(self._places[source].ids):
                return source
        return self._find_oldest(free)

    def _copy(self, source: int, target: int, count: int) -> None:
        end = round_up(count, CONTEXT_BLOCK)
        for first in range(0, end, self._block):
            last = min(end, first + self._block)
            kept = self._keeper.read_context(source, first, last)
            self._keeper.put_context(target, first, last, kept)

    def _load(self, target: int, names: Sequence[str], ids: list[int], identity: bytes) -> int:
        """Bring blocks out of files to a place; return the tokens that it has then."""
        assert self._files is not None
        self._forward.go_on_from(target, len(names) * self._block)
        done, put, state, is_exact, whole = 0, 0, None, True, 0
        ring = self._forward.ring or Ring(0, 0)
        for number, name in enumerate(names):
            block = self._files.read(name)
            if block is None or not (block.is_exact or self._from_answers):
                break
            first = number * self._block
            put = first + self._block
            self._keeper.put_context(target, first, put, block.context)
            is_exact = is_exact and block.is_exact
            whole = whole + self._block if block.is_whole else 0
            has_all = whole >= min(ring.window, put)
            if has_all and (not self._has_states or len(block.state)):
                done, state = number + 1, block.state
        if self._has_states and state is not None:
            self._keeper.put_state(target, state)
        count = done * self._block
        if put - count > ring.slack and ring.window:
            count = 0
        self._forward.go_on_from(target, count)
        self._forward.earliest[target] = count if ring.window else 0
        exact = count if is_exact else 0
        self._places[target] = _Place(ids[:count], exact, done, time.monotonic(), identity)
        return count

    def _save(self, place: int) -> None:
        """Put whole blocks that are not in files into files."""
        kept = self._places[place]
        count = len(kept.ids) if self._from_answers else kept.exact
        if self._files is None or count // self._block <= kept.saved:
            return
        names = name_blocks(kept.identity, kept.ids[:count], self._block)
        window = 0 if self._forward.ring is None else self._forward.ring.window
        for number in range(kept.saved, len(names)):
            first, end = number * self._block, (number + 1) * self._block
            state: F32 = np.zeros(0, np.float32)
            if self._has_states and end == len(kept.ids):
                state = self._keeper.read_state(place)
            context = self._keeper.read_context(place, first, end)
            is_whole = first >= self._forward.earliest[place] - window
            is_exact = end <= kept.exact
            self._files.write(names[number], Block(context, state, is_exact, is_whole))
        kept.saved = len(names)


def _count_common(first: list[int], second: list[int]) -> int:
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(number for number in range(most) if first[number] != second[number])


def make_kept_prefixes(parts: Parts) -> KeptPrefixes | None:
    """The prefixes of a plan's ``[serve]``; None if nothing is to be kept, or nothing can be: a GPU
    with the whole model does not give its KV cache out."""
    resolved = parts.resolved
    plan = resolved.plan
    weights = parts.texts.identity
    if weights is None or plan.serve.prefixes == "none" or parts.forward.program is None:
        return None
    size = resolved.source.count_cut(resolved)
    if resolved.model.state_layers:
        size *= resolved.chunks
    identity = hashlib.sha256(resolved.digest.encode())
    identity.update(weights)
    ropes = [rope for rope, _ in list_turns(resolved.model) if rope.kind == "longrope"]
    files = None
    if plan.serve.prefix_cache is not None:
        folder = find_cache_folder("prefixes") / identity.hexdigest()[:32]
        files = PrefixFiles(folder, plan.serve.prefix_cache)
    return KeptPrefixes(
        parts.forward,
        block=math.lcm(size, CONTEXT_BLOCK),
        # All keys of a prompt that is long for LongRoPE turn in another way.
        identify=lambda end: identity.digest() + bytes(rope.is_long(end) for rope in ropes),
        goes_on_from_answers=plan.serve.prefixes == "answers",
        has_states=bool(resolved.model.state_layers),
        files=files,
    )
