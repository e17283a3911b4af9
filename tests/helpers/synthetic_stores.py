"""What tests of synthetic stores share: a small shape, and the bytes of a store."""

import hashlib
from pathlib import Path

SHAPE = {
    "layers": 2, "hidden": 256, "ffn": 1024, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "vocab": 1024, "context": 256,
}  # fmt: skip


def hash_store(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
