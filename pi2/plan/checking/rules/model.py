"""Rules about models and families."""

from collections.abc import Iterator

from pi2.model.blocks import list_turns
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.common import find_type, list_known_keys, suggest
from pi2.plan.documents.family import Sections
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.private import walk_values
from pi2.plan.toml.expressions import is_expression, parse_expression
from pi2.plan.toml.text import KeyPath, format_path


@rule("P248", "error", "model")
def check_rope_scaling(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    for rope, width in list_turns(model):
        yield from _check_rope("other_rope" if rope is model.other_rope else "rope", rope, width)


def _check_rope(table: str, rope: Rope, head_dim: int) -> Iterator[Finding]:
    kind = Origin("model", (table, "kind"), f'kind = "{rope.kind}"')
    if rope.kind in ("plain", "none") and rope.factor != 1.0:
        subject = "plain positions ignore" if rope.kind == "plain" else "no rotation ignores"
        yield Finding(
            (table, "factor"),
            f"{subject} the factor {rope.factor:g}",
            'write kind = "linear" or "llama3", or remove the factor',
            origins=(kind,),
        )
    if rope.kind == "yarn" and rope.fast_rotations <= rope.slow_rotations:
        yield Finding(
            (table, "fast_rotations"),
            f"fast_rotations is {rope.fast_rotations:g}, expected more than "
            f"slow_rotations, {rope.slow_rotations:g}",
        )
    rotated = rope.count_rotated(head_dim)
    if rope.share < 1.0 and (rotated == 0 or rotated % 2):
        yield Finding(
            (table, "share"),
            f"{rotated} elements of a head are rotated, expected an even number",
            "take the share from the checkpoint's configuration",
        )
    pairs = rotated // 2 if rope.kind == "longrope" else 0
    for name in ("short_factors", "long_factors"):
        count = len(getattr(rope, name))
        if count != pairs:
            yield Finding(
                (table, name),
                f"{count} factors are stated, expected {pairs}",
                'only kind = "longrope" has them, one for each pair that turns',
                origins=(kind,),
            )
    if rope.kind == "longrope" and rope.original_context < 2:
        yield Finding(
            (table, "original_context"), "original_context is 1, expected 2 tokens or more"
        )
    if rope.kind == "llama3" and rope.high_frequency_factor < rope.low_frequency_factor:
        yield Finding(
            (table, "high_frequency_factor"),
            f"high_frequency_factor is {rope.high_frequency_factor:g}, expected no less "
            f"than low_frequency_factor, {rope.low_frequency_factor:g}",
        )


@rule("P322", "error", "plan", "model")
def check_sequences_share_positions(facts: Facts) -> Iterator[Finding]:
    decode, context = facts.plan.decode, facts.plan.kv.context
    if decode.step_tokens == 1:
        return
    batch, guesses = decode.batch, decode.batch == 1
    for table in ("rope", "other_rope"):
        rope = getattr(facts.model, table)
        if rope is None or rope.kind != "longrope" or context <= rope.original_context:
            continue
        original = f"original_context = {rope.original_context}"
        yield Finding(
            ("decode", "speculation" if guesses else "batch"),
            f"the plan generates {f'{batch} sequences' if batch > 1 else 'several tokens'} "
            "at a time, and the model's positions "
            f"differ between sequences of up to {rope.original_context} tokens and longer ones",
            ("remove it" if guesses else "write batch = 1")
            + f", or set kv.context to {rope.original_context} at most",
            origins=(
                Origin("plan", ("kv", "context"), f"context = {context}"),
                Origin("model", (table, "original_context"), original),
            ),
        )


@rule("P246", "error", "model")
def check_tokens_in_vocabulary(facts: Facts) -> Iterator[Finding]:
    tokenizer, vocab = facts.model.tokenizer, facts.model.shape.vocab
    tokens: list[tuple[KeyPath, int]] = [
        (("tokenizer", "eos", number), token) for number, token in enumerate(tokenizer.eos)
    ]
    if tokenizer.bos is not None:
        tokens.append((("tokenizer", "bos"), tokenizer.bos))
    for path, token in tokens:
        if not 0 <= token < vocab:
            yield Finding(
                path,
                f"there is no token {token}: the vocabulary has 0 to {vocab - 1}",
                origins=(Origin("model", ("shape", "vocab"), f"vocab = {vocab}"),),
            )
    if tokenizer.add_bos and tokenizer.bos is None:
        yield Finding(
            ("tokenizer", "add_bos"),
            "prompts begin with `bos`, which is not stated",
            "add `bos`, or write add_bos = false",
        )


_PARTS = ("gate", "up", "down")


def _list_sections(facts: Facts) -> Iterator[tuple[KeyPath, Sections]]:
    yield (), facts.family
    for name, when in facts.family.when.items():
        yield ("when", name), when


@rule("P295", "error", "family")
def check_model_keys(facts: Facts) -> Iterator[Finding]:
    for base, sections in _list_sections(facts):
        for section in ("read", "set"):
            for path, _ in walk_values(getattr(sections, section), (*base, section)):
                own = path[len(base) + 1 :]
                is_known = not own or find_type(Model, own) is not None
                if not is_known and (len(own) == 1 or find_type(Model, own[:-1]) is not None):
                    yield _report_key(path, own)
        for key in sections.names:
            for part in _PARTS if "{part}" in key else ("",):
                own = ("tensors", key.replace("{part}", part))
                if find_type(Model, own) is None:
                    yield _report_key((*base, "names", key), own)


def _report_key(path: KeyPath, own: KeyPath) -> Finding:
    near = suggest(str(own[-1]), list_known_keys(Model, own[:-1]))
    return Finding(
        path,
        f"model documents have no key `{format_path(own)}`",
        None if near is None else f"did you mean `{near}`?",
        at="key",
    )


@rule("P296", "error", "family")
def check_expressions(facts: Facts) -> Iterator[Finding]:
    for base, sections in _list_sections(facts):
        texts = {(*base, "require", name): text for name, text in sections.require.items()}
        for section in ("assume", "fix", "set"):
            walked = walk_values(getattr(sections, section), (*base, section))
            texts |= {path: str(value) for path, value in walked if is_expression(value)}
        if sections.window is not None:
            texts[(*base, "window", "layers")] = sections.window.layers
        if base:
            texts[(*base, "test")] = facts.family.when[str(base[1])].test
        for path, text in texts.items():
            try:
                parse_expression(text)
            except ValueError as error:
                yield Finding(path, f"`{text}`: {error}")
        for path, value in walk_values(sections.read, (*base, "read")):
            if not isinstance(value, dict) and not (
                isinstance(value, list) and value and isinstance(value[0], str)
            ):
                yield Finding(
                    path,
                    f"`{format_path(path)}` is no array of keys to read",
                    'write ["key"], or ["key", default]; a fixed value belongs in [set]',
                )
