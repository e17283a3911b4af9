"""Expressions that documents state as text: arithmetic, comparisons and calls, read by a walker."""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

MARK = "="
"""A text that begins with it is an expression."""
MAX_LENGTH = 300
_OVER_LAYERS = ("each", "where")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: float(base) ** exponent,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceiling": lambda number, divisor: -(-number // divisor),
    "least": min,
    "length": len,
    "log": math.log,
    "most": max,
    "rounded": lambda number: round(number, 6),
    "whole": int,
}
"""What every expression may call."""
_ALLOWED = (
    *(ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.Constant, ast.Name),
    *(ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.List),
    *(ast.Subscript, ast.UnaryOp),
)


class Names(Protocol):
    """What names in an expression mean."""

    @property
    def layers(self) -> int:
        """Layers that ``each`` and ``where`` go through."""
        ...

    def find(self, name: str) -> Any:
        """The value of a name, which may have dots; None where there is none."""
        ...

    def call(self, name: str, arguments: list[Any]) -> Any:
        """What the function ``name`` gives."""
        ...


def is_expression(value: object) -> bool:
    return isinstance(value, str) and value.startswith(MARK)


@lru_cache(maxsize=1024)
def parse_expression(text: str) -> ast.expr:
    """The expression, with or without `MARK`; `ValueError` says why it is none."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_LENGTH} are read")
    try:
        tree = ast.parse(text.removeprefix(MARK).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is no expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Call) and node.keywords):
            raise ValueError(f"it has a {type(node).__name__}, which expressions do not know")
    return tree


def list_names(tree: ast.expr) -> Iterator[str]:
    """Names of keys in an expression, with their dots; names of functions are left out."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called | inner:
            name = ast.unparse(node)
            if name not in _WORDS and name != "layer":
                yield name


def evaluate(tree: ast.expr, names: Names, layer: int | None = None) -> Any:
    """The value; raises `TypeError`, `ValueError`, `ArithmeticError` or `LookupError` for values
    that do not suit it, and what ``names`` raise."""

    def value_of(node: ast.expr) -> Any:
        return evaluate(node, names, layer)

    match tree:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.Name("layer") if layer is not None:
            return layer
        case ast.Name() | ast.Attribute():
            return names.find(ast.unparse(tree))
        case ast.UnaryOp(ast.Not(), operand):
            return not value_of(operand)
        case ast.UnaryOp(_, operand):
            return -_check_number(value_of(operand))
        case ast.BinOp(left, symbol, right):
            found = _BINARY[type(symbol)](
                _check_number(value_of(left)), _check_number(value_of(right))
            )
            return _check_number(found)
        case ast.BoolOp(symbol, parts):
            for part in parts:
                found = value_of(part)
                if bool(found) is isinstance(symbol, ast.Or):
                    break
            return found
        case ast.Compare(left, symbols, operands):
            values = [value_of(node) for node in (left, *operands)]
            return all(
                _COMPARISONS[type(symbol)](values[n], values[n + 1])
                for n, symbol in enumerate(symbols)
            )
        case ast.IfExp(test, body, orelse):
            return value_of(body if value_of(test) else orelse)
        case ast.List(items):
            return [value_of(item) for item in items]
        case ast.Subscript(value, index):
            return value_of(value)[value_of(index)]
        case ast.Call(ast.Name(function), [body]) if function in _OVER_LAYERS:
            found = [evaluate(body, names, number) for number in range(names.layers)]
            return found if function == "each" else [n for n, flag in enumerate(found) if flag]
        case ast.Call(ast.Name(function), arguments):
            values = [value_of(item) for item in arguments]
            own = _FUNCTIONS.get(function)
            return names.call(function, values) if own is None else own(*values)
    raise TypeError(f"{ast.unparse(tree)} has no value")


def _check_number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
