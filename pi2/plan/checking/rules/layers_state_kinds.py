"""A model with layers that keep a state says what they are, and their sizes.

Why: every layer has a kind; states of one kind have one shape, so that there is at most one kind
beside attention; value heads share the keys of key heads evenly, and norms divide the output
evenly; between two mixers of a layer there is one norm and nothing else, and none has attention
twice.

Example: ``kinds = ["delta", "attention"]`` without a table ``[recurrence]``.

Fix: state what the checkpoint's configuration states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_states import Recurrence

CODE = "P275"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare kinds with the number of layers, and with the tables that they need."""
    model = facts.model
    if model.attention.output_gate and model.tensors.fused_qkv is not None:
        yield _find(
            ("attention", "output_gate"),
            "queries with gates are not in one tensor with keys and values",
            "name query, key and value in [tensors]",
        )
    if model.attention.output_gate_of == "head" and model.tensors.query_gate is None:
        yield _find(
            ("attention", "output_gate_of"),
            "gates of whole heads are no rows of the query projection",
            "name tensors.query_gate",
        )
    kinds = () if model.layers is None else model.layers.kinds
    if kinds and len(kinds) != model.shape.layers:
        yield _find(
            ("layers", "kinds"),
            f"{len(kinds)} kinds are stated, but the model has {model.shape.layers} layers",
            "state one kind for each layer",
        )
    mixers = (mixer for layer in range(len(kinds)) for mixer in model.list_mixers(layer))
    states = list(dict.fromkeys(mixer for mixer in mixers if mixer != "attention"))
    if len(states) > 1:
        yield _find(
            ("layers", "kinds"),
            f"layers of the kinds {' and '.join(states)} are in one model",
            "one kind beside attention can be computed",
        )
    for kind in states[:1]:
        needed = "convolution" if kind == "convolution" else "recurrence"
        if getattr(model, needed) is None:
            yield _find(
                ("layers", "kinds"),
                f"layers of the kind {kind} need the table [{needed}]",
                f"state [{needed}]",
            )
    yield from _check_double(model)
    yield from _check_recurrence(model, states)


def _check_double(model: Model) -> Iterator[Finding]:
    """Of several mixers in a layer, what comes between them is one norm of weights."""
    if not model.uneven_layers:
        return
    twice = [n for n in model.uneven_layers if model.list_mixers(n).count("attention") > 1]
    if twice:
        yield _find(
            ("layers", "kinds"),
            f"layer {twice[0]} has attention twice, and room for one layer's keys and values",
            "make two layers of it, the first of them without FFN (ffn.absent_layers)",
        )
    norm, moe = model.norm, model.moe
    wrong = {
        ("norm", "inputs"): not norm.inputs,
        ("norm", "outputs"): norm.outputs,
        ("norm", "bias"): norm.bias,
        ("residual",): model.residual == "parallel",
        ("moe", "router_input"): moe is not None and moe.router_input == "layer",
    }
    for path, is_wrong in wrong.items():
        if is_wrong:
            yield _find(
                path,
                f"{'.'.join(path)} has another value than its default, which layers with several "
                "mixers, or none, cannot be computed with",
                "remove it, or state one mixer for each layer",
            )


def _check_recurrence(model: Model, states: Sequence[str]) -> Iterator[Finding]:
    sizes = model.recurrence
    if sizes is None:
        return
    if sizes.value_heads % sizes.key_heads:
        yield _find(
            ("recurrence", "value_heads"),
            f"{sizes.value_heads} value heads cannot share {sizes.key_heads} key heads evenly",
            "take both from the checkpoint's configuration",
        )
    if sizes.width % sizes.norm_groups:
        yield _find(
            ("recurrence", "norm_groups"),
            f"{sizes.width} elements are not divided by {sizes.norm_groups} norms",
            "take norm_groups from the checkpoint's configuration",
        )
    wrong = sizes.projection_bias or sizes.norm_groups > 1 or sizes.longest_step is not None
    if "delta" in states and (wrong or sizes.shortest_step):
        yield _find(
            ("recurrence",),
            "layers of the kind delta have no biases, parts of norms and limits of steps",
            "remove them, or write mamba instead of delta",
        )
    yield from _check_delta(sizes, states)
    if "mamba1" in states:
        yield from _check_first_mamba(sizes)
    elif states and (sizes.step_rank is not None or sizes.part_norm != "none"):
        yield _find(
            ("recurrence",),
            f"layers of the kind {states[0]} have no step_rank, and no norms of parts",
            "remove step_rank and part_norm, or write mamba1",
        )
    if sizes.longest_step is not None and sizes.longest_step < sizes.shortest_step:
        yield _find(
            ("recurrence", "longest_step"),
            f"the longest step {sizes.longest_step:g} is below the shortest, "
            f"{sizes.shortest_step:g}",
            "take both from the checkpoint's configuration",
        )


def _check_delta(sizes: Recurrence, states: Sequence[str]) -> Iterator[Finding]:
    """What only the delta rule has: decays of keys, and gates of other kinds."""
    of_keys = sizes.decay_of == "key"
    own = sizes.gate != "silu" or sizes.gate_rank is not None
    if states and states[0] != "delta" and (of_keys or own):
        yield _find(
            ("recurrence",),
            f"layers of the kind {states[0]} have no decays of keys, and gates of no other kind",
            "remove decay_of, gate and gate_rank, or write delta",
        )
    if not of_keys and (sizes.decay_rank is not None or sizes.decay_floor is not None):
        yield _find(
            ("recurrence", "decay_of"),
            "decay_rank and decay_floor are of decays of keys",
            'write decay_of = "key", or remove them',
        )
    if of_keys and sizes.key_heads != sizes.value_heads:
        yield _find(
            ("recurrence", "key_heads"),
            f"decays of keys need as many key heads as value heads, not {sizes.key_heads} for "
            f"{sizes.value_heads}",
            "take both from the checkpoint's configuration",
        )


def _check_first_mamba(sizes: Recurrence) -> Iterator[Finding]:
    """The first Mamba has one head, and step sizes that are made of fewer elements."""
    if sizes.step_rank is None:
        yield _find(
            ("recurrence", "step_rank"),
            "layers of the kind mamba1 need step_rank",
            "state the number of columns of the projection to step sizes",
        )
    limited = sizes.shortest_step > 0.0 or sizes.longest_step is not None
    if max(sizes.key_heads, sizes.value_heads, sizes.norm_groups) > 1 or limited:
        yield _find(
            ("recurrence",),
            "layers of the kind mamba1 have one head, no parts of norms and no limits of steps",
            "state 1 for key_heads and value_heads, and remove the others",
        )


def _find(path: tuple[str, ...], message: str, remedy: str) -> Finding:
    return Finding(document="model", path=path, message=message, help=remedy)
