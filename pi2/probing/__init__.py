"""Measuring this machine: what a device document says of it."""

from __future__ import annotations
