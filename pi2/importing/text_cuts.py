"""How byte-pair tokenizers of GGUF files cut text (``tokenizer.ggml.pre``): expressions that find
what llama.cpp finds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


def _write_ranges(ranges: str) -> str:
    """Characters of an expression's class: ``A-F 1E`` as its syntax has them."""
    return re.sub("[0-9A-F]+", r"\\x{\g<0>}", ranges).replace(" ", "")


_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
"""Of English words: it's, we'LL."""
_GAPS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{_SIGNS}{_GAPS}"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}{_SIGNS}{_GAPS}"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
"""Signs, and the slashes after them."""
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
"""Letters that are no small or no capital letters of English; others are both."""
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_MARKED_CASES = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{first}{_LOWER}{last}(?:{_ENDINGS})?".replace(
        r"(?=\p{L})", r"(?=[\p{L}\p{M}])"
    )
    for first, last in ("*+", "+*")
)
_GPT4O = rf"{_CASES}(?:{_ENDINGS})?|\p{{N}}{{1,3}}{_PATHS}{_GAPS}"
_CODE_WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
_EAST = r"[一-龥぀-ゟ゠-ヿ]+"
_IDEOGRAPHS = r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+"
"""DeepSeek's range holds spaces, which llama.cpp does not count to it."""
_THOUSANDS = r"(?<=\p{N})(?=(?:\p{N}{3})*(?!\p{N}))"
"""After each group of three digits, counted from the end of a number, and after the rest."""
_HAN = _write_ranges("3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2EBEF 2F800-2FA1F")
_PIECES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_ALPHABETS = _write_ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F "
    "386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 "
    "1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 "
    "2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 "
    "2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Letters of Latin, Greek, Cyrillic, Armenian and others that have two cases."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tokenizer cuts text into words."""

    expressions: tuple[str, ...]
    """In the order in which they are applied."""
    whole_words: bool = False
    """Whether a word that is a token is taken whole, before any merges."""
    begins: bool = False
    """Whether texts get a begin token unless the file says otherwise."""
    always_begins: bool = False
    """Whether they get one though the file says otherwise, as Gemma 4's files do."""
    bytes_as_letters: bool = True
    """Whether tokens are written with a letter for each byte, as GPT-2's; else they are text, with
    U+2581 for a space, and bytes have tokens of their own."""


_OLD = Cut((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"))
_LLAMA = Cut((_LLAMA3,), whole_words=True, begins=True)
_QWEN = Cut((_QWEN2,))
_PLAIN = Cut((_GPT2,))
_DIGITS_APART = Cut((r"\p{N}", _GPT2))
_DEEPSEEK = Cut((r"\p{N}{1,3}", _EAST, _CODE_WORDS + _GAPS))
_HARMONY = Cut((_GPT4O,))
_GLM = Cut((_LLAMA3,))
_AYA = Cut((_THOUSANDS, rf"{_MARKED}(?:{_ENDINGS})?|\p{{N}}{{1,3}}{_PATHS}{_GAPS}"))
_LING = Cut((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",))
_GEMMA = Cut((r"\n+",), bytes_as_letters=False, always_begins=True)

CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("", "default"), _OLD),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA,
    ),
    "jina-v5-nano": _LLAMA,
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GLM),
    **dict.fromkeys(("glm4", "glm5"), replace(_GLM, whole_words=True)),
    "minicpm5": Cut(
        (r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+{_SIGNS}{_GAPS}"), whole_words=True
    ),
    "jais-2": Cut(
        (
            rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}{_SIGNS}|\s*[\r\n]+|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN),
    "qwen35": Cut((rf"{_ENDINGS}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_GAPS}",)),
    "laguna": Cut((r"\n+", _QWEN2)),
    "ufakzeka": Cut((rf"{_LETTERS}|\p{{N}}{_SIGNS}{_GAPS}",)),
    "seed-coder": Cut((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_GAPS}",)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LING),
    "exaone-moe": Cut(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _HARMONY),
    "granite-embed-multi-97m": Cut(
        (rf"{_MARKED_CASES}|\p{{N}}{{1,3}}{_PATHS}{_GAPS}",), whole_words=True
    ),
    "tekken": Cut((rf"{_CASES}|\p{{N}}{_PATHS}{_GAPS}",), whole_words=True, begins=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "youtu": Cut(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _EAST,
            rf"{_MARKED}(?:{_ENDINGS})?|\p{{N}}{_PATHS}{_GAPS}",
        ),
        whole_words=True,
    ),
    "kimi-k2": Cut(
        (
            rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?(?:(?=\p{{L}})[^{_HAN}])+(?:{_ENDINGS})?"
            rf"|\p{{N}}{{1,3}}{_SIGNS}{_GAPS}",
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "spark2_5": Cut(
        (
            r"\p{N}{1,3}",
            _EAST,
            _CODE_WORDS.removesuffix("*").removesuffix(r"[\r\n]") + r"|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "afmoe": Cut(
        (
            _THOUSANDS,
            r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _CODE_WORDS + _GAPS,
        )
    ),
    "deepseek-llm": Cut(
        (
            r"[\r\n]",
            rf"\s?[{_ALPHABETS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+\z",
            _IDEOGRAPHS,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    "falcon": Cut((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _DIGITS_APART),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS_APART),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _PLAIN),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt"), _PLAIN),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe", "olmo", "jais"), _PLAIN),
    **dict.fromkeys(("trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Cut((_PIECES,))),
    "viking": Cut((_PIECES, r"\p{N}")),
    "chameleon": Cut(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
    "superbpe": Cut((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA),
    "sarvam-moe": Cut((r"\n+",), bytes_as_letters=False),
}
"""By the name that a file has for it; no name is the same as ``default``."""

_LATER = {
    "L": "1C89-1C8F A7CB-A7CF A7DA-A7F1 105BD-105FF 10D3A-10E5F 10EB2-10EFC 11375-113FF "
    "11B0A-11BFF 13456-143FF 14647-167FF 16B90-16E3F 18CD6-18CFF 1E4FA-1E7DF",
    "N": "10D3A-10E5F 116CA-116FF 11B0A-11BFF 14647-167FF 16B90-16E3F 1BCA4-1CEFF 1E4FA-1E7DF",
    "M": "892-897 10D3A-10E5F 10EB2-10EFC 11375-113FF 11F5A-11FAF 14647-167FF 1E4FA-1E7DF",
    "P": "1B4D-1B4F 1B7F 10D3A-10E5F 11375-113FF 11B0A-11BFF 16B90-16E3F 1E4FA-1E7DF",
    "S": "2427-243F 31E4-31EE 10D3A-10E5F 1BCA4-1CEFF 1F8B2-1F8FF 1FA89-1FA8F 1FABE 1FAC6-1FACD "
    "1FADC-1FADF 1FAE9-1FAEF 1FBCB-1FBEF",
}
"""Characters that Unicode 15.1 does not have, and that later versions count to a category."""


def write_expression(expression: str) -> str:
    """An expression of a cut for the tokenizer library, whose Unicode is newer than llama.cpp's."""

    def write(found: re.Match[str]) -> str:
        return rf"[\p{{{found[1]}}}&&[^{_write_ranges(_LATER[found[1]])}]]"

    return re.sub(r"\\p\{([LNMPS])\}", write, expression)
