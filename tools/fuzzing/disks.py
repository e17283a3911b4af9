"""Disks that fail while a model is read: wrong places, kinds of reads and moments."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pi2
from fuzzing.gguf import write_gguf
from fuzzing.seeds import read_gguf_seed
from pi2.backends.host import HostLoops
from pi2.diagnostics import UserError
from pi2.memory.io_engine import ReadBatch
from pi2.memory.uring import UringEngine

FAULTS = ("none", "direct", "open", "short", "end", "error")
TOLD = {"P506", "P508", "P511", "P532", "P546", "P620"}
"""Codes of errors that a disk may cause."""
_BLOCK = 4096
_read, _open, _wait = os.preadv, os.open, UringEngine.wait


@dataclass
class FailingDisk:
    """Reads of files below ``folder``: ``direct`` ones are refused, or at ``open`` already; they
    are ``short``; the file has an ``end`` at byte ``after``; bytes from there on give an
    ``error``."""

    folder: Path
    fault: str = "none"
    """May change while it is in use."""
    after: int = 0

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not self._has(os.readlink(f"/proc/self/fd/{fd}")):
            return _read(fd, buffers, offset, flags)
        sizes = [memoryview(own).nbytes for own in buffers]
        most = self.judge(offset, sum(sizes), is_direct=bool(_flags(fd) & os.O_DIRECT))
        if most < 0:
            raise OSError(-most, os.strerror(-most))
        left, cut = most, []
        for own in buffers:
            cut.append(memoryview(own).cast("B")[:left])
            left -= len(cut[-1])
        return _read(fd, cut, offset, flags)

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        if self.fault == "open" and flags & os.O_DIRECT and self._has(os.fspath(path)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return _open(path, flags, *more, **named)

    def judge(self, offset: int, size: int, *, is_direct: bool) -> int:
        """Bytes that a read of ``size`` gives at most; below 0: an error."""
        if self.fault == "direct" and is_direct:
            return -errno.EINVAL
        if self.fault == "error" and offset + size > self.after:
            return -errno.EIO
        if self.fault == "end":
            return max(0, min(size, self.after - offset))
        if self.fault == "short" and size > _BLOCK:
            return max(_BLOCK, size // 2 // _BLOCK * _BLOCK)
        return size

    def wait(self, engine: UringEngine, batch: ReadBatch, part: int, count: int = 1) -> None:
        """Wait as io_uring does, and spoil the results of its system calls."""
        _wait(engine, batch, part, count)
        fd = engine._files[batch.file]
        if not self._has(os.readlink(f"/proc/self/fd/{fd}")):
            return
        direct = bool(_flags(fd) & os.O_DIRECT)
        for number in range(batch.parts[part].start, batch.parts[part + count - 1].stop):
            size = int(batch.results[number])
            if size > 0:
                most = self.judge(int(batch.offsets[number]), size, is_direct=direct)
                batch.results[number] = min(size, most)

    def _has(self, path: Any) -> bool:
        return str(path).startswith(str(self.folder))

    @contextmanager
    def use(self) -> Iterator[None]:
        """Have this process read so."""

        def read_runs(loops: HostLoops, fd: int, *arguments: Any) -> None:
            vectors, firsts, counts, offsets, results = arguments
            for i in range(len(firsts)):
                buffers = [
                    (ctypes.c_uint8 * size).from_address(address)
                    for address, size in vectors[firsts[i] : firsts[i] + counts[i]].tolist()
                ]
                try:
                    results[i] = os.preadv(fd, buffers, int(offsets[i]))
                except OSError:
                    results[i] = -1

        def wait(engine: UringEngine, batch: ReadBatch, part: int, count: int = 1) -> None:
            self.wait(engine, batch, part, count)

        with ExitStack() as stack:
            for place, own in (
                ("os.preadv", self.preadv),
                ("os.open", self.open),
                ("pi2.memory.host_loops.HostLoops.read_runs", read_runs),
                ("pi2.memory.uring.UringEngine.wait", wait),
            ):
                stack.enter_context(patch(place, own))
            yield


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


@dataclass
class DiskTarget:
    """A disk under a GGUF file or a neuron store: the tokens are right, or the error names the
    file."""

    folder: Path
    make_store: Callable[[], Path]
    """Gives the plan of a sound store, in a folder of its own."""
    name: str = "disk"

    @cached_property
    def _plans(self) -> dict[str, tuple[Path, dict[str, object]]]:
        """Files with the settings of a run whose weights are not all in memory."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "model.gguf"
        file.write_bytes(write_gguf(*read_gguf_seed()))
        sizes: dict[str, object] = {"memory.budget": "1 GiB", "memory.segments.cold": "4 MiB"}
        streamed = sizes | {"memory.weights": "loaded", "memory.segments.hot": "64 KiB"}
        whole: dict[str, object] = {"memory.weights": "loaded"}
        store = sizes | {"layers.hot": 0.125, "memory.segments.hot": "1 MiB"}
        return {
            "streamed": (file, streamed),
            "loaded": (file, whole),
            "store": (self.make_store(), store),
        }

    @cached_property
    def _expected(self) -> dict[str, list[int]]:
        return {name: self._generate(name, "pread") for name in self._plans}

    def _generate(self, name: str, engine: str) -> list[int]:
        plan, settings = self._plans[name]
        with pi2.load(plan, set={**settings, "io.engine": engine}) as model:
            return list(model.generate([1, 5, 9], max_tokens=4, temperature=0.0).result.token_ids)

    def make(self, random: Random) -> bytes:
        """What is read, with which engine, the fault, and its place in the file."""
        name = random.choice(sorted(self._plans))
        size = max(file.stat().st_size for file in self._list_files(name))
        after = random.choice((random.randrange(size), random.randrange(size) // _BLOCK * _BLOCK))
        engine = random.choice(("pread", "io_uring"))
        return json.dumps([name, engine, random.choice(FAULTS), after]).encode()

    def _list_files(self, name: str) -> list[Path]:
        plan, _ = self._plans[name]
        if name != "store":
            return [plan]
        return [file for file in plan.parent.rglob("*.arrow") if file.is_file()]

    def run(self, case: bytes) -> str:
        """Generate from that disk."""
        name, engine, fault, after = json.loads(case)
        expected, folder = self._expected[name], self._plans[name][0].parent
        try:
            with FailingDisk(folder, fault, after).use():
                found = self._generate(name, engine)
        except UserError as error:
            (item,) = error.diagnostics
            assert fault in ("end", "error") and item.code in TOLD, item
            assert str(folder) in item.message, item
            return "told"
        assert found == expected, f"wrong tokens: {found}, not {expected}"
        return "right"
