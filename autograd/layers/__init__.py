"""Layers cut over the ranks of a communicator, and what their parameters are parts of."""

from .data_parallel import DataParallelGradients
from .dropout import Dropout
from .linear import ColumnParallelLinear, RowParallelLinear
from .shards import Shard, clip_grad_norm_, finish_gradients
from .vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DataParallelGradients",
    "Dropout",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "finish_gradients",
    "vocab_parallel_cross_entropy",
]
