"""Routers of mixtures on the device, against what the other backends compute."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.arithmetic import Router
from pi2.backends.gpu.kernels.routing import list_router_kernels
from pi2.backends.gpu.kernels.specification import RouterKernels
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.plan.documents.model_parts import Moe
from tests.helpers.gpu import Bench

TOKENS = 5


@pytest.mark.parametrize(
    "moe",
    [
        Moe(experts=8, active_experts=2),
        Moe(experts=100, active_experts=8, normalise_weights=False, shared_experts=2),
        Moe(experts=3, active_experts=1, router="sigmoid", shared_experts=1, shared_gate=True),
        # DeepSeek V3, with a bias of the scores, too.
        Moe(
            experts=72,
            active_experts=6,
            router="sigmoid",
            router_bias=True,
            choice_bias=True,
            groups=6,
            active_groups=3,
            scaling=2.5,
            shared_experts=1,
            dense_layers=(0,),
            dense_ffn=30,
        ),
        Moe(experts=6, active_experts=2, groups=3, active_groups=2, group_score="best"),
    ],
    ids=["softmax", "many experts", "sigmoid", "biases and groups", "best of groups"],
)
def test_routes_are_those_of_numpy(launcher: Launcher, moe: Moe) -> None:
    length = 96
    random = np.random.default_rng(3)
    inputs = random.standard_normal((TOKENS, length)).astype(np.float32)
    router = random.standard_normal((moe.experts, length)).astype(np.float32)
    # Of equal scores the first counts.
    router[1] = router[0]
    shared: F32 = (random.standard_normal((1, length)) / 8).astype(np.float32)
    biases, choice = (random.standard_normal((2, 1, moe.experts)) / 2).astype(np.float32)
    # Neurons of a layer that is no mixture take an expert more.
    others = 1 if moe.dense_layers else 0
    total = moe.experts + moe.shared_experts + others
    assert moe.router != "mixer" and moe.router != "none"
    kernels = RouterKernels(
        length=length,
        experts=moe.experts,
        active=moe.active_experts,
        kind=moe.router,
        normalise=moe.normalise_weights,
        bias=moe.router_bias,
        choice_bias=moe.choice_bias,
        groups=moe.groups,
        active_groups=moe.active_groups,
        group_best=1 if moe.group_score == "best" else 2,
        scaling=moe.scaling,
        shared=moe.shared_experts,
        others=others,
        some_dense=bool(moe.dense_layers),
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
            **({"router_biases": biases} if moe.router_bias else {}),
            "route_scores": np.empty((TOKENS, kernels.rows), np.float32),
        },
        numbers,
    )["route_scores"]
    empty = np.full((TOKENS, total), 7, np.float32)
    arrays = {"route_scores": scores, "routes": empty}
    arrays |= {"choice_biases": choice} if moe.choice_bias else {}
    found = bench.run("route", arrays, numbers)["routes"]
    wanted = Router(
        moe=moe,
        weights=router,
        bias=biases if moe.router_bias else None,
        choice_bias=choice if moe.choice_bias else None,
        shared=shared if moe.shared_gate else None,
        experts=total,
        dense_experts=0,
    ).route(inputs)
    np.testing.assert_array_equal(found != 0, wanted != 0)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    if moe.dense_layers:
        found = bench.run("route_first", {"routes": empty}, numbers | {"count": 2})["routes"]
        np.testing.assert_array_equal(found, np.arange(total) < np.full((TOKENS, 1), 2))
