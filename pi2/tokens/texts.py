"""Lists of hundreds of thousands of texts as arrays: no object for each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any, overload

import numpy as np

from pi2.arrays import I64, U8, U64
from pi2.tokens.table_tokenizer import Merge

_FACTOR = 0x9E3779B97F4A7C15
"""Of a hash: an odd number."""
MASK = (1 << 64) - 1
_MOST_BYTES = 1 << 14
"""That count for a hash."""
_STEP = 1 << 16
"""Bytes that are searched for lengths at a time."""


class Texts(Sequence[str]):
    """Texts in UTF-8, one after the other in ``data``."""

    def __init__(self, data: U8, starts: I64, sizes: I64) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes

    @classmethod
    def read(cls, source: Any, place: int, count: int) -> tuple[Texts, int]:
        """Read ``count`` texts from a buffer, each after its length as u64, and say where they end;
        `struct.error` or OverflowError if the buffer ends before."""
        measure = Struct("<Q").unpack_from
        end, ends = place, _guess_ends(source, place, count)
        if ends is None:
            listed = [end := end + 8 + measure(source, end)[0] for _ in range(count)]
            ends = np.array(listed, np.int64)
        end = int(ends[-1]) if count else place
        if end > len(source):
            measure(source, end)
        region = np.frombuffer(source, np.uint8, end - place, place)
        stops = ends - place
        heads = np.concatenate([np.zeros(min(count, 1), np.int64), stops[:-1]])
        is_text = np.ones(len(region), bool)
        for byte in range(8):
            is_text[heads + byte] = False
        stops -= 8 * np.arange(1, count + 1)
        starts = heads - 8 * np.arange(count)
        return cls(region[is_text], starts, stops - starts), end

    @classmethod
    def join(cls, texts: Iterable[str]) -> Texts:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        sizes = np.array([len(text) for text in encoded], np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(sizes) - sizes, sizes)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        return self.get_bytes(number).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Texts):
            same = np.array_equal(self.sizes, other.sizes)
            return same and np.array_equal(self.data, other.data)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def get_bytes(self, number: int) -> bytes:
        """A text in UTF-8."""
        start = self.starts[number]
        return self.data[start : start + self.sizes[number]].tobytes()

    @property
    def are_whole(self) -> bool:
        """Whether each is UTF-8: none begins or ends within a character."""
        begins = self.data[self.starts[self.sizes > 0]]
        if ((begins & 0xC0) == 0x80).any():
            return False
        try:
            self.data.tobytes().decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True

    @cached_property
    def numbers(self) -> TextNumbers:
        return TextNumbers(self)


def _guess_ends(source: Any, place: int, count: int) -> I64 | None:
    """Ends of texts if none begins with zeros or has six of them, as only lengths do; else None."""
    parts, found = [np.zeros(0, np.int64)], 0
    for at in range(place, len(source), _STEP):
        if found >= count:
            break
        is_zero = np.frombuffer(source, np.uint8, min(_STEP + 6, len(source) - at), at) == 0
        pairs = is_zero[1:] & is_zero[:-1]
        sixes = pairs[:-4] & pairs[2:-2] & pairs[4:]
        parts.append(np.flatnonzero(sixes[:-1] & ~is_zero[6:]) + (at - 2))
        found += len(parts[-1])
    heads, read = np.concatenate(parts)[:count], np.frombuffer(source, np.uint8)
    ends = heads + 8 + read[heads] + 256 * read[heads + 1].astype(np.int64)
    is_whole = len(heads) == count > 0 and heads[0] == place and ends[-1] <= len(source)
    return ends if is_whole and (ends[:-1] == heads[1:]).all() else None


def hash_pieces(data: U8, starts: I64, sizes: I64) -> U64:
    """Hashes uint64 [n] of pieces of ``data``, as `hash_bytes` makes them."""
    found = np.zeros(len(starts), np.uint64)
    order = np.argsort(sizes, kind="stable")
    starts, sizes = starts[order], sizes[order]
    made = np.zeros(len(starts), np.uint64)
    for place in range(min(int(sizes.max(initial=0)), _MOST_BYTES)):
        first = int(np.searchsorted(sizes, place, "right"))
        part = made[first:]
        part *= np.uint64(_FACTOR)
        part += data[starts[first:] + place]
        part += np.uint64(1)
    found[order] = made
    return found


def hash_bytes(text: bytes) -> int:
    """A hash whose value for two joined texts follows from their values."""
    made = 0
    for byte in text[:_MOST_BYTES]:
        made = made * _FACTOR + byte + 1 & MASK
    return made


class TextNumbers(Mapping[str, int]):
    """Numbers of texts by the texts; of equal texts the first counts."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.hashes = hash_pieces(texts.data, texts.starts, texts.sizes)
        """uint64 [texts]."""
        self._order = np.argsort(self.hashes).astype(np.int32)
        self._sorted = self.hashes[self._order]
        self._keys, self._places = self._sorted.data, self._order.data

    @property
    def are_distinct(self) -> bool:
        """Whether no two texts have the same hash."""
        return bool((self._sorted[1:] != self._sorted[:-1]).all())

    def __getitem__(self, text: str) -> int:
        found = self.list_all(text)
        if not found:
            raise KeyError(text)
        return found[0]

    def list_all(self, text: str) -> list[int]:
        encoded = text.encode("utf-8", "surrogatepass")
        return [
            number
            for number in self.list_hashed(hash_bytes(encoded))
            if self.texts.get_bytes(number) == encoded
        ]

    def list_hashed(self, key: int) -> list[int]:
        """Numbers of texts with a hash, ascending."""
        place, found = bisect_left(self._keys, key), []
        while place < len(self._keys) and self._keys[place] == key:
            found.append(self._places[place])
            place += 1
        return sorted(found)

    def find_hashed(self, wanted: U64, sizes: I64) -> I64:
        """Numbers int64 [n] of texts with these hashes and sizes, -1 where there is none; no two
        texts may have the same hash."""
        places = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        numbers = self._order[places].astype(np.int64)
        same = (self._sorted[places] == wanted) & (self.texts.sizes[numbers] == sizes)
        return np.where(same, numbers, -1)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.texts))

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class ListedMerges:
    """Merges of pairs that a file lists."""

    keys: memoryview
    """Pairs, ascending: left << 32 | right."""
    ranks: memoryview
    tokens: memoryview
    """What each pair becomes."""

    @classmethod
    def read(cls, merges: Texts, tokens: Texts) -> ListedMerges | None:
        """Read merges ``left right``; None if one is of texts that are no tokens."""
        data, starts, stops = merges.data, merges.starts, merges.starts + merges.sizes
        spaces = np.append(np.flatnonzero(data == ord(" ")), len(data))
        cuts = spaces[np.searchsorted(spaces, starts)]
        if (cuts >= stops).any():
            return None
        numbers = tokens.numbers
        sizes = cuts - starts, stops - cuts - 1
        hashes = [hash_pieces(data, *part) for part in ((starts, sizes[0]), (cuts + 1, sizes[1]))]
        lefts, rights = map(numbers.find_hashed, hashes, sizes)
        powers = np.full(_MOST_BYTES + 1, _FACTOR, np.uint64)
        powers[0] = 1
        powers = np.multiply.accumulate(powers)[sizes[1].clip(max=_MOST_BYTES)]
        made = numbers.find_hashed(hashes[0] * powers + hashes[1], merges.sizes - 1)
        if min(found.min(initial=0) for found in (lefts, rights, made)) < 0:
            return None
        keys = (lefts << 32 | rights).astype(np.uint64)
        order = np.argsort(keys, kind="stable")
        parts = keys[order], order.astype(np.int32), made[order].astype(np.int32)
        return cls(*(part.data for part in parts))

    @classmethod
    def join(cls, kept: memoryview) -> ListedMerges:
        """Make it of the bytes of its three lists, one after the other."""
        count = len(kept) // 16
        parts = kept[: 8 * count], kept[8 * count : 12 * count], kept[12 * count :]
        return cls(parts[0].cast("Q"), parts[1].cast("i"), parts[2].cast("i"))

    def find(self, left: int, right: int) -> Merge | None:
        """What becomes of two tokens; the last merge counts where a file lists one twice."""
        key = left << 32 | right
        place = bisect_right(self.keys, key) - 1
        if place < 0 or self.keys[place] != key:
            return None
        return self.ranks[place], self.tokens[place]


class ScoredMerges:
    """Merges of any pair whose text is a token, by that token's score."""

    def __init__(self, tokens: Texts, scores: Any) -> None:
        self._numbers = tokens.numbers
        self._texts = tokens
        order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        self._ranks = ranks.data
        self._hashes = self._numbers.hashes.data
        self._sizes = tokens.sizes.data
        self._powers = [1]

    def find(self, left: int, right: int) -> Merge | None:
        """Merge of two tokens: of a token's pairs, the one with lower numbers goes first."""
        size, powers = self._sizes[right], self._powers
        while len(powers) <= size:
            powers.append(powers[-1] * _FACTOR & MASK)
        key = self._hashes[left] * powers[size] + self._hashes[right] & MASK
        for token in self._numbers.list_hashed(key):
            if self._texts.get_bytes(token) == (
                self._texts.get_bytes(left) + self._texts.get_bytes(right)
            ):
                return self._ranks[token] << 64 | left << 32 | right, token
        return None
