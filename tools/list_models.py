"""Write docs/reference/models.md: the models that pi2 converts, and those that ran for real.

python tools/list_models.py [--check]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pi2.importing.families import list_families
from pi2.importing.gguf_architectures import list_architectures

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/models.md"
TEXT = """\
<!-- Written by tools/list_models.py. -->
# Models

`pi2 convert` and `pi2 pull` read Hugging Face folders, GGUF files and MLC-LLM folders. For every
family a tiny random model agrees with transformers, and most GGUF architectures with llama.cpp.

| trained models that ran | how |
|---|---|
| SmolLM2-135M-Instruct, Gemma 3 270M, Qwen2.5-Coder-1.5B | GGUF files as they are |
| the demo model | store with trained predictors |

No larger trained model has been run yet.

## Families

`model_type` in `config.json`:

{families}

## Text parts

Models with pictures, sound or video, of which the text part is converted:

{parts}

## GGUF architectures

{architectures}

Decoders with attention run as they are; the others are converted at the first run.
`bitnet-25`, `bitnet-b1.58` and the types of bitnet.cpp are refused (P544, P535).
"""


def write_list(names: Iterable[str]) -> str:
    """Names in lines of equal length."""
    return textwrap.fill(", ".join(sorted(names)) + ".", 110, break_on_hyphens=False)


def make_page() -> str:
    """The text of the page."""
    return TEXT.format(
        families=write_list(list_families().families),
        parts=write_list(list_families().wrappers),
        architectures=write_list(list_architectures()),
    )


def main() -> int:
    """Write or check; the exit code is 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args().check
    differs = not PAGE.is_file() or PAGE.read_text("utf-8") != make_page()
    if differs and not check:
        PAGE.write_text(make_page(), encoding="utf-8")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
