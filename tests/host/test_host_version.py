"""The host library in the version of each supported release: available functions, and errors for the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import HOST, Place, RankPool

import pynccl
from pynccl.bindings import abi
from pynccl.bindings.errors import NcclVersionError
from pynccl.bindings.structs import CommConfig
from pynccl.host.version import reported_version

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_release(version: str) -> None:
    pool = RankPool({**HOST, "PYNCCL_HOST_VERSION": version}, communicators=False)
    pool.run(1, check_release, version)
    pool.close()


def check_release(_: Place, dotted: str) -> None:
    """All checks of a version. They share one process, as starting one per check takes long."""
    warnings.simplefilter("error")
    library, version = pynccl.load(), tuple(map(int, dotted.split(".")))
    assert library.version == version
    missing = {name for name, row in abi.FUNCTIONS.items() if row.since > version}
    assert {name for name in abi.FUNCTIONS if not library.supports(name)} == missing
    check_config_fields(library, dotted, version)
    comms = pynccl.Communicator.init_all(2)
    calls: dict[str, Callable[[], Any]] = {
        "ncclMemAlloc": lambda: pynccl.mem_alloc(8).free(),
        "ncclParamGetAllParameterKeys": pynccl.params,
        "ncclCommMemStats": comms[0].mem_stats,
        **{name: partial(getattr, library, name) for name in missing},
    }
    for name, call in calls.items():
        if name in missing:
            needed = ".".join(map(str, abi.FUNCTIONS[name].since))
            with pytest.raises(NcclVersionError, match=f"{name} needs NCCL >= {needed}.*; loaded {dotted} from host"):
                call()
        else:
            call()
    for comm in comms:
        comm.destroy()


def check_config_fields(library: Any, dotted: str, version: abi.Version) -> None:
    """Check that a config field is accepted from its release on, and that the error names it in older releases."""
    fields = {"min_ctas": (2, 17), "traffic_class": (2, 26), "comm_name": (2, 27), "nvls_host_mode": (2, 32)}
    for name, since in fields.items():
        config = CommConfig(**{name: "x" if name == "comm_name" else 1})
        if version >= since:
            pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, config=config).destroy()
        else:
            text = f"{name} needs NCCL >= {since[0]}.{since[1]}; loaded {dotted} from host"
            with pytest.raises(NcclVersionError, match=text):
                pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, config=config)


def test_valid_and_invalid_values_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_VERSION", "2.21")  # without a patch level
    assert reported_version() == (2, 21, 0)
    for text in ("2.17.1", "2.33.0", "3", "2.21.5rc1", "latest"):
        monkeypatch.setenv("PYNCCL_HOST_VERSION", text)
        expected = f"PYNCCL_HOST_VERSION='{text}': expected the number of an NCCL release from 2.18 to 2.32.3"
        with pytest.raises(NcclVersionError, match=expected):
            reported_version()
