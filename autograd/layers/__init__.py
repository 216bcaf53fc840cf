"""Layers cut over the ranks of a communicator, and what their parameters are parts of."""

from .describe import describe
from .key_value import KeyValueLinear
from .linear import ColumnParallelLinear, RowParallelLinear
from .parallelize import parallelize
from .shards import Shard, clip_grad_norm_, finish_gradients
from .vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "KeyValueLinear",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "clip_grad_norm_",
    "describe",
    "finish_gradients",
    "parallelize",
    "vocab_parallel_cross_entropy",
]
