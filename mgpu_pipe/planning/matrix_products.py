"""Seconds of a layer's matrix products by their shapes: of its weights, and of adapters next to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.planning.work import Constants, Hardware, Numbers, Work

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Rows and columns that one multiprocessor computes of a product (cuBLAS's largest tiles on A100 and H100)."""
ALIGNMENT = 64
"""Multiple to which tensor cores pad a product's dimensions."""


@dataclass(frozen=True)
class Product:
    """Matrix products of (rows, inner) and (inner, columns); of experts, ``copies`` of them at once."""

    rows: Numbers
    columns: Numbers
    inner: Numbers
    copies: Numbers = 1.0
    entry: Numbers = 2.0
    """Bytes of an entry."""

    def seconds(self, hardware: Hardware, constants: Constants, peak: Numbers) -> Numbers:
        height = np.ceil(self.rows / TILE_ROWS)
        waves = self.copies * height * np.ceil(self.columns / TILE_COLUMNS) / hardware.multiprocessors
        quantised = 1 + constants.wave * (np.ceil(waves) / waves - 1)
        padded = np.ceil(self.inner / ALIGNMENT) * ALIGNMENT / self.inner * (1 + constants.short / self.inner)
        padded = padded * np.where(np.asarray(self.copies) > 1, height * TILE_ROWS / self.rows, 1)
        entries = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        moved = self.entry * self.copies * entries
        flops = 2 * self.copies * self.rows * self.columns * self.inner
        return flops / (peak * constants.gemm) * quantised * padded + moved / (hardware.bandwidth * constants.memory)

    @property
    def gradients(self) -> tuple[Product, Product]:
        """Products of the gradients of the input and of the weight."""
        of_input = Product(self.rows, self.inner, self.columns, self.copies, self.entry)
        return of_input, Product(self.inner, self.columns, self.rows, self.copies, self.entry)


def _products(work: Work) -> list[Product]:
    """Products of a layer's forward pass on a rank."""
    queries = work.head_dim * work.heads / work.tp
    keys = work.head_dim * np.maximum(1, work.key_value_heads / work.tp)
    is_spread = np.asarray(work.ep) > 1
    inner = work.inner / np.where(is_spread, 1, work.tp)
    routed = work.tokens * work.chosen / np.where(is_spread, work.tp, 1)
    copies = np.minimum(np.maximum(1, work.experts / work.ep), np.maximum(1, routed))
    entry = work.activation_bytes
    # Matrices of latent attention as two of the same parameters.
    half, is_usual = work.attention_weights / (2 * work.width * work.tp), np.asarray(work.attention_weights) == 0
    products = [
        Product(work.tokens, np.where(is_usual, queries + 2 * keys, half), work.width, entry=entry),
        Product(work.tokens, work.width, np.where(is_usual, queries, half), entry=entry),
        Product(routed / copies, (1 + work.gated) * inner, work.width, copies, entry),
        Product(routed / copies, work.width, inner, copies, entry),
    ]
    if not np.any(np.asarray(work.shared) > 0):
        return products
    shared = work.shared * work.inner / work.tp
    inputs = Product(work.tokens, (1 + work.gated) * shared, work.width, entry=entry)
    return [*products, inputs, Product(work.tokens, work.width, shared, entry=entry)]


def product_seconds(
    rows: Numbers, columns: Numbers, inner: Numbers, entry: Numbers, hardware: Hardware, constants: Constants
) -> NDArray[np.float64]:
    """Seconds of matrix products of (rows, inner) and (inner, columns) with entries of ``entry`` bytes."""
    seconds = Product(rows, columns, inner, entry=entry).seconds(hardware, constants, hardware.peak)
    return np.asarray(seconds, dtype=np.float64)


def layer_product_seconds(work: Work, hardware: Hardware, constants: Constants) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds of a layer's products: forward, for gradients of inputs, and for gradients of weights.

    Products of adapters count as forward and as gradients of inputs.
    """
    eight = np.asarray(work.float8) > 0
    peak = np.where(eight, hardware.float8_peak * constants.float8, hardware.peak)
    forward: Numbers = 0.0
    inputs: Numbers = 0.0
    weights: Numbers = 0.0
    for product in _products(work):
        of_input, of_weight = product.gradients
        forward = forward + product.seconds(hardware, constants, peak)
        inputs = inputs + of_input.seconds(hardware, constants, peak)
        weights = weights + of_weight.seconds(hardware, constants, peak)
    added = _adapter_seconds(work, hardware, constants)
    trained = np.where(np.asarray(work.adapter_rank) > 0, 0, work.trained)  # next to adapters no dense weight is
    return forward + added[0], inputs + added[1], trained * weights


def _adapter_seconds(work: Work, hardware: Hardware, constants: Constants) -> tuple[Numbers, Numbers]:
    """Seconds of a layer's adapters: two narrow products forward and four backward, and a sum.

    Tensor cores pad the rank. A sum is read by the kernel that follows in compiled blocks, so that the backward pass
    reads a gradient for it, and the forward pass a result.
    """
    if not np.any(np.asarray(work.adapter_rank) > 0):
        return 0.0, 0.0
    rank = np.ceil(np.maximum(work.adapter_rank, 1) / ALIGNMENT) * ALIGNMENT
    queries, keys = work.head_dim * work.heads / work.tp, work.head_dim * np.maximum(1, work.key_value_heads / work.tp)
    inner = work.inner / work.tp
    is_dense = np.where(np.asarray(work.experts) > 0, 0.0, 1.0)
    linears: list[tuple[Numbers, Numbers, Numbers]] = [
        (1.0, work.width, queries),
        (2.0, work.width, keys),
        (1.0, queries, work.width),
        ((1 + work.gated) * is_dense, work.width, inner),
        (is_dense, inner, work.width),
    ]
    forward: Numbers = 0.0
    backward: Numbers = 0.0
    for times, inputs, outputs in linears:
        down = Product(work.tokens, rank, inputs, entry=work.activation_bytes)
        up = Product(work.tokens, outputs, rank, entry=work.activation_bytes)
        gradients = (*down.gradients, *up.gradients)
        sums = work.activation_bytes * work.tokens / (hardware.bandwidth * constants.memory)
        narrow = sum(product.seconds(hardware, constants, hardware.peak) for product in (down, up))
        forward = forward + times * (narrow + sums * outputs)
        narrow = sum(product.seconds(hardware, constants, hardware.peak) for product in gradients)
        backward = backward + times * (narrow + sums * inputs)
    has = np.asarray(work.adapter_rank) > 0
    return np.where(has, work.adapted * forward, 0), np.where(has, work.adapted * backward, 0)
