"""Functions that lanes run: matmuls and sums of stacked rows, with `out=`."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_rows(a: Tensor, w_t: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = a @ w_t (+ bias).   a [q, rows, k], w_t [k, n], out [q, rows, n]; or a [rows, k], out [rows, n]

    q: number of ranks, whose blocks of rows need not be adjacent in memory. out may have another data type."""
    if out.dtype is not a.dtype:
        product = a.new_empty(out.shape)
        linear_rows(a, w_t, bias, out=product)
        out.copy_(product)
    elif a.dim() == 2:
        if bias is None:
            torch.mm(a, w_t, out=out)
        else:
            torch.addmm(bias, a, w_t, out=out)
    elif a.shape[0] == 1 or (_is_flat(a) and _is_flat(out)):
        linear_rows(a.flatten(0, 1), w_t, bias, out=out.flatten(0, 1))
    elif a.is_cuda:  # one kernel, without copies for strided stacks
        stack = w_t.expand(a.shape[0], *w_t.shape)
        if bias is None:
            torch.bmm(a, stack, out=out)
        else:
            torch.baddbmm(bias, a, stack, out=out)
    else:
        for rows, out_rows in zip(a, out, strict=True):
            linear_rows(rows, w_t, bias, out=out_rows)


def _is_flat(stack: Tensor) -> bool:
    """Return whether the blocks of all ranks are adjacent in memory."""
    return stack.stride(0) == stack.shape[1] * stack.stride(1)


def linear_plus(a: Tensor, w_t: Tensor, addend: Tensor, *, out: Tensor) -> None:
    """out = a @ w_t + addend, in the wider type of a and out."""
    total = out if out.dtype.itemsize >= a.dtype.itemsize else a.new_empty(out.shape)
    linear_rows(a, w_t, out=total)
    total.add_(addend)
    if total is not out:
        out.copy_(total)


def outer_rows(g: Tensor, a: Tensor, *, out: Tensor) -> None:
    """out = sum_q g_q.T @ a_q.   g [q, rows, n], a [q, rows, k] -> [n, k]; or g [rows, n], a [rows, k]"""
    _outer(g, a, out, first=True)


def add_outer_rows(g: Tensor, a: Tensor, so_far: Tensor, *, out: Tensor) -> None:
    """out = so_far + sum_q g_q.T @ a_q; so_far is out."""
    _outer(g, a, out, first=False)


def _outer(g: Tensor, a: Tensor, out: Tensor, first: bool) -> None:
    if g.dim() == 3 and _is_flat(g) and _is_flat(a):
        g, a = g.flatten(0, 1), a.flatten(0, 1)
    pairs = [(g, a)] if g.dim() == 2 else list(zip(g, a, strict=True))
    for rows, others in pairs:
        if out.dtype is not g.dtype:  # sums of several products have a wider type than the products
            product = torch.mm(rows.t(), others)
            out.copy_(product) if first else out.add_(product)
        elif first:
            torch.mm(rows.t(), others, out=out)
        else:
            torch.addmm(out, rows.t(), others, out=out)
        first = False


def copy(source: Tensor, *, out: Tensor) -> None:
    """out = source, converted to the type of out."""
    out.copy_(source)


def add(addend: Tensor, so_far: Tensor, *, out: Tensor) -> None:
    """out = so_far + addend; so_far is out."""
    out.add_(addend)


def sum_rows(rows: Tensor, *, out: Tensor) -> None:
    """out = sum over all rows, in the type of out.   [.., n] -> [n]"""
    torch.sum(rows.flatten(0, -2), 0, dtype=out.dtype, out=out)


def add_sum_rows(rows: Tensor, so_far: Tensor, *, out: Tensor) -> None:
    """out = so_far + sum over all rows; so_far is out."""
    out.add_(rows.flatten(0, -2).sum(0, dtype=out.dtype))


def sum_in_order(parts: Tensor, *, out: Tensor) -> None:
    """out = parts[0] + parts[1] + .. in this order, in at least float32.   parts [p, rows, n] -> [rows, n]

    The bits of a row do not depend on the number of rows."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    total = out if out.dtype is dtype else out.new_empty(out.shape, dtype=dtype)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if total is not out:
        out.copy_(total)
