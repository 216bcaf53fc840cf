#!/usr/bin/env bash
# Everything that needs a GPU, in one command, offline: the GPU tests with 1 rank, then with 2 and 4 (sharing one GPU if
# there is only one), then train.py beside the unsharded model. Not yet run on a GPU.
#
#   scripts/gpu_check.sh              results: out/gpu_check.json, or $OUT/gpu_check.json
#   PYTHON=python3.12 scripts/gpu_check.sh
#
# PYTHON (python3) must have torch for CUDA, libnccl, cuda-core, pytest and pytest-timeout; this repository is installed
# into it, without dependencies. Exit code: 0 if nothing failed, also without a GPU, where every step is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py
