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


def test_the_address_that_routes_outwards_is_first_and_loopback_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in interfaces.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    there = {
        "lo": ["127.0.0.1", "::1"],
        "docker0": ["172.17.0.1"],
        "ib0": ["10.1.0.2"],
        "eth0": ["10.0.0.2", "fd00::2"],
    }
    monkeypatch.setattr(interfaces, "_addresses", lambda: there)
    monkeypatch.setattr(interfaces, "_outward", lambda: ["10.1.0.2"])
    assert interfaces.own_addresses() == ["10.1.0.2", "10.0.0.2", "fd00::2", "172.17.0.1"]
    monkeypatch.setattr(interfaces, "_outward", list)  # no default route
    assert interfaces.own_addresses() == ["10.0.0.2", "fd00::2", "10.1.0.2", "172.17.0.1"]
