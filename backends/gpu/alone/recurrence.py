"""Kernels of a layer that keeps a state, from what it reads to what is projected back."""

from __future__ import annotations

from pi2.backends.gpu.alone.use import ModelUse
from pi2.backends.gpu.alone.work_list import WorkList
from pi2.plan.weights.tensor_names import name_layer_tensor


def list_recurrence(work: WorkList, use: ModelUse, layer: int, tokens: int, runs: int) -> None:
    """Add the kernels that turn u into ``mixed_state``; ``runs``: parts of equal length that the
    tokens consist of, each of another sequence."""
    assert use.state is not None
    shape, state, products = use.state.shape, work.state, use.products

    def name(kind: str) -> str:
        return name_layer_tensor(layer, kind)

    projected, is_short = state["projected"], shape.kind == "convolution"
    bias = name("state_in_bias")
    work.multiply(
        products["state_in"], name("state_in"), shape.rows, tokens, state["u"], projected, bias
    )
    numbers = {"runs": runs, "length": tokens // runs, "tokens": tokens}
    arrays = {
        **work.arrays.kept[layer],
        "projected": projected,
        "places": state["places"],
        "weights": work.find_vector(name("state_convolution")),
        "convolved": state["mixed_state" if is_short else "convolved"],
    }
    if shape.convolution_bias:
        arrays["biases"] = work.find_vector(name("state_convolution_bias"))
    work.add("convolve", arrays, numbers)
    if is_short:
        return
    gates = state["state_gates"]
    work.multiply(
        products["state_gates"], name("state_gates"), shape.gates, tokens, state["u"], gates
    )
    arrays |= {
        "gates": gates,
        "rates": work.find_vector(name("state_decay")),
        "steps": work.find_vector(name("state_step")),
        "recurred": state["recurred"],
    }
    if shape.kind == "mamba":
        arrays["skips"] = work.find_vector(name("state_skip"))
    work.add("recur", arrays, numbers)
    arrays |= {"weights": work.find_vector(name("state_norm")), "mixed": state["mixed_state"]}
    work.add("gate_state", arrays, numbers)
