"""ModelReport: what a comparison of a sharded model with the unsharded one has found, to be read."""

from __future__ import annotations

import math
from typing import NamedTuple


class Difference(NamedTuple):
    """A gradient that differs from the unsharded model's."""

    name: str  # of the parameter
    error: float  # the largest difference on any rank, relative to the largest element of the whole gradient
    where: str  # the largest difference: rank, index in the whole parameter, the two values
    explanation: str | None  # "factor", "missing sum", "missing rank"; None: none of them
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.where}, {self.error:.3%} of the gradient's largest element\n    {self.advice}"


class ModelReport(NamedTuple):
    """What `check_model` found, equal on all ranks; str() of it is meant to be read."""

    parameters: int  # compared
    error: float  # the largest of all gradients, each relative to its largest element
    losses: tuple[float, ...]  # of the sharded model, rank by rank
    reference_loss: float
    wrong: int  # gradients that differ
    differences: tuple[Difference, ...]  # the first of them, in the order of definition

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.parameters} gradients equal the reference's; the largest error is {self.error:.2g}"
        first = self.differences[0]
        text = f"{self.wrong} of {self.parameters} gradients differ from the reference's. The first is\n  {first}"
        explained = next((one for one in self.differences if one.explanation), first)
        if explained is not first:
            text += f"\nThe first that is explained is\n  {explained}"
        if not self._losses_agree():
            found = ", ".join(f"{loss:.9g}" for loss in self.losses)
            text += (
                f"\nThe losses differ, too: {found} on the ranks, {self.reference_loss:.9g} of the reference. Look at "
                "the forward pass first."
            )
        return text

    def _losses_agree(self) -> bool:
        """Each is the reference's, or a share whose sum or mean is."""
        total = math.fsum(self.losses)
        wholes = (self.losses, (total,), (total / len(self.losses),))
        return any(all(math.isclose(one, self.reference_loss, rel_tol=1e-2) for one in whole) for whole in wholes)


class ModelError(AssertionError):
    """Gradients differ. Raised on every rank alike; `report` is a ModelReport, and the text is its text."""

    def __init__(self, report: ModelReport) -> None:
        super().__init__(report)
        self.report = report
