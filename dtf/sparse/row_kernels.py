"""Compiled steps of the row optimizers: one pass over the touched rows and their state. Imported where numba is known
to be there.

Each: `records` (rows, width + state) row and state side by side; `positions` (U,) distinct, -1 is passed over;
`gradients` (U, width) are multiplied by `factor`. Numbers are of the records' dtype.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dtf.sparse.id_kernels import AHEAD, prefetch


@njit(cache=True, nogil=True, error_model="numpy")
def shrink(records, width, positions, since, now):
    """Multiply rows by exp(now - since) and note in `since` that it is done."""
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0:
            pending = np.exp(now - since[at])
            for j in range(width):
                records[at, j] *= pending
            since[at] = now


@njit(cache=True, nogil=True, error_model="numpy")
def sgd(records, positions, gradients, factor, lr):
    flat, stride, width = records.reshape(-1), records.shape[1], gradients.shape[1]
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(flat, positions[i + AHEAD] * stride, stride)
        at = positions[i] * stride
        if at >= 0:
            for j in range(width):
                flat[at + j] -= lr * (gradients[i, j] * factor)


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(records, positions, gradients, factor, lr, eps, weight_decay):
    flat, stride, width = records.reshape(-1), records.shape[1], gradients.shape[1]
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(flat, positions[i + AHEAD] * stride, stride)
        at = positions[i] * stride
        if at >= 0:
            for j in range(width):
                gradient = gradients[i, j] * factor + weight_decay * flat[at + j]
                total = flat[at + width + j] + gradient * gradient
                flat[at + width + j] = total
                flat[at + j] -= lr * gradient / (np.sqrt(total) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_adagrad(records, positions, gradients, factor, lr, eps, weight_decay):
    flat, stride, width = records.reshape(-1), records.shape[1], gradients.shape[1]
    one = np.sqrt(lr / lr)  # of the records' dtype
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(flat, positions[i + AHEAD] * stride, stride)
        at = positions[i] * stride
        if at >= 0:
            square = one - one
            for j in range(width):
                gradient = gradients[i, j] * factor + weight_decay * flat[at + j]
                square += gradient * gradient
            total = flat[at + width] + square / gradients.dtype.type(width)
            flat[at + width] = total
            rate = lr / (np.sqrt(total) + eps)
            for j in range(width):
                flat[at + j] -= rate * (gradients[i, j] * factor + weight_decay * flat[at + j])


@njit(cache=True, nogil=True, error_model="numpy")
def adam(records, positions, gradients, factor, rate, take1, take2, eps, weight_decay):
    """`rate`: the learning rate with both bias corrections; `take1`, `take2`: 1 - beta."""
    flat, stride, width = records.reshape(-1), records.shape[1], gradients.shape[1]
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(flat, positions[i + AHEAD] * stride, stride)
        at = positions[i] * stride
        if at >= 0:
            for j in range(width):
                gradient = gradients[i, j] * factor + weight_decay * flat[at + j]
                mean = flat[at + width + j]
                mean += (gradient - mean) * take1
                square = flat[at + 2 * width + j]
                square += (gradient * gradient - square) * take2
                flat[at + width + j] = mean
                flat[at + 2 * width + j] = square
                flat[at + j] -= rate * mean / (np.sqrt(square) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def ftrl(records, positions, gradients, factor, alpha, beta, l1, l2):
    """State: z, n.

    An element whose state is zero starts where it was drawn: its z is the one whose solution is the drawn value.
    """
    flat, stride, width = records.reshape(-1), records.shape[1], gradients.shape[1]
    zero = alpha - alpha
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch(flat, positions[i + AHEAD] * stride, stride)
        at = positions[i] * stride
        if at >= 0:
            for j in range(width):
                gradient, value = gradients[i, j] * factor, flat[at + j]
                z, n = flat[at + width + j], flat[at + 2 * width + j]
                root = np.sqrt(n)
                if n == zero and z == zero and value != zero:
                    z = -value * (beta / alpha + l2) - np.copysign(l1, value)
                if gradient != zero:
                    n += gradient * gradient
                    grown = np.sqrt(n)
                    z += gradient - (grown - root) / alpha * value
                    solved = -(z - np.copysign(l1, z)) / ((beta + grown) / alpha + l2)
                    flat[at + j] = solved if abs(z) > l1 else zero
                    flat[at + width + j] = z
                    flat[at + 2 * width + j] = n
