"""Rules about families."""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, rule
from pi2.plan.documents.common import find_type, list_known_keys, suggest
from pi2.plan.documents.family import Sections
from pi2.plan.documents.model import Model
from pi2.plan.documents.private import walk_values
from pi2.plan.toml.expressions import is_expression, parse_expression
from pi2.plan.toml.text import KeyPath, format_path

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

    Fix: write the key as the reference of model documents does.
    """
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
        document="family",
        path=path,
        at="key",
        message=f"model documents have no key `{format_path(own)}`",
        help=None if near is None else f"did you mean `{near}`?",
    )


@rule("P296", "error", "family")
def check_expressions(facts: Facts) -> Iterator[Finding]:
    """Unreadable expression in a family.

    Why: a text that begins with ``=``, a condition and a requirement are computed from a
    checkpoint's configuration: arithmetic, comparisons, ``and``, ``or``, ``not``, ``a if b else c``
    and calls of functions.

    Example: ``multipliers.embedding = "= shape.hidden **"``.

    Fix: write the expression as Python has it.
    """
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
                yield Finding(document="family", path=path, message=f"`{text}`: {error}")
        for path, value in walk_values(sections.read, (*base, "read")):
            if not isinstance(value, dict) and not (
                isinstance(value, list) and value and isinstance(value[0], str)
            ):
                yield Finding(
                    document="family",
                    path=path,
                    message=f"`{format_path(path)}` is no array of keys to read",
                    help='write ["key"], or ["key", default]; a fixed value stands in [set]',
                )
