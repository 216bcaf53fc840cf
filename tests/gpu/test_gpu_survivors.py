"""A rank is killed on a GPU: the others abort what is in flight, meet again and train on. Over sockets."""

from __future__ import annotations

import pytest
from gpu.launches import ProcessResult, run_ranks

pytestmark = pytest.mark.usefixtures("own_launch")

# Rank 0 serves the store, so rank 2 dies. `where` says what the others are in then.
PROGRAM = """
import os, signal, sys, time, torch, pynccl
where = sys.argv[1]
comm = pynccl.init(device=0, elastic=True)
torch.cuda.set_device(comm.device)
group, side = comm.split(0), pynccl.create_stream(0)
weight, step = torch.zeros(1 << 16, device=comm.device), 0
sums = []
while step < 6:
    try:
        grad = torch.full_like(weight, 10.0 ** comm.rank)
        if step == 3 and comm.generation == 0:
            if comm.rank == 2:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            if where == "launches":
                for _ in range(3000):  # more than the launch queue holds
                    comm.all_reduce(grad)
            elif where == "group":
                group.all_reduce(grad, stream=side)
                side.synchronize()
            elif where == "elsewhere" and comm.rank == 1:
                while True:
                    time.sleep(0.1)
                    comm.check_async_error()
        comm.all_reduce(grad, grad)
        comm.commit(timeout=30)
        weight += grad
        step += 1
        sums.append(grad[0].item())
    except pynccl.NcclError as error:
        began = time.monotonic()
        comm = comm.survivors(timeout=30)
        print(comm.verdict, f"{time.monotonic() - began:.2f} s", type(error).__name__, file=sys.stderr)
        step = comm.agree(step)
        comm.sync_state(weight)
print(comm.generation, comm.rank, comm.size, sums, bool((weight == 366.0).all()))
"""


@pytest.mark.parametrize("where", ["commit", "launches", "group", "elsewhere"])
def test_the_ranks_that_are_left_train_on(where: str) -> None:
    killed: ProcessResult
    *left, killed = run_ranks(["-c", PROGRAM, where], 3, 80, NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1)
    assert killed.code == -9
    for rank, done in enumerate(left):
        assert done.code == 0, done.err
        assert done.out == f"1 {rank} 2 {[111.0] * 3 + [11.0] * 3} True\n"
        assert "rank 2's process" in done.err
