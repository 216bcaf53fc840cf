"""The names in torch_internals.py exist in the installed torch."""

from __future__ import annotations

import pkgutil

from pynccl_autograd import torch_internals


def test_internal_names_of_torch_exist() -> None:
    assert torch_internals.NAMES
    for name in (*torch_internals.NAMES, *torch_internals.INDUCTOR, *torch_internals.WRAPPERS):
        assert pkgutil.resolve_name(name) is not None, name
