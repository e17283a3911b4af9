"""Plans that come with pi2, as far as their weights are here."""

import importlib.util
import re
from pathlib import Path

PLANS = Path(__file__).parents[2] / "plans"


def list_plans() -> list[Path]:
    """Files of the plans whose weights no package has that is not installed."""
    return [path for path in sorted(PLANS.rglob("*.plan.toml")) if has_package(path)]


def has_package(path: Path) -> bool:
    """Whether the package that the plan's weights are in, if any, is installed."""
    found = re.search(r'"package:(\w+)/', path.read_text("utf-8"))
    return found is None or importlib.util.find_spec(found[1]) is not None
