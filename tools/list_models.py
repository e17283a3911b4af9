"""Write docs/reference/models.md: the models that pi2 converts, and those that ran for real.

python tools/list_models.py [--check]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from pi2.importing.families import list_families
from pi2.importing.gguf_architectures import list_architectures

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/models.md"
TEXT = """\
<!-- Written by tools/list_models.py. -->
# Models

`pi2 convert` and `pi2 pull` read Hugging Face folders and GGUF files. For every
family a tiny random model agrees with transformers. A small file of each GGUF architecture but
{alone} gives llama.cpp's logits, in memory and in half of its size.

| trained models that ran | how |
|---|---|
| SmolLM2-135M-Instruct, Gemma 3 270M, Qwen2.5-Coder-1.5B | GGUF files as they are |
| the demo model | store with trained predictors |

No larger trained model has been run yet.

## Families

`model_type` in `config.json`:

{families}

## Families that people ask for

pi2 does not read GGUF files of an "unknown" architecture yet. The original checkpoint converts,
unless the family is refused.

{asked}

[MTP heads](../howto/draft-tokens.md#mtp-heads) of DeepSeek V3, GLM 4.5 and 5, Qwen3-Next and
Qwen 3.5 draft, also those in GGUF files; GLM 4.5's as its file has it.

## Text parts

Models with pictures, sound or video, of which the text part is converted:

{parts}

## GGUF architectures

{count} run as they are; files that have predictors of neurons are converted at the first run. The
family is the document of plans/families that describes them.

{architectures}

Others are refused, with what pi2 does not compute:

{refused}

`bitnet-25`, `bitnet-b1.58` and the types of bitnet.cpp are refused (P544, P535).
"""


ALONE = "bamboo, opt and phimoe"
"""Architectures that llama.cpp does not compute, or otherwise."""
ASKED = (
    ("Qwen 3.5 and 3.6, dense", "qwen3_5_text", "qwen35"),
    ("Qwen 3.5 and 3.6, 35B-A3B and larger", "qwen3_5_moe_text", "qwen35moe"),
    ("Gemma 4", "gemma4_text", "gemma4"),
    ("gpt-oss", "gpt_oss", "gpt-oss"),
    ("DeepSeek V4 Flash and Pro", "deepseek_v4", "deepseek4"),
    ("DeepSeek V3.2", "deepseek_v32", "deepseek32"),
    ("GLM 5", "glm_moe_dsa", "glm-dsa"),
    ("GLM 5.x Flash", "glm5_next", "glm5-next"),
    ("Qwen3.8 Flash Next", "qwen4_exp", "qwen4exp"),
    ("Kimi K2", "kimi_k2", "deepseek2"),
    ("Kimi Linear", "kimi_linear", "kimi-linear"),
    ("MiniMax M2", "minimax_m2", "minimax-m2"),
    ("MiniMax M3", "minimax_m3_vl_text", "minimax-m3"),
    ("LFM2.5", "lfm2", "lfm2"),
    ("LFM2.5, mixtures", "lfm2_moe", "lfm2moe"),
    ("Ling 3", "bailing_hybrid", "bailingmoe3"),
    ("Ministral 3", "ministral3", "mistral3"),
    ("Mistral Small 4", "mistral4", "mistral4"),
)
"""Models with their ``model_type`` and ``general.architecture``, where one is known."""


def write_asked() -> Iterator[str]:
    """A table of what becomes of `ASKED`."""
    found, readers = list_families(), list_architectures()
    yield "| model | `model_type` | GGUF | missing |"
    yield "|---|---|---|---|"
    for name, kind, architecture in ASKED:
        missing = found.refused.get(kind, "")
        own = "converts" if kind in found.families else "refused"
        read = "runs" if architecture in readers else "refused" if missing else "unknown"
        shown = f"`{architecture}` {read}" if architecture else read
        yield f"| {name} | `{kind}` {own} | {shown} | {missing} |"


def write_list(names: Iterable[str]) -> str:
    """Names in lines of equal length."""
    return textwrap.fill(", ".join(sorted(names)) + ".", 110, break_on_hyphens=False)


def write_architectures() -> Iterator[str]:
    """A table of architectures that run."""
    yield "| architecture | family |"
    yield "|---|---|"
    for name in list_architectures():
        yield f"| {name} | `{list_families().architectures[name][0]}` |"


def write_refused() -> Iterator[str]:
    """A table of architectures of GGUF files that are refused."""
    found = list_families()
    yield "| architecture | missing |"
    yield "|---|---|"
    for name in sorted(found.refused_files):
        yield f"| {name} | {found.refused_files[name]} |"


def make_page() -> str:
    """The text of the page."""
    return TEXT.format(
        alone=ALONE,
        count=len(list_architectures()),
        refused="\n".join(write_refused()),
        asked="\n".join(write_asked()),
        families=write_list(list_families().families),
        parts=write_list(list_families().wrappers),
        architectures="\n".join(write_architectures()),
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
