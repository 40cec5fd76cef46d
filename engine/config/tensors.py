"""Canonical tensor names and the shapes a model's weights must have. Knows no file and no family's names.

Matrices are [output rows, input columns]: y = x · Wᵀ. Names, with i a layer and e an expert:

    embedding.weight [vocab, hidden]      final_norm.weight [hidden]      head.weight [vocab, hidden]
    layers.i.input_norm.weight            layers.i.feed_forward_norm.weight
    layers.i.post_mixer_norm.weight       layers.i.post_feed_forward_norm.weight     layers.i.scalar [1]
    layers.i.attention.{q,k,v,o}.{weight,bias}    layers.i.attention.{q,k}_norm.weight [head_dim]
    layers.i.deltanet.{qkv,z,b,a,out}.weight      layers.i.deltanet.conv.weight [conv_dim, kernel]
    layers.i.deltanet.{dt_bias,a_log} [value heads]  layers.i.deltanet.norm.weight [value_head_dim]
    layers.i.feed_forward.{gate,up,down}.{weight,bias}
    layers.i.moe.router.weight [experts, hidden]  layers.i.moe.experts.e.{gate,up,down}.weight
    layers.i.moe.shared.{gate,up,down}.weight     layers.i.moe.shared_gate.weight [1, hidden]
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.model import AttentionSpec, DeltaNetSpec, DenseSpec, LayerSpec, ModelConfig, MoESpec

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """All tensors the model needs, by canonical name, in the order a forward pass meets them.

    A tied head is not among them.
    """
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab_size, config.hidden_size)}
    for index, layer in enumerate(config.layers):
        shapes.update((f"layers.{index}.{name}", shape) for name, shape in _layer(layer, config.hidden_size))
    shapes["final_norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "input_norm.weight", (hidden,)
    if isinstance(layer.mixer, AttentionSpec):
        yield from _attention(layer.mixer, hidden)
    else:
        yield from _deltanet(layer.mixer, hidden)
    if layer.post_norms:
        yield "post_mixer_norm.weight", (hidden,)
    yield "feed_forward_norm.weight", (hidden,)
    if isinstance(layer.feed_forward, DenseSpec):
        yield from _dense(layer.feed_forward, hidden)
    else:
        yield from _moe(layer.feed_forward, hidden)
    if layer.post_norms:
        yield "post_feed_forward_norm.weight", (hidden,)
    if layer.has_scalar:
        yield "scalar", (1,)


def _attention(spec: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    rows = {"q": spec.q_rows, "k": spec.kv_dim}
    if not spec.v_from_k:
        rows["v"] = spec.kv_dim
    for name, n_rows in rows.items():
        yield f"attention.{name}.weight", (n_rows, hidden)
        if spec.qkv_bias:
            yield f"attention.{name}.bias", (n_rows,)
    if spec.qk_norm is not None:
        yield "attention.q_norm.weight", (spec.head_dim,)
        yield "attention.k_norm.weight", (spec.head_dim,)
    yield "attention.o.weight", (hidden, spec.q_dim)
    if spec.output_bias:
        yield "attention.o.bias", (hidden,)


def _deltanet(spec: DeltaNetSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "deltanet.qkv.weight", (spec.conv_dim, hidden)
    yield "deltanet.z.weight", (spec.value_dim, hidden)
    yield "deltanet.b.weight", (spec.n_value_heads, hidden)
    yield "deltanet.a.weight", (spec.n_value_heads, hidden)
    yield "deltanet.conv.weight", (spec.conv_dim, spec.conv_kernel)
    yield "deltanet.dt_bias", (spec.n_value_heads,)
    yield "deltanet.a_log", (spec.n_value_heads,)
    yield "deltanet.norm.weight", (spec.value_head_dim,)
    yield "deltanet.out.weight", (hidden, spec.value_dim)


def _gated(prefix: str, intermediate: int, hidden: int, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    for name, rows, columns in (
        ("gate", intermediate, hidden),
        ("up", intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        yield f"{prefix}.{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}.{name}.bias", (rows,)


def _dense(spec: DenseSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from _gated("feed_forward", spec.intermediate, hidden, spec.bias)


def _moe(spec: MoESpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "moe.router.weight", (spec.n_experts, hidden)
    for expert in range(spec.n_experts):
        yield from _gated(f"moe.experts.{expert}", spec.intermediate, hidden)
    if spec.shared_intermediate is not None:
        yield "moe.shared_gate.weight", (1, hidden)
        yield from _gated("moe.shared", spec.shared_intermediate, hidden)
