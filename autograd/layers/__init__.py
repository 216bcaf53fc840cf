"""Tensor-parallel layers, sharded models, their gradients and their checkpoints."""

from .checkpoint import IncompatibleKeys, full_state_dict, load_full_state_dict, save_full_state_dict
from .checkpoint_optimizer import (
    dcp_optimizer_state_dict,
    dcp_state_dict,
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from .data_parallel import DataParallelGradients
from .dropout import Dropout
from .gradients import FinishedInBackward, clip_grad_norm_, finish_gradients, finish_gradients_in_backward
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .optimizers import check_steps
from .replace import parallelize
from .scaler import GradScaler
from .shard import Shard
from .shards import describe, keep_shards, set_shard
from .vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DataParallelGradients",
    "Dropout",
    "FinishedInBackward",
    "GradScaler",
    "IncompatibleKeys",
    "KeyValueLinear",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "clip_grad_norm_",
    "dcp_optimizer_state_dict",
    "dcp_state_dict",
    "describe",
    "finish_gradients",
    "finish_gradients_in_backward",
    "full_optimizer_state_dict",
    "full_state_dict",
    "keep_shards",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "parallelize",
    "save_full_state_dict",
    "set_shard",
    "vocab_parallel_cross_entropy",
]

check_steps()
