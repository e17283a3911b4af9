"""Renders a chat template in its own process: ``python -m pi2.sandbox.template``. It offers what
transformers offers (``raise_exception``, ``strftime_now``, ``tojson``, ``break``, ``continue``,
``{% generation %}``) in jinja2's sandbox, with limited sizes."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pi2.sandbox.child import serve

MAX_TEXT = 1 << 24
"""Characters that a template may write, and items that ``*`` may make."""
MAX_BITS = 1 << 12
"""Bits of a number that ``**`` may make."""
_UNUSED = ("lipsum", "cycler", "joiner")
"""What jinja2 offers and chat templates have no use for."""


class Generation(Extension):
    """``{% generation %}``, which trainers use to find answers: the contents, as they are."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses at once, and keeps arithmetic small."""

    intercepted_binops = frozenset({"*", "**"})

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute unless the result is too large."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > MAX_BITS:
                    raise SecurityError("a number that is too large")
        elif isinstance(left, int) and not isinstance(right, (int, float)):
            _check_product(left, right)
        elif isinstance(right, int) and not isinstance(left, (int, float)):
            _check_product(right, left)
        return super().call_binop(context, operator, left, right)


def _check_product(times: int, items: Any) -> None:
    if hasattr(items, "__len__") and times * len(items) > MAX_TEXT:
        raise SecurityError("a text or list that is too long")


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The user's own date: templates tell the model which day it is."""
    return datetime.now().astimezone().strftime(pattern)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_list_items,
    )


def _list_items(value: Any) -> list[Any]:
    """What a filter such as ``map`` gives, as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def make_environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    for name in _UNUSED:
        del environment.globals[name]
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def render(source: str, given: Mapping[str, Any]) -> str:
    """The template's output; raises the template's errors, OverflowError if it writes too much."""
    pieces: list[str] = []
    size = 0
    for piece in make_environment().from_string(source).generate(given):
        size += len(piece)
        if size > MAX_TEXT:
            raise OverflowError(f"it writes more than {MAX_TEXT} characters")
        pieces.append(piece)
    return "".join(pieces)


def explain(error: BaseException) -> str:
    problem = " ".join(str(error)[:2000].split())[:300] or type(error).__name__
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {problem}"
    if isinstance(error, SecurityError):
        return f"it wants what no template may have: {problem}"
    return problem


def _work(request: bytes) -> bytes:
    """Render ``[source, variables]``."""
    source, given = json.loads(request)
    # Characters that no text has are found where the text is encoded.
    return render(source, given).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    serve(_work, explain)
