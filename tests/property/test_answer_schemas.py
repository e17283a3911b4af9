"""Schemas of any shape: answers that keep to them, or a reason."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from pi2.serving.call_grammars import make_constraint, write_call_grammar  # noqa: E402
from pi2.serving.errors import ApiError  # noqa: E402
from tests.helpers.answers import read  # noqa: E402
from tests.unit.test_serving_grammars import Family  # noqa: E402

FAMILIES = [Family(name, "special") for name in ("hermes", "gemma4", "lfm2")]
SCALARS = (
    st.none() | st.booleans() | st.integers(-20, 20) | st.sampled_from(["", "a", "x y", 'é/"\\'])
)
NUMBERS = st.integers(-30, 30) | st.floats(-30, 30).map(lambda value: round(value, 2))
WORDS = st.sampled_from(["a", "b", "key c"])


def _nest(inner: Any) -> Any:
    several = st.lists(inner, min_size=1, max_size=2)
    keys = {
        "type": st.sampled_from(["object", "array", "string", "integer", "number", "null"])
        | st.lists(st.sampled_from(["string", "integer", "object"]), max_size=2),
        "properties": st.dictionaries(WORDS, inner, max_size=3) | st.just([]),
        "required": st.lists(WORDS, max_size=2, unique=True),
        "additionalProperties": st.booleans() | inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
        "items": inner,
        "prefixItems": several,
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3) | st.just("3"),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 9),
        "pattern": st.sampled_from(["^[a-z]+$", "a|b", "^x|y$", "a/b"]),
        "minimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "enum": st.lists(SCALARS, max_size=3),
        "const": SCALARS | st.just({"k": [1]}),
        "anyOf": several,
        "oneOf": several,
        "allOf": several,
        "$ref": st.sampled_from(["#", "#/$defs/d", "#/properties/a", "#/none"]),
    }
    return st.fixed_dictionaries({}, optional=keys).map(
        lambda found: dict(list(found.items())[:4])
    ) | st.sampled_from([True, False, 3])


SCHEMAS = st.recursive(
    st.just({}) | SCALARS.map(lambda value: {"const": value}), _nest, max_leaves=6
)


def speak(family: Family, grammar: str, seed: int) -> str | None:
    """A text of a grammar, drawn byte by byte; None if it takes long."""
    maker = make_constraint(family.vocabulary, grammar, family.tokenizer.get_vocab_size())
    constraint, generator = maker(), np.random.default_rng(seed)
    closing = [token for sign in '"}],<\n' if (token := family.tokenizer.token_to_id(sign))]
    ids: list[int] = []
    while len(ids) < 300:
        bias = constraint.find_bias()
        assert bias is not None
        allowed = np.flatnonzero(bias == 0)
        if family.end in allowed:
            return str(family.tokenizer.decode(ids, skip_special_tokens=False))
        wanted = np.intersect1d(allowed, closing)
        if len(wanted) and generator.random() < 0.6:
            allowed = wanted
        ids.append(int(generator.choice(allowed)))
        constraint.accept(ids[-1])
    return None


def loosen(schema: Any) -> Any:
    """A schema with ``oneOf`` as grammars understand it: one at least."""
    if isinstance(schema, list):
        return [loosen(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: loosen(value) for key, value in schema.items() if key != "oneOf"}
    return {"allOf": [found, {"anyOf": loosen(schema["oneOf"])}]} if "oneOf" in schema else found


@given(schema=SCHEMAS, number=st.integers(0, len(FAMILIES) - 1), seed=st.integers(0, 99))
def test_arguments_are_as_their_schema_says_or_it_is_refused(
    schema: Any, number: int, seed: int
) -> None:
    family = FAMILIES[number]
    whole = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"d": {"type": "string"}},
    }
    tool = {"name": "f", "parameters": whole}
    try:
        grammar = write_call_grammar(family.facts, [tool], prompt="", is_parallel=False)
    except ApiError:
        return
    text = speak(family, grammar, seed)
    if text is None or "\ufffd" in text:
        return
    reader = family.facts.make_reader(tools=[tool])
    _, _, ((name, arguments),) = read(reader, text, len(text))
    assert name == "f"
    jsonschema.Draft202012Validator(loosen(whole)).validate(arguments)
