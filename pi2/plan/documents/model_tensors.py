"""What a model document calls the tensors of its checkpoint."""

from typing import Literal

from pydantic import Field

from pi2.plan.documents.common import Table


class Tensors(Table):
    """Names of the checkpoint's tensors; ``{layer}`` stands for the layer's number, and
    ``{expert}`` for the expert's in the FFN's and predictors' names.  An FFN's name without
    ``{expert}`` means one tensor of all experts, [experts, ...]."""

    embedding: str = "model.embed_tokens.weight"
    """Embedding table [vocab, hidden]."""
    attention_norm: str = "model.layers.{layer}.input_layernorm.weight"
    """Norm before attention [hidden]."""
    query: str = "model.layers.{layer}.self_attn.q_proj.weight"
    """Query projection [heads x head_dim, hidden]."""
    key: str = "model.layers.{layer}.self_attn.k_proj.weight"
    """Key projection [kv_heads x head_dim, hidden]."""
    value: str = "model.layers.{layer}.self_attn.v_proj.weight"
    """Value projection [kv_heads x head_dim, hidden]."""
    output: str = "model.layers.{layer}.self_attn.o_proj.weight"
    """Output projection of attention [hidden, heads x head_dim]."""
    query_bias: str = "model.layers.{layer}.self_attn.q_proj.bias"
    """Bias of the query projection."""
    key_bias: str = "model.layers.{layer}.self_attn.k_proj.bias"
    """Bias of the key projection."""
    value_bias: str = "model.layers.{layer}.self_attn.v_proj.bias"
    """Bias of the value projection."""
    output_bias: str = "model.layers.{layer}.self_attn.o_proj.bias"
    """Bias of the output projection."""
    fused_qkv: str | None = Field(
        default=None, examples=["model.layers.{layer}.self_attn.qkv_proj.weight"]
    )
    """Query, key and value projections in one tensor, which then replaces the three."""
    fused_qkv_bias: str | None = Field(
        default=None, examples=["model.layers.{layer}.self_attn.qkv_proj.bias"]
    )
    """Biases of query, key and value in one tensor."""
    fused_order: Literal["stacked", "grouped"] = "stacked"
    """``stacked``: all query rows, all key rows, all value rows; ``grouped``: for every key head
    its queries, its key, its value."""
    query_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    """Norm of every query head [head_dim], or of all of them [heads x head_dim]."""
    key_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    """Norm of every key head [head_dim], or of all of them [kv_heads x head_dim]."""
    query_gate: str | None = Field(
        default=None, examples=["model.layers.{layer}.self_attn.gate_proj.weight"]
    )
    """Projection to the gates of what heads mix [heads x head_dim, hidden], with
    ``attention.output_gate``, or [heads, hidden] where every head has one gate; absent means that
    every head of ``query`` is followed by its gates."""
    sinks: str = "model.layers.{layer}.self_attn.sinks"
    """Score of every head that no token has [heads]."""
    latent_query: str = "model.layers.{layer}.self_attn.q_a_proj.weight"
    """Projection to what queries are made of [query_rank, hidden]."""
    latent_query_bias: str = "model.layers.{layer}.self_attn.q_a_proj.bias"
    """Its bias."""
    latent_query_norm: str = "model.layers.{layer}.self_attn.q_a_layernorm.weight"
    """Norm of that [query_rank]."""
    latent_query_out: str = "model.layers.{layer}.self_attn.q_b_proj.weight"
    """Projection from that to queries [heads x (plain + rotated), query_rank]."""
    latent: str = "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"
    """Projection to the latent vector and to the rotated key [rank + rotated, hidden]."""
    latent_bias: str = "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias"
    """Its bias."""
    latent_norm: str = "model.layers.{layer}.self_attn.kv_a_layernorm.weight"
    """Norm of the latent vector [rank]."""
    latent_out: str = "model.layers.{layer}.self_attn.kv_b_proj.weight"
    """Projection of the latent vector to each head's key and value [heads x (plain + head_dim),
    rank]."""
    index_query: str = "model.layers.{layer}.self_attn.indexer.wq_b.weight"
    """Projection to the index's queries [heads x width, query_rank], or [heads x width, hidden] of
    an index of blocks."""
    index_query_norm: str = "model.layers.{layer}.self_attn.indexer.q_norm.weight"
    """Norm of each of them [width] (``blocks``)."""
    index_key: str = "model.layers.{layer}.self_attn.indexer.wk.weight"
    """Projection to its key [width, hidden]."""
    index_key_norm: str = "model.layers.{layer}.self_attn.indexer.k_norm.weight"
    """Norm of that [width]."""
    index_key_norm_bias: str = "model.layers.{layer}.self_attn.indexer.k_norm.bias"
    """Its bias (``tokens``)."""
    index_weights: str = "model.layers.{layer}.self_attn.indexer.weights_proj.weight"
    """Projection to the weights of its heads [heads, hidden] (``tokens``)."""
    inner_norm: str = "model.layers.{layer}.inner_layernorm.{mixer}.weight"
    """Norm before another mixer than the first in layers that have several [hidden];
    ``attention_norm`` is that before the first."""
    attention_norm_bias: str = "model.layers.{layer}.input_layernorm.bias"
    """Bias of the norm before attention."""
    layer_scale: str = "model.layers.{layer}.layer_scalar"
    """Number that what a layer gives is multiplied by [1], with ``layer_scale``."""
    layer_embedding: str = "model.embed_tokens_per_layer.weight"
    """Table of the layers' own embeddings [layer_embedding.vocab, layers x width]."""
    layer_projection: str = "model.per_layer_model_projection.weight"
    """Projection of the first layer's input, which is added to them [layers x width, hidden]."""
    layer_projection_norm: str = "model.per_layer_projection_norm.weight"
    """Norm of its output for a layer [width]."""
    layer_input_gate: str = "model.layers.{layer}.per_layer_input_gate.weight"
    """Projection to the gates of a layer's own embedding [width, hidden]."""
    layer_input_output: str = "model.layers.{layer}.per_layer_projection.weight"
    """Projection of the gated embedding back to the residual stream [hidden, width]."""
    layer_input_norm: str = "model.layers.{layer}.post_per_layer_input_norm.weight"
    """Norm of what that gives [hidden]."""
    stream_in: str = "model.altup_projections.{stream}.weight"
    """Projection of the embedding to another residual stream, the first of which has the number 0
    [hidden, hidden]."""
    stream_out: str = "model.altup_unembed_projections.{stream}.weight"
    """Projection of such a stream after the last layer [hidden, hidden]."""
    altup_router: str = "model.layers.{layer}.altup.modality_router.weight"
    """What makes the inputs of a layer's coefficients [streams, hidden]."""
    altup_router_norm: str = "model.layers.{layer}.altup.router_norm.weight"
    """Norm of its input [hidden]."""
    altup_predict: str = "model.layers.{layer}.altup.prediction_coefs.weight"
    """Projection to the coefficients that predict streams [streams x streams, streams]."""
    altup_correct: str = "model.layers.{layer}.altup.correction_coefs.weight"
    """Projection to the coefficients that correct them [streams, streams]."""
    altup_scale: str = "model.layers.{layer}.altup.correct_output_scale"
    """Factors of what gates a layer's own embedding [hidden], with ``altup.scaled``."""
    laurel_in: str = "model.layers.{layer}.laurel.linear_left.weight"
    """First projection of LAuReL [laurel_rank, hidden]."""
    laurel_out: str = "model.layers.{layer}.laurel.linear_right.weight"
    """Second one [hidden, laurel_rank]."""
    laurel_norm: str = "model.layers.{layer}.laurel.post_laurel_norm.weight"
    """Norm of what that gives [hidden]."""
    ffn_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    """Norm before the FFN [hidden]; the one before attention where both share it."""
    ffn_norm_bias: str = "model.layers.{layer}.post_attention_layernorm.bias"
    """Bias of the norm before the FFN."""
    attention_output_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    """Norm of what attention gives [hidden], with ``norm.outputs``."""
    ffn_output_norm: str = "model.layers.{layer}.post_feedforward_layernorm.weight"
    """Norm of what the FFN gives [hidden], with ``norm.outputs``."""
    gate: str = "model.layers.{layer}.mlp.gate_proj.weight"
    """Gate projection [ffn, hidden]."""
    up: str = "model.layers.{layer}.mlp.up_proj.weight"
    """Up projection [ffn, hidden]."""
    down: str = "model.layers.{layer}.mlp.down_proj.weight"
    """Down projection [hidden, ffn]."""
    fused_gate_up: str | None = Field(
        default=None, examples=["model.layers.{layer}.mlp.gate_up_proj.weight"]
    )
    """Gate and up projections in one tensor [2 x ffn, hidden]."""
    fused_gate_up_bias: str | None = Field(
        default=None, examples=["model.layers.{layer}.mlp.experts.gate_up_proj_bias"]
    )
    """Biases of gate and up in one tensor [2 x ffn]."""
    gate_up_order: Literal["stacked", "neighbours"] = "stacked"
    """``stacked``: all gate rows, all up rows; ``neighbours``: for every neuron its gate, its
    up."""
    experts_turned: bool = False
    """Whether matrices of experts that are in one tensor have columns where others have rows:
    [experts, hidden, ffn]."""
    gate_bias: str = "model.layers.{layer}.mlp.gate_proj.bias"
    """Bias of the gate projection [ffn]."""
    up_bias: str = "model.layers.{layer}.mlp.up_proj.bias"
    """Bias of the up projection [ffn]."""
    down_bias: str = "model.layers.{layer}.mlp.down_proj.bias"
    """Bias of the down projection [hidden]."""
    attention_sub_norm: str = "model.layers.{layer}.self_attn.attn_sub_norm.weight"
    """Norm of what the heads have mixed [heads x head_dim], with ``attention.sub_norm``."""
    ffn_sub_norm: str = "model.layers.{layer}.mlp.ffn_sub_norm.weight"
    """Norm of the neurons' activations [ffn], with ``ffn.sub_norm``."""
    embedding_norm: str = "model.embed_norm.weight"
    """Norm of embeddings [hidden], with ``norm.embedding_weights``."""
    embedding_norm_bias: str = "model.embed_norm.bias"
    """Its bias."""
    final_norm: str = "model.norm.weight"
    """Norm after the last layer [hidden]."""
    final_norm_bias: str = "model.norm.bias"
    """Bias of the norm after the last layer."""
    positions: str = "model.embed_positions.weight"
    """Learned position vectors [context + offset, hidden]."""
    head: str = "lm_head.weight"
    """Output head [vocab, hidden], where it is not tied."""
    head_bias: str = "lm_head.bias"
    """Bias of the output head [vocab]."""
    router: str = "model.layers.{layer}.block_sparse_moe.gate.weight"
    """Router [experts, hidden]."""
    router_bias: str = "model.layers.{layer}.mlp.router.bias"
    """Bias of its scores [experts]."""
    router_norm: str = "model.layers.{layer}.router.scale"
    """Norm of what the router reads [hidden], with ``moe.router_input = "stream"``."""
    expert_scale: str = "model.layers.{layer}.router.per_expert_scale"
    """Factors of the experts' weights [experts]."""
    experts_in: str = "model.layers.{layer}.mlp.fc1_latent_proj.weight"
    """Projection of the FFN's input to what experts read [latent, hidden], with ``moe.latent``."""
    experts_out: str = "model.layers.{layer}.mlp.fc2_latent_proj.weight"
    """Projection of what experts give back to the residual stream [hidden, latent]."""
    experts_output_norm: str = "model.layers.{layer}.post_feedforward_layernorm_2.weight"
    """Norm of what the experts give [hidden], with ``side_ffn.norms``."""
    side_norm: str = "model.layers.{layer}.pre_feedforward_layernorm.weight"
    """Norm before the dense FFN next to experts [hidden]."""
    side_gate: str = "model.layers.{layer}.mlp.gate_proj.weight"
    """Gate projection of the dense FFN next to experts [width, hidden]."""
    side_up: str = "model.layers.{layer}.mlp.up_proj.weight"
    """Up projection of it [width, hidden]."""
    side_down: str = "model.layers.{layer}.mlp.down_proj.weight"
    """Down projection of it [hidden, width]."""
    side_output_norm: str = "model.layers.{layer}.post_feedforward_layernorm_1.weight"
    """Norm of its output [hidden]."""
    choice_bias: str = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
    """Bias of the experts' weights, only for the choice [experts]."""
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert.gate_proj.weight"
    """Gate projection of the shared experts [shared experts x ffn, hidden]."""
    shared_up: str = "model.layers.{layer}.mlp.shared_expert.up_proj.weight"
    """Up projection of the shared experts [shared experts x ffn, hidden]."""
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj.weight"
    """Down projection of the shared experts [hidden, shared experts x ffn]."""
    fused_shared: str | None = Field(
        default=None, examples=["model.layers.{layer}.shared_mlp.input_linear.weight"]
    )
    """Gate and up projections of the shared experts in one tensor, gates first."""
    dense_gate: str = "model.layers.{layer}.mlp.gate_proj.weight"
    """Gate projection of an MoE model's dense layers [dense_ffn, hidden]."""
    dense_up: str = "model.layers.{layer}.mlp.up_proj.weight"
    """Up projection of those layers [dense_ffn, hidden]."""
    dense_down: str = "model.layers.{layer}.mlp.down_proj.weight"
    """Down projection of those layers [hidden, dense_ffn]."""
    fused_dense: str | None = Field(
        default=None, examples=["model.layers.{layer}.mlp.gate_up_proj.weight"]
    )
    """Gate and up projections of an MoE model's dense layers in one tensor, gates first."""
    shared_router: str = "model.layers.{layer}.mlp.shared_expert_gate.weight"
    """Router of the shared experts [1, hidden]."""
    state_in: str = "model.layers.{layer}.linear_attn.in_proj_qkv.weight"
    """Projection into a layer with a state: ``state_order`` states its rows. In this and the
    following names, ``{mixer}`` is the number of the mixer in its layer, from 0 on."""
    state_order: Literal["separate", "single", "grouped", "mamba", "mamba1", "convolution"] = (
        "separate"
    )
    """``separate``: query, key and value in ``state_in``, their gates in ``state_gate``, and input
    gates and decays in ``state_beta`` and ``state_alpha``; ``single``: the same, but query, key and
    value in tensors of their own, ``state_in``, ``state_key`` and ``state_value``, and so are their
    convolutions; ``grouped``: for every key head its query, key, values and gates in ``state_in``,
    its input gates and decays in ``state_beta``; ``mamba``: gates, x, B, C and step sizes, all in
    ``state_in``; ``mamba1``: x and its gates; ``convolution``: b, c and x."""
    state_in_bias: str = "model.layers.{layer}.mamba.in_proj.bias"
    """Bias of ``state_in``."""
    state_key: str = "model.layers.{layer}.self_attn.k_proj.weight"
    """Projection to keys [key_heads x key_dim, hidden] (``single``)."""
    state_value: str = "model.layers.{layer}.self_attn.v_proj.weight"
    """Projection to values [value_heads x value_dim, hidden] (``single``)."""
    state_gate: str = "model.layers.{layer}.linear_attn.in_proj_z.weight"
    """Projection to gates of the output [value_heads x value_dim, hidden], or its first factor
    [gate_rank, hidden]."""
    state_output_gates: str = "model.layers.{layer}.self_attn.g_b_proj.weight"
    """Projection of what gates of the output are made of [value_heads x value_dim, gate_rank], with
    ``recurrence.gate_rank``."""
    state_beta: str = "model.layers.{layer}.linear_attn.in_proj_b.weight"
    """Projection to input gates [value_heads, hidden]."""
    state_alpha: str = "model.layers.{layer}.linear_attn.in_proj_a.weight"
    """Projection to decays [value_heads, hidden], with ``decay_of = "key"`` [value_heads x key_dim,
    hidden], or its first factor [decay_rank, hidden]."""
    state_decays: str = "model.layers.{layer}.self_attn.f_b_proj.weight"
    """Projection of what decays are made of [value_heads x key_dim, decay_rank], with
    ``recurrence.decay_rank``."""
    state_convolution: str = "model.layers.{layer}.linear_attn.conv1d.weight"
    """Convolution over tokens [channels, 1, kernel]; only of queries (``single``)."""
    state_key_convolution: str = "model.layers.{layer}.self_attn.k_conv1d.weight"
    """Convolution of keys over tokens [key_heads x key_dim, 1, kernel] (``single``)."""
    state_value_convolution: str = "model.layers.{layer}.self_attn.v_conv1d.weight"
    """Convolution of values over tokens [value_heads x value_dim, 1, kernel] (``single``)."""
    state_convolution_bias: str = "model.layers.{layer}.linear_attn.conv1d.bias"
    """Bias of the convolution [channels]."""
    state_decay: str = "model.layers.{layer}.linear_attn.A_log"
    """Logarithms of rates of decay [value_heads], or [value_dim, key_dim] (``mamba1``)."""
    state_parts: str = "model.layers.{layer}.mamba.x_proj.weight"
    """Projection of the convolution's output to the step sizes' factor, B and C [step_rank + 2 x
    key_dim, value_dim] (``mamba1``)."""
    state_steps: str = "model.layers.{layer}.mamba.dt_proj.weight"
    """Projection to step sizes [value_dim, step_rank] (``mamba1``)."""
    state_step_norm: str = "model.layers.{layer}.mamba.dt_layernorm.weight"
    """Norm of what step sizes are made of [step_rank], with ``recurrence.part_norm``."""
    state_key_norm: str = "model.layers.{layer}.mamba.b_layernorm.weight"
    """Norm of B [key_dim]."""
    state_query_norm: str = "model.layers.{layer}.mamba.c_layernorm.weight"
    """Norm of C [key_dim]."""
    state_step: str = "model.layers.{layer}.linear_attn.dt_bias"
    """Bias of step sizes [value_heads], [value_heads x key_dim] with ``decay_of = "key"``, or
    [value_dim] (``mamba1``)."""
    state_skip: str = "model.layers.{layer}.linear_attn.D"
    """Share of the values that is added to the output [value_heads] (``mamba``), or [value_dim]
    (``mamba1``)."""
    state_norm: str = "model.layers.{layer}.linear_attn.norm.weight"
    """Norm of the output [value_dim], or [value_heads x value_dim] (``mamba``)."""
    state_output: str = "model.layers.{layer}.linear_attn.out_proj.weight"
    """Projection back [hidden, value_heads x value_dim]."""
    state_output_bias: str = "model.layers.{layer}.linear_attn.out_proj.bias"
    """Bias of the projection back [hidden]."""
    predictor_in: str = "model.layers.{layer}.mlp.predictor.fc1.weight"
    """First matrix of the activation predictor [rank, hidden]."""
    predictor_out: str = "model.layers.{layer}.mlp.predictor.fc2.weight"
    """Second matrix of the activation predictor [ffn, rank]."""
    predictor_bias: str = "model.layers.{layer}.mlp.predictor.bias"
    """Bias of the activation predictor [ffn]."""


TENSOR_OPTIONS = frozenset({"fused_order", "state_order", "gate_up_order", "experts_turned"})
"""Keys of `Tensors` that are not names."""
