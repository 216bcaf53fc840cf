"""Every name of cuda.core, cuda.bindings and torch's CUDA side that this project uses, and the versions checked for it.

cuda.core and cuda.bindings were checked in their Linux wheels, imported without a driver (1.0.0 with bindings 13.1.1 to
13.3.0 and 13.4.4); torch in the sources of its wheels (.py and .pyi), since only a build with CUDA has
`torch._C._cuda_*`. test_cuda_names.py finds the uses in the sources and compares the table with the installed packages.
"""

from __future__ import annotations

LOOKED_UP: dict[str, tuple[str, ...]] = {
    "cuda.core": ("0.5.0", "0.5.1", "0.6.0", "0.7.0", "1.0.0", "1.0.1", "1.1.1", "1.2.2"),
    "cuda.bindings": ("12.9.0", "12.9.10", "13.0.0", "13.0.3", "13.1.0", "13.4.4"),
    "torch": ("2.11.0", "2.13.0"),
}

# With the names of the arguments that this project passes.
CORE: tuple[str, ...] = (
    "Buffer.handle",
    "Device(device_id)",
    "Device.create_stream(options)",
    "Device.device_id",
    "Device.set_current()",
    "Event.handle",
    "Event.is_done",
    "LegacyPinnedMemoryResource()",
    "LegacyPinnedMemoryResource.allocate(size)",
    "Stream.close()",
    "Stream.device",
    "Stream.from_handle(handle)",
    "Stream.handle",
    "Stream.record(event)",
    "Stream.sync()",
    "Stream.wait(event_or_stream)",
    "StreamOptions(priority)",
)

BINDINGS: tuple[str, ...] = (
    "driver.CUcontext",
    "driver.CUresult.CUDA_ERROR_NOT_READY",
    "driver.CUresult.CUDA_SUCCESS",
    "driver.CUstream",
    "driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED",
    "driver.cuCtxGetCurrent",
    "driver.cuCtxSetCurrent",
    "driver.cuDeviceGet",
    "driver.cuDeviceGetCount",
    "driver.cuDeviceGetName",
    "driver.cuDeviceTotalMem",
    "driver.cuDriverGetVersion",
    "driver.cuInit",
    "driver.cuMemcpyDtoH",
    "driver.cuMemcpyHtoD",
    "driver.cuStreamIsCapturing",
    "driver.cuStreamQuery",
    "driver.cuThreadExchangeStreamCaptureMode",
    "nvml.device_get_count_v2",
    "nvml.device_get_handle_by_index_v2",
    "nvml.device_get_memory_info_v2",
    "nvml.device_get_name",
    "nvml.init_v2",
    "nvml.shutdown",
    "nvml.system_get_cuda_driver_version_v2",
    "nvml.system_get_driver_version",
)

TORCH: tuple[str, ...] = (
    "_C._cuda_customAllocator",
    "_C._cuda_getCurrentRawStream",
    "_C._cuda_getCurrentStream",
    "_C._cuda_getDevice",
    "_C._cuda_setStream",
    "cuda.CUDAGraph",
    "cuda.Event",
    "cuda.ExternalStream",
    "cuda.MemPool",
    "cuda.Stream",
    "cuda.Stream.record_event",
    "cuda.Stream.wait_event",
    "cuda.Stream.wait_stream",
    "cuda._sleep",
    "cuda.current_device",
    "cuda.current_stream",
    "cuda.default_stream",
    "cuda.default_generators",
    "cuda.device",
    "cuda.device_count",
    "cuda.empty_cache",
    "cuda.get_device_name",
    "cuda.get_device_properties",
    "cuda.get_rng_state",
    "cuda.graph",
    "cuda.is_available",
    "cuda.is_current_stream_capturing",
    "cuda.is_initialized",
    "cuda.max_memory_allocated",
    "cuda.mem_get_info",
    "cuda.memory_allocated",
    "cuda.memory_reserved",
    "cuda.nccl.version",
    "cuda.reset_peak_memory_stats",
    "cuda.set_device",
    "cuda.set_rng_state",
    "cuda.set_sync_debug_mode",
    "cuda.stream",
    "cuda.synchronize",
    "cuda.use_mem_pool",
)

# Name -> the checked versions that lack it, and what this project does there.
ABSENT: dict[str, tuple[tuple[str, ...], str]] = {
    "cuda.bindings.nvml": (
        ("12.9.0", "13.0.0", "13.0.3", "13.1.0"),
        "the doctor uses the driver API",
    ),
}

# (cuda.core, cuda.bindings) versions that cannot be imported together; devices.import_problem reports this.
BROKEN_PAIRS: tuple[tuple[str, str], ...] = (("1.0.0", "13.0.0"), ("1.0.0", "13.0.3"), ("1.0.0", "13.1.0"))
