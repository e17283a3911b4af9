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
from pi2.plan.weights.layout import GROUP


@rule("P249", "error", "model")
def check_experts_exist(facts: Facts) -> Iterator[Finding]:
    """More experts per token than in the layer.

    Why: the router picks ``active_experts`` different ones of ``experts``.

    Example: ``active_experts = 8`` with ``experts = 4``.

    Fix: take both numbers from the checkpoint's configuration."""
    moe = facts.model.moe
    if moe is None or moe.active_experts <= moe.experts:
        return
    yield Finding(
        ("moe", "active_experts"),
        f"{moe.active_experts} active experts, a layer has {moe.experts}",
        "take the number from the checkpoint's configuration",
        origins=(Origin("model", ("moe", "experts"), f"experts = {moe.experts}"),),
    )


@rule("P245", "error", "model")
def check_fatrelu_threshold(facts: Facts) -> Iterator[Finding]:
    """FATReLU threshold missing or out of place.

    Why: FATReLU is zero at or below its threshold, which is a number of the checkpoint; with 0 it
    is ReLU.  Other activations would ignore it.

    Example: ``activation = "fatrelu"`` without ``threshold``.

    Fix: write the checkpoint's threshold, or name the activation that it has."""
    ffn = facts.model.ffn
    activation = Origin("model", ("ffn", "activation"), f'activation = "{ffn.activation}"')
    if ffn.activation == "fatrelu" and ffn.threshold <= 0:
        yield Finding(
            ("ffn", "threshold"),
            f"fatrelu needs a threshold above 0, it is {ffn.threshold:g}",
            'write the checkpoint\'s threshold, or activation = "relu"',
            origins=(activation,),
        )
    elif ffn.activation != "fatrelu" and ffn.threshold != 0:
        yield Finding(
            ("ffn", "threshold"),
            f"{ffn.activation} has no threshold",
            'remove it, or write activation = "fatrelu"',
            origins=(activation,),
        )


@rule("P241", "error", "model")
def check_head_is_even(facts: Facts) -> Iterator[Finding]:
    """Odd head width.

    Why: rotary positions turn pairs of elements, one from each half of a head.

    Example: ``head_dim = 33``.

    Fix: take the number from the checkpoint's configuration."""
    model, other = facts.model, facts.model.other_heads
    latent = model.attention.latent
    turned = model.shape.head_dim if latent is None else latent.rotated
    heads = {"shape": (turned, model.shape.head_dim)}
    if other is not None:
        heads["other_heads"] = (other.head_dim, other.head_dim)
    for table, (turned, width) in heads.items():
        if turned % 2:
            yield Finding(
                (table, "head_dim"),
                f"a head of {width} elements has no two halves to rotate",
                "take head_dim from the checkpoint's configuration",
            )


@rule("P240", "error", "model")
def check_heads_share_keys(facts: Facts) -> Iterator[Finding]:
    """Heads are no multiple of key-value heads.

    Why: in grouped-query attention each key and value head serves the same number of query heads.

    Example: ``heads = 8`` with ``kv_heads = 3``.

    Fix: take both numbers from the checkpoint's configuration."""
    shape, other = facts.model.shape, facts.model.other_heads
    stated = {"shape": (shape.heads, shape.kv_heads)}
    if other is not None:
        stated["other_heads"] = (other.heads or shape.heads, other.kv_heads)
    for table, (count, kv_heads) in stated.items():
        if count % kv_heads == 0:
            continue
        owner = table if table == "shape" or (other and other.heads) else "shape"
        heads = Origin("model", (owner, "heads"), f"heads = {count}")
        yield Finding(
            (table, "kv_heads"),
            f"{count} heads cannot share {kv_heads} key and value heads evenly",
            "take heads and kv_heads from the checkpoint's configuration",
            origins=(heads,),
        )


@rule("P248", "error", "model")
def check_rope_scaling(facts: Facts) -> Iterator[Finding]:
    """Position scaling incomplete or without effect.

    Why: ``plain`` positions ignore ``factor``; ``llama3`` scales between two wavelengths, ``yarn``
    between two numbers of rotations, which must be in order; elements turn in pairs, of which each
    has its factors with ``longrope``.

    Example: ``kind = "plain"`` with ``factor = 4.0``.

    Fix: take kind and factors from the checkpoint's configuration."""
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


@rule("P242", "error", "model")
def check_rank_fills_groups(facts: Facts) -> Iterator[Finding]:
    """Predictor rank is no multiple of 32.

    Why: quantised weights share a scale in groups of 32, and a group never spans two rows.  Widths
    of the model may be any: `pi2 convert` fills up their last group with zeros.

    Example: ``rank = 50``.

    Fix: take the next multiple of 32; `pi2 convert` fills up the predictors' matrices."""
    predictor = facts.model.predictor
    if predictor is not None and predictor.rank % GROUP:
        yield Finding(
            ("predictor", "rank"),
            f"rank is {predictor.rank}, expected a multiple of {GROUP}",
            "take the number from the checkpoint's configuration",
        )


@rule("P322", "error", "plan", "model")
def check_sequences_share_positions(facts: Facts) -> Iterator[Finding]:
    """Sequences with different position scaling.

    Why: the positions of LongRoPE are computed otherwise in a sequence that is longer than the
    model's original context; several sequences at a time, or tokens that are verified together,
    share one table of them.

    Example: ``decode.batch = 4`` and a context of 8,192 tokens for a model whose original context
    has 4,096.

    Fix: set ``kv.context`` to the original context at most, or ``decode.batch = 1`` without
    ``decode.speculation``."""
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
    """Special token outside the vocabulary.

    Why: an end token that the model cannot produce never ends a text.

    Example: ``eos = [32000]`` with ``vocab = 32000``, whose last token is 31999.

    Fix: take the ids from the tokenizer's file."""
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


@rule("P231", "error", "plan", "model")
def check_context_within_model(facts: Facts) -> Iterator[Finding]:
    """Context longer than the model's.

    Why: beyond the length that a model was trained for its positions mean nothing to it, and its
    text falls apart.

    Example: ``kv.context = 4096`` for a model with ``context = 2048``.

    Fix: lower ``kv.context``."""
    wanted, known = facts.plan.kv.context, facts.model.shape.context
    if wanted <= known:
        return
    yield Finding(
        ("kv", "context"),
        f"context {wanted} exceeds the limit of the model `{facts.model.id}`: {known}",
        f"write context = {known} or less",
        origins=(Origin("model", ("shape", "context"), f"context = {known}"),),
    )


_PARTS = ("gate", "up", "down")


def _list_sections(facts: Facts) -> Iterator[tuple[KeyPath, Sections]]:
    yield (), facts.family
    for name, when in facts.family.when.items():
        yield ("when", name), when


@rule("P295", "error", "family")
def check_model_keys(facts: Facts) -> Iterator[Finding]:
    """Unknown model key in a family.

    Why: what `read`, `set` and `names` state becomes a model document, which has no other keys.

    Example: ``norm.epsilom = ["rms_norm_eps", 1e-6]`` in ``[read]``.

    Fix: write the key as the reference of model documents does."""
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
    """Unreadable expression in a family.

    Why: a text that begins with ``=``, a condition and a requirement are computed from a
    checkpoint's configuration: arithmetic, comparisons, ``and``, ``or``, ``not``, ``a if b else c``
    and calls of functions.

    Example: ``multipliers.embedding = "= shape.hidden **"``.

    Fix: write the expression as Python has it."""
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
