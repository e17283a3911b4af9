"""What kernels of a cubin take of a GPU, out of its ELF sections."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

_SVAL = 0x04
"""Format of a record of ``.nv.info`` that has a size and values."""
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
"""Attributes of records: bytes of a thread's stack frame, and its registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    registers: int
    """Of a thread."""
    frame_bytes: int
    """Local memory of a thread: what does not fit into registers."""
    shared_bytes: int
    """Of a work group."""


def read_resources(cubin: bytes) -> Mapping[str, Resources]:
    sections = _list_sections(cubin)
    names = _list_symbols(sections)
    found: dict[int, dict[str, int]] = {}
    (info,) = (data for name, data, _ in sections if name == ".nv.info")
    place = 0
    while place < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if kind != _SVAL:
            continue
        if attribute in (_FRAME_SIZE, _REGISTERS):
            symbol, value = struct.unpack_from("<II", info, place)
            key = "registers" if attribute == _REGISTERS else "frame_bytes"
            found.setdefault(symbol, {})[key] = value
        place += size
    shared = {name: size for name, _, size in sections}
    return {
        names[symbol]: Resources(
            registers=values["registers"],
            frame_bytes=values["frame_bytes"],
            shared_bytes=shared.get(f".nv.shared.{names[symbol]}", 0),
        )
        for symbol, values in found.items()
        # Functions that kernels call, such as exact divisions, have no registers of their own.
        if "registers" in values
    }


def _list_sections(cubin: bytes) -> list[tuple[str, bytes, int]]:
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + entry * n) for n in range(count)]
    strings = headers[names_at][4]
    found = []
    for name, kind, _, _, begin, size in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        # Shared memory has a size and no contents.
        found.append((text, b"" if kind == 8 else cubin[begin : begin + size], size))
    return found


def _list_symbols(sections: list[tuple[str, bytes, int]]) -> list[str]:
    contents = {name: data for name, data, _ in sections}
    table, strings = contents[".symtab"], contents[".strtab"]
    names = []
    for place in range(0, len(table), 24):
        (begin,) = struct.unpack_from("<I", table, place)
        names.append(strings[begin : strings.index(b"\0", begin)].decode())
    return names
