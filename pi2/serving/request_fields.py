"""Fields of requests that are not used: which are ignored, and which are refused.

A field that does not change the answer is ignored; one that would is refused, unless its value asks
for what is done anyway.  `tests/unit/test_serving_fields.py` compares these tables with the fields
of OpenAI's, Anthropic's and Ollama's own clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from pi2.serving.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What becomes of an interface's fields that its schema does not have."""

    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that would change the answer, and values with which they do not; null and what is
    empty are such everywhere."""

    def leave_out(self, values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """The ``values`` of other fields; ApiError 400 for one that would change the answer."""
        kept = {}
        for name, value in values.items():
            if name in self.refused:
                if value not in (None, "", [], {}) and value not in self.refused[name]:
                    own = place + name
                    message = f"'{own}' is not supported and would change the answer: leave it out."
                    raise ApiError(400, message, param=own, code="unsupported_parameter")
            elif name not in self.ignored:
                kept[name] = value
        return kept


class Tolerant(BaseModel):
    """A part of a body: keys that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    fields: ClassVar[Fields] = Fields()
    place: ClassVar[str] = ""
    """What fields of this part are called after."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        return cls.fields.leave_out(values, cls.place) if isinstance(values, dict) else values


class Strict(Tolerant):
    """A body: keys that are not known are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def keep_tools(kind: str) -> BeforeValidator:
    """Leaves out tools of other kinds than ``kind``: servers that have them run them."""

    def keep(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = (None, kind)
        return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in kinds]

    return BeforeValidator(keep)


_ACCOUNTS = frozenset(
    {
        *("user", "store", "metadata", "client_metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Who asks, what it costs, and what is kept."""
_SERVERS = frozenset(
    {
        # llama.cpp
        *("cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress", "n_keep"),
        *("reasoning_format", "t_max_predict_ms", "t_max_prompt_ms", "stream_interval"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "repeat_last_n"),
        *("penalize_nl", "sse_ping_interval", "n_cmpl_timeout", "verbose"),
        # vLLM and SGLang
        *("priority", "cache_salt", "request_id", "kv_transfer_params", "vllm_xargs", "rid"),
        *("session_id", "data_parallel_rank", "return_cached_tokens_details"),
        # gateways
        *("provider", "route", "usage", "trace", "litellm_session_id", "caching", "keep_alive"),
    }
)
"""What other servers do with a request."""
_OTHER_SAMPLERS: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0, False),
    "mirostat_mode": (0, False),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
    "grammar": (),
    "json_schema": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "ebnf": (),
    "lora": (),
    "min_tokens": (0,),
    "stop_token_ids": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (),
    "n_probs": (0,),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (-1,),
    "models": (),
    "transforms": (),
    "plugins": (),
}
"""How other servers draw tokens, or choose what answers."""

CHAT = Fields(
    ignored=_ACCOUNTS
    | _SERVERS
    | {"prediction", "web_search_options", "verbosity", "include_reasoning", "separate_reasoning"},
    refused={
        **_OTHER_SAMPLERS,
        "audio": (),
        "modalities": (["text"],),
        "functions": (),
        "function_call": ("auto", "none"),
        "moderation": (),
        "documents": (),
        "ignore_eos": (False,),
        "chat_template": (),
        "echo": (False,),
        "search_parameters": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    },
)
COMPLETIONS = Fields(
    ignored=_ACCOUNTS | _SERVERS,
    refused={
        **_OTHER_SAMPLERS,
        "response_format": ({"type": "text"},),
        "add_special_tokens": (True,),
        "return_tokens_as_token_ids": (False,),
    },
)
EMBEDDINGS = Fields(
    ignored=_ACCOUNTS | _SERVERS,
    refused={"input_type": (), "task": (), "instruction": (), "truncate_prompt_tokens": (-1,)},
)
RESPONSES = Fields(
    ignored=(_ACCOUNTS - {"user", "metadata", "safety_identifier", "prompt_cache_key"})
    | _SERVERS
    | {"stream_options", "max_tool_calls", "context_management"},
    refused={
        **_OTHER_SAMPLERS,
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "moderation": (),
        "top_logprobs": (0,),
    },
)
_TURNS = frozenset(
    {
        *("cache_control", "context_management", "inference_geo", "speed", "betas", "metadata"),
        *("service_tier", "diagnostics", "billing_policy", "fallback_credit_token", "fallbacks"),
        *("user_profile_id", "workspace_id", "client_metadata"),
        # Tools that run on Anthropic's servers are left out, and so is where they run.
        *("container", "mcp_servers"),
    }
)
COUNTS = Fields(
    ignored=_TURNS
    | {"compaction", "thread", "max_tokens", "stop_sequences", "stream"}
    | {"temperature", "top_p", "top_k"}
)
"""A count is that of the conversation, however it is answered."""
MESSAGES = Fields(
    ignored=_TURNS | _SERVERS,
    refused={**_OTHER_SAMPLERS, "compaction": (), "thread": ({"type": "create"},)},
)
OLLAMA = Fields(
    ignored=frozenset({"keep_alive", "truncate", "shift", "width", "height", "steps"}),
    refused={"images": (), "template": (), "context": ()},
)
OLLAMA_MESSAGE = Fields(refused={"images": ()})
OLLAMA_OPTIONS = Fields(
    ignored=frozenset(
        {
            *("num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
            *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "numa"),
            *("num_keep", "repeat_last_n", "mirostat_tau", "mirostat_eta", "penalize_newline"),
        }
    ),
    refused={"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)},
)
