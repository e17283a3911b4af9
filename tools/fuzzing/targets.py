"""What is fuzzed: how a case is made, and what must hold of pi2 when it meets it.

A case is bytes.  Whatever is in them, there is a `UserError` or a result that is right: any other
exception, a warning of numpy, or wrong tokens are failures.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

import pi2
from fuzzing.disks import DiskTarget
from fuzzing.documents import DocumentTarget, ReferenceTarget
from fuzzing.files import CompanionTarget, FilePlanTarget
from fuzzing.gguf import write_gguf
from fuzzing.mutations import spoil_bytes, spoil_document, spoil_text
from fuzzing.seeds import (
    CONVERSATION,
    RULES,
    TEMPLATE_PIECES,
    list_configs,
    list_templates,
    list_tokenizers,
    read_gguf_seed,
    write_tokenizer,
)
from pi2.backends.arithmetic import compute_rope_tables
from pi2.diagnostics import UserError
from pi2.engine.model_texts import ChatTemplate
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.sandbox.coding import decode_ids, encode_text
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer, try_tokenizer

MOST_CONTEXT = 4096
"""Tokens that tables of positions are computed for."""
_TEXTS = (
    "",
    "a",
    "def f(x):\n  pass",
    "\u00e9\u6f22\U0001f44d" * 9,
    "zz " * 300,
    "\0\ufffd",
    "<s>a</s>",
)


class Target(Protocol):
    """Something that reads what strangers have written."""

    name: str

    def make(self, random: Random) -> bytes:
        """A case."""

    def run(self, case: bytes) -> str:
        """Give it to pi2; returns in a word what became of it, and raises what is a failure."""


@dataclass
class ConfigTarget:
    """``config.json`` of every family beside the weights of one of its models."""

    folder: Path
    name: str = "config"

    @cached_property
    def _seeds(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        return {folder.name: (folder, config) for folder, config in list_configs()}

    def make(self, random: Random) -> bytes:
        """The name of a model and its configuration, spoilt."""
        name = random.choice(sorted(self._seeds))
        return json.dumps([name, spoil_document(random, self._seeds[name][1])]).encode()

    def run(self, case: bytes) -> str:
        """Describe the model, and compute its positions."""
        name, config = json.loads(case)
        folder = self.folder / name
        if not folder.exists():
            shutil.copytree(self._seeds[name][0], folder)
        (folder / "config.json").write_text(json.dumps(config))
        return _describe(folder)


@dataclass
class GgufTarget:
    """A GGUF file: its metadata, and its bytes."""

    folder: Path
    name: str = "gguf"

    @cached_property
    def _seed(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        return read_gguf_seed()

    def make(self, random: Random) -> bytes:
        """The file, spoilt."""
        metadata, tensors = self._seed
        if random.randrange(3):
            changed = spoil_document(random, metadata)
            return write_gguf(changed, tensors)
        content = write_gguf(metadata, tensors)
        header = content.index(b"token_embd") + 3000
        return spoil_bytes(random, content, last=header)

    def run(self, case: bytes) -> str:
        """Describe the model and convert it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "model.gguf"
        file.write_bytes(case)
        return _describe(file, self.folder / "store")


def _describe(checkpoint: Path, output: Path | None = None) -> str:
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        try:
            model = describe_checkpoint(checkpoint).model
        except UserError:
            return "refused"
        _compute_positions(model)
        if output is None:
            return "described"
        try:
            convert_checkpoint(checkpoint, model, output, replace=True)
        except UserError:
            return "described, not converted"
    return "converted"


def _compute_positions(model: Model) -> None:
    """Tables of positions, all of finite numbers."""
    for rope in (model.rope, model.other_rope):
        if rope is None:
            continue
        context = min(model.shape.context, MOST_CONTEXT)
        for is_long in (False, True):
            size = model.shape.head_dim
            tables = compute_rope_tables(rope, size, context, is_long=is_long)
            assert all(np.isfinite(table).all() for table in tables), rope


@dataclass
class TokenizerTarget:
    """``tokenizer.json``.

    ``trying`` is what tries it; what it accepts must work with other texts, too.
    """

    trying: Callable[[bytes], Any] = try_tokenizer
    name: str = "tokenizer"

    def make(self, random: Random) -> bytes:
        """A tokenizer, spoilt, or with rules of another kind."""
        document = json.loads(random.choice(list_tokenizers()))
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if random.randrange(4) == 0:
                rules = [rule for rule in RULES[part] if random.randrange(4) == 0]
                key = {"normalizer": "normalizers", "decoder": "decoders"}.get(part)
                sequence = {"type": "Sequence", key or "pretokenizers": rules}
                several = rules and part != "post_processor" and random.randrange(2)
                document[part] = sequence if several else random.choice(RULES[part])
        if random.randrange(8) == 0:
            return spoil_bytes(random, json.dumps(document).encode())
        if random.randrange(3) == 0:
            every = [rule for rules in RULES.values() for rule in rules]
            document = spoil_document(random, document, every)
        return json.dumps(document).encode()

    def run(self, case: bytes) -> str:
        """Try it, and use it where it was accepted."""
        try:
            self.trying(case)
        except TokenizerRefused:
            return "refused"
        try:
            tokenizer = open_tokenizer(case)
            for text in _TEXTS:
                decode_ids(tokenizer, encode_text(tokenizer, text))
        except UserError:
            return "accepted, refused with a text"
        return "accepted"


@dataclass
class TemplateTarget:
    """A chat template."""

    name: str = "template"

    def make(self, random: Random) -> bytes:
        """A template, spoilt."""
        text = random.choice(list_templates())
        return spoil_text(random, text, TEMPLATE_PIECES).encode("utf-8", "replace")

    def run(self, case: bytes) -> str:
        """Render a conversation."""
        template = ChatTemplate(
            Path("t.jinja"), case.decode("utf-8", "replace"), {"bos_token": "<s>"}
        )
        try:
            template.render(CONVERSATION)
        except UserError as error:
            (finding,) = error.diagnostics
            assert finding.code == "P608", finding
            return "refused"
        return "rendered"


@dataclass
class StoreTarget:
    """The files of a neuron store: damaged ones are found, or change no token."""

    folder: Path
    name: str = "store"

    @cached_property
    def plan(self) -> Path:
        """A plan whose store is sound."""
        place = self.folder / "seed"
        shutil.rmtree(place, ignore_errors=True)
        source, config = next(item for item in list_configs() if item[0].name == "bamboo")
        checkpoint = place / "checkpoint"
        shutil.copytree(source, checkpoint)
        (checkpoint / "tokenizer.json").write_bytes(write_tokenizer(config["vocab_size"]))
        from pi2.cli.main import run

        assert run(["convert", str(checkpoint), "-o", str(place / "store")]) == 0
        return place / "store/default.plan.toml"

    @cached_property
    def _expected(self) -> list[int]:
        return self._generate(self.plan)

    def _generate(self, plan: Path) -> list[int]:
        settings: dict[str, object] = {"backends.cpu": "reference", "layers.hot": 0.125}
        settings |= {"memory.segments.hot": "1 MiB", "memory.segments.cold": "1 MiB"}
        settings |= {"memory.budget": "1 GiB"}
        with pi2.load(plan, set=settings) as model:
            return list(model.generate([1, 5, 9], max_tokens=4, temperature=0.0).result.token_ids)

    def make(self, random: Random) -> bytes:
        """The path of a file in the store, and its contents, spoilt."""
        store = self.plan.parent
        files = [file for file in sorted(store.rglob("*")) if file.is_file()]
        file = random.choice([file for file in files if file.suffix in (".arrow", ".json")])
        content = file.read_bytes()
        if random.randrange(3):
            changed = bytearray(content)
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            content = bytes(changed)
        else:
            content = spoil_bytes(random, content)
        return str(file.relative_to(store)).encode() + b"\n" + content

    def run(self, case: bytes) -> str:
        """Generate from the store with that file in it."""
        name, _, content = case.partition(b"\n")
        expected, file = self._expected, self.plan.parent / name.decode()
        sound = file.read_bytes()
        file.write_bytes(content)
        try:
            found = self._generate(self.plan)
        except UserError:
            return "refused"
        finally:
            file.write_bytes(sound)
        assert found == expected, f"wrong tokens: {found}, not {expected}"
        return "harmless"


def make_targets(folder: Path) -> dict[str, Target]:
    """Everything that is fuzzed, by name; ``folder`` is for their files."""
    store = StoreTarget(folder / "store")
    targets: list[Target] = [
        DocumentTarget(folder / "document"),
        ReferenceTarget(folder / "references"),
        ConfigTarget(folder / "config"),
        GgufTarget(folder / "gguf"),
        FilePlanTarget(folder / "file-plan"),
        CompanionTarget(folder / "companions"),
        TokenizerTarget(),
        TemplateTarget(),
        store,
        DiskTarget(folder / "disk", lambda: store.plan),
    ]
    return {target.name: target for target in targets}
