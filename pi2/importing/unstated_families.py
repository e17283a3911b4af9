"""Families that no model document can state, by ``model_type``, and what they have that none
states."""

from __future__ import annotations

_STREAMS = "several residual streams that layers mix (hyper-connections)"
_SHARED = "attention whose weights several layers share"
_ALIBI = "scores that fall with the distance of tokens (ALiBi)"

UNSTATED = {
    "apertus": "an activation of which every layer states the shape (xIELU)",
    "axk1": "norms of what experts give, and none of what attention gives",
    "bloom": _ALIBI,
    "diffllama": "attention that is the difference of two",
    "doge": "keys that values choose for a query",
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _STREAMS),
    "falcon_h1": "Mamba-2 and attention beside each other, with factors of their parts",
    "jetmoe": "experts of attention",
    "longcat_flash": "two times attention in a layer, and experts that compute nothing",
    "minimax": "lightning attention, whose state decays by a number of each head",
    "mpt": _ALIBI,
    "olmo_hybrid": "layers that have norms before what mixes tokens, and others after it",
    "recurrent_gemma": "a recurrence of single numbers with gates (RG-LRU)",
    "zamba": _SHARED,
    "zamba2": _SHARED,
}
