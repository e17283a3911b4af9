"""Measuring this machine: what a device document says of it."""
