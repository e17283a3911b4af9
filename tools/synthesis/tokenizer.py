"""A tokenizer for models that were never trained: a token per byte, numbers for the rest."""

from __future__ import annotations

from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model

BYTES = 256


def make_tokenizer(model: Model) -> bytes:
    """``tokenizer.json`` with ``model.shape.vocab`` tokens.

    Text becomes one token per byte.  Tokens that the model document calls begin and end are
    special; the others, which no text becomes, read as their number.  Raises `UserError` P551 for
    a vocabulary that does not hold all bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    settings, vocab = model.tokenizer, model.shape.vocab
    named = {token: f"<end-{token}>" for token in settings.eos}
    if settings.bos is not None:
        named[settings.bos] = "<begin>"
    if vocab < BYTES + len(named):
        raise UserError.of(
            "P551", f"a vocabulary of {vocab} does not hold {BYTES} bytes and {len(named)} marks"
        )
    letters = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokens: dict[str, int] = {}
    for token in range(vocab):
        text = named.get(token) or next(letters, None)
        # The alphabet writes a space as \u0120.
        tokens[text if text is not None else f"\u0120{token}"] = token
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in named.values()])
    return str(tokenizer.to_str()).encode()
