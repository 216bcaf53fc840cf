"""NCCL's parameters as a dictionary, and the encryption of its sockets."""

from __future__ import annotations

import pytest
from libraries import Stub

import pynccl


def test_params_returns_dict_of_strings() -> None:
    stub = Stub()
    assert pynccl.params(stub.library) == {"NCCL_ALGO": "", "NCCL_NTHREADS": "512"}
    assert pynccl.param("NCCL_NTHREADS", stub.library) == "512"
    with pytest.raises(pynccl.NcclInvalidArgument, match=r"ncclParamGetParameter\('NCCL_ALGOO'\) failed"):
        pynccl.param("NCCL_ALGOO", stub.library)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclParamGetAllParameterKeys needs NCCL >= 2\.30"):
        pynccl.params(Stub((2, 29, 7)).library)


def test_set_encryption_on_and_off() -> None:
    stub = Stub()
    pynccl.set_encryption("secret", stub.library)
    pynccl.set_encryption(None, stub.library)
    on, off = stub.calls()
    stamp = {"size": 32, "version": 23203, "magic": 0xCAFEBEEF}
    assert (on.name, on.args) == ("ncclSetEncryption", {**stamp, "mode": 1, "length": 6, "first": ord("s")})
    assert off.args == {**stamp, "mode": 0, "length": -1, "first": 0}
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclSetEncryption needs NCCL >= 2\.32; loaded 2\.31\.2"):
        pynccl.set_encryption("secret", Stub((2, 31, 2)).library)


def test_encryption_error_does_not_reveal_key() -> None:
    stub = Stub()
    stub.fail("ncclSetEncryption", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"ncclSetEncryption\(PSK\) failed") as caught:
        pynccl.set_encryption("secret", stub.library)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="set_encryption: psk is not a valid C string") as invalid:
        pynccl.set_encryption("secret\0", stub.library)
    assert "secret" not in str(invalid.value)
