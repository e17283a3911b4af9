"""Makes the prompts of tests/golden/chat: what transformers makes of conversations.

Every ``NAME.jinja`` there (a template in the manner of published ones, written for the tests) is
applied to every conversation of ``conversations.json``; the prompt is ``NAME.CONVERSATION.txt``, or
``NAME.CONVERSATION.refused`` with the error where the template refuses.  Needs transformers, which
pi2 does not.
"""

from __future__ import annotations

import json
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parents[1] / "tests/golden/chat"


def main() -> None:
    """Write all files anew."""
    for old in [*FOLDER.glob("*.txt"), *FOLDER.glob("*.refused")]:
        old.unlink()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    conversations = json.loads((FOLDER / "conversations.json").read_text("utf-8"))
    for template in sorted(FOLDER.glob("*.jinja")):
        for name, conversation in conversations.items():
            target = FOLDER / f"{template.stem}.{name}"
            try:
                text = tokenizer.apply_chat_template(
                    conversation["messages"],
                    tools=conversation.get("tools"),
                    chat_template=template.read_text("utf-8"),
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except TemplateError as error:
                target.with_name(f"{target.name}.refused").write_text(str(error), "utf-8")
            else:
                target.with_name(f"{target.name}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
