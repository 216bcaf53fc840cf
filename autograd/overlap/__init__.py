"""Matmuls with the collective before or behind them, as one operation each."""

from .unfused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
