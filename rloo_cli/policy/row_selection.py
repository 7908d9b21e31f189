"""Rows picked out of hidden states; their gradients are added in float32.

All K completions of a prompt begin at the same row, the prompt's last, which predicts the first
token of each. `index_select` adds their K gradients in the dtype of the states: in bfloat16 each
addition rounds to 8 bits, and on a GPU in a varying order. Here they are added in float32 and
rounded once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SUM_COLUMNS = 512  # columns that are summed at once: no float32 copy of all rows is made


class SelectRows(torch.autograd.Function):
    """`select_rows`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """(T, h), (N,) -> (N, h)"""
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.dtype = len(states), states.dtype
        return states.index_select(0, index).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        """(N, h) -> (T, h)"""
        (index,) = ctx.saved_tensors
        return add_row_gradients(g, index, ctx.num_rows, ctx.dtype), None, None


def select_rows(states: Tensor, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of `states`, in `dtype` (None: their own). (T, h), (N,) -> (N, h)

    Gradients that arrive in float32, because `dtype` is, are rounded only after they are added.
    """
    selected: Tensor = SelectRows.apply(states, index, dtype or states.dtype)
    return selected


def add_row_gradients(gradient: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Sum the gradients of each row in float32, and round the sum once. (N, h), (N,) -> (T, h)

    `num_rows`: T. `dtype`: of the result; in float64 sums are float64.
    """
    sum_dtype = torch.promote_types(dtype, torch.float32)
    if gradient.dtype == sum_dtype == dtype:
        return gradient.new_zeros((num_rows, gradient.shape[1])).index_add_(0, index, gradient)
    total = gradient.new_empty((num_rows, gradient.shape[1]), dtype=dtype)
    for start in range(0, gradient.shape[1], SUM_COLUMNS):
        columns = slice(start, start + SUM_COLUMNS)
        part = gradient[:, columns].to(sum_dtype)
        sums = part.new_zeros((num_rows, part.shape[1]))
        total[:, columns] = sums.index_add_(0, index, part)
    return total
