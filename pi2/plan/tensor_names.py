"""Names of the dense tensors in a neuron store."""

from __future__ import annotations

EMBEDDING = "embedding"
HEAD = "head"
FINAL_NORM = "final_norm"


def name_layer_tensor(layer: int, kind: str) -> str:
    """Name of a layer's tensor, for example ``layers.3.qkv``.

    Kinds: ``attention_norm`` and ``ffn_norm`` (float32 [1, hidden]); ``qkv`` [(heads + 2 kv_heads)
    head_dim, hidden], query rows first, then key, then value; ``qkv_bias`` float32 [1, rows of
    qkv]; ``output`` [hidden, heads head_dim]; ``predictor_in`` [rank, hidden], ``predictor_out``
    [ffn, rank] in stored order, ``predictor_bias`` float32 [1, ffn] in stored order.
    """
    return f"layers.{layer}.{kind}"
