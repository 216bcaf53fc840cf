"""The network addresses of this node, and an id of the node."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

from .failure import invalid_usage

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_LAST_RESORTS = ("docker", "virbr", "br-", "veth", "lo")

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_UP = 0x1


@functools.cache  # read once, before descriptors can run out
def node_id() -> str:
    """Return an id that is equal for processes which can connect over 127.0.0.1: same boot, same network namespace."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts = [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    except FileNotFoundError:  # not Linux: use the host name
        pass
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()


def is_single_node() -> bool:
    """Return whether the launcher's environment says that all ranks are on this node: then listen on loopback only."""
    world, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world and world == local:
        return True
    if world and local:
        return False
    master = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(master).is_loopback
    return master == "localhost"


def local_addresses() -> list[str]:
    """Return the addresses of this node, starting with that of the default route.

    If NCCL_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, is set, return only the addresses of the interfaces it names."""
    by_interface = _addresses()
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    if variable:
        text = os.environ[variable]
        chosen = [address for name in by_interface if is_named(text, name) for address in by_interface[name]]
        if not chosen:
            raise invalid_usage(
                f"{variable}={text!r} names no interface that is up and has an address; available: "
                + ", ".join(f"{name} ({', '.join(found)})" for name, found in by_interface.items())
            )
        return chosen
    order = sorted(by_interface, key=lambda name: (name.startswith(_LAST_RESORTS), name))
    found = [address for name in order if name != "lo" for address in by_interface[name]]
    return list(dict.fromkeys([*_outward(), *found]))


def is_named(text: str, interface: str) -> bool:
    """Return whether a value of NCCL_SOCKET_IFNAME selects it: "eth,ib" (prefixes), "=eth0" (exact), "^lo" (not)."""
    excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    names = [name for name in text.lstrip("^=").split(",") if name]
    found = any(interface == name or (not exact and interface.startswith(name)) for name in names)
    return found != excluded


def _outward() -> list[str]:
    # Connecting a datagram socket sends nothing, but the kernel picks the source address. OSError: no route.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return [str(probe.getsockname()[0])]
    return []


def _addresses() -> Mapping[str, list[str]]:
    """Return {interface: addresses} of the interfaces that are up; IPv4 first, without link-local addresses."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                flags = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
                if struct.unpack_from("<H", flags, 16)[0] & _UP:
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                    found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, _, _, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:
                found.setdefault(name, []).append(str(address))
    return found
