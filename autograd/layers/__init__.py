"""Layers cut over the ranks of a communicator."""

from .linear import ColumnParallelLinear, RowParallelLinear
from .vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "vocab_parallel_cross_entropy"]
