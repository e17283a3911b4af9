"""Human quantities with units: ``"19 GiB"``, ``"3.3 GHz"``, ``"450 MB/s"``, ``"120 us"``.

A document states a quantity as text; in memory it is a plain number in the base unit that the
field's name carries (``_bytes``, ``_hz``, ``_bytes_s``, ``_s``). Bare numbers are refused: every
unit is visible."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

BYTE_UNITS: Mapping[str, int] = {**_BINARY, **_DECIMAL}
RATE_UNITS: Mapping[str, int] = {f"{unit}/s": size for unit, size in BYTE_UNITS.items()}
HERTZ_UNITS: Mapping[str, int] = {"Hz": 1, "kHz": 10**3, "MHz": 10**6, "GHz": 10**9}
SECOND_UNITS: Mapping[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
}
LONG_UNITS: Mapping[str, int] = {"s": 1, "min": 60, "h": 3600}
TOKEN_UNITS: Mapping[str, int] = {"tok/s": 1}
WATT_UNITS: Mapping[str, Fraction] = {"mW": Fraction(1, 1000), "W": Fraction(1)}

_FEW_DIGITS = 6
"""Sizes of so many digits are read at a glance."""

_COARSE_STEPS = {"MiB": 16 * 2**20, "KiB": 4 * 2**10}
"""Sizes from which on people write whole units."""

_NUMBER = r"[0-9]{1,24}(?:\.[0-9]{1,40})?"
_QUANTITY = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?P<unit>[A-Za-zµμ/]+)\s*")

Units = Mapping[str, int | Fraction] | Mapping[str, int] | Mapping[str, Fraction]


class QuantityError(ValueError):
    """A text that is no quantity; ``hint`` says what may be meant."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def _show_example(units: Units) -> str:
    return f'"4 {list(units)[min(2, len(units) - 1)]}"'


def parse_quantity(text: str, units: Units) -> Fraction:
    """Return the value of ``text`` in base units; ``QuantityError`` states the expected form."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise QuantityError(f"expected a number and a unit, such as {_show_example(units)}")
    unit = match["unit"]
    if unit not in units:
        near = _find_unit(unit, units)
        hint = f'write "{match["number"]} {near}"' if near else None
        raise QuantityError(f"unknown unit `{unit}`, expected one of {', '.join(units)}", hint)
    return Fraction(match["number"]) * units[unit]


def parse_size(text: str, option: str = "--memory", code: str = "P612") -> int:
    """Bytes of the value of an option, such as ``"3 GiB"``; UserError with ``code``."""
    try:
        size = parse_quantity(text, BYTE_UNITS)
    except QuantityError as error:
        number = re.fullmatch(rf"\s*({_NUMBER})\s*", text)
        reason = str(error) if number is None else "the unit is missing"
        help_text = f"write {option} {number[1]}GiB, for example" if number else error.hint
        shown = help_text or f"for example {option} 3GiB"
        raise UserError.of(code, f"{option} {text!r}: {reason}", help=shown) from None
    if not 1 <= size < 2**63:
        reason = "the size is zero" if size < 1 else "no machine has so much"
        help_text = f"for example {option} 3GiB"
        raise UserError.of(code, f"{option} {text!r}: {reason}", help=help_text)
    return int(size)


_PERCENT = re.compile(r"^\s*(\d{1,2}(?:\.\d{1,3})?|100)\s*%(\s+of\s+the\s+file)?\s*$")


def read_percent(text: object) -> tuple[Fraction, bool] | None:
    """A share of the memory, such as ``"60 %"``, and whether it is one of the weights' file
    (``"60 % of the file"``); None for anything else."""
    found = _PERCENT.match(text) if isinstance(text, str) else None
    return None if found is None else (Fraction(found[1]) / 100, found[2] is not None)


def _find_unit(unit: str, units: Units) -> str | None:
    """The unit that ``gb``, ``G`` or ``µs`` most likely means."""
    plain = unit.replace("µ", "u").replace("μ", "u").lower()
    rate = "/s" in "".join(units)
    for spelling in (plain, plain + "b", plain + "/s", plain.removesuffix("ps") + "/s"):
        for known in units:
            if known.lower() == spelling and (rate or "/" not in spelling):
                return known
    return None


def format_quantity(value: float | Fraction, units: Units) -> str:
    """Write ``value`` exactly, in the largest unit that leaves at most three decimals."""
    exact = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    by_size = sorted(units.items(), key=lambda item: -item[1])
    for unit, size in by_size:
        scaled = exact / size
        if scaled >= 1 and (scaled * 1000).denominator == 1:
            return f"{_write_decimal(scaled)} {unit}"
    unit, size = by_size[-1]
    return f"{_write_decimal(exact / size)} {unit}"


def _write_decimal(value: Fraction) -> str:
    """Write ``value`` in full, without an exponent; at most 40 decimals."""
    decimals = next((n for n in range(41) if (value * 10**n).denominator == 1), 40)
    digits = f"{round(value * 10**decimals):0{decimals + 1}d}"
    return digits if decimals == 0 else f"{digits[:-decimals]}.{digits[-decimals:]}"


def format_bytes(value: int) -> str:
    """Write a byte count exactly, preferring binary units (``"512 B"``, ``"1.5 GiB"``).

    If a decimal unit says it with fewer digits, it is written in that (``"19 GB"``, not
    ``"18554687.5 KiB"``)."""
    binary = format_quantity(value, _BINARY)
    decimal = format_quantity(value, {"B": 1, **_DECIMAL})
    return decimal if _count_digits(decimal) < _count_digits(binary) else binary


def round_size(value: int) -> int:
    """``value``, rounded down to few digits: whole MiB."""
    mib = _BINARY["MiB"]
    few = _count_digits(format_bytes(value)) <= _FEW_DIGITS
    return value if few or value < mib else value // mib * mib


def round_up_size(value: int) -> int:
    """``value``, rounded up to few digits: whole MiB or KiB."""
    step = _find_step(value)
    return -(-value // step) * step


def round_down_size(value: int) -> int:
    """``value``, rounded down to few digits: whole MiB or KiB."""
    return value // _find_step(value) * _find_step(value)


def _find_step(value: int) -> int:
    for unit in ("MiB", "KiB"):
        if value >= _COARSE_STEPS[unit]:
            return _BINARY[unit]
    return 1


def write_least(value: int) -> str:
    """A size of at least ``value`` for people to write: ``"2704 MiB"``."""
    return format_bytes(round_up_size(value))


def write_most(value: int) -> str:
    """A size of at most ``value`` for people to write."""
    return format_bytes(round_down_size(value))


def compare_bytes(*values: int) -> tuple[str, ...]:
    """Write byte counts for people, with as many digits as tell different ones apart."""
    for digits in range(3, 8):
        texts = tuple(approximate_bytes(value, digits) for value in values)
        if len(set(texts)) == len(set(values)):
            return texts
    return tuple(f"{value} B" for value in values)


def _count_digits(text: str) -> int:
    return sum(char.isdigit() for char in text)


def approximate_bytes(value: float, digits: int = 3) -> str:
    """Write a byte count for people, rounded: ``"1.46 GiB"``."""
    for unit, size in sorted(_BINARY.items(), key=lambda item: -item[1]):
        # 1,000 MiB and more would not fit into three digits.
        if abs(value) >= (size if unit in ("B", "KiB") else size * 999.5 / 1024):
            number = f"{value:.0f}" if unit == "B" else approximate_number(value / size, digits)
            return f"{number} {unit}"
    return "0 B"


def approximate_number(value: float, digits: int = 3) -> str:
    """Write a number for people, rounded to ``digits`` significant digits, without an exponent:
    ``"0.0123"``, ``"13.8"``; the digits of a whole number are all kept: ``"1384"``."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else f"{value}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def approximate_share(value: float, decimals: int = 0) -> str:
    """Write a share of 1 in percent for people: ``"12%"``; never ``"-0%"``."""
    return f"{value:z.{decimals}%}"


def write_table(titles: str, rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a Markdown table; ``titles`` have `` | `` between them."""
    yield f"| {titles} |"
    yield "|" + " --- |" * (titles.count(" | ") + 1)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


_BUS = rf"\s*(?P<number>{_NUMBER})\s*MT/s\s*x\s*(?P<bits>[0-9]{{1,5}})\s*bits?\s*"
_BLOCKS = rf"\s*(?P<number>{_NUMBER})\s*(?P<kilo>k?)IOPS\s*x\s*(?P<block>{_NUMBER}\s*[A-Za-z]+)\s*"
TERA_OPS = rf"\s*(?P<number>{_NUMBER})\s*TOPS\s*"


def explain_rate(text: str) -> tuple[Fraction, str] | None:
    """Bytes per second of a data sheet's ``"6400 MT/s x 128 bit"`` or ``"250 kIOPS x 4 KiB"``, and
    the formula; None for anything else."""
    if (found := re.fullmatch(_BUS, text)) is not None:
        number, bits = Fraction(found["number"]), int(found["bits"])
        return number * 10**6 * bits / 8, f"{found['number']} MT/s x {bits} bit / 8"
    if (found := re.fullmatch(_BLOCKS, text)) is not None:
        number = Fraction(found["number"]) * (1000 if found["kilo"] else 1)
        return number * parse_quantity(found["block"], BYTE_UNITS), " ".join(text.split())
    return None


def parse_rate(text: str, units: Units) -> Fraction:
    found = explain_rate(text)
    return parse_quantity(text, units) if found is None else found[0]


def explain_giga_ops(text: str) -> tuple[float, str] | None:
    """Operations per second, in units of 1e9, of a data sheet's ``"45 TOPS"``, and the formula."""
    found = re.fullmatch(TERA_OPS, text)
    return found and (float(Fraction(found["number"]) * 1000), f"{found['number']} TOPS x 1000")


def _validate(
    units: Units,
    convert: Callable[[Fraction], float],
    parse: Callable[[str, Units], Fraction],
    hint: str,
) -> BeforeValidator:
    def validate(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str):
            raise PydanticCustomError(
                "quantity_type",
                "expected a quantity with its unit as text, such as {example}",
                {"example": _show_example(units)},
            )
        try:
            return convert(parse(value, units))
        except QuantityError as error:
            context = {"reason": str(error), "hint": error.hint or hint}
            raise PydanticCustomError("quantity", "{reason}", context) from None

    return BeforeValidator(validate)


def _make_type(
    units: Units,
    *examples: str,
    write: Callable[[Any], str] | None = None,
    convert: Callable[[Fraction], float] = float,
    parse: Callable[[str, Units], Fraction] = parse_quantity,
    pattern: str | None = None,
    hint: str = "",
) -> Any:
    """The type of a key whose text is a number and one of ``units``; ``pattern`` and ``hint`` say
    what else it may be."""
    usual = rf"^\s*{_NUMBER}\s*({'|'.join(map(re.escape, units))})\s*$"
    schema = {"type": "string", "pattern": pattern or usual, "examples": list(examples)}
    return Annotated[
        float if convert is float else int,
        _validate(units, convert, parse, hint),
        PlainSerializer(write or partial(format_quantity, units=units), return_type=str),
        WithJsonSchema(schema),
    ]


def find_quantity(field: "FieldInfo") -> dict[str, Any] | None:
    """The JSON Schema of a field's quantity; None if it has another type."""
    found = [*field.metadata]
    for option in get_args(field.annotation):  # Bytes | None
        found += get_args(option)[1:] if get_origin(option) is Annotated else ()
    schemas = (item.json_schema for item in found if isinstance(item, WithJsonSchema))
    return next((dict(schema) for schema in schemas if schema is not None), None)


def _convert_bytes(value: Fraction) -> int:
    if value < 1 and value != 0:
        raise QuantityError("not a whole number of bytes")
    if value >= 2**63:
        raise QuantityError("more bytes than any machine has")
    return int(value)


def _strip_names(pattern: str) -> str:
    """The pattern as JSON Schemas have it."""
    return re.sub(r"\?P<\w+>", "?:", pattern)


RATE_UNITS_OUT: Mapping[str, int | Fraction] = {"B/s": 1, "MB/s": 10**6, "GB/s": 10**9}

if TYPE_CHECKING:
    Bytes = int
    MemoryBytes = int
    BytesPerSecond = float
    Hertz = float
    Seconds = float
    LongSeconds = float
    TokensPerSecond = float
    Watts = float
else:
    Bytes = _make_type(BYTE_UNITS, "512 B", "19 GiB", write=format_bytes, convert=_convert_bytes)
    # A size, or a share of the memory, which is replaced before.
    MemoryBytes = _make_type(
        BYTE_UNITS,
        "19 GiB",
        "60 %",
        write=format_bytes,
        convert=_convert_bytes,
        pattern=rf"^\s*{_NUMBER}\s*({'|'.join(BYTE_UNITS)}|%(\s+of\s+the\s+file)?)\s*$",
        hint='a share is "60 %" of memory, or "60 % of the file"',
    )
    BytesPerSecond = _make_type(
        RATE_UNITS,
        "450 MB/s",
        "43.9 GB/s",
        "6400 MT/s x 128 bit",
        "250 kIOPS x 4 KiB",
        write=partial(format_quantity, units=RATE_UNITS_OUT),
        parse=parse_rate,
        pattern=rf"^(\s*{_NUMBER}\s*({'|'.join(RATE_UNITS)})\s*|{_strip_names(_BUS)}"
        rf"|{_strip_names(_BLOCKS)}|\s*{_NUMBER}\s*k?IOPS\s*)$",
        hint='a data sheet\'s "6400 MT/s x 128 bit" and "250 kIOPS x 4 KiB" are also read',
    )
    Hertz = _make_type(HERTZ_UNITS, "3.3 GHz")
    Seconds = _make_type(SECOND_UNITS, "120 us")
    LongSeconds = _make_type(LONG_UNITS, "30 s", "10 min")
    TokensPerSecond = _make_type(TOKEN_UNITS, "8 tok/s")
    Watts = _make_type(WATT_UNITS, "5.1 W")
