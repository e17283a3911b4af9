"""Makes tests/golden/gguf_tokenizers.json: what llama.cpp makes of texts, for each kind of GGUF
tokenizer, with small vocabularies whose merges cross the places where words may end.

    python tools/make_gguf_goldens.py [--fuzz SECONDS] [FILE.gguf ...]

Needs llama-cpp-python, which pi2 itself does not.  With ``--fuzz`` random texts are compared with
pi2's tokenizers instead, and nothing is written; files are compared as they are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pi2.importing.gguf_file import read_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.gguf_tokens import CUTS, find_marks

FILE = Path(__file__).resolve().parents[1] / "tests/golden/gguf_tokenizers.json"
TEXTS = (
    "don't I'VE we'll they'RE it's 'Sir' x'd",
    "def f(x):\n    return x**2 + 1\n\n\n# end  \n",
    "½ ² ³ Ⅷ ٣٤٥ १२३ 12345678 1234567 3.14159 1,000,000 a1b22c333",
    "e\u0301 caf\u00e9 cafe\u0301 n\u0303o A\u030a",
    "Der Fluss fror zu. La rivière a dégelé. Příliš žluťoučký kůň",
    "Съешь же ещё этих мягких булок",
    "Καλημέρα κόσμε, τι κάνεις;",
    "שלום עולם, مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया। বাংলা தமிழ் తెలుగు",
    "สวัสดีชาวโลก ភាសាខ្មែរ မြန်မာ",
    "春天来了，河水又流动起来。「日本語」テスト カタカナ ㄅㄆㄇ",
    "안녕하세요 세계! ㄱㄴㄷ ᄒᆞᆫ글",
    "ქართული ᏣᎳᎩ Հայերեն አማርኛ 𐐔𐐯𐑅𐐨𐑉𐐯𐐻",
    "👩\u200d👩\u200d👧 🇩🇪🇫🇷 👍🏽 ☃\ufe0f 1\ufe0f\u20e3",
    " \t  tab\tand\r\nlines\r\n\r\n\u00a0nbsp\u3000wide\u2003em \u2028 sep\x0b\x0c\x85next",
    "\n\n\n\n\nnewlines\n \n  \n   trailing   ",
    "      six spaces" + " " * 40 + "forty",
    "HTTPServer camelCase SCREAMING_SNAKE kebab-case $x += y<<2; /* a//b */ `q` ~/.ssh\\n",
    "if (a != b && c >= d) { return [1,2,3]; } // 'x' \"y\" <p>&amp;</p> @user #tag 50% ^_^",
    "\x00\x01\x1c\x1f\x7f\ufeff\ufffd\ue000\U0010ffff\U000e0041\u0378\U00013460\u1c89\u0897",
    "ſ'ſ İ 'K \u2019s ‘quoted’ “double” … — – ！，。、；：～",
    "<|im_start|>user\nhi <|im_end|><s></s><tool>x</tool> <|im_end",  # marks that users write
    "IMGIMGABCZ <sentinel:12> 00001111 x" + "9" * 25,
    '#include <stdio.h>\n\tint main(void)\t{\r\n\t\tputs("hi");\r\n}',
    "",
    " ",
    "a",
    "   a b  c   ",
)
MARKS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
OWN = ("<tool>", "</tool>")
ENDS: tuple[tuple[tuple[str, ...], Mapping[str, int]], ...] = (
    (("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>"), {"eos": 1}),
    (("<|file_sep|>", "<|fim_prefix|>", "<|fim_middle|>", "x"), {"eos": 3}),
    (("<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>"), {"eos": 3}),
    (("<|end|>", "<|flush|>", "<|calls|>", "<|endoftext|>"), {"eos": 3}),
    (("<|end|>", "<|endoftext|>", "</s>"), {"eos": 1, "eot": 0}),
    (("<bos>", "<eos>", "<turn|>", "<|tool_response>", "</s>"), {"eos": 1}),
    (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "</s>"), {"eos": 1}),
    (("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), {"eos": 3, "eom": 2}),
    (("[EOS]", "[EOT]", "[PAD]", "y", "[e~["), {"eos": 3}),
    (("<PRE>", "<SUF>", "<MID>", "<PAD>", "<REPO>", "<EOT>", "z"), {"eos": 6, "fim_pad": 4}),
)
"""Tokens of vocabularies, and the tokens that files name."""


def main() -> None:
    """Write the file, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--fuzz", type=float, metavar="SECONDS")
    chosen = parser.parse_args()
    llama_cpp.llama_log_set(_ignore, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        vocabularies = {kind: make_vocabulary(kind) for kind in ("gpt2", "gemma4", "llama")}
        if chosen.fuzz is None and not chosen.files:
            made = {"texts": list(TEXTS), "ends": list_ends(folder, vocabularies["gpt2"])}
            made["vocabularies"] = {
                kind: {"metadata": metadata, **list_ids(folder, metadata)}
                for kind, metadata in vocabularies.items()
            }
            FILE.write_text(json.dumps(made, ensure_ascii=True, separators=(",", ":")) + "\n")
            return
        for kind, metadata in vocabularies.items():
            for cut in list_cuts(kind):
                written = write_vocabulary(folder / "v.gguf", {**metadata, **cut})
                compare(written, (chosen.fuzz or 0) / 100, " ".join((kind, *cut.values())))
        for file in chosen.files:
            compare(file, chosen.fuzz or 10, file.name)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _ignore(level: int, text: bytes, data: object) -> None:
    """Say nothing."""


class Peer:
    """llama.cpp with a file's vocabulary."""

    def __init__(self, file: Path) -> None:
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        assert self._model, f"llama.cpp refuses {file}"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._ids = (llama_cpp.llama_token * 100_000)()

    def encode(self, text: str, *, special: bool = True, begin: bool = False) -> list[int]:
        """Tokens of a text; ``special``: its marks are marks."""
        data, ids = text.encode(), self._ids
        count = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), ids, len(ids), begin, special
        )
        return list(ids[:count])

    def list_ends(self) -> list[int]:
        """Tokens that end an answer."""
        count = llama_cpp.llama_vocab_n_tokens(self._vocab)
        return [n for n in range(count) if llama_cpp.llama_vocab_is_eog(self._vocab, n)]

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)


def list_cuts(kind: str) -> list[dict[str, str]]:
    """``tokenizer.ggml.pre`` of a vocabulary: all that are of its kind."""
    if kind == "llama":
        return [{}]
    found = {name: cut for name, cut in CUTS.items() if name}
    return [
        {"tokenizer.ggml.pre": name}
        for name, cut in found.items()
        if cut.bytes_as_letters == (kind == "gpt2")
    ]


def make_vocabulary(kind: str) -> dict[str, Any]:
    """Metadata of a small vocabulary: merges that were learned from the texts as a whole."""
    from tokenizers import normalizers

    tokenizer = Tokenizer(models.BPE())
    alphabet: list[str] = []
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    # llama.cpp ends tokens at the character 0.
    texts = [text.replace("\x00", "") for text in TEXTS]
    pieces = [text[start : start + 9] for text in texts for start in range(0, len(text), 4)]
    tokenizer.train_from_iterator(pieces, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    tokens = [*MARKS, *OWN]
    kinds = [2] + [3] * (len(MARKS) - 1) + [4] * len(OWN)
    if kind != "gpt2":
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        kinds += [6] * 256
    numbers = learned["vocab"]
    found = [text for text in sorted(numbers, key=numbers.__getitem__) if text not in tokens]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [*tokens, *found],
        "tokenizer.ggml.token_type": kinds + [1] * len(found),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if kind == "llama":
        scores = [0.0] * len(tokens) + [-float(place) for place in range(len(found))]
        return metadata | {"tokenizer.ggml.scores": scores}
    return metadata | {"tokenizer.ggml.merges": [" ".join(pair) for pair in learned["merges"]]}


def write_vocabulary(file: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def list_ids(folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The different results of each text, with and without marks; and for each kind which of them
    it has, and whether its texts begin with a token."""
    results: list[list[list[list[int]]]] = [[] for _ in TEXTS]
    kinds: dict[str, dict[str, Any]] = {}
    for cut in list_cuts(metadata["tokenizer.ggml.model"]):
        peer = Peer(write_vocabulary(folder / "vocabulary.gguf", {**metadata, **cut}))
        places = []
        for text, known in zip(TEXTS, results, strict=True):
            found = [peer.encode(text), peer.encode(text, special=False)]
            found = found[:1] if found[0] == found[1] else found
            if found not in known:
                known.append(found)
            places.append(known.index(found))
        begins = peer.encode("a", begin=True) != peer.encode("a")
        peer.close()
        kinds[cut.get("tokenizer.ggml.pre", "")] = {"begins": begins, "results": places}
    return {"results": results, "kinds": kinds}


def list_ends(folder: Path, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Vocabularies, and their tokens that end an answer."""
    made = []
    for own, roles in ENDS:
        keys = {f"tokenizer.ggml.{role}_token_id": number for role, number in roles.items()}
        letters = sorted(pre_tokenizers.ByteLevel.alphabet() + ["ab"])
        tokens = [*own, *(letter for letter in letters if letter not in own)]
        metadata = {
            "tokenizer.ggml.model": base["tokenizer.ggml.model"],
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": ["a b"],
            **keys,
        }
        peer = Peer(write_vocabulary(folder / "ends.gguf", metadata))
        made.append({"tokens": own, "keys": keys, "ends": peer.list_ends()})
        peer.close()
    return made


def compare(file: Path, seconds: float, name: str) -> None:
    """Say where pi2 and llama.cpp differ."""
    metadata = read_gguf(file).metadata
    own = Tokenizer.from_buffer(make_tokenizer(file, metadata))
    peer = Peer(file)
    marks = find_marks(file, metadata)
    if sorted(marks.ends) != peer.list_ends():
        print(f"{name}: other ends: {sorted(marks.ends)} {peer.list_ends()}")
    different = count = 0
    for text in draw_texts(seconds):
        count += 1
        ids = own.encode(text, add_special_tokens=False).ids
        if ids != peer.encode(text):
            different += 1
            print(f"{name}: {text!a}: {ids} {peer.encode(text)}")
    peer.close()
    print(f"{name}: {different} of {count} texts differ", flush=True)


PIECES: tuple[Sequence[str], ...] = (
    (*" \n\r\t\x0b\x1c\x00\x85", "  ", "\n\n", "\r\n", "\u00a0", "\u3000", "\u2003", "\u2028"),
    ("'s", "'S", "'t", "'RE", "'ve", "'LL", "'d", "'M", "'", "’s", '"', "ſ", "'ſ", "İ"),
    (*"0123456789²½Ⅷ٣", "12345", "1234", "123", "१२३", "000000"),
    ("hello", "World", "HTTPServer", "camelCase", "é", "e\u0301", "мир", "世界", "한국", "สวัสดี"),
    ("नमस्ते", "שלום", "مرحبا", "👩\u200d👩\u200d👧", "🇩🇪", "x", "<s>", "</s>", "<|im_end|>"),
    (*"!@#$%^&*()_+-=[]{}|;:,.<>/?`~\\。、…", "...", "//", "!="),
)


def draw_texts(seconds: float) -> Iterator[str]:
    """The texts, and random ones of all of Unicode for some time."""
    yield from TEXTS
    draw = random.Random(time.time())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        parts = []
        for _ in range(draw.randint(1, 40)):
            if draw.random() < 0.8:
                parts.append(draw.choice(draw.choice(PIECES)))
                continue
            first = draw.choice((0, 0x300, 0x900, 0x2000, 0xA000, 0x10000, 0x1F300, 0xE0000))
            code = draw.randrange(first, first + draw.choice((0x100, 0x4000)))
            parts.append(chr(code if not 0xD800 <= code < 0xE000 else 0xFFFD))
        yield "".join(parts)


if __name__ == "__main__":
    main()
