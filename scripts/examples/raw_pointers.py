"""Memory that no tensor owns: `(pointer, count, dtype)` of NumPy, cuda.core or CuPy, without torch.

    torchrun --standalone --nproc-per-node=2 scripts/examples/raw_pointers.py
    raw_pointers: numpy is right; cuda.core skipped: the communicator is on cpu; cupy skipped: the communicator ...

A pointer says neither where it lies nor which stream its memory is worked on, so `stream=` has to be given, and the
memory has to live until the stream has passed the call. NumPy's memory is for the host library; cuda.core's and CuPy's
for a GPU. What cannot run here is skipped, and the line says why. NumPy and CuPy arrays can be passed as they are, too.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

import pynccl


def with_numpy(comm: pynccl.Communicator, values: Any) -> Any:
    x = values.copy()
    raw = (x.ctypes.data, x.size, x.dtype)
    comm.all_reduce(raw, raw, stream=0)  # in place; 0 is the caller: done when the call returns
    return x


def with_cuda_core(comm: pynccl.Communicator, values: Any) -> Any:
    from cuda.bindings import driver
    from cuda.core import Device

    device = Device(int(comm.device.partition(":")[2]))
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(values.nbytes, stream=stream)
    stream.sync()
    driver.cuMemcpyHtoD(int(buffer.handle), values.ctypes.data, values.nbytes)
    raw = (int(buffer.handle), values.size, "float32")  # a dtype's name will do
    comm.all_reduce(raw, raw, stream=stream)
    stream.sync()
    found = np.empty_like(values)
    driver.cuMemcpyDtoH(found.ctypes.data, int(buffer.handle), values.nbytes)
    buffer.close(stream)
    return found


def with_cupy(comm: pynccl.Communicator, values: Any) -> Any:
    import cupy

    with cupy.cuda.Device(int(comm.device.partition(":")[2])):
        x = cupy.asarray(values)
        raw = (x.data.ptr, x.size, x.dtype)
        comm.all_reduce(raw, raw, stream=cupy.cuda.get_current_stream())
        return x.get()  # on the same stream, so behind the all_reduce


WAYS = {"numpy": ("cpu", with_numpy), "cuda.core": ("cuda", with_cuda_core), "cupy": ("cuda", with_cupy)}


def main(comm: pynccl.Communicator) -> str:
    values = np.arange(1000, dtype=np.float32) + comm.rank
    expected = np.arange(1000) * comm.size + comm.size * (comm.size - 1) / 2
    said = []
    for name, (kind, way) in WAYS.items():
        if not comm.device.startswith(kind):
            said.append(f"{name} skipped: the communicator is on {comm.device}")
        elif importlib.util.find_spec(name.partition(".")[0]) is None:
            said.append(f"{name} skipped: it is not installed")
        else:
            np.testing.assert_array_equal(way(comm, values), expected)
            said.append(f"{name} is right")
    return f"raw_pointers: {'; '.join(said)}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
