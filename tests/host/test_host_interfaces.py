"""Which of this machine's interfaces ranks are reached at: those that the variable names, as NCCL reads it."""

from __future__ import annotations

import pytest

from pynccl.host import interfaces
from pynccl.host.failure import HostFailure


def test_the_variable_names_interfaces_as_nccls_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, interface, named in (
        ("eth", "eth0", True),
        ("eth0,ib", "ib1", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^lo,docker", "docker0", False),
        ("^lo,docker", "eth0", True),
        ("^=eth0", "eth01", True),
        ("eth1", "eth0", False),
    ):
        assert interfaces.is_named(text, interface) is named, text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(HostFailure, match=r"GLOO_SOCKET_IFNAME='nowhere7' names no interface.*lo \(127.0.0.1"):
        interfaces.own_addresses()
