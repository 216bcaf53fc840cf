"""A few runs of the fault campaign (scripts/faults/campaign.py): every run ends as it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.campaign import campaign
from faults.judge import GOOD

# One run each of none, kill, stop, exception, early-exit, count, left-out, ctrl-c and in-split.
SEEDS = (21, 1, 44, 66, 26, 92, 33, 77, 38)


@pytest.mark.slow
def test_every_fault_is_reported_with_the_culprits_rank_and_line(tmp_path: Path) -> None:
    for verdict in campaign(SEEDS, tmp_path):
        assert verdict.outcome in GOOD, verdict
        assert verdict.named_rank in (None, True) and verdict.named_line in (None, True), verdict
