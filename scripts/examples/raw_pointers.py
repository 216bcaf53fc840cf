"""Pass memory without tensors: `(pointer, count, dtype)` from NumPy, cuda.core or CuPy, without torch.

    torchrun --standalone --nproc-per-node=2 scripts/examples/raw_pointers.py
    raw_pointers: numpy is right; cuda.core skipped: the communicator is on cpu; cupy skipped: the communicator ...

A pointer does not identify its device or stream, so pass `stream=`, and keep the memory alive until the stream has
completed the call. NumPy's memory works with the host library, cuda.core's and CuPy's with a GPU. The script skips what
cannot run here and prints the reason. You can also pass NumPy and CuPy arrays directly.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

import pynccl


def with_numpy(comm: pynccl.Communicator, values: Any) -> Any:
    x = values.copy()
    raw = (x.ctypes.data, x.size, x.dtype)
    comm.all_reduce(raw, raw, stream=0)  # in place; stream 0 is the caller's: complete on return
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
    raw = (int(buffer.handle), values.size, "float32")  # the dtype can be a name
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
        return x.get()  # on the same stream, so after the all_reduce


LIBRARIES = {"numpy": ("cpu", with_numpy), "cuda.core": ("cuda", with_cuda_core), "cupy": ("cuda", with_cupy)}


def main(comm: pynccl.Communicator) -> str:
    values = np.arange(1000, dtype=np.float32) + comm.rank
    expected = np.arange(1000) * comm.size + comm.size * (comm.size - 1) / 2
    results = []
    for name, (kind, all_reduce) in LIBRARIES.items():
        if not comm.device.startswith(kind):
            results.append(f"{name} skipped: the communicator is on {comm.device}")
        elif importlib.util.find_spec(name.partition(".")[0]) is None:
            results.append(f"{name} skipped: it is not installed")
        else:
            np.testing.assert_array_equal(all_reduce(comm, values), expected)
            results.append(f"{name} is right")
    return f"raw_pointers: {'; '.join(results)}"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
