"""Prompts go on from what was read before: in places of sequences that have ended, or from files.

What a prompt's whole chunks gave is the same bit for bit whoever reads them; it is *exact*.  What
was computed while tokens were generated, or after such tokens, is not: sparse layers leave neurons
out.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.protocol import CONTEXT_BLOCK, ContextKeeper, StateKeeper
from pi2.caches import find_cache_folder
from pi2.engine.parts import Parts
from pi2.engine.prefix_files import Block, PrefixFiles, name_blocks
from pi2.engine.sequences import Sequences
from pi2.plan.arithmetic.sizes import count_chunks
from pi2.plan.weights.layout import round_up


@dataclass(slots=True)
class _Place:
    """What a sequence's place has."""

    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are there."""
    exact: int = 0
    """Tokens of these, from the first, that were read as in any prompt that begins with them."""
    saved: int = 0
    """Blocks that are in files."""
    used_at: float = 0.0


class KeptPrefixes:
    """Knows what is in the places of sequences, and in files."""

    def __init__(
        self,
        forward: Sequences,
        keeper: ContextKeeper,
        *,
        block: int,
        identity: bytes,
        goes_on_from_answers: bool,
        states: StateKeeper | None = None,
        files: PrefixFiles | None = None,
    ) -> None:
        """``block``: tokens that are kept as one, a multiple of ``CONTEXT_BLOCK``: a chunk of a
        prompt, or with ``states`` as many as are read before one can be kept; ``identity``: what
        keys and values depend on beside tokens; ``goes_on_from_answers``: whether what is not exact
        is used; ``states``: copies the states of a model that has some."""
        assert block % CONTEXT_BLOCK == 0
        self._forward = forward
        self._keeper = keeper
        self._block = block
        self._identity = identity
        self._from_answers = goes_on_from_answers
        self._states = states
        self._files = files
        self._places = [_Place() for _ in forward.positions]

    def choose_place(self, free: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        """See `pi2.engine.prefixes.Prefixes`."""
        ids = list(prompt_ids)
        most = len(ids) - 1
        usable = [self._count_usable(place, ids, most) for place in range(len(self._places))]
        sources = free if self._states is not None else range(len(self._places))
        source = max(sources, key=lambda place: (usable[place], place in free))
        reused = usable[source]
        if self._files is not None:
            names = self._name(ids[:most])
            known = self._files.count_known(names)
            if known * self._block > reused:
                target = self._find_oldest(free)
                return target, self._load(target, names[:known], ids)
        target = self._choose_target(free, source, reused)
        kept = self._places[source]
        self._forward.go_on_from(target, reused)
        if target != source:
            self._copy(source, target, reused)
        exact, saved = min(kept.exact, reused), min(kept.saved, reused // self._block)
        self._places[target] = _Place(ids[:reused], exact, saved, time.monotonic())
        return target, reused

    def choose_empty(self, free: Sequence[int]) -> int:
        """See `pi2.engine.prefixes.Prefixes`."""
        place = self._find_oldest(free)
        self._forward.reset(place)
        self.forget(place)
        return place

    def note_copy(self, source: int, target: int) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""
        kept = self._places[source]
        self._places[target] = replace(kept, ids=list(kept.ids), used_at=time.monotonic())

    def note_prompt(self, place: int, ids: I32) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""
        kept = self._places[place]
        if kept.exact == len(kept.ids):
            kept.exact = len(ids)
        kept.ids = ids.tolist()
        self._save(place)

    def note_token(self, place: int, token: int) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""
        self._places[place].ids.append(token)

    def note_end(self, place: int) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""
        kept = self._places[place]
        # What failed or was given up may have been read by some layers only.
        del kept.ids[self._forward.positions[place] :]
        kept.exact = min(kept.exact, len(kept.ids))
        kept.used_at = time.monotonic()
        self._save(place)

    def forget(self, place: int) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""
        self._places[place] = _Place()

    def close(self) -> None:
        """See `pi2.engine.prefixes.Prefixes`."""

    def _name(self, ids: Sequence[int]) -> list[str]:
        return name_blocks(self._identity, ids, self._block)

    def _count_usable(self, place: int, ids: list[int], most: int) -> int:
        """Tokens of a prompt that a place has and that may be gone on from."""
        kept = self._places[place]
        common = _count_common(kept.ids, ids[:most])
        if self._states is not None:
            # A state is that after the last token, and no other.
            whole = common == len(kept.ids)
            exact = kept.exact == common and common % self._block == 0
            return common if whole and (exact or self._from_answers) else 0
        if self._from_answers and common > kept.exact:
            return common
        return min(common, kept.exact) // self._block * self._block

    def _find_oldest(self, free: Sequence[int]) -> int:
        """An empty place, or the one that was not used for longest."""
        return min(
            free, key=lambda place: (bool(self._places[place].ids), self._places[place].used_at)
        )

    def _choose_target(self, free: Sequence[int], source: int, reused: int) -> int:
        """The place itself where most of it is used, or nothing can be copied; else the one that
        was not used for longest, so that the others can still be gone on from."""
        if reused and source in free:
            if self._states is not None or 2 * reused >= len(self._places[source].ids):
                return source
        return self._find_oldest(free)

    def _copy(self, source: int, target: int, count: int) -> None:
        end = round_up(count, CONTEXT_BLOCK)
        for first in range(0, end, self._block):
            last = min(end, first + self._block)
            kept = self._keeper.read_context(source, first, last)
            self._keeper.put_context(target, first, last, kept)

    def _load(self, target: int, names: Sequence[str], ids: list[int]) -> int:
        """Bring blocks out of files to a place; return the tokens that it has then."""
        assert self._files is not None
        self._forward.go_on_from(target, len(names) * self._block)
        done, state, is_exact = 0, None, True
        for number, name in enumerate(names):
            block = self._files.read(name)
            if block is None or not (block.is_exact or self._from_answers):
                break
            first = number * self._block
            self._keeper.put_context(target, first, first + self._block, block.context)
            is_exact = is_exact and block.is_exact
            if self._states is None or len(block.state):
                done, state = number + 1, block.state
        if self._states is not None and state is not None:
            self._states.put_state(target, state)
        count = done * self._block
        self._forward.go_on_from(target, count)
        exact = count if is_exact else 0
        self._places[target] = _Place(ids[:count], exact, done, time.monotonic())
        return count

    def _save(self, place: int) -> None:
        """Put whole blocks that are not in files into files."""
        kept = self._places[place]
        count = len(kept.ids) if self._from_answers else kept.exact
        if self._files is None or count // self._block <= kept.saved:
            return
        names = self._name(kept.ids[:count])
        for number in range(kept.saved, len(names)):
            first, end = number * self._block, (number + 1) * self._block
            state: F32 = np.zeros(0, np.float32)
            if self._states is not None and end == len(kept.ids):
                state = self._states.read_state(place)
            context = self._keeper.read_context(place, first, end)
            self._files.write(names[number], Block(context, state, is_exact=end <= kept.exact))
        kept.saved = len(names)


def _count_common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(number for number in range(most) if first[number] != second[number])


def make_kept_prefixes(parts: Parts) -> KeptPrefixes | None:
    """What a plan's ``[serve]`` asks for; None where nothing is to be kept, or nothing can be: a
    GPU that has the whole model does not give its keys and values out."""
    resolved = parts.resolved
    plan = resolved.plan
    if parts.store is None or plan.serve.prefixes == "none":
        return None
    executor: object = parts.whole if parts.layers is None else parts.executor
    if not isinstance(executor, ContextKeeper):
        return None
    states = None
    # A file's tokens are rounded otherwise where a prompt is cut, as in llama.cpp.
    size = plan.prefill.chunk if resolved.file is None else CONTEXT_BLOCK
    if resolved.model.state_layers:
        if not isinstance(executor, StateKeeper):
            return None
        states = executor
        size *= count_chunks(resolved)
    identity = hashlib.sha256(resolved.digest.encode())
    identity.update(parts.store.identity)
    files = None
    if plan.serve.prefix_cache is not None:
        folder = find_cache_folder("prefixes") / identity.hexdigest()[:32]
        files = PrefixFiles(folder, plan.serve.prefix_cache)
    return KeptPrefixes(
        parts.forward,
        executor,
        block=math.lcm(size, CONTEXT_BLOCK),
        identity=identity.digest(),
        goes_on_from_answers=plan.serve.prefixes == "answers",
        states=states,
        files=files,
    )
