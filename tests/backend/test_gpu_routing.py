"""Routers of mixtures on the device, against what the other backends compute."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.experts import Router
from pi2.backends.gpu.kernels.routing import list_router_kernels
from pi2.backends.gpu.kernels.specification import RouterKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.plan.documents.model import Moe
from tests.helpers.gpu import Bench

TOKENS = 5


@pytest.mark.parametrize(
    "moe",
    [
        Moe(experts=8, active_experts=2),
        Moe(experts=100, active_experts=8, normalise_weights=False, shared_experts=2),
        Moe(experts=3, active_experts=1, router="sigmoid", shared_experts=1, shared_gate=True),
    ],
    ids=["softmax", "many experts", "sigmoid"],
)
def test_routes_are_those_of_numpy(launcher: Launcher, moe: Moe) -> None:
    length = 96
    random = np.random.default_rng(3)
    inputs = random.standard_normal((TOKENS, length)).astype(np.float32)
    router = random.standard_normal((moe.experts, length)).astype(np.float32)
    # Of equal scores the first counts.
    router[1] = router[0]
    shared: F32 = (random.standard_normal((1, length)) / 8).astype(np.float32)
    assert moe.router != "mixer"
    kernels = RouterKernels(
        length=length,
        experts=moe.experts,
        active=moe.active_experts,
        kind=moe.router,
        normalise=moe.normalise_weights,
        shared=moe.shared_experts,
        shared_gate=moe.shared_gate,
    )
    rows = np.concatenate([router, shared]) if moe.shared_gate else router
    bench = Bench(launcher, list(list_router_kernels(kernels)))
    numbers = {"tokens": TOKENS}
    scores = bench.run(
        "route_scores",
        {
            "inputs": inputs,
            "router": rows,
            "route_scores": np.empty((TOKENS, kernels.rows), np.float32),
        },
        numbers,
    )["route_scores"]
    empty = np.empty((TOKENS, moe.experts + moe.shared_experts), np.float32)
    found = bench.run("route", {"route_scores": scores, "routes": empty}, numbers)["routes"]
    wanted = Router(
        moe=moe,
        weights=router,
        shared=shared if moe.shared_gate else None,
        experts=moe.experts + moe.shared_experts,
        dense_experts=0,
    ).route(inputs)
    np.testing.assert_array_equal(found != 0, wanted != 0)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
