"""OverlapConfig: how a linear layer hides its communication."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pynccl.bindings.values import INT_MAX, INT_MIN, instance, integer, shown

METHODS = ("auto", "slices", "ring", "exchange", "bulk", "off")
MAX_COMPUTE_STREAMS = 2  # more are slower: each takes a share of the GPU from the last waves of the others


@dataclass(frozen=True)
class OverlapConfig:
    """How one layer overlaps. Every rank must pass the same one. A field that is None is chosen automatically.

    method           "auto"      a race: off, bulk, 2, 4 and 8 slices and the ring run twice in each of 10 rounds, in
                                 the first 262 calls of a pass, 282 on a GPU; most leave after 2 or 4 rounds. Then all
                                 ranks keep the fastest; "off", unless another one takes 3% less in the median and less
                                 than "off" in two thirds of the rounds
                     "slices"    `chunks` collectives, each of a slice of every rank's rows
                     "ring"      N-1 steps of send and recv, each of one rank's rows; twice as many for an all-reduce
                     "exchange"  as slices, but sums use all_to_all and add in rank order, in at least float32: the
                                 same bits for every number of chunks
                     "bulk"      one collective, concurrent with a matmul that does not depend on it
                     "off"       no overlap
    chunks           number of slices of the rows, >= 1, for "slices" and "exchange"; None: 2, 4 and 8 are tried. With
                     "auto" the race has only this number of slices, and no ring; if deterministic, it has no effect
    aggregate        "ring" gathers the blocks of two ranks for each matmul
    compute_streams  1 or 2 streams that the matmuls alternate between; None: 2 on a GPU with several slices or
                     a ring that gathers
    num_comm_ctas    maximum number of thread blocks (CTAs) of a collective, as NCCL's maxCTAs. Before NCCL 2.31, and
                     for "ring", it needs a child communicator, which a layer splits off when it is constructed, and a
                     function in its first pass; the child ends with its parent
    priority         of the communication stream. Below 0, its kernels run before those of the matmuls' streams; from 0
                     on, they have the same priority
    deterministic    use only schedules that add in rank order ("exchange"), without a race. "auto": one exchange for
                     sums, "off" for gathers
    save_gathered    keep the gathered input for the weight's gradient. False: the backward pass gathers it again,
                     behind the gradient of the input; the layers of a communicator share one buffer for it
    dgrad            configuration of the backward pass; None: that of the forward pass. save_gathered is that of the
                     forward pass, and so is deterministic if the method is "auto"

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
        limits = {"chunks": INT_MAX, "compute_streams": MAX_COMPUTE_STREAMS, "num_comm_ctas": INT_MAX}
        for name, maximum in limits.items():
            if (value := getattr(self, name)) is not None:
                upto = "" if maximum == INT_MAX else f" and <= {maximum}"
                value = integer(value, f"OverlapConfig: {name}", 1, maximum, f"an integer >= 1{upto}, or None")
                object.__setattr__(self, name, value)
        for name in ("aggregate", "deterministic", "save_gathered"):
            instance(getattr(self, name), bool, f"OverlapConfig: {name}", "True or False")
        priority = integer(self.priority, "OverlapConfig: priority", INT_MIN, INT_MAX)
        object.__setattr__(self, "priority", priority)
        instance(self.dgrad, (OverlapConfig, type(None)), "OverlapConfig: dgrad", "an OverlapConfig or None")
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


AUTO = OverlapConfig()
OFF = OverlapConfig(method="off")
