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

BEGIN = time.perf_counter()


def main(file: str, text: str, lengths: list[int], count: int, memory: str) -> dict[str, object]:
    """Figures of one run; the import of pi2 belongs to the time of loading."""
    import pi2

    context = {"kv.context": sum(lengths) + 2 * count}
    with pi2.load(file, memory=memory or None, set=context) as model:
        found: dict[str, object] = {"load_s": time.perf_counter() - BEGIN}
        ids, first = model.encode(Path(text).read_text(encoding="utf-8")), 0
        for length in lengths:
            prompt = ids[first : first + length]
            answer = complete(model.generate(prompt, max_tokens=1, temperature=0.0))
            found[f"prompt_{length}_tokens_s"] = length / answer.ttft_s
            first += length
        answer = complete(
            model.generate(ids[-16:], max_tokens=count, temperature=0.0, ignore_eos=True)
        )
        found["decode_tokens_s"] = answer.decode_tokens_s
        found["ids"] = list(answer.token_ids)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def complete(generation: Generation) -> GenerationResult:
    """Generate everything."""
    for _ in generation:
        pass
    return generation.result


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(main(given[0], given[1], json.loads(given[2]), int(given[3]), given[4])))
