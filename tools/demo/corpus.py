"""Text of the demo model: the Python standard library of the running interpreter.

Licence of the text: the Python Software Foundation Licence, version 2 (PSF-2.0), and the older
licences that it carries along; the demo model is trained on it, and pieces of it are shipped
beside the model as held-out and calibration text.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
SEPARATOR = f"\n{EOT}\n"
SPLIT = r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n\s*|[^\S\n]+|\s+"
SKIP = (
    "site-packages/", "encodings/", "lib2to3/tests/data/", "lib2to3/pgen2/tokenize",
    "pydoc_data/", "test/test_importlib/data", "test/encoded_modules/", "ensurepip/",
    "config-", "__pycache__/",
)  # fmt: skip
TABLES = ("html/entities.py", "stringprep.py", "idlelib/idle_test/htest.py")
HELDOUT_SHARE = 0.03


@dataclass(frozen=True)
class Document:
    """One source file."""

    path: str
    text: str
    test: bool
    heldout: bool


def fraction(seed: int, key: str) -> float:
    """A number in [0, 1) fixed by the seed and the key."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_table(text: str) -> bool:
    """True for files that are mostly numbers or escapes."""
    odd = sum(text.count(c) for c in "0123456789\\")
    return odd > 0.12 * len(text) or max(map(len, text.splitlines()), default=0) > 1000


def read_documents(seed: int) -> list[Document]:
    """Every usable source file of the standard library, in order of path, no doubles."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in SKIP) or name in TABLES or "/bad" in name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        text = text.replace("\r\n", "\n").replace("\t", "    ").rstrip() + "\n"
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen or EOT in text or "\0" in text or is_table(text):
            continue
        seen.add(digest)
        test = "test/" in name or "tests/" in name or name.startswith("test")
        heldout = fraction(seed, name) < HELDOUT_SHARE and len(text) < 100_000
        found.append(Document(name, text, test, heldout))
    return found


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE over the training split; library files count, tests only in part."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [d.text for d in documents if not d.heldout and not d.test]
    texts += [d.text for d in documents if not d.heldout and d.test][::4]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def boundary_splits(tokenizer: Tokenizer) -> dict[int, tuple[int, int]]:
    """Tokens such as " foo" or "(self" that may be written as two: first character, rest."""
    vocab = tokenizer.get_vocab()
    out = {}
    for token, index in vocab.items():
        if token != EOT and len(token) > 1 and not (token[0].isalnum() or token[0] in "_Ċ"):
            first, rest = vocab.get(token[0]), vocab.get(token[1:])
            if first is not None and rest is not None:
                out[index] = (first, rest)
    return out


def split_some(ids: np.ndarray, table: dict[int, tuple[int, int]], seed: int) -> np.ndarray:
    """Write 2 % of the tokens that can be cut in two as two.

    So the model has seen a lone space or bracket before a word, which is how a prompt ends
    when somebody types ``def `` and asks for the rest.
    """
    rng = np.random.default_rng(seed)
    draw = rng.random(len(ids)) < 0.02
    out: list[int] = []
    for index, cut in zip(ids.tolist(), draw.tolist(), strict=True):
        if cut and index in table:
            out.extend(table[index])
        else:
            out.append(index)
    return np.asarray(out, dtype=np.uint16)


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents; every document begins with the separator token."""

    library: list[np.ndarray]
    tests: list[np.ndarray]
    heldout_texts: list[str]
    calibration_texts: list[str]
    tokenizer: Tokenizer

    def epoch(self, seed: int, number: int, test_share: float) -> np.ndarray:
        """One pass: all library files and a share of the tests, shuffled and joined."""
        rng = np.random.default_rng((seed, number, 11))
        chosen = list(self.library)
        picks = rng.permutation(len(self.tests))[: int(test_share * len(self.tests))]
        chosen += [self.tests[i] for i in picks]
        order = rng.permutation(len(chosen))
        stream = np.concatenate([chosen[i] for i in order])
        return stream[int(rng.integers(256)) :]


def separator_id(tokenizer: Tokenizer) -> int:
    """The token between documents, which is the model's begin, end and padding token too."""
    index = tokenizer.token_to_id(EOT)
    if index is None:
        raise ValueError(f"the tokenizer has no {EOT}")
    return index


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of one document, the separator token first."""
    ids = [separator_id(tokenizer), *tokenizer.encode(text).ids]
    return np.asarray(ids, dtype=np.uint16)


def pick_texts(documents: list[Document], seed: int, limit: int, test_limit: int) -> list[str]:
    """Whole documents in hashed order, up to so many characters of library and test files."""
    out, used = [], {False: 0, True: 0}
    for doc in sorted(documents, key=lambda d: fraction(seed + 1, d.path)):
        size = len(doc.text)
        if size <= 40_000 and used[doc.test] + size <= (test_limit if doc.test else limit):
            used[doc.test] += size
            out.append(doc.text)
    return out


def tokenise(
    cache: Path, tokenizer: Tokenizer, documents: list[Document], seed: int
) -> list[np.ndarray]:
    """Token ids of the training documents, kept in a file for the next command."""
    texts = "".join(d.text for d in documents) + tokenizer.to_str() + str(seed)
    key = hashlib.sha256(texts.encode()).hexdigest()
    if cache.exists():
        with np.load(cache) as saved:
            if str(saved["key"]) == key:
                return np.split(saved["ids"], np.cumsum(saved["lengths"])[:-1])
    cuts = boundary_splits(tokenizer)
    pieces = [
        split_some(encode(tokenizer, doc.text), cuts, seed + number)
        for number, doc in enumerate(documents)
    ]
    lengths = np.asarray([len(p) for p in pieces])
    np.savez(cache, key=key, ids=np.concatenate(pieces), lengths=lengths)
    return pieces


def load_corpus(folder: Path, seed: int, vocab_size: int) -> Corpus:
    """Read, tokenise and split the corpus; the tokenizer is kept in the folder."""
    documents = read_documents(seed)
    path = folder / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(documents, vocab_size)
        tokenizer.save(str(path))
    held = [d for d in documents if d.heldout]
    trained = [d for d in documents if not d.heldout]
    pieces = tokenise(folder / "tokens.npz", tokenizer, trained, seed)
    library = [p for p, doc in zip(pieces, trained, strict=True) if not doc.test]
    tests = [p for p, doc in zip(pieces, trained, strict=True) if doc.test]
    corpus = Corpus(
        library,
        tests,
        pick_texts(held, seed, 200_000, 60_000),
        pick_texts(trained, seed, 750_000, 250_000),
        tokenizer,
    )
    split = {
        "python": sysconfig.get_python_version(),
        "seed": seed,
        "library_tokens": int(sum(map(len, library))),
        "test_tokens": int(sum(map(len, tests))),
        "training_files": len(trained),
        "heldout_files": [d.path for d in held],
        "heldout_text_bytes": sum(len(t.encode()) for t in corpus.heldout_texts),
    }
    (folder / "corpus.json").write_text(json.dumps(split, indent=1) + "\n")
    return corpus
