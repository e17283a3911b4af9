"""Rules by topic: functions with the decorator `rule`, and what stated.toml states."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

from pi2.plan.checking import Rule
from pi2.plan.checking.rules.stated import read_stated_rules


@cache
def load_rules() -> tuple[Rule, ...]:
    """All rules, in the order of their codes."""
    return tuple(sorted(_import_rules(), key=lambda rule: rule.code))


def _import_rules() -> Iterator[Rule]:
    yield from read_stated_rules()
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        yield from (value for value in vars(module).values() if isinstance(value, Rule))
