"""The process of `process_unit`: computes neurons in shared memory. Standard input has a line of
JSON (`Setup`), then `MESSAGE`s; each gets a `REPLY`."""

import json
import mmap
import struct
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from pi2.arrays import F32
from pi2.backends.reference.operators import compute_activations, multiply_down
from pi2.formats import find_packing, name_packings
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Precision, round_up, scale_bytes, weight_bytes

MESSAGE = struct.Struct("<9q")
"""Its number; tokens; bytes from the start of the shared memory to: inputs, routes (-1: none), the
sum, and bundles; neurons, of which 0 ask only for a reply; and for rows of a matrix their length
and the place of their precision in `PRECISIONS`, else 0. Rows take the place of bundles, with their
scales behind them."""
PRECISIONS: tuple[Precision, ...] = name_packings("tables")
REPLY = struct.Struct("<2q2d200s")
"""The message's number; 0, or 1 after a failure; when the work began and ended, in seconds of
`time.perf_counter`; and what failed, in UTF-8."""


def run_worker(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer messages until ``source`` ends."""
    setup: dict[str, Any] = json.loads(source.readline())
    model = Model.model_validate_json(setup["model"])
    layout = model.lay_out_bundle(setup["stride"])
    memory = mmap.mmap(setup["file"], setup["bytes"])
    hidden, experts = layout.hidden, model.expert_count

    def view(place: int, *shape: int) -> Any:
        count = int(np.prod(shape))
        return np.frombuffer(memory, np.float32, count, place).reshape(shape)

    while len(message := source.read(MESSAGE.size)) == MESSAGE.size:
        number, tokens, inputs_at, routes_at, total_at, place, count, length, kind = MESSAGE.unpack(
            message
        )
        start_s, failure = time.perf_counter(), ""
        try:
            if length:
                rows = view_rows(memory, place, count, length, PRECISIONS[kind])
                view(total_at, tokens, count)[:] = view(inputs_at, tokens, length) @ rows.T
            elif count:
                size = count * layout.stride
                bundles = np.frombuffer(memory, np.uint8, size, place).reshape(count, -1)
                routes = None if routes_at < 0 else view(routes_at, tokens, experts)
                inputs = view(inputs_at, tokens, hidden)
                active = compute_activations(model, layout, inputs, bundles, routes)
                view(total_at, tokens, hidden)[:] += multiply_down(layout, active, bundles)
        except MemoryError:
            failure = "it has no memory left"
        text = failure.encode()[:200]
        reply = REPLY.pack(number, bool(failure), start_s, time.perf_counter(), text)
        try:
            sink.write(reply)
        except BrokenPipeError:  # whoever asked has ended
            return


def view_rows(memory: mmap.mmap, place: int, count: int, length: int, precision: Precision) -> F32:
    """Rows [count, length] of a matrix in float32, whose packed weights begin at ``place``, and
    scales behind them at the next multiple of 64 bytes."""
    weights = np.frombuffer(memory, np.uint8, count * weight_bytes(length, precision), place)
    scales_at = round_up(place + weights.nbytes, 64)
    scales = None
    if size := count * scale_bytes(length, precision):
        scales = np.frombuffer(memory, np.float16, size // 2, scales_at).reshape(count, -1)
    return find_packing(precision).dequantize(weights.reshape(count, -1), scales, length)


if __name__ == "__main__":
    with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as output:
        run_worker(sys.stdin.buffer, output)
