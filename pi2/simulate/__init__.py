"""Discrete-event simulation of a plan on a device that nobody needs to have at hand."""

from __future__ import annotations

from pi2.simulate.checking import read_inputs
from pi2.simulate.report import SimulationResult
from pi2.simulate.simulator import simulate

__all__ = ["SimulationResult", "read_inputs", "simulate"]
