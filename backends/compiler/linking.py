"""Links object files of LLVM to a shared library: no linker need be installed.

Knows what LLVM writes for functions without exceptions and thread-local variables (System V ABI,
with its supplements for AMD64 and AArch64).  Names that no file defines are looked up when the
library is loaded."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEADER, _PART, _HEAD = (struct.Struct(f"<{x}") for x in ("16s2HI3QI6H", "2I6Q", "2I4Q2I2Q"))
_SYMBOL, _RELOCATION = struct.Struct("<I2BH2Q"), struct.Struct("<2Qq")
_PLAIN, _SYMBOLS, _STRINGS, _RELOCATIONS, _HASH = 1, 2, 3, 4, 5
_DYNAMIC, _EMPTY, _EXPORTS, _STARTS = 6, 8, 11, 14
"""Types of sections (SHT_PROGBITS and so on)."""
_WRITE, _ALLOC, _CODE, _OF_THREAD = 1, 2, 4, 0x400
"""Flags of sections."""
_WEAK, _STACK = 2, 0x6474E551
_PAGE = 16384
"""Bytes: the largest that Android has."""
_X86, _ARM = 62, 183
_FIELDS: Mapping[int, Mapping[int, tuple[str, bool]]] = {
    _X86: {1: ("word", False), 2: ("near", False), 4: ("call", False)}
    | dict.fromkeys((9, 41, 42), ("near", True)),
    _ARM: {257: ("word", False), 261: ("near", False), 275: ("page", False)}
    | dict.fromkeys((282, 283), ("call", False))
    | dict.fromkeys((277, 278, 284, 285, 286, 299), ("low", False))
    | {311: ("page", True), 312: ("low", True)},
}
"""The field that a relocation fills in, by its type, and whether with the place of an entry of the
table of addresses instead of a symbol's."""
_SHIFTS = {284: 1, 285: 2, 286: 3, 299: 4, 312: 3}
"""How loads of AArch64 count offsets: in units of 2 to this power, bytes by default."""
_BY_SYMBOL, _BY_PLACE = {_X86: 1, _ARM: 257}, {_X86: 8, _ARM: 1027}
"""Relocations when a library is loaded: by a symbol's address, and by the library's."""


class LinkError(Exception):
    """Object files have unknown parts, or lack a name that they need."""


@dataclass(slots=True, eq=False)
class _Section:
    name: str
    kind: int
    flags: int
    data: bytearray
    link: "_Section | None" = None
    item_bytes: int = 0
    alignment: int = 16
    empty_bytes: int = 0
    relocations: Sequence[tuple[int, int, int]] = ()
    """Offset, symbol and type, addend."""
    symbols: "Sequence[_Symbol]" = ()
    address: int = 0
    offset: int = 0

    @property
    def size(self) -> int:
        return len(self.data) + self.empty_bytes

    def is_empty(self) -> bool:
        return self.kind == _EMPTY

    def grow(self, count: int) -> int:
        """Add so many bytes, and return where they begin."""
        self.data += bytes(count)
        return len(self.data) - count


@dataclass(slots=True, eq=False)
class _Symbol:
    name: str
    info: int
    other: int
    section: _Section | None
    value: int
    size: int

    @property
    def address(self) -> int:
        return 0 if self.section is None else self.section.address + self.value

    @property
    def is_global(self) -> bool:
        return self.info >> 4 != 0 and self.name != ""

    @property
    def is_weak(self) -> bool:
        return self.section is None or self.info >> 4 == _WEAK


def link_objects(files: Sequence[Path], output: Path, *, needed: str | None = None) -> list[str]:
    """Write the library of object files; return names that none of them defines, which the system
    looks up in the library ``needed`` as well. Raises `LinkError`."""
    library = _Library(needed)
    for path in files:
        library.add(path)
    output.write_bytes(library.write())
    output.chmod(0o755)
    return library.list_foreign()


class _Library:
    def __init__(self, needed: str | None) -> None:
        self._number = 0
        self._sections: list[_Section] = []
        self._globals: dict[str, _Symbol] = {}
        self._names = _Names()
        self._needed = self._names.add(needed) if needed else 0
        strings = _Section(".dynstr", _STRINGS, _ALLOC, self._names.data)
        self._table = _Section(".dynsym", _EXPORTS, _ALLOC, bytearray(24), strings, 24)
        self._places: dict[_Symbol, int] = {}
        """Numbers of symbols in the table."""
        self._late = _Section(".rela.dyn", _RELOCATIONS, _ALLOC, bytearray(), self._table, 24)
        """Addresses that the loader fills in."""
        self._late_count = 0
        self._addresses = _Section(".got", _PLAIN, _ALLOC | _WRITE, bytearray())
        self._entries: dict[_Symbol, int] = {}
        self._stubs = _Section(".plt", _PLAIN, _ALLOC | _CODE, bytearray())
        """Code that jumps to an address of the table of addresses."""
        self._jumps: dict[_Symbol, int] = {}

    def list_foreign(self) -> list[str]:
        return sorted(name for name, symbol in self._globals.items() if symbol.section is None)

    def add(self, path: Path) -> None:
        """Read an object file."""
        data = path.read_bytes()
        ident, kind, number, *_ = _HEADER.unpack_from(data)
        if ident[:6] != b"\x7fELF\2\1" or kind != 1 or number not in _FIELDS:
            raise LinkError(f"{path.name} is no object file of x86-64 or AArch64")
        if self._number not in (0, number):
            raise LinkError(f"{path.name} is for another machine than the files before")
        self._number = number
        start, size, count, names = (_HEADER.unpack_from(data)[place] for place in (6, 11, 12, 13))
        heads = [_HEAD.unpack_from(data, start + size * place) for place in range(count)]
        sections: dict[int, _Section] = {}
        for place, (name, kind, flags, _, offset, size, *_, alignment, _) in enumerate(heads):
            text = _read_name(data, heads[names][4] + name)
            # Nothing is thrown through these functions: there is no table for unwinding.
            if not flags & _ALLOC or text == ".eh_frame":
                continue
            if kind not in (_PLAIN, _EMPTY, _STARTS) or flags & _OF_THREAD:
                raise LinkError(f"{path.name} has a section {text} of type {kind}")
            held = bytearray(b"" if kind == _EMPTY else data[offset : offset + size])
            flags &= _WRITE | _ALLOC | _CODE
            section = sections[place] = _Section(text, kind, flags, held)
            section.alignment, section.empty_bytes = max(1, alignment), size - len(held)
        self._sections += sections.values()
        symbols: list[_Symbol] = []
        for _, kind, _, _, offset, size, link, target, _, _ in heads:
            if kind == _SYMBOLS:
                for item in _SYMBOL.iter_unpack(data[offset : offset + size]):
                    name, info, other, home, value, length = item
                    text = _read_name(data, heads[link][4] + name)
                    symbols.append(_Symbol(text, info, other, sections.get(home), value, length))
            elif kind == _RELOCATIONS and target in sections:
                found = _RELOCATION.iter_unpack(data[offset : offset + size])
                sections[target].relocations = list(found)
        for section in sections.values():
            section.symbols = symbols
        for symbol in filter(lambda symbol: symbol.is_global, symbols):
            held_symbol = self._globals.setdefault(symbol.name, symbol)
            if held_symbol.is_weak and symbol.section is not None:
                if held_symbol.section is None or not symbol.is_weak:
                    self._globals[symbol.name] = symbol

    def write(self) -> bytes:
        for section in self._sections:
            self._plan(section)
        for symbol in self._globals.values():
            if symbol.other & 3 == 0:
                self._places[symbol] = self._table.grow(_SYMBOL.size) // _SYMBOL.size
                self._names.add(symbol.name)
        self._late.grow(_RELOCATION.size * (self._late_count + len(self._entries)))
        self._late_count = 0
        chain = _Section(".hash", _HASH, _ALLOC, bytearray(), self._table, 4)
        # One bucket: a list of all symbols, which begins with the last.
        count = len(self._places)
        chain.data += struct.pack(f"<{count + 4}I", 1, count + 1, count, 0, *range(count))
        strings = self._table.link
        assert strings is not None
        dynamic = _Section(".dynamic", _DYNAMIC, _ALLOC | _WRITE, bytearray(208), strings, 16)
        own = self._sections
        starts = [section for section in own if section.kind == _STARTS]
        written = [section for section in own if section.flags & _WRITE and section not in starts]
        written.sort(key=_Section.is_empty)
        groups = (
            [chain, self._table, strings, self._late, *(x for x in own if x.flags == _ALLOC)],
            [*(x for x in own if x.flags & _CODE), self._stubs],
            [dynamic, self._addresses, *starts, *written],
        )
        parts = _place(groups)
        placed = [section for group in groups for section in group]
        numbers = {section: place for place, section in enumerate(placed, 1)}
        self._fill(numbers)
        facts = [
            *((4, chain.address), (5, strings.address), (6, self._table.address)),
            *((10, len(strings.data)), (11, _SYMBOL.size), (7, self._late.address)),
            *((8, len(self._late.data)), (9, _RELOCATION.size)),
            *([(1, self._needed)] if self._needed else []),
            *([(25, starts[0].address), (27, sum(x.size for x in starts))] if starts else []),
        ]
        dynamic.data[: 16 * len(facts)] = b"".join(struct.pack("<2Q", *fact) for fact in facts)
        parts.append((2, 6, dynamic.offset, dynamic.address, 208, 208, 8))
        parts.append((_STACK, 6, 0, 0, 0, 0, 16))  # no code is run from it
        return _join(self._number, parts, placed, numbers)

    def _find_symbol(self, section: _Section, info: int) -> _Symbol:
        symbol = section.symbols[info >> 32]
        return self._globals[symbol.name] if symbol.is_global else symbol

    def _plan(self, section: _Section) -> None:
        """Count words that only the loader can fill in; give symbols entries and stubs."""
        for _, info, _ in section.relocations:
            symbol, kind = self._find_symbol(section, info), info & 0xFFFFFFFF
            if kind not in _FIELDS[self._number]:
                raise LinkError(f"relocations of type {kind} are unknown")
            wanted, through_entry = _FIELDS[self._number][kind]
            self._late_count += wanted == "word"
            is_jump = symbol.section is None and wanted == "call"
            if (through_entry or is_jump) and symbol not in self._entries:
                self._entries[symbol] = self._addresses.grow(8)
            if is_jump and symbol not in self._jumps:
                self._jumps[symbol] = self._stubs.grow(16)
            if symbol.section is None and wanted in ("near", "page", "low") and not through_entry:
                raise LinkError(f"{symbol.name} is used as if it were near, and is undefined")

    def _fill(self, numbers: Mapping[_Section, int]) -> None:
        """Write addresses, and distances of them."""
        for symbol, place in self._places.items():
            home = 0 if symbol.section is None else numbers[symbol.section]
            name, address = self._names.add(symbol.name), symbol.address
            value = (name, symbol.info, symbol.other, home, address, symbol.size)
            _SYMBOL.pack_into(self._table.data, place * _SYMBOL.size, *value)
        for symbol, place in self._entries.items():
            self._fill_late(self._addresses.address + place, symbol, 0)
        for symbol, place in self._jumps.items():
            self._write_stub(place, self._addresses.address + self._entries[symbol])
        for section in self._sections:
            for offset, info, add in section.relocations:
                symbol, place = self._find_symbol(section, info), section.address + offset
                wanted, through_entry = _FIELDS[self._number][info & 0xFFFFFFFF]
                if wanted == "word":
                    self._fill_late(place, symbol, add)
                    continue
                target = symbol.address
                if through_entry:
                    target = self._addresses.address + self._entries[symbol]
                elif symbol.section is None:
                    target = self._stubs.address + self._jumps[symbol]
                _fill_in(
                    section.data, offset, info & 0xFFFFFFFF, wanted, target + add - place, place
                )

    def _fill_late(self, place: int, symbol: _Symbol, add: int) -> None:
        """Let the loader write a symbol's address."""
        fact = (place, _BY_PLACE[self._number], symbol.address + add)
        if symbol.section is None:
            fact = (place, self._places[symbol] << 32 | _BY_SYMBOL[self._number], add)
        _RELOCATION.pack_into(self._late.data, self._late_count * _RELOCATION.size, *fact)
        self._late_count += 1

    def _write_stub(self, offset: int, entry: int) -> None:
        data, place = self._stubs.data, self._stubs.address + offset
        if self._number == _X86:
            struct.pack_into("<Hi", data, offset, 0x25FF, entry - place - 6)  # jmp *entry(%rip)
            return
        # adrp x16, entry; ldr x17, [x16, entry]; br x17
        struct.pack_into("<3I", data, offset, 0x90000010, 0xF9400211, 0xD61F0220)
        _fill_in(data, offset, 275, "page", entry - place, place)
        _fill_in(data, offset + 4, 286, "low", entry - place - 4, place + 4)


def _fill_in(
    data: bytearray, offset: int, kind: int, wanted: str, distance: int, place: int
) -> None:
    """Write a distance from ``place`` as code or data there has it."""
    if wanted == "near" or kind == 4:
        struct.pack_into("<i", data, offset, distance)
        return
    (code,) = struct.unpack_from("<I", data, offset)
    if wanted == "call":
        code |= distance >> 2 & 0x3FFFFFF
    elif wanted == "low":
        code |= (place + distance & 0xFFF) >> _SHIFTS.get(kind, 0) << 10
    else:
        pages = (place + distance >> 12) - (place >> 12)
        code |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    struct.pack_into("<I", data, offset, code)


class _Names:
    def __init__(self) -> None:
        self.data = bytearray(1)
        self._places: dict[str, int] = {}

    def add(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = len(self.data)
            self.data += name.encode() + b"\0"
        return self._places[name]


def _read_name(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _place(groups: Sequence[Sequence[_Section]]) -> list[tuple[int, ...]]:
    """Give sections offsets and addresses; return what the loader maps."""
    offset = address = _HEADER.size + (len(groups) + 2) * _PART.size
    parts: list[tuple[int, ...]] = []
    for group in groups:
        # Segments meet within a page of the file, which is mapped twice.
        address = -(-address // _PAGE) * _PAGE + offset % _PAGE if parts else address
        first, first_address = (offset, address) if parts else (0, 0)
        for section in group:
            step = -address % section.alignment
            address += step
            offset += 0 if section.is_empty() else step
            section.offset, section.address = offset, address
            address += section.size
            offset += len(section.data)
        flags = 4 | (1 if group[0].flags & _CODE else 0) | (2 if group[0].flags & _WRITE else 0)
        size, held = address - first_address, offset - first
        parts.append((1, flags, first, first_address, held, size, _PAGE))
    return parts


def _join(
    number: int,
    parts: Sequence[tuple[int, ...]],
    sections: Sequence[_Section],
    numbers: Mapping[_Section, int],
) -> bytes:
    """The whole file: headers, sections and, last, what tools and Android want to know of them."""
    names = _Names()
    data = bytearray()
    for section in sections:
        data = data.ljust(section.offset, b"\0")
        data += section.data
    end = len(data)
    heads = [(0,) * 10]
    for section in sections:
        link = 0 if section.link is None else numbers[section.link]
        info = 1 if section.kind == _EXPORTS else 0
        place = (section.address, section.offset, section.size)
        kind = (names.add(section.name), section.kind, section.flags)
        heads.append((*kind, *place, link, info, section.alignment, section.item_bytes))
    name = names.add(".shstrtab")
    heads.append((name, _STRINGS, 0, 0, end, len(names.data), 0, 0, 1, 0))
    data += names.data
    data += b"\0" * (-len(data) % 8)
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    sizes = (_HEADER.size, _PART.size, len(parts), _HEAD.size, len(heads), len(heads) - 1)
    header = _HEADER.pack(ident, 3, number, 1, 0, _HEADER.size, len(data), 0, *sizes)
    shown = b"".join(_PART.pack(*part[:4], *part[3:]) for part in parts)
    data[: len(header) + len(shown)] = header + shown
    return bytes(data + b"".join(_HEAD.pack(*head) for head in heads))
