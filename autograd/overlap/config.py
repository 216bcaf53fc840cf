"""OverlapConfig: how a linear layer is to hide its communication; also from TransformerEngine's configuration keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pynccl.bindings.values import attribute, shown

METHODS = ("auto", "slices", "ring", "exchange", "bulk", "off")
# TransformerEngine's names of them.
_METHOD_OF = {"ring_exchange": "ring", "pipeline": "slices", "bulk": "bulk", "none": "off"}
MOST_COMPUTE_STREAMS = 2  # more of them lose: each takes a share of the GPU from the others' last waves


@dataclass(frozen=True)
class OverlapConfig:
    """How one layer overlaps. Every rank must pass the same; what is None, is chosen.

    method           "auto"      off, bulk, 2, 4 and 8 slices and the ring take turns in the first calls, at most 24 of
                                 each pass; then all ranks keep the fastest, which may be "off"
                     "slices"    `chunks` collectives, each of a slice of every rank's rows
                     "ring"      N-1 steps of send and recv, each of one rank's rows
                     "exchange"  as slices, but what is summed travels by all_to_all and is added up in the order of
                                 the ranks, in float32 at least: the same bits for every number of chunks
                     "bulk"      the collective uncut, beside a matmul that does not need it
                     "off"       one after the other
    chunks           slices that the rows are cut into, >= 1; for "slices" and "exchange". None: 2, 4 and 8 are tried
    aggregate        "ring" gathers the blocks of two ranks for each matmul
    compute_streams  1 or 2, on which the matmuls of the slices take turns; None: 2 on a GPU where there are slices
    num_comm_ctas    most thread blocks (CTAs) that a collective takes from the matmul, as NCCL's maxCTAs. Before NCCL
                     2.31, and of "ring", it needs a communicator of its own, which a layer splits off when it is made,
                     and a function in its first pass; it ends with the communicator
    priority         of the communication's stream: below 0 it runs before the matmuls' streams, from 0 on as they do
    deterministic    sums only by "exchange", and "auto" tries no way that rounds otherwise
    save_gathered    keep what the forward pass has gathered for the weight's gradient; else it is gathered once more
                     in the backward pass, beside the gradient of the input, and the memory is free in between
    dgrad            the backward pass, if it is to go otherwise than the forward pass

    ValueError, TypeError for what has no meaning.
    """

    method: str = "auto"
    chunks: int | None = None
    aggregate: bool = False
    compute_streams: int | None = None
    num_comm_ctas: int | None = None
    priority: int = -1
    deterministic: bool = False
    save_gathered: bool = True
    dgrad: OverlapConfig | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"OverlapConfig: method is {shown(self.method)}, expected one of {', '.join(METHODS)}")
        for name, most in (("chunks", None), ("compute_streams", MOST_COMPUTE_STREAMS), ("num_comm_ctas", None)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1 and (most is None or value <= most)):
                upto = f" and <= {most}" if most else ""
                raise ValueError(f"OverlapConfig: {name} is {shown(value)}, expected an integer >= 1{upto}, or None")
        for name in ("aggregate", "deterministic", "save_gathered"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"OverlapConfig: {name} is {shown(getattr(self, name))}, expected True or False")
        if type(self.priority) is not int:
            raise TypeError(f"OverlapConfig: priority is {shown(self.priority)}, expected an integer")
        if self.dgrad is not None and not isinstance(self.dgrad, OverlapConfig):
            raise TypeError(f"OverlapConfig: dgrad is {shown(self.dgrad)}, expected an OverlapConfig or None")
        if self.deterministic and self.method not in ("auto", "exchange", "off"):
            raise ValueError(
                f'OverlapConfig: deterministic=True sums by method "exchange", but method is {self.method!r}; pass '
                '"auto" or "exchange"'
            )

        backward = self.dgrad
        if backward is not None:
            deterministic = backward.deterministic or (self.deterministic and backward.method == "auto")
            backward = replace(backward, save_gathered=self.save_gathered, deterministic=deterministic)
        object.__setattr__(self, "_backward", backward)

    @property
    def backward(self) -> OverlapConfig:
        """That of the backward pass."""
        return self._backward or self  # type: ignore[attr-defined]


class Buffered(Protocol):
    """A configuration with buffers of its own: CommOverlap, CommOverlapP2P."""

    @property
    def config(self) -> OverlapConfig: ...

    @property
    def workspace(self) -> Any: ...


# What `overlap=` takes; a dict is one of TransformerEngine's keys.
Overlap = Literal["auto", "off"] | OverlapConfig | Mapping[str, Any] | Buffered
OFF = OverlapConfig(method="off")
AUTO = OverlapConfig()


def as_config(owner: str, overlap: Any, kind: str) -> OverlapConfig:
    """What `overlap=` of a layer says: "auto", "off", an OverlapConfig, or a dict of TransformerEngine's keys.

    kind  "column" or "row": which of TransformerEngine's defaults are meant"""
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
        f'{owner}: overlap is {shown(overlap)}, expected "auto", "off", an OverlapConfig, or a dict of '
        "TransformerEngine's keys, or a CommOverlap"
    )


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
# Of its own kernels and number formats, which have no meaning here: accepted, so that a configuration can be shared.
# set_sm_margin: torch's matmuls go through cublasGemmEx, which takes no number of multiprocessors.
_IGNORED = (
    "is_reduce_scatter", "cga_size", "gemm_priority", "use_ce", "fp8_buf", "atomic_gemm",
    "pipeline_rs_overlap_first_gemm", "set_sm_margin",
)  # fmt: skip


def from_keys(owner: str, keys: Mapping[str, Any], kind: str) -> OverlapConfig:
    """A layer's configuration from TransformerEngine's keys: of its forward pass, or of each pass by name.

        {"method": "pipeline", "num_splits": 4}                  the forward pass; the others by default
        {"fprop": {...}, "dgrad": {...}, "wgrad": {...}}         each
        {"qkv_fprop": {...}, "proj_dgrad": {...}, ...}           the same of a whole model: this layer's are taken

    method ring_exchange / pipeline / bulk are "ring", "slices" and "bulk" here, num_splits `chunks`, num_sm
    `num_comm_ctas`, comm_priority `priority`. What is left out is TransformerEngine's default for this kind of layer.
    """
    by_pass = {name: value for name, value in keys.items() if _pass_of(name)}
    if by_pass and len(by_pass) < len(keys):
        raise ValueError(f"{owner}: overlap has keys of passes and of one pass, {list(keys)}; pass either")
    own = (
        {_pass_of(name): value for name, value in by_pass.items() if _is_of(name, kind)} if by_pass else {"fprop": keys}
    )
    for name, value in own.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"{owner}: overlap[{name!r}] is {shown(value)}, expected a dict")
    defaults = DEFAULTS[kind]
    fprop, dgrad = (_known(owner, own.get(name, {}), defaults[name]) for name in ("fprop", "dgrad"))
    wgrad = own.get("wgrad", {}).get("method", "bulk")
    if wgrad not in ("bulk", "none", "external"):
        raise ValueError(f"{owner}: overlap: method of wgrad is {shown(wgrad)}, expected 'bulk'")
    return replace(_one(owner, fprop), dgrad=_one(owner, dgrad))


def _pass_of(name: Any) -> str:
    """fprop of "fprop" and of "qkv_fprop"; "" of what names no pass."""
    found = str(name).rpartition("_")[2]
    return found if found in _PASSES else ""


def _is_of(name: str, kind: str) -> bool:
    layer = name.rpartition("_")[0]
    return not layer or layer in _LAYERS[kind]


def _known(owner: str, keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys; those of another method than the default's do not go on from its defaults."""
    unknown = [key for key in keys if key not in _KEYS and key not in _IGNORED]
    if unknown:
        raise ValueError(f"{owner}: overlap has no key {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
    method = keys.get("method", defaults["method"])
    if not isinstance(method, str) or method not in _METHOD_OF:
        raise ValueError(f"{owner}: overlap: method is {shown(method)}, expected one of {', '.join(_METHOD_OF)}")
    base = next(each for each in (_RING, _PIPELINE, _BULK, {}) if each.get("method", method) == method)
    return {**base, **keys}


def _one(owner: str, keys: Mapping[str, Any]) -> OverlapConfig:
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
