"""Grammars of values of a JSON schema, in the notations of the families.  What a schema leaves open
has a limit: an answer ends."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pi2.serving.literals import Schema, dump_json_text
from pi2.serving.schemas import list_alternatives, list_properties

DIGITS = 16
"""Most digits before and after the point of a number without bounds."""
CHARACTERS = 1 << 16
"""Most characters of a text without a stated limit."""
ITEMS = 256
"""Most items of a list without a stated limit."""
KEYS, KEY_CHARACTERS = 64, 64
"""Most keys of an object in addition to stated ones, and their length."""
_DEPTH, _FREE_DEPTH = 16, 6
"""Values within values: of schemas that refer to themselves, and of any value."""
_MOST = 10**DIGITS - 1
_PLACES = 1e-9
"""Steps of a number whose bounds are stated."""
TERMS = rf"""
INTEGER: /-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})/
NUMBER: /-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})(\.[0-9]{{1,{DIGITS}}})?([eE][-+]?[0-9]{{1,2}})?/
"""
NO_VALUE = "no value is as it demands, or it nests without end"
_LEAF = {"x-guidance": {"whitespace_flexible": False}}
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[-+][0-9]{2}:[0-9]{2})?",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"([0-9]{1,3}\.){3}[0-9]{1,3}",
    "email": r"[A-Za-z0-9.!#$%&'*+=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,15}:[^\s<>\"]{1,2000}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
"""Formats that answers keep to; others only describe."""
_BARE = re.compile(r"[A-Za-z_][\w.-]*")
"""Names that need no quotes."""
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

WriteText = Callable[[str | None], str]
"""Writes a text up to a mark: as a terminal (`write_content`) has it, or any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How values are written."""

    words: Mapping[str, str]
    """Of ``true``, ``false`` and ``null``."""
    comma: str = '" "? "," " "?'
    colon: str = '" "? ":" " "?'
    mark: str = ""
    """The mark around texts, if they are not quoted as in JSON; keys have none then."""
    write_rest: WriteText | None = None
    """Writes such a text after its first mark."""


JSON = Notation(words={"true": "true", "false": "false", "null": "null"})
PYTHON = Notation(words={"true": "True", "false": "False", "null": "None"})


def quote(text: str) -> str:
    """A text as grammars write it: in ASCII, because they do not take every other character."""
    return json.dumps(text)


class SchemaWriter:
    """Writes rules of the values of a schema and of its parts."""

    def __init__(self, root: Schema, notation: Notation, add_rule: Callable[..., str]) -> None:
        """``root``: what references are into; ``add_rule`` takes a body and gives a name."""
        self._root = root
        self._notation = notation
        self._add = add_rule
        self._known: dict[tuple[str, int], str | None] = {}

    def write(self, schema: Any, depth: int = _DEPTH) -> str:
        """The rule of a schema's values; ValueError if there are none."""
        found = self.find(schema, depth)
        if found is None:
            raise ValueError(NO_VALUE)
        return found

    def find(self, schema: Any, depth: int = _DEPTH) -> str | None:
        """The rule of a schema's values; None if there are none, or they nest too deeply."""
        key = json.dumps(schema), depth
        if depth < 0:
            return None
        if key not in self._known:
            plains = list_alternatives(self._root, schema)
            bodies = [self.write_plain(plain, depth) for plain in plains]
            kept = [body for body in bodies if body is not None]
            self._known[key] = self._add(" | ".join(kept)) if kept else None
        return self._known[key]

    def write_plain(self, plain: Schema, depth: int = _DEPTH) -> str | None:
        """The body of one of `list_alternatives`; None if it nests too deeply."""
        words = self._notation.words
        if "enum" in plain:
            return " | ".join(map(self._write_constant, plain["enum"]))
        match plain["type"]:
            case "null":
                return quote(words["null"])
            case "boolean":
                return f"{quote(words['true'])} | {quote(words['false'])}"
            case "integer" | "number":
                return self._write_number(plain)
            case "string":
                mark, write = self._notation.mark, self._notation.write_rest
                if write is None:
                    return self._write_string(plain)
                return f"{mark} {write(write_content(plain))}"
            case "array":
                return self._write_array(plain, depth)
        return self._write_object(plain, depth)

    def _write_constant(self, value: Any) -> str:
        if isinstance(value, str):
            mark = self._notation.mark
            return f"{mark} {quote(value)} {mark}" if mark else quote(dump_json_text(value))
        return quote(self._notation.words.get(json.dumps(value), json.dumps(value)))

    def _write_leaf(self, schema: Schema) -> str:
        return self._add(f"%json {json.dumps({**schema, **_LEAF})}")

    def _write_number(self, plain: Schema) -> str:
        kind = plain["type"]
        bounds = {key: plain[key] for key in (*_LOW, *_HIGH, "multipleOf") if key in plain}
        if not bounds:
            return str(kind).upper()
        low = max((bounds[key] for key in _LOW if key in bounds), default=-_MOST)
        high = min((bounds[key] for key in _HIGH if key in bounds), default=_MOST)
        if low < _MOST < high or "maximum" not in bounds:
            bounds["maximum"] = _MOST if low < _MOST else low * 10
        if low < -_MOST < high or "minimum" not in bounds:
            bounds["minimum"] = -_MOST if high > -_MOST else high * 10
        if kind == "number":
            bounds.setdefault("multipleOf", _PLACES)
        return self._write_leaf({"type": kind, **bounds})

    def _write_string(self, plain: Schema) -> str:
        kept = {key: plain[key] for key in ("pattern", "minLength") if key in plain}
        if plain.get("format") in _FORMATS:
            kept["format"] = plain["format"]
        most = plain.get("maxLength", CHARACTERS + plain.get("minLength", 0))
        return self._write_leaf({"type": "string", **kept, "maxLength": most})

    def _write_array(self, plain: Schema, depth: int) -> str | None:
        heads: Sequence[Any] = plain.get("prefixItems") or ()
        rest, least = plain.get("items", not heads), plain.get("minItems", 0)
        if isinstance(rest, list):  # as older drafts write it
            heads, rest = rest, False
        most = plain.get("maxItems", max(ITEMS, least))
        items: list[tuple[str, bool]] = []
        for head in heads[:most]:
            if (item := self.find(head, depth - 1)) is None:
                break
            items.append((item, len(items) < least))
        count = len(items)
        if count == len(heads) and count < most and rest is not False:
            item = self.find(rest, _go_deeper(rest, depth))
            if item is not None:
                needed = max(0, least - count)
                items.append((self._repeat(item, max(1, needed), most - count), needed > 0))
                count = most
        if count < least:
            return None
        inner = write_sequence(items, self._notation.comma, self._add, in_order=True)
        return f'"[" " "? {inner} " "? "]"'

    def _repeat(self, item: str, least: int, most: int) -> str:
        if most == 1:
            return item
        between = f"({self._notation.comma} {item})"
        return self._add(f"{item} {between}{{{least - 1},{most - 1}}}")

    def _write_object(self, plain: Schema, depth: int) -> str | None:
        def write_pair(name: str, schema: Any) -> str | None:
            is_bare = self._notation.mark and _BARE.fullmatch(name)
            key = quote(name if is_bare else dump_json_text(name))
            value = self.find(schema, depth - 1)
            return None if value is None else self._add(f"{key} {self._notation.colon} {value}")

        items = list_members(plain, write_pair)
        if items is None:
            return None
        free = self._write_free(plain, depth, sum(needed for _, needed in items))
        if free is None:
            return None
        inner = write_sequence([*items, *free], self._notation.comma, self._add)
        return f'"{{" " "? {inner} " "? "}}"'

    def _write_free(
        self, plain: Schema, depth: int, stated: int
    ) -> Sequence[tuple[str, bool]] | None:
        """Keys that are not stated, at most one item; objects that state their keys are
        closed unless they allow others.  None if some are needed and cannot be."""
        patterns: Mapping[str, Any] = plain.get("patternProperties") or {}
        names = [*(plain.get("properties") or {}), *(plain.get("required") or ())]
        is_open = not (names or patterns or "properties" in plain)
        extra = plain.get("additionalProperties", is_open)
        least = max(0, plain.get("minProperties", 0) - stated)
        most = min(KEYS + least, plain.get("maxProperties", KEYS + least) - stated)
        if "maxProperties" in plain and len(set(names)) > max(stated, plain["maxProperties"]):
            raise ValueError("'maxProperties' next to optional properties is not supported")
        kinds = [(_anchor(pattern), schema) for pattern, schema in patterns.items()]
        if extra is not False:
            kinds.append((_name_pattern(plain.get("propertyNames")), extra))
        pairs = []
        for number, (pattern, schema) in enumerate(kinds):
            # Names that are stated, or that an earlier pattern has, are not free.
            taken = [_escape(name) for name in names] + [known for known, _ in kinds[:number]]
            value = self.find(schema, _go_deeper(schema, depth))
            if value is not None:
                pairs.append(f"{self._write_key(pattern, taken)} {self._notation.colon} {value}")
        if most <= 0 or not pairs:
            return [] if least == 0 else None
        return [(self._repeat(self._add(" | ".join(pairs)), max(1, least), most), least > 0)]

    def _write_key(self, pattern: str, taken: Sequence[str]) -> str:
        if self._notation.mark:
            signs, mark = f"[A-Za-z_][A-Za-z0-9_.-]{{0,{KEY_CHARACTERS - 1}}}", ""
        else:
            signs, mark = rf'[^"\\\x00-\x1f\x7f]{{1,{KEY_CHARACTERS}}}', '"'
        body = f"/{mark}{signs}{mark}/"
        body += f" & /{mark}({pattern}){mark}/" if pattern else ""
        body += "".join(f" & ~/{mark}({known}){mark}/" for known in taken if known)
        return self._add(body, is_terminal=True)


def list_members(
    plain: Schema, write: Callable[[str, Any], str | None]
) -> list[tuple[str, bool]] | None:
    """The stated properties of an object, and whether each is needed; ``write`` writes one of a
    name and a schema, or gives None if it can have no value.  None if such a one is needed."""
    found = []
    for name, schema, is_needed in list_properties(plain):
        member = write(name, schema)
        if member is not None:
            found.append((member, is_needed))
        elif is_needed:
            return None
    return found


def write_sequence(
    items: Sequence[tuple[str, bool]],
    between: str,
    add_rule: Callable[[str], str],
    *,
    in_order: bool = False,
) -> str:
    """Items one after the other, ``between`` between two; those not needed may be missing, with
    ``in_order`` only at the end.  Rules nest as deeply as a binary tree of the items: the grammar
    library recurses into rules, and thousands of levels overflow its stack."""

    def write(part: Sequence[tuple[str, bool]]) -> tuple[str, str]:
        """Rules of one or more items of a part, and of all."""
        if len(part) == 1:
            return part[0][0], part[0][0]
        left, right = part[: len(part) // 2], part[len(part) // 2 :]
        (some, first), (others, last) = write(left), write(right)
        whole = add_rule(f"{first} {between} {last}") if in_order else ""
        ways = [f"{first if in_order else some} {between} {others}"]
        if not _needs_any(right):
            ways.append(some)
        if not in_order and not _needs_any(left):
            ways.append(others)
        return add_rule(" | ".join(ways)), whole

    if not items:
        return '""'
    some, _ = write(items)
    return some if _needs_any(items) else add_rule(f'{some} | ""')


def _needs_any(items: Sequence[tuple[str, bool]]) -> bool:
    return any(is_needed for _, is_needed in items)


def _go_deeper(schema: Any, depth: int) -> int:
    """The depth of a part, less where anything may be."""
    return depth - 1 if schema not in (None, True, {}) else min(depth - 1, _FREE_DEPTH)


def write_content(plain: Schema) -> str | None:
    """The terminal of a text without quotes, as a ``string`` schema wants it; None for any."""
    parts = []
    if "pattern" in plain:
        parts.append(f"/{_anchor(plain['pattern'])}/")
    if plain.get("format") in _FORMATS:
        parts.append(f"/{_escape_slash(_FORMATS[plain['format']])}/")
    if "minLength" in plain or "maxLength" in plain:
        least = plain.get("minLength", 0)
        parts.append(f"/(?s:.{{{least},{plain.get('maxLength', CHARACTERS + least)}}})/")
    return " & ".join(parts) or None


def _name_pattern(names: Any) -> str:
    """The pattern of an object's free keys, of ``propertyNames``."""
    if not isinstance(names, Mapping):
        return ""
    if names.get("enum"):
        return "|".join(_escape(str(name)) for name in names["enum"])
    if set(names) - {"type", "pattern", "maxLength", "minLength", "description", "title"}:
        raise ValueError("'propertyNames' with more than a pattern is not supported")
    return _anchor(names["pattern"]) if "pattern" in names else ""


def _anchor(pattern: str) -> str:
    """A pattern that the whole text must match, of one that may stand anywhere in it."""
    written = []
    for choice in _split_choices(pattern):
        begins, ends = choice.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", choice) is not None
        inner = choice[1 if begins else 0 : -1 if ends else None]
        before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
        written.append(f"{before}(?:{inner}){after}")
    return _escape_slash("|".join(written))


def _split_choices(pattern: str) -> list[str]:
    """The parts between the bars of a pattern that are in no bracket."""
    found, depth, is_class = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part == "|" and depth == 0 and not is_class:
            found.append("")
            continue
        depth += 0 if is_class else (part == "(") - (part == ")")
        is_class = (is_class or part == "[") and part != "]"
        found[-1] += part
    return found


def _escape(text: str) -> str:
    return _escape_slash(re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text))


def _escape_slash(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
