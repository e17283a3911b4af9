"""What a plan costs in time and memory, and the plan that somebody's wish needs."""

from __future__ import annotations
