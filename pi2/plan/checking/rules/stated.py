"""Rules that stated.toml states: conditions of documents."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from pi2.formats import find_packing
from pi2.model.blocks import Attention, list_turns
from pi2.plan.arithmetic.resolved import has_packable_shape, list_placed_splits, list_settings
from pi2.plan.arithmetic.sizes import DEFAULT_BLOCK_BYTES, count_gate_read_bytes, find_block_bytes
from pi2.plan.checking import Fact, Facts, Finding, Origin, Rule, list_row_splits
from pi2.plan.documents.common import suggest
from pi2.plan.documents.device import EXAMPLE_READS
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.documents.model_parts import Moe
from pi2.plan.documents.plan_units import SparsityMethod, parse_selector
from pi2.plan.documents.private import find_private, walk_figures, walk_values
from pi2.plan.documents.quantities import (
    RATE_UNITS_OUT,
    approximate_bytes,
    format_bytes,
    format_quantity,
    write_most,
)
from pi2.plan.toml.expressions import evaluate, parse_expression
from pi2.plan.toml.source import KINDS, Kind
from pi2.plan.toml.text import KeyPath, write_value
from pi2.plan.weights.layout import GROUP, round_up


def _list_unshared(model: Model) -> list[int]:
    """Layers that read the KV cache of an earlier one, of which no earlier one has such a cache."""
    last = range(max(0, model.shape.layers - model.attention.kv_shared_layers), model.shape.layers)
    own = ((layer, model.blocks[layer].attention) for layer in last)
    return [layer for layer, attention in own if attention is None or attention.has_keys]


def _list_kinds(model: Model) -> list[str]:
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


def _count_rotated(model: Model) -> int:
    latent = model.attention.latent
    return model.rope.count_rotated(model.shape.head_dim if latent is None else latent.rotated)


def _shares_index(model: Model) -> bool:
    """Whether the first layer that chooses has no index of its own."""
    chosen = (own.chooses for block in model.blocks if (own := block.attention) is not None)
    return next((own for own in chosen if own != "all"), "index") == "shared"


def explain_method(method: SparsityMethod, model: Model) -> str | None:
    """Why neurons of ``model`` cannot be cut by ``method``; None if they can."""
    if method == "cats":
        return None
    if model.moe is not None:
        return f"{method} is not for MoE models: not for `{model.id}`"
    if not model.ffn.gated or model.ffn.bias:
        return f"{method} needs gates without biases: not `{model.id}`"
    return None


def find_other_choice(moe: Moe) -> str | None:
    """The key by which experts are chosen by more than their scores; None if there is none."""
    others = {
        "router": moe.router == "mixer",
        "choice_bias": moe.choice_bias,
        "groups": moe.groups > 1,
    }
    return next((key for key, differs in others.items() if differs), None)


class _Turn(NamedTuple):
    """Positions of a model, by the name of their table."""

    table: str
    rope: Rope
    rotated: int

    @property
    def pairs(self) -> int:
        return self.rotated // 2 if self.rope.kind == "longrope" else 0


def _list_turns(facts: Facts) -> list[_Turn]:
    other = facts.model.other_rope
    return [
        _Turn("other_rope" if rope is other else "rope", rope, rope.count_rotated(width))
        for rope, width in list_turns(facts.model)
    ]


def _name_usable(facts: Facts) -> str:
    return "capacity" if facts.device.memory.usable is None else "usable"


def _name_by_file(facts: Facts, kind: Kind) -> str:
    return facts.files[kind].name.removesuffix(f".{kind}.toml")


def _computes_nothing(facts: Facts) -> bool:
    plan = facts.plan
    backends = {*plan.backends.values(), *(unit.backend for unit in plan.units.values())}
    return backends <= {"null", None}


def _name_dial(facts: Facts) -> str:
    """The setting of experts that changes results."""
    experts = facts.plan.experts
    stated = {
        "prefer_cached": experts.prefer_cached,
        "least_weight": experts.least_weight,
        "read_best": experts.read_best is not None,
        "most_reads": experts.most_reads is not None,
    }
    return next((key for key, is_stated in stated.items() if is_stated), "layers")


def _drafts_along(facts: Facts) -> bool:
    settings = facts.resolved.plan.decode.speculation
    is_named = settings is not None and (settings.drafts == "plan") == (settings.plan is not None)
    return is_named and facts.resolved.draft is not None


def _count_free(facts: Facts) -> int:
    memory = facts.resolved.plan.memory
    used: int = sum(dict(memory.segments).values())
    return memory.budget - used


def _count_shared(facts: Facts) -> int:
    return sum(facts.resolved.source.shared.values())


def _count_bundle(facts: Facts) -> int | None:
    """Bytes of a neuron; None if the model's neurons have no shape that stores have."""
    model = facts.model
    if not has_packable_shape(model):
        return None
    return model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes


def _fits_thresholds(facts: Facts) -> bool:
    found = facts.resolved.thresholds
    return found is not None and found.fits(facts.resolved.model)


_CLAIM = re.compile(
    r"\b(?:data ?sheet|spec(?:ification)?s?(?: sheet)?|product (?:page|brief)|press release"
    r"|(?:vendor|manufacturer|maker)(?:'s)?|marketing|advertised|up to)\b",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\d\s*(?:to|-|–|\.\.)\s*\d|±|\+/-")  # noqa: RUF001  # people write dashes
_PLACEHOLDER = re.compile(r"(?<![A-Za-z])(?:REPLACE|CHANGE)[ _-]?(?:ME|THIS)(?![A-Za-z])")
_MOST_READS = {"ufs": 6e9, "nvme": 16e9, "sata": 0.6e9, "emmc": 0.6e9, "sd": 2e9}
"""What interfaces pass at most: UFS 4.1, four lanes of PCI Express 5, SATA 3, HS400, SD Express."""


def _search(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else found[0]


def _find_texts(facts: Facts, find: Callable[[str], str | None]) -> dict[KeyPath, str]:
    """What ``find`` finds in texts of documents, by document and place."""
    values = ((k, *item) for k in KINDS for item in walk_values(facts.known.get(k), ()))
    texts = ((kind, path, text) for kind, path, text in values if isinstance(text, str))
    return {(kind, *path): found for kind, path, text in texts if (found := find(text))}


def _find_private(facts: Facts, kind: str) -> dict[KeyPath, str]:
    def find(text: str) -> str | None:
        return next((item.shortened for item in find_private(text) if item.kind == kind), None)

    return _find_texts(facts, find)


def _find_again(items: Sequence[Hashable] | Mapping[Any, Hashable]) -> dict[Any, Any]:
    """Places of items that an earlier one equals, and the place of that."""
    first: dict[Hashable, Any] = {}
    places = items.items() if isinstance(items, Mapping) else enumerate(items)
    pairs = [(place, first.setdefault(item, place)) for place, item in places if item is not None]
    return {place: earlier for place, earlier in pairs if place != earlier}


def _list_stated(facts: Facts) -> dict[KeyPath, Hashable]:
    """What parts of a device may be stated once, by their places."""
    keys = ("pattern", "block", "range", "depth", "threads", "cluster", "burst")
    found: dict[KeyPath, Hashable] = {}
    for number, item in enumerate(facts.device.storage.reads):
        values = (getattr(item, key) for key in keys)
        found["storage", "reads", number] = ("the same reads", *values)
    for name, unit in facts.device.units.items():
        for number, figure in enumerate(unit.compute):
            found["units", name, "compute", number] = ("the same operands", name, figure.precision)
        for number, feature in enumerate(unit.features or ()):
            found["units", name, "features", number] = ("the same feature", name, feature)
    return found


def _list_clusters(facts: Facts) -> dict[KeyPath, str]:
    return {
        ("units", name, "clusters", number, "id"): cluster.id
        for name, unit in facts.device.units.items()
        for number, cluster in enumerate(unit.clusters)
    }


def _list_selectors(facts: Facts) -> list[tuple[KeyPath, int, int]]:
    """Ranges of layers that a plan names, and their places."""
    plan = facts.plan
    texts: dict[KeyPath, str] = {
        ("layers", "overrides", n, "select"): item.select
        for n, item in enumerate(plan.layers.overrides)
    }
    texts |= {
        ("experts", "layers", n, "select"): item.select
        for n, item in enumerate(plan.experts.layers)
    }
    return [(path, *layers) for path, text in texts.items() for layers in parse_selector(text)]


def _list_named_units(facts: Facts) -> dict[KeyPath, str]:
    """Keys of a plan that are names of units."""
    plan = facts.plan
    splits = (*list_placed_splits(plan), *list_row_splits(plan))
    found: dict[KeyPath, str] = {(*own.path, name): name for own in splits for name in own.split}
    found |= {("units", name): name for name in plan.units}
    return found | {("memory", "units", name): name for name in plan.memory.units}


def _list_batches(facts: Facts) -> dict[KeyPath, tuple[int, int]]:
    """Sequences of entries of batches, and of the entry before each."""
    tables = {path: own.batches or () for path, _, own in list_settings(facts.plan)}
    return {
        (*path, "batches", n, "sequences"): (entry.sequences, table[n - 1].sequences if n else 0)
        for path, table in tables.items()
        for n, entry in enumerate(table)
    }


def _list_idle_settings(facts: Facts) -> list[str]:
    """Settings of dense units that the sparse unit has."""
    settings = facts.resolved.plan.units.get(facts.resolved.sparse_unit)
    stated = set() if settings is None else settings.model_fields_set
    return sorted(stated & {"process", "on_failure"})


def _list_graphs(facts: Facts, key: str) -> dict[KeyPath, tuple[str, float]]:
    """What tables of graphs of NPUs list by ``key``, and the unit."""
    return {
        ("units", name, "graphs", key, n): (name, value)
        for name, settings in facts.resolved.plan.units.items()
        if settings.graphs is not None and _find_kind(facts, name) == "npu"
        for n, value in enumerate(getattr(settings.graphs, key) or ())
    }


def _find_kind(facts: Facts, unit: str) -> str | None:
    found = facts.resolved.device.units.get(unit)
    return None if found is None else found.kind


def _suggest_unit(name: str, known: Iterable[str]) -> str:
    near = suggest(name, known)
    return f"did you mean `{near}`?" if near else f"its units: {', '.join(known)}"


_OF_FACTS: Mapping[str, Callable[..., Any]] = {
    "batches": _list_batches,
    "beyond": lambda facts, own: [n for n in own or () if n >= facts.model.shape.layers],
    "bundle_bytes": _count_bundle,
    "device_block": lambda facts: find_block_bytes(facts.device),
    "block": lambda facts: find_block_bytes(facts.resolved.device),
    "clusters": _list_clusters,
    "computes_nothing": _computes_nothing,
    "cores": lambda facts: sum(
        item.cores for unit in facts.device.units.values() for item in unit.clusters
    ),
    "dial": _name_dial,
    "drafts_along": _drafts_along,
    "figures": lambda facts: dict(walk_figures(facts.device)),
    "fits": _fits_thresholds,
    "free_bytes": _count_free,
    "gate_read_bytes": lambda facts: count_gate_read_bytes(facts.resolved),
    "graphs": _list_graphs,
    "idle_settings": _list_idle_settings,
    "keys_are_values": lambda facts: _has_such_keys(facts.model),
    "kind_of": _find_kind,
    "kinds": lambda facts: _list_kinds(facts.model),
    "mixes_several": lambda facts: any(len(block.mixers) != 1 for block in facts.model.blocks),
    "named_by_file": _name_by_file,
    "obstacle": lambda facts, method: explain_method(method, facts.model),
    "other_choice": lambda facts: find_other_choice(facts.model.moe),
    "placeholders": lambda facts: _find_texts(facts, partial(_search, _PLACEHOLDER)),
    "private": _find_private,
    "rotated": lambda facts: _count_rotated(facts.model),
    "selectors": _list_selectors,
    "shared_bytes": _count_shared,
    "shares_index": lambda facts: _shares_index(facts.model),
    "stated": _list_stated,
    "turns": _list_turns,
    "twice": lambda facts: _list_twice(facts.model),
    "unit_names": _list_named_units,
    "unshared": lambda facts: _list_unshared(facts.model),
    "usable": lambda facts: getattr(facts.device.memory, _name_usable(facts)),
    "usable_key": _name_usable,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "about": approximate_bytes,
    "again": _find_again,
    "block_bytes": lambda: DEFAULT_BLOCK_BYTES,
    "claim": partial(_search, _CLAIM),
    "example_read": EXAMPLE_READS.__getitem__,
    "group": lambda: GROUP,
    "has_scales": lambda name: find_packing(name).has_scales,
    "least_known": lambda *values: min(value for value in values if value is not None),
    "listed": ", ".join,
    "write_most": write_most,
    "near": _suggest_unit,
    "most_reads": _MOST_READS.get,
    "pluck": lambda items, key: [getattr(item, key) for item in items],
    "range": partial(_search, _RANGE),
    "rate": lambda value: format_quantity(value, RATE_UNITS_OUT),
    "round_up": round_up,
    "length_step": lambda name: find_packing(name).length_step,
    "shares_down_scales": lambda name: find_packing(name).shares_down_scales,
    "size": format_bytes,
    "upper": str.upper,
}
"""Functions of expressions."""
_HOLE = re.compile(r"\{([^{}]+?)(?::(g|and|\.0%))?\}")


@dataclass(frozen=True, slots=True)
class _Names:
    """What names mean in the expressions of a rule."""

    facts: Facts
    needs: tuple[Fact, ...]
    item: Any = None
    """One of what `for` gives, and its number, name or path."""
    n: int | str | KeyPath = 0
    layers: int = 0

    @property
    def own(self) -> tuple[Fact, ...]:
        """What names leave out: the only document that the rule needs."""
        return self.needs if len(self.needs) == 1 else ()

    def find(self, name: str) -> Any:
        first, *path = name.split(".")
        if first in ("item", "n"):
            value: Any = getattr(self, first)
        else:
            known: Mapping[Any, object] = self.facts.known
            path = [*self.own, first, *path]
            value = known.get(path.pop(0))
        for part in path:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    def call(self, name: str, arguments: list[Any]) -> Any:
        if name in _PLAIN:
            return _PLAIN[name](*arguments)
        return _OF_FACTS[name](self.facts, *arguments)

    def holds(self, text: str) -> bool:
        return bool(evaluate(parse_expression(text), self))

    def write(self, text: str) -> str:
        """``text`` with the values of the expressions in it."""

        def fill(hole: re.Match[str]) -> str:
            value = evaluate(parse_expression(hole[1]), self)
            return " and ".join(value) if hole[2] == "and" else format(value, hole[2] or "")

        return _HOLE.sub(fill, text)

    def write_path(self, text: str) -> tuple[Any, ...]:
        """The parts of a path, which dots divide outside of expressions."""
        found: list[int | str] = []
        for part in _DOT.split(text):
            hole = _HOLE.fullmatch(part)
            value = self.write(part) if hole is None else evaluate(parse_expression(hole[1]), self)
            found += value if isinstance(value, tuple) else [value]
        return tuple(found)

    def trace(self, stated: str | Mapping[str, str]) -> Origin:
        path = self.write_path(stated if isinstance(stated, str) else stated["at"])
        if isinstance(stated, str):
            value = self.find(".".join(path))
            shown = f"{value:g}" if isinstance(value, float) else write_value(value)
            text = f"{path[-1]} = {shown}"
        else:
            text = self.write(stated["text"])
        path = path if self.own in ((), ("resolved",)) else (*self.own, *path)
        return Origin(path[0], path[1:], text)


def _find(names: _Names, stated: Mapping[str, Any]) -> Iterator[Finding]:
    for word in stated.get("each", ("",)):
        texts = {key: stated.get(key, "").replace("{each}", word) for key in _TEXTS}
        if not names.holds(texts["when"]):
            continue
        wanted = [*stated.get("cases", {}).items()]
        wanted += [(text, f"not ({test})") for text, test in stated.get("needs", {}).items()]
        cases = [names.write(text) for text, test in wanted if names.holds(test)]
        for case in cases if wanted else [""]:
            at, says, help = (texts[key].replace("{case}", case) for key in ("at", "says", "help"))
            path = names.write_path(at)
            yield Finding(
                path if names.needs else path[1:],
                names.write(says),
                names.write(help) or None,
                document=None if names.needs else path[0],
                at="key" if stated.get("key") else "value",
                origins=tuple(map(names.trace, stated.get("origins", ()))),
            )


def _list_names(facts: Facts, needs: tuple[Fact, ...], items: str) -> Iterator[_Names]:
    """The names of a finding, for each of its ``items`` if it states any."""
    names = _Names(facts, needs)
    found = evaluate(parse_expression(items), names) if items else [None]
    for n, item in found.items() if isinstance(found, Mapping) else enumerate(found):
        yield replace(names, item=item, n=n)


_TEXTS = ("at", "when", "says", "help")
_DOT = re.compile(r"\.(?![^{]*\})")


def _make_rule(code: str, table: Mapping[str, Any]) -> Rule:
    needs = tuple(table["of"])

    def check(facts: Facts) -> Iterator[Finding]:
        if not _Names(facts, needs).holds(table.get("given", "true")):
            return
        for stated in ({**table, **own} for own in table.get("findings", ({},))):
            for names in _list_names(facts, needs, stated.get("for", "")):
                yield from _find(names, stated)

    return Rule(code=code, severity=table.get("severity", "error"), needs=needs, check=check)


def read_stated_rules() -> Iterator[Rule]:
    tables = tomli.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    yield from (_make_rule(code, table) for code, table in tables.items())
