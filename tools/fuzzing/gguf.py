"""Writes GGUF files whose metadata may say anything.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from pi2.arrays import F32

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_INT32, _INT64, _UINT64, _FLOAT64 = 5, 11, 10, 12
_FORMS = {_INT32: "<i", _INT64: "<q", _UINT64: "<Q", _FLOAT32: "<f", _FLOAT64: "<d", _BOOL: "<?"}
_ALIGNMENT = 32


def write_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, F32]) -> bytes:
    """A file of version 3, all tensors float32; what cannot be written is left out."""
    pairs = []
    for key, value in metadata.items():
        kind = _find_kind(value)
        if kind is not None:
            pairs.append(_write_text(key) + struct.pack("<I", kind) + _write_value(kind, value))
    entries, data = [], b""
    for name, values in tensors.items():
        sizes = struct.pack(f"<{values.ndim}Q", *values.shape[::-1])
        entries.append(
            _write_text(name)
            + struct.pack("<I", values.ndim)
            + sizes
            + struct.pack("<IQ", 0, len(data))
        )
        data += _pad(np.ascontiguousarray(values, np.float32).tobytes())
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs))
    return _pad(header + b"".join(pairs) + b"".join(entries)) + data


def _pad(content: bytes) -> bytes:
    return content + bytes(-len(content) % _ALIGNMENT)


def _write_text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _find_kind(value: Any) -> int | None:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        for kind in (_INT32, _INT64, _UINT64):
            try:
                struct.pack(_FORMS[kind], value)
            except struct.error:
                continue
            return kind
        return None
    if isinstance(value, float):
        return _FLOAT64 if abs(value) > 1e38 else _FLOAT32
    if isinstance(value, str):
        return _STRING
    return _ARRAY if isinstance(value, list) else None


def _write_value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _write_text(value)
    if kind != _ARRAY:
        return struct.pack(_FORMS[kind], value)
    kinds = [_find_kind(item) for item in value]
    inner = kinds[0] if kinds and kinds[0] is not None else _INT32
    fitting = [item for item, own in zip(value, kinds, strict=True) if own == inner]
    written = b"".join(_write_value(inner, item) for item in fitting)
    return struct.pack("<IQ", inner, len(fitting)) + written
