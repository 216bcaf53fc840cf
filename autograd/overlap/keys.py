"""The values of `overlap=`: "auto", "off", an OverlapConfig, an object with buffers, or TransformerEngine's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from pynccl.bindings.values import attribute, shown

from .config import AUTO, OFF, OverlapConfig


class Buffered(Protocol):
    """A configuration with its own buffers: CommOverlap, CommOverlapP2P."""

    @property
    def config(self) -> OverlapConfig: ...

    @property
    def buffers(self) -> Any: ...


# Values of `overlap=`; a dict has TransformerEngine's keys.
Overlap = Literal["auto", "off"] | OverlapConfig | Mapping[str, Any] | Buffered


def as_config(owner: str, overlap: Any, kind: str) -> OverlapConfig:
    """Convert the value of `overlap=` to an OverlapConfig.

    kind  "column" or "row": selects TransformerEngine's defaults"""
    if isinstance(overlap, OverlapConfig):
        return overlap
    own = attribute(overlap, "config")
    if isinstance(own, OverlapConfig):
        return own
    if isinstance(overlap, Mapping):
        return from_keys(owner, overlap, kind)
    if isinstance(overlap, str) and overlap in ("auto", "off"):
        return AUTO if overlap == "auto" else OFF
    raise ValueError(
        f'{owner}: overlap is {shown(overlap)}, expected "auto", "off", an OverlapConfig, a CommOverlap, or a dict '
        "of TransformerEngine's keys"
    )


# TransformerEngine's names for the methods.
_METHOD_OF = {"ring_exchange": "ring", "pipeline": "slices", "bulk": "bulk", "none": "off"}
# TransformerEngine's defaults. Its layers qkv and fc1 are column-parallel, proj and fc2 row-parallel.
_LAYERS = {"column": ("qkv", "fc1"), "row": ("proj", "fc2")}
_PASSES = ("fprop", "dgrad", "wgrad")
_RING = {"method": "ring_exchange", "num_sm": 1}
_PIPELINE = {"method": "pipeline", "num_sm": 16, "num_splits": 4}
_BULK = {"method": "bulk", "num_sm": 16}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "column": {"fprop": _RING, "dgrad": _BULK, "wgrad": _BULK},
    "row": {"fprop": _PIPELINE, "dgrad": _RING},
}
_KEYS = ("method", "num_splits", "num_sm", "aggregate", "comm_priority")
# Keys of TransformerEngine's kernels and number formats: accepted and ignored, so that a configuration can be shared.
# set_sm_margin: torch's matmuls call cublasGemmEx, which cannot limit the number of multiprocessors.
_IGNORED = (
    "is_reduce_scatter", "cga_size", "gemm_priority", "use_ce", "fp8_buf", "atomic_gemm",
    "pipeline_rs_overlap_first_gemm", "set_sm_margin",
)  # fmt: skip


def from_keys(owner: str, keys: Mapping[str, Any], kind: str) -> OverlapConfig:
    """Create a layer's configuration from TransformerEngine's keys.

        {"method": "pipeline", "num_splits": 4}                  the forward pass; defaults for the others
        {"fprop": {...}, "dgrad": {...}, "wgrad": {...}}         each pass
        {"qkv_fprop": {...}, "proj_dgrad": {...}, ...}           a full model; the layer uses the keys of its kind

    The methods ring_exchange, pipeline and bulk are "ring", "slices" and "bulk" here; num_splits is `chunks`, num_sm
    `num_comm_ctas`, comm_priority `priority`. Omitted keys have TransformerEngine's defaults for this kind of layer.
    """
    by_pass = {name: value for name, value in keys.items() if _pass_of(name)}
    if by_pass and len(by_pass) < len(keys):
        raise ValueError(f"{owner}: overlap mixes names of passes with keys of one pass, {list(keys)}; use either")
    own = (
        {_pass_of(name): value for name, value in by_pass.items() if _is_of(name, kind)} if by_pass else {"fprop": keys}
    )
    for name, value in own.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"{owner}: overlap[{name!r}] is {shown(value)}, expected a dict")
    defaults = DEFAULTS[kind]
    fprop, dgrad = (_with_defaults(owner, own.get(name, {}), defaults[name]) for name in ("fprop", "dgrad"))
    wgrad = own.get("wgrad", {}).get("method", "bulk")
    if wgrad not in ("bulk", "none", "external"):
        raise ValueError(f"{owner}: overlap: method of wgrad is {shown(wgrad)}, expected 'bulk'")
    return replace(_config_of(owner, fprop), dgrad=_config_of(owner, dgrad))


def _pass_of(name: Any) -> str:
    """Return "fprop" for "fprop" and "qkv_fprop"; "" if the name has no pass."""
    found = str(name).rpartition("_")[2]
    return found if found in _PASSES else ""


def _is_of(name: str, kind: str) -> bool:
    layer = name.rpartition("_")[0]
    return not layer or layer in _LAYERS[kind]


def _with_defaults(owner: str, keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults of the method to the keys, after checking them."""
    unknown = [key for key in keys if key not in _KEYS and key not in _IGNORED]
    if unknown:
        raise ValueError(f"{owner}: overlap has unknown key {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
    method = keys.get("method", defaults["method"])
    if not isinstance(method, str) or method not in _METHOD_OF:
        raise ValueError(f"{owner}: overlap: method is {shown(method)}, expected one of {', '.join(_METHOD_OF)}")
    base = next(each for each in (_RING, _PIPELINE, _BULK, {}) if each.get("method", method) == method)
    return {**base, **keys}


def _config_of(owner: str, keys: Mapping[str, Any]) -> OverlapConfig:
    method = _METHOD_OF[keys["method"]]
    try:
        return OverlapConfig(
            method=method,
            chunks=keys.get("num_splits") if method == "slices" else None,
            num_comm_ctas=keys.get("num_sm") or None,
            aggregate=bool(keys.get("aggregate", False)),
            priority=keys.get("comm_priority", -1),
        )
    except (ValueError, TypeError) as error:
        raise type(error)(f"{owner}: {error}") from None
