"""Selection of the network interfaces at which ranks are reachable, through environment variables as in NCCL."""

from __future__ import annotations

import pytest

from pynccl.host import interfaces
from pynccl.host.failure import HostFailure


def test_interface_patterns_follow_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
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
        interfaces.local_addresses()


def test_the_default_routes_address_is_first_and_loopback_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in interfaces.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    addresses = {
        "lo": ["127.0.0.1", "::1"],
        "docker0": ["172.17.0.1"],
        "ib0": ["10.1.0.2"],
        "eth0": ["10.0.0.2", "fd00::2"],
    }
    monkeypatch.setattr(interfaces, "_addresses", lambda: addresses)
    monkeypatch.setattr(interfaces, "_outward", lambda: ["10.1.0.2"])
    assert interfaces.local_addresses() == ["10.1.0.2", "10.0.0.2", "fd00::2", "172.17.0.1"]
    monkeypatch.setattr(interfaces, "_outward", list)  # no default route
    assert interfaces.local_addresses() == ["10.0.0.2", "fd00::2", "10.1.0.2", "172.17.0.1"]
