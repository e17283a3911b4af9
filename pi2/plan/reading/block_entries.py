"""``[[blocks]]`` of model documents: read into keys by layer, and written from them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import Diagnostic
from pi2.plan.documents.model_mixing import BY_LAYER, BlockEntries, BlockEntry, BlockFfn, BlockMixer
from pi2.plan.documents.plan_units import write_selector
from pi2.plan.toml.source import SourceFile
from pi2.plan.toml.text import KeyPath, format_path, write_value

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

KEYS: Mapping[KeyPath, str] = {
    ("layers",): "mix.op",
    ("other_heads",): "mix.heads, mix.kv_heads, mix.head_dim",
    ("other_rope",): "mix.rope",
    **{("attention", listed): f"mix.{key}" for key, listed in BY_LAYER.items()},
    ("ffn", "absent_layers"): 'ffn.op = "none"',
    ("ffn", "gate_sparsity"): "ffn.gate_sparsity",
    ("moe", "dense_layers"): 'ffn.op = "dense"',
    ("moe", "dense_ffn"): "ffn.width",
}
"""Keys by layer, and what says the same in a block."""
_HEADS = ("heads", "kv_heads", "head_dim", "keys_are_values")


def choose_layers(text: str, count: int) -> list[int]:
    """Layers that ``text`` names among ``count``; slices are cut as Python's are.

    Raises `IndexError` with the number of a layer that is not there."""
    found: dict[int, None] = {}
    for part in text.replace(" ", "").split(","):
        if ":" in part:
            limits = [int(item) if item else None for item in part.split(":")]
            found.update(dict.fromkeys(range(count)[slice(*limits)]))
            continue
        first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
        for number in (int(first), int(last) if dash else int(first)):
            if not -count <= number < count:
                raise IndexError(number)
        end = int(last) if dash else int(first)
        found.update((number % count, None) for number in range(int(first), end + 1))
    return sorted(found)


def describe_layers(layers: Sequence[int], count: int) -> str:
    """The shortest choice that names ``layers``, which are sorted, of ``count``."""
    steps = {after - before for before, after in pairwise(layers)}
    if len(steps) == 1 and len(layers) > 2:
        (step,) = steps
        first = str(layers[0]) if layers[0] else ""
        last = str(layers[-1] + 1) if layers[-1] + step < count else ""
        return f"{first}:{last}" + (f":{step}" if step > 1 else "")
    return write_selector(layers, ", ")


def spread_blocks(source: SourceFile) -> tuple[SourceFile, list[Diagnostic]]:
    """The file as it would be with keys by layer instead of blocks, and the blocks' faults."""
    if "blocks" not in source.values:
        return source, []
    from pi2.plan.reading.schema_check import check_schema

    values = {key: value for key, value in source.values.items() if key != "blocks"}
    own = {"schema_version": BlockEntries.VERSION, "blocks": source.values["blocks"]}
    document, findings = check_schema(replace(source, values=own), BlockEntries)
    if document is None or findings:
        return replace(source, values=values), findings
    spread = _Spread(values, document.blocks)
    spread.run()
    findings = [source.report(*fault) for fault in spread.faults]
    aliases = {**source.aliases, **spread.aliases}
    return replace(source, values=spread.values, aliases=aliases), findings


class _Spread:
    """Puts what blocks state into the ``values`` of a document."""

    def __init__(self, values: Mapping[str, Any], entries: Sequence[BlockEntry]) -> None:
        self.values: dict[str, Any] = copy.deepcopy(dict(values))
        self.entries = entries
        self.aliases: dict[KeyPath, KeyPath] = {}
        self.faults: list[tuple[str, KeyPath, str, str | None]] = []
        shape = self.read("shape")
        self.count = shape.get("layers", 0) if type(shape.get("layers")) is int else 0
        self.mixers: dict[int, tuple[int, BlockMixer]] = {}
        self.ffns: dict[int, tuple[int, BlockFfn]] = {}

    def read(self, key: str) -> dict[str, Any]:
        found = self.values.get(key)
        return found if isinstance(found, dict) else {}

    def refuse(self, path: KeyPath, message: str, help: str | None = None) -> None:
        self.faults.append(("P104", path, message, help))

    def run(self) -> None:
        if not 0 < self.count <= 1024:
            help = "state `layers` in the table `[shape]`"
            self.refuse(("blocks",), "`blocks` needs `shape.layers` in the same file", help)
            return
        for path, instead in KEYS.items():
            if path[-1] in (self.values if len(path) == 1 else self.read(str(path[0]))):
                shown = format_path(path)
                message = f"`{shown}` and `[[blocks]]` both say what layers differ in"
                self.faults.append(
                    ("P110", path, message, f"state {instead} in `[[blocks]]`, delete `{shown}`")
                )
        for number, entry in enumerate(self.entries):
            try:
                layers = choose_layers(entry.layers, self.count)
            except IndexError as error:
                message = (
                    f"there is no layer {error}: the model has the layers 0 to {self.count - 1}"
                )
                self.refuse(("blocks", number, "layers"), message)
                continue
            if not layers:
                self.refuse(("blocks", number, "layers"), f'"{entry.layers}" names no layer')
            if entry.mix is not None:
                self.mixers.update((layer, (number, entry.mix)) for layer in layers)
            if entry.ffn is not None:
                self.ffns.update((layer, (number, entry.ffn)) for layer in layers)
        if not self.faults:
            self.put_mixers()
            self.put_ffns()

    def put(self, path: KeyPath, value: object, origin: KeyPath) -> None:
        """State ``value`` at ``path``; findings about it stand at ``origin``."""
        table = self.values
        for part in path[:-1]:
            table = table.setdefault(str(part), {})
            if not isinstance(table, dict):
                return  # the schema says what is wrong
        table[str(path[-1])] = value
        self.alias(path, value, origin)

    def alias(self, path: KeyPath, value: object, origin: KeyPath) -> None:
        self.aliases[path] = origin
        for key, item in value.items() if isinstance(value, dict) else ():
            self.alias((*path, key), item, (*origin, key))
        for place in range(len(value)) if isinstance(value, list) else ():
            self.aliases[(*path, place)] = origin

    def find_one(
        self, key: str, tell: Callable[[BlockMixer], object]
    ) -> tuple[Any, list[int], KeyPath]:
        """What ``tell`` finds in mixers, the layers that have it, and its place."""
        found: dict[int, object] = {}
        first: KeyPath = ()
        for layer, (number, mixer) in sorted(self.mixers.items()):
            value = tell(mixer)
            if not value:
                continue
            place = ("blocks", number, "mix", *((key,) if key else ()))
            if found and value != next(iter(found.values())):
                what = f"`{key}`" if key else "`heads`, `kv_heads` and `head_dim`"
                message = f"{what} of blocks may have one value in addition to the model's"
                self.refuse(place, message, "let these blocks agree")
                break
            first = first or place
            found[layer] = value
        return next(iter(found.values()), None), list(found), first

    def put_mixers(self) -> None:
        kinds = [
            self.mixers[n][1].op if n in self.mixers else "attention" for n in range(self.count)
        ]
        if any(kind != "attention" for kind in kinds):
            first = next(number for number, kind in enumerate(kinds) if kind != "attention")
            self.put(("layers", "kinds"), kinds, ("blocks", self.mixers[first][0], "mix", "op"))
            for layer, (number, _) in self.mixers.items():
                self.aliases[("layers", "kinds", layer)] = ("blocks", number, "mix", "op")
        attentive = [n for n, kind in enumerate(kinds) if "attention" in kind.split("+")]
        for number, entry in enumerate(self.entries):
            if entry.mix is not None and "attention" not in entry.mix.op.split("+"):
                for key in entry.mix.model_fields_set - {"op"}:
                    message = f'`{key}` belongs to attention, and `op` is "{entry.mix.op}"'
                    self.refuse(("blocks", number, "mix", key), message)
        for key, listed in BY_LAYER.items():
            value, layers, place = self.find_one(key, attrgetter(key))
            if value is None:
                continue
            if key in self.read("attention"):
                message = f"`attention.{key}` and `[[blocks]]` both state `{key}`"
                self.faults.append(("P110", ("attention", key), message, "delete one of them"))
            self.put(("attention", key), value, place)
            if layers != attentive:
                self.put(("attention", listed), layers, place)
        rope, layers, place = self.find_one("rope", attrgetter("rope"))
        if rope is not None:
            stated = rope.model_dump(mode="json", exclude_unset=True)
            self.put(("other_rope",), stated, place)
            self.put(("other_rope", "layers"), layers, place)

        def tell(mixer: BlockMixer) -> dict[str, Any]:
            stated = mixer.model_dump(include=set(_HEADS), exclude_none=True)
            return stated if any(stated.values()) else {}

        heads, layers, place = self.find_one("", tell)
        if heads is not None:
            own = {key: self.read("shape").get(key) for key in ("kv_heads", "head_dim")}
            self.put(("other_heads",), {**own, **heads}, place)
            self.put(("other_heads", "layers"), layers, place)

    def put_ffns(self) -> None:
        has_experts, shape = "moe" in self.values, self.read("shape")
        dense: dict[int, KeyPath] = {}
        absent: dict[int, KeyPath] = {}
        widths: dict[object, KeyPath] = {}
        for layer, (number, ffn) in sorted(self.ffns.items()):
            place: KeyPath = ("blocks", number, "ffn")
            if ffn.op == "none":
                absent[layer] = (*place, "op")
            elif ffn.op == "experts" and not has_experts:
                self.refuse((*place, "op"), '"experts" needs a table `[moe]`')
                return
            elif ffn.op == "dense" and has_experts:
                dense[layer] = (*place, "op")
                widths.setdefault(ffn.width, (*place, "width"))
            elif ffn.width is not None and ffn.width != shape.get("ffn"):
                help = f"write {shape.get('ffn')}, or leave it out"
                message = "`width` differs from `shape.ffn` in a model without experts"
                self.refuse((*place, "width"), message, help)
                return
        if absent:
            self.put(("ffn", "absent_layers"), list(absent), next(iter(absent.values())))
        if dense:
            width, place = next(iter(widths.items()))
            if len(widths) > 1 or width is None:
                place = list(widths.values())[-1]
                self.refuse(
                    place, "dense FFNs of an MoE model have one `width`", "for example 10944"
                )
            self.put(("moe", "dense_layers"), list(dense), next(iter(dense.values())))
            self.put(("moe", "dense_ffn"), width, place)
        shares = [
            self.ffns[n][1].gate_sparsity if n in self.ffns else 0.0 for n in range(self.count)
        ]
        if any(shares):
            first = next(number for number, share in enumerate(shares) if share)
            place = ("blocks", self.ffns[first][0], "ffn", "gate_sparsity")
            self.put(("ffn", "gate_sparsity"), shares, place)


def gather_blocks(model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a model, as plain data, with ``blocks`` instead of keys by layer; as they are
    where reading them again would not give the same model."""
    entries = list_entries(model)
    kept = copy.deepcopy(dict(values))
    for path in KEYS:
        table = kept if len(path) == 1 else kept.get(str(path[0]), {})
        table.pop(str(path[-1]), None)
    mixers = [entry["mix"] for entry in entries if "mix" in entry]
    for key in BY_LAYER:
        if any(key in mixer for mixer in mixers):
            kept["attention"].pop(key, None)
    spread = _Spread(kept, [BlockEntry.model_validate(entry) for entry in entries])
    spread.run()
    if spread.faults or type(model).model_validate_json(json.dumps(spread.values)) != model:
        return dict(values)
    return {**kept, "blocks": entries}


def list_entries(model: Model) -> list[dict[str, Any]]:
    """Entries of ``[[blocks]]`` that say what each layer of ``model`` is: what most layers have,
    then what others have instead."""
    count = model.shape.layers
    parts: dict[str, list[dict[str, Any]]] = {
        "mix": [_describe_mixer(model, layer) for layer in range(count)],
        "ffn": [_describe_ffn(model, layer) for layer in range(count)],
    }
    first: dict[str, Any] = {}
    later: list[dict[str, Any]] = []
    for key, items in parts.items():
        texts = [write_value(item) for item in items]
        usual = Counter(texts).most_common(1)[0][0]
        first[key] = items[texts.index(usual)]
        for text in dict.fromkeys(texts):
            if text == usual:
                continue
            layers = [number for number, item in enumerate(texts) if item == text]
            chosen = describe_layers(layers, count)
            known = next((item for item in later if item["layers"] == chosen), None)
            if known is None:
                later.append({"layers": chosen, key: items[layers[0]]})
            else:
                known[key] = items[layers[0]]
    return [first, *later]


def _describe_mixer(model: Model, layer: int) -> dict[str, Any]:
    kinds = () if model.layers is None else model.layers.kinds
    kind = kinds[layer] if layer < len(kinds) else "attention"
    own: dict[str, Any] = {"op": kind}
    if "attention" not in kind.split("+"):
        return own
    heads, rope, attention = model.other_heads, model.other_rope, model.attention
    if heads is not None and layer in heads.layers:
        stated = heads.model_dump(exclude_none=True)
        own |= {key: stated[key] for key in _HEADS if stated.get(key)}
    if rope is not None and layer in rope.layers:
        own["rope"] = {
            "kind": rope.kind,
            **rope.model_dump(mode="json", exclude_defaults=True, exclude={"layers"}),
        }
    for key, listed in BY_LAYER.items():
        layers = getattr(attention, listed)
        if layers is not None and layer in layers and getattr(attention, key):
            own[key] = getattr(attention, key)
    return own


def _describe_ffn(model: Model, layer: int) -> dict[str, Any]:
    moe = model.moe
    own: dict[str, Any] = {"op": "dense" if moe is None else "experts"}
    if layer in model.ffn.absent_layers:
        own["op"] = "none"
    elif moe is not None and layer in moe.dense_layers:
        own = {"op": "dense", "width": moe.dense_ffn}
    shares = model.ffn.gate_sparsity
    if layer < len(shares) and shares[layer]:
        own["gate_sparsity"] = shares[layer]
    return own


def write_entries(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Entries as TOML, without a line before the first."""
    for number, entry in enumerate(entries):
        yield from ("", "[[blocks]]") if number else ("[[blocks]]",)
        yield from (f"{key} = {write_value(value)}" for key, value in entry.items())
