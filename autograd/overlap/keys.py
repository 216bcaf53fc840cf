"""The values of `overlap=`: "auto", "off", an OverlapConfig, an object with buffers, or TransformerEngine's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from pynccl.bindings.values import attribute, instance, shown

from .config import AUTO, OFF, OverlapConfig


class Buffered(Protocol):
    """A configuration with its own buffers: CommOverlap, CommOverlapP2P."""

    config: OverlapConfig
    buffers: Any


# Values of `overlap=`; a dict has TransformerEngine's keys.
Overlap = Literal["auto", "off"] | OverlapConfig | Mapping[str, Any] | Buffered


def as_config(owner: str, overlap: Any, kind: str) -> OverlapConfig:
    """Convert the value of `overlap=` to an OverlapConfig.

    kind  "column" or "row": selects TransformerEngine's defaults"""
    own = overlap if isinstance(overlap, OverlapConfig) else attribute(overlap, "config")
    if isinstance(own, OverlapConfig):
        return own
    if isinstance(overlap, Mapping):
        return from_keys(owner, overlap, kind)
    if isinstance(overlap, str) and overlap in ("auto", "off"):
        return AUTO if overlap == "auto" else OFF
    expected = '"auto", "off", an OverlapConfig, a CommOverlap, or a dict with the keys of TransformerEngine'
    raise ValueError(f"{owner}: overlap is {shown(overlap)}, expected {expected}")


# TransformerEngine's methods, each with its defaults for the other keys.
_RING = OverlapConfig("ring", num_comm_ctas=1)
_PIPELINE = OverlapConfig("slices", chunks=4, num_comm_ctas=16)
_BULK = OverlapConfig("bulk", num_comm_ctas=16)
_METHODS = {"ring_exchange": _RING, "pipeline": _PIPELINE, "bulk": _BULK, "none": OFF}
# Its layers of each kind, and their default methods.
_LAYERS = {"column": ("qkv", "fc1"), "row": ("proj", "fc2")}
_DEFAULTS = {"column": {"fprop": _RING, "dgrad": _BULK}, "row": {"fprop": _PIPELINE, "dgrad": _RING}}
_PASSES = ("fprop", "dgrad", "wgrad")
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
    has_pass = [str(name).rpartition("_")[2] in _PASSES for name in keys]
    if not any(has_pass):
        keys = {"fprop": keys}
    elif not all(has_pass):
        raise ValueError(f"{owner}: overlap mixes names of passes with keys of one pass, {list(keys)}; use either")
    own: dict[str, Any] = {}  # pass -> its keys, for this kind of layer
    for name, value in keys.items():
        layer, _, of_pass = str(name).rpartition("_")
        if layer in ("", *_LAYERS[kind]):
            instance(value, Mapping, f"{owner}: overlap[{name!r}]", "a dict")
            own[of_pass] = value
    wgrad = own.get("wgrad", {}).get("method", "bulk")
    if wgrad not in ("bulk", "none", "external"):
        raise ValueError(f"{owner}: overlap: method of wgrad is {shown(wgrad)}, expected 'bulk'")
    fprop, dgrad = (_config_of(owner, own.get(name, {}), default) for name, default in _DEFAULTS[kind].items())
    return replace(fprop, dgrad=dgrad)


def _config_of(owner: str, keys: Mapping[str, Any], default: OverlapConfig) -> OverlapConfig:
    """Convert the keys of one pass. Without a method, the others have the defaults of `default`."""
    unknown = [key for key in keys if key not in _KEYS and key not in _IGNORED]
    if unknown:
        raise ValueError(f"{owner}: overlap has unknown key {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
    if "method" in keys:
        method = keys["method"]
        if not isinstance(method, str) or method not in _METHODS:
            raise ValueError(f"{owner}: overlap: method is {shown(method)}, expected one of {', '.join(_METHODS)}")
        default = _METHODS[method]
    try:
        return replace(
            default,
            chunks=keys.get("num_splits", default.chunks) if default.method == "slices" else None,
            num_comm_ctas=keys.get("num_sm", default.num_comm_ctas) or None,
            aggregate=bool(keys.get("aggregate", False)),
            priority=keys.get("comm_priority", default.priority),
        )
    except (ValueError, TypeError) as error:
        raise type(error)(f"{owner}: {error}") from None
