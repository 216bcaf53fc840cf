"""The names in torch_internals.py exist in the installed torch."""

from __future__ import annotations

import pkgutil

import torch

from pynccl_autograd import torch_internals


def test_internal_names_of_torch_exist() -> None:
    assert torch_internals.NAMES
    later = (*torch_internals.INDUCTOR, torch_internals.SHAPE_AND_OFFSET, *torch_internals.STATE_DICTS)
    for name in (*torch_internals.NAMES, *later, *torch_internals.WRAPPERS):
        assert pkgutil.resolve_name(name) is not None, name
    module, groups = torch.nn.Linear(1, 1), (torch_internals.FORWARD_HOOKS, torch_internals.BACKWARD_HOOKS)
    for name in (*groups[0], *groups[1], *torch_internals.STATE_HOOKS):
        assert hasattr(module, name), name
    for name in torch_internals.TENSOR_HOOKS:
        assert hasattr(module.weight, name), name
