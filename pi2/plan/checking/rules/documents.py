"""Rules about single documents: origins of figures, private data, families."""

import re
from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, report_private, rule
from pi2.plan.checking.findings import Origin as Place
from pi2.plan.documents.common import Origin, find_type, list_known_keys, suggest
from pi2.plan.documents.family import Sections
from pi2.plan.documents.model import Model
from pi2.plan.documents.private import walk_figures, walk_texts, walk_values
from pi2.plan.toml.expressions import is_expression, parse_expression
from pi2.plan.toml.source import KINDS
from pi2.plan.toml.text import KeyPath, format_path

_CLAIM = re.compile(
    r"\b(?:data ?sheet|spec(?:ification)?s?(?: sheet)?|product (?:page|brief)|press release"
    r"|(?:vendor|manufacturer|maker)(?:'s)?|marketing|advertised|up to)\b",
    re.IGNORECASE,
)


@rule("P402", "warning", "device")
def check_claims_are_no_measurements(facts: Facts) -> Iterator[Finding]:
    for path, figure in walk_figures(facts.device):
        found = _CLAIM.search(figure.source) if figure.status == "measured" else None
        if found is not None:
            yield Finding(
                (*path, "status"),
                f"called measured, but its source is a claim: `{found[0]}`",
                'write status = "vendor-claimed", or say how it was measured',
            )


_RANGE = re.compile(r"\d\s*(?:to|-|–|\.\.)\s*\d|±|\+/-")  # noqa: RUF001  # people write dashes


@rule("P401", "warning", "device")
def check_measured_has_spread(facts: Facts) -> Iterator[Finding]:
    for path, figure in walk_figures(facts.device):
        if figure.status != "measured" or figure.spread is not None:
            continue
        if figure.samples is None and _RANGE.search(figure.source) is None:
            yield Finding(
                (*path, "status"),
                "a measured figure without `samples` and `spread`",
                'write both, or status = "estimated" if they are not known',
            )


@rule("P403", "warning", "plan", "device")
def check_plan_rests_on_claims(facts: Facts) -> Iterator[Finding]:
    claimed = [path for path, figure in _list_rates(facts) if figure.status == "vendor-claimed"]
    if not claimed:
        return
    places = tuple(
        Place("device", (*path, "status"), 'status = "vendor-claimed"') for path in claimed
    )
    count = "a read rate" if len(claimed) == 1 else f"{len(claimed)} read rates"
    yield Finding(
        ("device",),
        f"the plan rests on {count} that only the vendor claims",
        "on the device, `pi2 probe -o FILE` measures it; until then, predicted ranges are wide",
        origins=places,
    )


def _list_rates(facts: Facts) -> Iterator[tuple[KeyPath, Origin]]:
    device = facts.device
    if device.memory.read_bandwidth is not None:
        yield ("memory", "read_bandwidth"), device.memory.read_bandwidth
    for name in sorted({*facts.plan.layers.split, *_list_overridden(facts)}):
        unit = device.units.get(name)
        if unit is not None and unit.read_bandwidth is not None:
            yield ("units", name, "read_bandwidth"), unit.read_bandwidth
    # A pattern that was measured too does not rest on what is claimed.
    layers = facts.plan.layers
    hots = [layers.hot, *(item.hot for item in layers.overrides)]
    is_read = facts.plan.memory.embedding == "flash" or any(x is not None and x < 1 for x in hots)
    reads = device.storage.reads if is_read else ()
    known = {figure.pattern for figure in reads if figure.status != "vendor-claimed"}
    for number, figure in enumerate(reads):
        if figure.pattern not in known:
            yield ("storage", "reads", number), figure


def _list_overridden(facts: Facts) -> Iterator[str]:
    for override in facts.plan.layers.overrides:
        yield from override.split or ()


@rule("P412", "warning")
def check_no_account_names(facts: Facts) -> Iterator[Finding]:
    yield from report_private(facts, "account", "an account, a mail address or a key")


@rule("P413", "warning")
def check_no_home_folders(facts: Facts) -> Iterator[Finding]:
    yield from report_private(facts, "home", "a home folder")


@rule("P411", "warning")
def check_no_serial_numbers(facts: Facts) -> Iterator[Finding]:
    yield from report_private(facts, "serial", "a serial number or hardware address")


_PLACEHOLDER = re.compile(r"(?<![A-Za-z])(?:REPLACE|CHANGE)[ _-]?(?:ME|THIS)(?![A-Za-z])")


@rule("P420", "error")
def check_nothing_left_to_replace(facts: Facts) -> Iterator[Finding]:
    for document in KINDS:
        for path, text in walk_texts(facts.known.get(document)):
            found = _PLACEHOLDER.search(text)
            if found is not None:
                yield Finding(
                    path,
                    f"`{found[0]}` is left in",
                    "write the value, or remove the key where it has a default",
                    document=document,
                )


_PARTS = ("gate", "up", "down")


def _list_sections(facts: Facts) -> Iterator[tuple[KeyPath, Sections]]:
    yield (), facts.family
    for name, when in facts.family.when.items():
        yield ("when", name), when


@rule("P295", "error", "family")
def check_model_keys(facts: Facts) -> Iterator[Finding]:
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
        path,
        f"model documents have no key `{format_path(own)}`",
        None if near is None else f"did you mean `{near}`?",
        at="key",
    )


@rule("P296", "error", "family")
def check_expressions(facts: Facts) -> Iterator[Finding]:
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
                yield Finding(path, f"`{text}`: {error}")
        for path, value in walk_values(sections.read, (*base, "read")):
            if not isinstance(value, dict) and not (
                isinstance(value, list) and value and isinstance(value[0], str)
            ):
                yield Finding(
                    path,
                    f"`{format_path(path)}` is no array of keys to read",
                    'write ["key"], or ["key", default]; a fixed value belongs in [set]',
                )
