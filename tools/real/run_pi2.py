"""Run a file with pi2 and print figures as JSON.

Arguments: file, text file, lengths of prompts as JSON, tokens to generate, memory budget or "".
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.engine.generation import Generation, GenerationResult
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.documents.plan import Io

BEGIN = time.perf_counter()
_DISK_PIECES, _DISK_PASSES = 256, 6


def main(file: str, text: str, lengths: list[int], count: int, memory: str) -> dict[str, object]:
    """Figures of one run; the import of pi2 belongs to the time of loading."""
    import pi2

    # The prompt that edits, and its answer, have about 400 tokens.
    context = {"kv.context": max(sum(lengths) + 2 * count, 512 if memory else 0)}
    with pi2.load(file, memory=memory or None, set=context) as model:
        found: dict[str, object] = {"load_s": time.perf_counter() - BEGIN}
        ids, first = model.encode(Path(text).read_text(encoding="utf-8")), 0
        for length in lengths:
            prompt = ids[first : first + length]
            answer = complete(model.generate(prompt, max_tokens=1, temperature=0.0))
            found[f"prompt_{length}_tokens_s"] = length / answer.ttft_s
            first += length
        before, start = model.stats.flash_read_bytes, time.perf_counter()
        answer = complete(
            model.generate(ids[-16:], max_tokens=count, temperature=0.0, ignore_eos=True)
        )
        read = (model.stats.flash_read_bytes - before) / (time.perf_counter() - start)
        found["decode_tokens_s"] = answer.decode_tokens_s
        found["ids"] = list(answer.token_ids)
        if model.expected is not None:
            found["expected_tokens_s"] = model.expected.tokens_s
            found["of_disk"] = read
            found["edit_tokens_s"] = edit(model)
            model.scheduler.speculation = None
            found["edit_plain_tokens_s"] = edit(model)
        settings = model.plan.plan.io
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if "of_disk" in found:
        found["of_disk"] = read / measure_disk(Path(file), settings)
    return found


def edit(model: LoadedModel) -> float:
    """Tokens per second where most of the answer stands in the prompt."""
    text = (Path(__file__).parent / "edit.txt").read_text(encoding="utf-8")
    prompt = model.encode_chat([{"role": "user", "content": text}])
    answer = complete(model.generate(prompt, max_tokens=160, temperature=0.0))
    return answer.decode_tokens_s or 0.0


def measure_disk(file: Path, settings: Io) -> float:
    """Bytes per second of sequential direct reads of 1 MiB, 32 of them in flight: the best pass.

    The end of the file is read, whose weights stream: a host may hold it in memory of its own.
    """
    import mmap

    import numpy as np

    from pi2.backends.host import load_host_loops
    from pi2.memory.direct_files import BatchReads, DirectFiles, Piece
    from pi2.memory.ring import WeightStream
    from pi2.progress import ignore_progress

    size, region = 1 << 20, np.frombuffer(mmap.mmap(-1, 32 << 20), np.uint8)
    last = file.stat().st_size // size
    one_pass = range(max(0, last - _DISK_PIECES), last)
    pieces = [Piece(0, at * size, size) for _ in range(_DISK_PASSES) for at in one_pass]
    files = DirectFiles([file])
    loops = load_host_loops(ignore_progress)
    reads = BatchReads(files, files.open_engine(settings, loops))
    stream = WeightStream(reads, pieces, region)
    best, start = 0.0, time.perf_counter()
    for count in range(len(pieces)):
        stream.take()
        stream.release()
        if (count + 1) % len(one_pass) == 0:
            now = time.perf_counter()
            best, start = max(best, len(one_pass) * size / (now - start)), now
    stream.close()
    files.close()
    return best


def complete(generation: Generation) -> GenerationResult:
    """Generate everything."""
    for _ in generation:
        pass
    return generation.result


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(main(given[0], given[1], json.loads(given[2]), int(given[3]), given[4])))
