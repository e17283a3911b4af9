"""The size of one request where neurons are read in longer stretches, such as experts."""

from __future__ import annotations

from pi2.plan.documents.device import Device
from pi2.plan.documents.plan import Plan

USUAL_BYTES = 512 << 10
"""Where nothing is known of the storage."""
LEAST_BYTES, MOST_BYTES = 128 << 10, 1 << 20
"""Smaller ones cost more processor time; larger ones let the first neurons come late."""
NEARLY = 0.95
"""Part of the highest rate that a smaller request should reach."""
IN_FLIGHT_BYTES = 8 << 20
"""Bytes that are asked for at a time: the storage divides itself between all requests that it
has, so that with more of them the first neurons come late."""


def choose_request_bytes(plan: Plan, device: Device) -> int:
    """What the plan states, or else the smallest block, of the random reads that the device
    states, with nearly the highest rate."""
    if plan.io.request is not None:
        return plan.io.request
    rates: dict[int, float] = {}
    for read in device.storage.reads:
        if read.pattern == "random" and LEAST_BYTES <= read.block <= MOST_BYTES:
            rates[read.block] = max(read.rate, rates.get(read.block, 0.0))
    most = max(rates.values(), default=0.0)
    return min((size for size, rate in rates.items() if rate >= NEARLY * most), default=USUAL_BYTES)


def count_requests_in_flight(plan: Plan, request_bytes: int) -> int:
    """Requests of that size that are handed over at a time."""
    return max(2, min(plan.io.depth, IN_FLIGHT_BYTES // request_bytes))
