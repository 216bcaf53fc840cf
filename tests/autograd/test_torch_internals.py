"""The names in torch_internals.py exist in the installed torch."""

from __future__ import annotations

import pkgutil

from pynccl_autograd import torch_internals


def test_internal_names_of_torch_exist() -> None:
    assert torch_internals.NAMES
    later = (*torch_internals.INDUCTOR, torch_internals.SHAPE_AND_OFFSET, *torch_internals.STATE_DICTS)
    for name in (*torch_internals.NAMES, *later):
        assert pkgutil.resolve_name(name) is not None, name
