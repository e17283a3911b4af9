"""A bundle's own reader of tokenizers gives what the tokenizers library gives, token by token."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.phone.runtime.pieces import Unsupported, translate
from pi2.phone.runtime.tokenizer import Tokenizer as OwnTokenizer
from pi2.sandbox.trial import TEXTS

ROOT = Path(__file__).resolve().parents[2]
CORPUS = (ROOT / "README.md").read_text() + (ROOT / "docs/howto/convert-a-model.md").read_text()
MARK = "\N{LOWER ONE EIGHTH BLOCK}"
ODD = (
    "aA1 \n\t\r'sStT_.,!?\u6f22\ud55c\u0939\u093f\u200be\u0301\xe9\ufb01\xbd\U0001f600\U0001f3fd"
    "\x1c\x85\xa0\u2028\u017f\u212a\U0001d518\u0663\u2167\xb2"
)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def list_texts() -> list[str]:
    chance = random.Random(1)
    pieces = [*ODD, "<|endoftext|>", MARK, "def", "sS"]
    drawn = ["".join(chance.choices(pieces, k=chance.randint(1, 60))) for _ in range(300)]
    return [*TEXTS, CORPUS[:8000], *drawn]


def train(
    model: Any, trainer: Any, *, cut: Any = None, change: Any = None, decoder: Any = None,
    added: tuple[AddedToken, ...] = (),
) -> bytes:  # fmt: skip
    tokenizer = Tokenizer(model)
    if change is not None:
        tokenizer.normalizer = change
    if cut is not None:
        tokenizer.pre_tokenizer = cut
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens(list(added))
    return str(tokenizer.to_str()).encode()


def train_pairs(size: int = 900, special: tuple[str, ...] = (), **options: Any) -> Any:
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False, **options
    )


def make_llama_3() -> bytes:
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return train(
        models.BPE(ignore_merges=True),
        train_pairs(
            special=("<|endoftext|>",), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
        cut=pre_tokenizers.Sequence([split, byte_level]),
        change=normalizers.NFC(),
        decoder=decoders.ByteLevel(),
    )


def make_gpt_2() -> bytes:
    added = (
        AddedToken("\n\n", normalized=False),
        AddedToken("def", single_word=True, normalized=True),
        AddedToken("sS", lstrip=True, rstrip=True, normalized=False),
    )
    return train(
        models.BPE(),
        train_pairs(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        cut=pre_tokenizers.ByteLevel(add_prefix_space=True),
        decoder=decoders.ByteLevel(),
        added=added,
    )


def make_falcon() -> bytes:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train(
        models.BPE(),
        train_pairs(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        cut=pre_tokenizers.Sequence([digits, byte_level]),
        decoder=decoders.ByteLevel(),
    )


def make_llama_2() -> bytes:
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        train_pairs(700, ("<unk>", "<s>", "</s>", *BYTES)),
        change=normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]),
        decoder=decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]),
    )


def make_gemma() -> bytes:
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        train_pairs(700, ("<unk>", "<s>", "</s>", *BYTES)),
        cut=pre_tokenizers.Split(" ", "merged_with_previous"),
        change=normalizers.Replace(" ", MARK),
        decoder=decoders.Sequence(steps),
    )


def make_unknown() -> bytes:
    return train(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        train_pairs(600, ("<unk>",), limit_alphabet=50),
        cut=pre_tokenizers.Metaspace(),
        change=normalizers.NFKC(),
        decoder=decoders.Metaspace(),
    )


def train_pieces() -> trainers.UnigramTrainer:
    return trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )


def make_unigram() -> bytes:
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    return train(
        models.Unigram(),
        train_pieces(),
        cut=pre_tokenizers.Metaspace(prepend_scheme="always"),
        change=normalizers.Sequence([normalizers.Strip(), spaces, normalizers.Lowercase()]),
        decoder=decoders.Metaspace(prepend_scheme="always"),
    )


def make_unigram_with_first() -> bytes:
    return train(
        models.Unigram(),
        train_pieces(),
        cut=pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoder=decoders.Metaspace(prepend_scheme="first"),
    )


def read_demo() -> bytes:
    return (ROOT / "plans/stores/pi2-demo/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "make",
    [
        read_demo, make_llama_3, make_gpt_2, make_falcon, make_llama_2, make_gemma, make_unknown,
        make_unigram, make_unigram_with_first,
    ],
)  # fmt: skip
def test_text_and_tokens_are_those_of_the_library(make: Callable[[], bytes]) -> None:
    content = make()
    library, own = Tokenizer.from_buffer(content), OwnTokenizer(content)
    chance = random.Random(2)
    for text in list_texts():
        expected = library.encode(text, add_special_tokens=False).ids
        assert own.encode(text).ids == expected, text
        drawn = [chance.randrange(library.get_vocab_size()) for _ in range(8)]
        for tokens in (expected, expected[1:], drawn):
            for special in (False, True):
                theirs = library.decode(tokens, skip_special_tokens=not special)
                assert own.decode(tokens, not special) == theirs, text


@pytest.mark.parametrize("kind", ["deepseek-llm", "gpt-4o", "kimi-k2", "superbpe", "afmoe"])
def test_tokenizers_of_gguf_files_do_what_llama_cpp_does(kind: str) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden/gguf_tokenizers.json").read_text())
    made = golden["vocabularies"]["gpt2"]
    metadata = made["metadata"] | {"tokenizer.ggml.pre": kind}
    own = OwnTokenizer(make_tokenizer(Path("x.gguf"), metadata))
    places = made["kinds"][kind]["results"]
    for text, results, place in zip(golden["texts"], made["results"], places, strict=True):
        assert own.encode(text).ids == results[place][0], text


def test_what_is_not_known_is_refused_and_not_guessed() -> None:
    rules = json.loads(read_demo())
    for key, rule in (
        ("pre_tokenizer", {"type": "UnicodeScripts"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        ("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
        ("model", {"type": "WordPiece", "vocab": {}}),
        ("model", {**rules["model"], "dropout": 0.1}),
    ):
        with pytest.raises(Unsupported):
            OwnTokenizer(json.dumps({**rules, key: rule}).encode())


@pytest.mark.parametrize(
    "expression", [r"\p{Han}+", r"[a&&b]", r"[[:alpha:]]", r"\h", r"a{1,2}+", r"\bx", r"(?m:x)"]
)
def test_expressions_that_python_reads_otherwise_are_refused(expression: str) -> None:
    with pytest.raises(Unsupported):
        translate(expression)
