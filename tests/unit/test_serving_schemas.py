"""Answers that keep to a schema, in every notation, and end."""

import itertools
import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from pi2.serving import schema_grammars
from pi2.serving.call_grammars import write_call_grammar, write_json_grammar
from pi2.serving.errors import ApiError
from tests.helpers.answers import FORMATS, Kind
from tests.helpers.slow import keep_quick
from tests.unit.test_serving_grammars import KINDS, Family

WHOLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 9},
        "b": {"$ref": "#/properties/a"},
        "c": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
        "d": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "e": {"oneOf": [{"type": "number", "maximum": 2}, {"type": "boolean"}]},
        "f": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
        "g": {"allOf": [{"$ref": "#/$defs/one"}, {"properties": {"z": {"const": 1}}}]},
        "h": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "i": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}]},
        "j": {"type": "string", "format": "date"},
    },
    "required": ["a"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["n"],
        },
        "one": {"properties": {"k": {"type": "string", "minLength": 2}}, "required": ["k"]},
    },
}
FINE: list[dict[str, Any]] = [
    {"a": 1}, {"a": 9, "b": 2}, {"a": 1, "c": "abcd"}, {"a": 1, "d": None}, {"a": 1, "d": {"n": 3}},
    {"a": 1, "d": {"n": 1, "next": {"n": 2, "next": {"n": -3}}}}, {"a": 1, "e": 1.5},
    {"a": 1, "e": False}, {"a": 1, "f": ["y"]}, {"a": 1, "f": ["x", "y"]},
    {"a": 1, "g": {"k": "ab", "z": 1}}, {"a": 1, "h": {"any": True, "other": False}},
    {"a": 1, "i": [3, None]}, {"a": 1, "i": []}, {"a": 1, "j": "2026-11-28"},
]  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {}, {"a": 0}, {"a": 10}, {"a": "1"}, {"a": 1, "b": 10}, {"a": 1, "c": "ABC"},
    {"a": 1, "c": "abcde"}, {"a": 1, "d": {}}, {"a": 1, "d": {"n": 1, "next": {"n": "x"}}},
    {"a": 1, "d": {"n": 1, "m": 1}}, {"a": 1, "e": 2.5}, {"a": 1, "e": "x"}, {"a": 1, "f": []},
    {"a": 1, "f": ["z"]}, {"a": 1, "f": ["x", "y", "x"]}, {"a": 1, "g": {"k": "a"}},
    {"a": 1, "g": {"z": 1}}, {"a": 1, "g": {"k": "ab", "z": 2}}, {"a": 1, "h": {"any": 1}},
    {"a": 1, "i": [None]}, {"a": 1, "i": [1, None, 2]}, {"a": 1, "j": "today"}, {"a": 1, "z": 1},
]  # fmt: skip
NO_PARAMETERS: list[dict[str, Any]] = [
    {"name": "f"},
    {"name": "f", "parameters": {}},
    {"name": "f", "parameters": {"type": "object", "properties": {}}},
]


@pytest.mark.parametrize("kind", keep_quick(KINDS, KINDS[:1]))
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_of_every_family_keep_to_the_whole_schema(name: str, kind: Kind) -> None:
    family = Family(name, kind)
    form = family.format.calls[0]

    def write(tool: dict[str, Any]) -> str:
        return write_call_grammar(family.facts, [tool], prompt="", is_parallel=False)

    whole = write({"name": "f", "parameters": WHOLE})
    for arguments in FINE:
        assert family.follow(whole, form.write([("f", arguments)])) is None, arguments
    for arguments in WRONG:
        text = form.write([("f", arguments)])
        is_tagged_text = (
            form.parameter and '"$kind"' not in form.parameter and arguments == {"a": "1"}
        )
        assert is_tagged_text or family.follow(whole, text) is not None, arguments
    for tool in NO_PARAMETERS:
        grammar = write(tool)
        assert family.follow(grammar, form.write([("f", {})])) is None
        assert family.follow(grammar, form.write([("f", {"a": 1})])) is not None


UNUSABLE: dict[str, Any] = {
    "'not' is not supported": {"not": {"type": "string"}},
    "'uniqueItems' is not supported": {"type": "array", "uniqueItems": True},
    "'#/$defs/none' is no part of it": {"$ref": "#/$defs/none"},
    "'https://x.org/s' is no part of it": {"$ref": "https://x.org/s"},
    "references go round in a circle": {"$ref": "#/properties/a"},
    "nests without end": {
        "type": "object",
        "properties": {"a": {"$ref": "#/properties/a"}},
        "required": ["a"],
    },
    "'text' is no type": {"type": "text"},
    "no value is as it demands": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "two values of 'pattern'": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]},
}


@pytest.mark.parametrize("reason", UNUSABLE)
@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "gemma4", "lfm2"])
def test_what_cannot_be_kept_to_is_refused_with_the_reason(name: str, reason: str) -> None:
    facts = Family(name, "plain").facts
    parameters = {"type": "object", "properties": {"a": UNUSABLE[reason]}, "required": ["a"]}
    tool = {"name": "f", "parameters": parameters}
    with pytest.raises(ApiError, match="parameters of the tools cannot be used") as refused:
        write_call_grammar(facts, [tool], prompt="", is_parallel=False)
    assert refused.value.status == 400 and reason in refused.value.message
    with pytest.raises(ApiError, match="JSON schema cannot be used"):
        write_json_grammar(facts, parameters, prompt="")


LONG, FREE = "9" * 400, {"type": "object", "additionalProperties": True}
ENDLESS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "integer"}, "12345678", LONG),
    ({"type": "integer", "minimum": 0}, "12345678", LONG),
    ({"type": "integer", "minimum": 10**17}, str(2 * 10**17), LONG),
    ({"type": "integer", "maximum": 0}, "-12", "-" + LONG),
    ({"type": "number"}, "-3.14159", f"3.{LONG}"),
    ({"type": "number"}, "6.62e-34", f"1e{LONG}"),
    ({"type": "number", "minimum": 0, "maximum": 1e300}, "0.25", f"0.{LONG}"),
    ({"type": "number", "exclusiveMinimum": 0}, "0.25", LONG),
    ({"type": "string"}, '"' + "word " * 40 + '"', '"' + "w" * 300 + '"'),
    ({"type": "string", "pattern": "^a*$"}, '"aaa"', '"' + "a" * 300 + '"'),
    ({"type": "array"}, '[1, "x", [null]]', "[" + "1," * 400 + "1]"),
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[" + "1," * 400 + "1]"),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, "[1]", "[1, 2]"),
    ({"type": "object", "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"type": "array"}, "[[[[1]]]]", "[" * 40 + "1" + "]" * 40),
    (FREE, '{"k": {"l": [1]}}', '{"' + "k" * 100 + '": 1}'),
    (FREE, "{}", "{" + ", ".join(f'"k{n}": 1' for n in range(100)) + "}"),
    (FREE, '{"k": 1}', '{"k":' + " " * 9 + "1}"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}, '{"a": "x"}', '{"b": 1}'),
    (
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        '{"a": 1, "b": 2}',
        '{"b": 2, "a": 1.5}',
    ),
    (
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}},
        '{"x-a": 1, "x-b": 2}',
        '{"y": 1}',
    ),
    ({"$defs": {"l": {"items": {"$ref": "#"}}}, "$ref": "#/$defs/l"}, "[[]]", "[" * 99 + "]" * 99),
]


@pytest.mark.parametrize(("schema", "fine", "endless"), ENDLESS)
def test_json_of_a_schema_ends(
    schema: dict[str, Any], fine: str, endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_grammars, "CHARACTERS", 250)
    family = Family("hermes", "plain")
    grammar = write_json_grammar(family.facts, schema, prompt="")
    json.loads(fine)
    assert family.follow(grammar, fine) is None
    assert family.follow(grammar, endless) is not None


def test_schemas_of_thousands_of_parts_are_kept_to_or_refused() -> None:
    names = [f"k{number}" for number in range(3000)]
    family = Family("hermes", "plain")

    def write(count: int, *needed: str) -> str:
        members = {f"k{number}": {"type": "null"} for number in range(count)}
        schema = {"type": "object", "properties": members, "required": list(needed)}
        return write_json_grammar(family.facts, schema, prompt="")

    choice = write_json_grammar(family.facts, {"enum": names}, prompt="")
    assert family.follow(choice, '"k2999"') is None and family.follow(choice, '"k3000"')
    wide = write(3000, "k7")
    assert family.follow(wide, '{"k7": null, "k2998": null}') is None
    assert family.follow(wide, '{"k2998": null}') and family.follow(
        wide, '{"k8": null, "k7": null}'
    )
    with pytest.raises(ApiError, match="it has more than 20000 parts") as refused:
        write(20_000)
    assert refused.value.status == 400


@pytest.mark.parametrize("count", range(6))
def test_properties_come_in_order_and_those_not_needed_may_be_missing(count: int) -> None:
    family, names = Family("hermes", "plain"), [f"k{number}" for number in range(count)]
    members = {name: {"type": "null"} for name in names}
    for needed in (set[str](), set(names[1:2]), set(names[::2]), set(names)):
        schema = {"type": "object", "properties": members, "required": sorted(needed)}
        grammar = write_json_grammar(family.facts, schema, prompt="")
        for kept in itertools.product([False, True], repeat=count):
            chosen = list(itertools.compress(names, kept))
            text = json.dumps(dict.fromkeys(chosen))
            assert (family.follow(grammar, text) is None) == (needed <= set(chosen)), text
        if count > 1:
            assert family.follow(grammar, json.dumps(dict.fromkeys(reversed(names)))) is not None
