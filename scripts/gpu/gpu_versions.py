"""What is installed on a machine with a GPU, as gpu_check reports it.

examples:
  python scripts/gpu/gpu_versions.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import torch

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

PACKAGES = (
    *("cuda-core", "cuda-bindings", "cuda-python", "cuda-pathfinder", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    *("nccl4py", "cupy-cuda13x", "mpi4py", "numpy", "triton", "pytest", "pytest-timeout", "setuptools", "pip"),
)


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def versions() -> dict[str, object]:
    library = pynccl.load()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, library.version)),
        "libnccl": library.path,
        "origin": library.origin,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "imported from": [os.path.realpath(str(module.__file__)) for module in (pynccl, ad)],
        "packages": packages(),
    }


def main() -> None:
    command.Parser(__doc__).parse_args()
    try:
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=15, check=False).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}")
    print("RESULT " + json.dumps(versions()))


if __name__ == "__main__":
    command.run(main)
