"""Rules that stated.toml states: conditions of one or two documents."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from pi2.formats import find_packing
from pi2.model.blocks import Attention
from pi2.plan.arithmetic.sizes import DEFAULT_BLOCK_BYTES
from pi2.plan.checking.findings import Fact, Facts, Finding, Origin, Rule
from pi2.plan.documents.model import Model
from pi2.plan.toml.expressions import evaluate, parse_expression
from pi2.plan.toml.text import write_value
from pi2.plan.weights.layout import GROUP


def _list_unshared(model: Model) -> list[int]:
    """Layers that read the KV cache of an earlier one, of which no earlier one has such a cache."""
    last = range(max(0, model.shape.layers - model.attention.kv_shared_layers), model.shape.layers)
    own = ((layer, model.blocks[layer].attention) for layer in last)
    return [layer for layer, attention in own if attention is None or attention.has_keys]


def _list_kinds(model: Model) -> list[str]:
    """Kinds of layers with a state."""
    kinds = model.layers.kinds if model.layers else ()
    mixers = (mixer for kind in kinds for mixer in kind.split("+"))
    return list(dict.fromkeys(name for name in mixers if name not in ("attention", "none")))


def _list_twice(model: Model) -> list[int]:
    """Layers that have attention twice."""
    counts = (sum(isinstance(m, Attention) for m in block.mixers) for block in model.blocks)
    return [layer for layer, count in enumerate(counts) if count > 1]


def _has_such_keys(model: Model) -> bool:
    attentions = (block.attention for block in model.blocks)
    return any(attention is not None and attention.keys_are_values for attention in attentions)


_OF_MODEL: Mapping[str, Callable[..., Any]] = {
    "beyond": lambda model, layers: [n for n in layers or () if n >= model.shape.layers],
    "keys_are_values": _has_such_keys,
    "kinds": _list_kinds,
    "mixes_several": lambda model: any(len(block.mixers) != 1 for block in model.blocks),
    "twice": _list_twice,
    "unshared": _list_unshared,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "block_bytes": lambda: DEFAULT_BLOCK_BYTES,
    "count": len,
    "group": lambda: GROUP,
    "has_scales": lambda name: find_packing(name).has_scales,
    "least": lambda *values: min(value for value in values if value is not None),
    "length_step": lambda name: find_packing(name).length_step,
    "shares_down_scales": lambda name: find_packing(name).shares_down_scales,
}
"""Functions of expressions."""
_HOLE = re.compile(r"\{([^{}]+?)(?::(g|and))?\}")


@dataclass(frozen=True, slots=True)
class _Names:
    """What names mean in the expressions of a rule."""

    facts: Facts
    needs: tuple[Fact, ...]
    layers: int = 0

    def place(self, name: str) -> tuple[Any, ...]:
        """The document of a key, and its path there."""
        parts = tuple(part for part in name.split(".") if part)
        return parts if len(self.needs) > 1 else (self.needs[0], *parts)

    def find(self, name: str) -> Any:
        document, *path = self.place(name)
        value: Any = self.facts.known[document]
        for part in path:
            value = getattr(value, part, None)
        return value

    def call(self, name: str, arguments: list[Any]) -> Any:
        if name in _PLAIN:
            return _PLAIN[name](*arguments)
        return _OF_MODEL[name](self.facts.model, *arguments)

    def holds(self, text: str) -> bool:
        return bool(evaluate(parse_expression(text), self))

    def write(self, text: str) -> str:
        """``text`` with the values of the expressions in it."""

        def fill(hole: re.Match[str]) -> str:
            value = evaluate(parse_expression(hole[1]), self)
            return " and ".join(value) if hole[2] == "and" else format(value, hole[2] or "")

        return _HOLE.sub(fill, text)

    def trace(self, stated: str | Mapping[str, str]) -> Origin:
        name = self.write(stated if isinstance(stated, str) else stated["at"])
        document, *path = self.place(name)
        if not isinstance(stated, str):
            return Origin(document, tuple(path), stated["text"])
        value = self.find(name)
        shown = f"{value:g}" if isinstance(value, float) else write_value(value)
        return Origin(document, tuple(path), f"{path[-1]} = {shown}")


def _find(names: _Names, stated: Mapping[str, Any]) -> Iterator[Finding]:
    for word in stated.get("each", ("",)):
        texts = {key: stated.get(key, "").replace("{each}", word) for key in _TEXTS}
        if not names.holds(texts["when"]):
            continue
        wanted = [*stated.get("cases", {}).items()]
        wanted += [(text, f"not ({test})") for text, test in stated.get("needs", {}).items()]
        cases = [names.write(text) for text, test in wanted if names.holds(test)]
        for case in cases if wanted else [""]:
            at, _, says, help = (
                names.write(text.replace("{case}", case)) for text in texts.values()
            )
            yield Finding(
                tuple(at.split(".")),
                says,
                help or None,
                at="key" if stated.get("key") else "value",
                origins=tuple(map(names.trace, stated.get("origins", ()))),
            )


_TEXTS = ("at", "when", "says", "help")


def _make_rule(code: str, table: Mapping[str, Any]) -> Rule:
    needs = tuple(table["of"])

    def check(facts: Facts) -> Iterator[Finding]:
        for stated in table.get("findings", ({},)):
            yield from _find(_Names(facts, needs), {**table, **stated})

    return Rule(code=code, severity=table.get("severity", "error"), needs=needs, check=check)


def read_stated_rules() -> Iterator[Rule]:
    """The rules of stated.toml."""
    tables = tomli.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    yield from (_make_rule(code, table) for code, table in tables.items())
