"""torch_internals.py: its names exist in this torch."""

from __future__ import annotations

import pkgutil

from pynccl_autograd import torch_internals


def test_the_names_exist() -> None:
    assert torch_internals.NAMES
    for name in torch_internals.NAMES:
        assert pkgutil.resolve_name(name) is not None, name
