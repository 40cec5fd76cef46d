"""A model's forward pass as a list of calls, built by walking its LayerSpecs.

A program is made for a number of rows and a kind of row. In the last layer of a prefill pass only attention
needs all rows: what follows it (a thirtieth of all products) is computed for the few rows whose logits are
asked for, by the program behind the pass. Which family a model came from it does not know.
"""

from __future__ import annotations

from engine.config import AttentionSpec, DenseSpec
from engine.cuda.buffers import part
from engine.cuda.parts import Call, Parts
from engine.cuda.products import Norm, Products
from engine.cuda.products_fp8 import make_products
from engine.cuda.rows import Rows
from kernels.embedding import embed
from kernels.tensor import Tensor


def whole_pass(parts: Parts, rows: Rows) -> Products:
    """From tokens to the residual stream behind the last layer; the final norm and the head come after."""
    products = _begin(parts, rows)
    for index in range(len(parts.config.layers)):
        _attention(parts, rows, products, index)
        _behind_attention(parts, products, index)
    return products


def pass_to_last_attention(parts: Parts, rows: Rows) -> list[Call]:
    """From tokens to the attention result of the last layer, in `attended`."""
    products = _begin(parts, rows)
    last = len(parts.config.layers) - 1
    for index in range(last):
        _attention(parts, rows, products, index)
        _behind_attention(parts, products, index)
    _attention(parts, rows, products, last)
    return products.calls


def rest_of_last_layer(parts: Parts, chosen: Tensor) -> Products:
    """What follows pass_to_last_attention, for chosen rows: int32 [rows], of the pass or carried."""
    count = chosen.shape[0]
    mixer = _mixer(parts, -1)
    passed, activations = parts.buffers.activations, parts.buffers.chosen
    attended = part(activations.attended, count, mixer.q_dim)
    all_attended = part(passed.attended, passed.residual.shape[0], mixer.q_dim)
    residual = activations.residual.rows(0, count)
    calls: list[Call] = [
        embed(parts.library, table=table, out=out, tokens=chosen)
        for table, out in ((passed.residual, residual), (all_attended, attended))
    ]
    products = make_products(parts, activations, count, calls)
    _behind_attention(parts, products, len(parts.config.layers) - 1)
    return products


def final_norm(parts: Parts) -> Norm:
    return Norm(parts.weights.final_norm, parts.config.final_norm)


def _begin(parts: Parts, rows: Rows) -> Products:
    activations = parts.buffers.activations
    calls: list[Call] = [*rows.begin(activations.residual.rows(0, rows.count))]
    return make_products(parts, activations, rows.count, calls)


def _attention(parts: Parts, rows: Rows, products: Products, index: int) -> None:
    """Up to the attention result, in `attended`."""
    spec, weights = parts.config.layers[index], parts.weights.layers[index]
    mixer = _mixer(parts, index)
    qkv = part(parts.buffers.activations.qkv, rows.count, mixer.q_dim + 2 * mixer.kv_dim)
    sums = products.project(Norm(weights.input_norm, spec.norm), weights.mixer.qkv, qkv)
    products.calls += rows.attend(index, mixer, weights.mixer, sums)


def _behind_attention(parts: Parts, products: Products, index: int) -> None:
    """From the attention result onto the residual stream."""
    spec, weights = parts.config.layers[index], parts.weights.layers[index]
    assert isinstance(spec.feed_forward, DenseSpec)
    attended = part(products.activations.attended, products.rows, _mixer(parts, index).q_dim)
    products.add(attended, weights.mixer.o)
    norm = Norm(weights.feed_forward_norm, spec.norm)
    products.feed_forward(norm, spec.feed_forward, weights.feed_forward)


def _mixer(parts: Parts, index: int) -> AttentionSpec:
    mixer = parts.config.layers[index].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer
