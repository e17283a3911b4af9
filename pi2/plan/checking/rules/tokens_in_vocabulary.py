"""Special tokens are tokens of the vocabulary.

Why: an end token that the model cannot produce never ends a text.

Example: ``eos = [32000]`` with ``vocab = 32000``, whose last token is 31999.

Fix: take the ids from the tokenizer's file.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.toml.paths import KeyPath

CODE = "P246"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare bos and eos with the vocabulary."""
    tokenizer, vocab = facts.model.tokenizer, facts.model.shape.vocab
    tokens: list[tuple[KeyPath, int]] = [
        (("tokenizer", "eos", number), token) for number, token in enumerate(tokenizer.eos)
    ]
    if tokenizer.bos is not None:
        tokens.append((("tokenizer", "bos"), tokenizer.bos))
    for path, token in tokens:
        if not 0 <= token < vocab:
            yield Finding(
                document="model",
                path=path,
                message=f"there is no token {token}: the vocabulary has 0 to {vocab - 1}",
                origins=(
                    Origin(document="model", path=("shape", "vocab"), text=f"vocab = {vocab}"),
                ),
            )
    if tokenizer.add_bos and tokenizer.bos is None:
        yield Finding(
            document="model",
            path=("tokenizer", "add_bos"),
            message="prompts begin with `bos`, which is not stated",
            help="add `bos`, or write add_bos = false",
        )
