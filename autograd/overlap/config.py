"""OverlapConfig: how a linear layer hides its communication. It can be created from TransformerEngine's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pynccl.bindings.values import INT_MAX, attribute, shown

METHODS = ("auto", "slices", "ring", "exchange", "bulk", "off")
# TransformerEngine's names for the methods.
_METHOD_OF = {"ring_exchange": "ring", "pipeline": "slices", "bulk": "bulk", "none": "off"}
MAX_COMPUTE_STREAMS = 2  # more are slower: each takes a share of the GPU from the last waves of the others


@dataclass(frozen=True)
class OverlapConfig:
    """How one layer overlaps. Every rank must pass the same one. A field that is None is chosen automatically.

    method           "auto"      a race: off, bulk, 2, 4 and 8 slices and the ring run twice in each of 10 rounds, in
                                 the first 262 calls of a pass; most leave after 2 or 4 rounds. Then all ranks keep
                                 the fastest; "off", unless another one takes 3% less in the median and less
                                 than "off" in two thirds of the rounds
                     "slices"    `chunks` collectives, each of a slice of every rank's rows
                     "ring"      N-1 steps of send and recv, each of one rank's rows
                     "exchange"  as slices, but sums use all_to_all and add in rank order, in at least float32: the
                                 same bits for every number of chunks
                     "bulk"      one collective, concurrent with a matmul that does not depend on it
                     "off"       no overlap
    chunks           number of slices of the rows, >= 1, for "slices" and "exchange"; None: 2, 4 and 8 are tried. With
                     "auto" the race has only this number of slices, and no ring
    aggregate        "ring" gathers the blocks of two ranks for each matmul
    compute_streams  1 or 2 streams that the matmuls of the slices alternate between; None: 2 on a GPU with slices
    num_comm_ctas    maximum number of thread blocks (CTAs) of a collective, as NCCL's maxCTAs. Before NCCL 2.31, and
                     for "ring", it needs a child communicator, which a layer splits off when it is constructed, and a
                     function in its first pass; the child ends with its parent
    priority         of the communication stream. Below 0, its kernels run before those of the matmuls' streams; from 0
                     on, they have the same priority
    deterministic    use only schedules that add in rank order ("exchange"), without a race
    save_gathered    keep the gathered input for the weight's gradient. False: the backward pass gathers it again,
                     hidden behind the gradient of the input, and the memory is free in between
    dgrad            configuration of the backward pass; None: that of the forward pass

    Raises ValueError or TypeError for invalid values.
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
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ValueError(f"OverlapConfig: method is {shown(self.method)}, expected one of {', '.join(METHODS)}")
        for name, maximum in (("chunks", None), ("compute_streams", MAX_COMPUTE_STREAMS), ("num_comm_ctas", None)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value <= (maximum or INT_MAX)):
                upto = f" and <= {maximum}" if maximum else ""
                raise ValueError(f"OverlapConfig: {name} is {shown(value)}, expected an integer >= 1{upto}, or None")
        for name in ("aggregate", "deterministic", "save_gathered"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"OverlapConfig: {name} is {shown(getattr(self, name))}, expected True or False")
        if type(self.priority) is not int:
            raise TypeError(f"OverlapConfig: priority is {shown(self.priority)}, expected an integer")
        if self.dgrad is not None and not isinstance(self.dgrad, OverlapConfig):
            raise TypeError(f"OverlapConfig: dgrad is {shown(self.dgrad)}, expected an OverlapConfig or None")
        if self.chunks is not None and self.method in ("ring", "bulk"):
            raise ValueError(
                f"OverlapConfig: chunks is {self.chunks}, but method {self.method!r} has no slices; omit chunks, or "
                'pass method "slices" or "exchange"'
            )
        if self.deterministic and self.method not in ("auto", "exchange", "off"):
            raise ValueError(
                f'OverlapConfig: deterministic=True requires method "auto", "exchange" or "off", but method is '
                f"{self.method!r}"
            )

        backward = self.dgrad
        if backward is not None:
            deterministic = backward.deterministic or (self.deterministic and backward.method == "auto")
            backward = replace(backward, save_gathered=self.save_gathered, deterministic=deterministic)
        object.__setattr__(self, "_backward", backward)

    @property
    def backward(self) -> OverlapConfig:
        """The configuration of the backward pass."""
        return self._backward or self  # type: ignore[attr-defined]


class Buffered(Protocol):
    """A configuration with its own buffers: CommOverlap, CommOverlapP2P."""

    @property
    def config(self) -> OverlapConfig: ...

    @property
    def workspace(self) -> Any: ...


# Values of `overlap=`; a dict has TransformerEngine's keys.
Overlap = Literal["auto", "off"] | OverlapConfig | Mapping[str, Any] | Buffered
OFF = OverlapConfig(method="off")
AUTO = OverlapConfig()


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
