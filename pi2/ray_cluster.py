"""The Ray cluster that this process uses: one that exists, or one only on this machine."""

import os
import sys
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError


def import_ray(help: str = "pip install 'pi2[ray]'") -> Any:
    """The module ``ray``; `UserError` P355 if it is not installed."""
    try:
        import ray
    except ImportError:
        raise UserError.of("P355", "ray is not installed", help=help) from None
    return ray


def start_ray(ray: Any, cpus: int | None = None) -> None:
    """Connect to the cluster that RAY_ADDRESS names, else start one on this machine that has
    ``cpus`` processors to give away; `UserError` P355 where there is no such cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    # Workers of this machine find what this process finds; those of a cluster have pi2 installed.
    root = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([root, *(item for item in sys.path if item)])
    local: dict[str, Any] = {
        "num_cpus": cpus or os.cpu_count() or 1,
        "include_dashboard": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
    }
    try:
        ray.init(log_to_driver=False, logging_level="error", **({} if address else local))
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError.of(
            "P355",
            f"no Ray cluster at {address or 'this machine'}: {reason}",
            help="start one with `ray start --head`, or leave RAY_ADDRESS unset",
        ) from None
