"""Makes the tokenizers of tests/golden/tokenizers: small SentencePiece models, and what that
library makes of some texts.

Needs sentencepiece, which pi2 itself does not: ``python tools/make_tokenizer_goldens.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import sentencepiece

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests/golden/tokenizers"
TEXTS = (
    "Weights are read from flash.",
    "  two  spaces and three   more ",
    "naïve café ☃ 😀",
    "",
    "a\nb\tc",
    "x12345 67",
    "\uff21\uff22\uff23 wide",
    "plan.toml: budget = 4 GiB",
)
RULES = "".join(f"{0xFF21 + offset:X}\t{0x41 + offset:X}\n" for offset in range(26))
"""Wide letters become ordinary ones."""
MODELS: dict[str, dict[str, object]] = {
    "pairs": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    "likeliest": {"model_type": "unigram", "normalization_rule_tsv": RULES},
    "likeliest-bytes": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
}


def main() -> None:
    """Write all."""
    for name, options in MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            rules = Path(scratch) / "rules.tsv"
            chosen = dict(options)
            if "normalization_rule_tsv" in chosen:
                rules.write_text(str(chosen["normalization_rule_tsv"]))
                chosen["normalization_rule_tsv"] = str(rules)
            else:
                chosen["normalization_rule_name"] = "identity"
            sentencepiece.SentencePieceTrainer.train(
                input=str(ROOT / "docs/howto/add-a-model.md"),
                model_prefix=str(Path(scratch) / "made"),
                vocab_size=420,
                hard_vocab_limit=False,
                minloglevel=2,
                **chosen,
            )
            content = (Path(scratch) / "made.model").read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(content)
        expected = {text: model.encode(text) for text in TEXTS}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(f"{name}: {model.get_piece_size()} pieces, {len(content)} bytes")


if __name__ == "__main__":
    main()
