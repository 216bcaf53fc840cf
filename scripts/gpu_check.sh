#!/usr/bin/env bash
# Everything that needs a GPU, offline, in three calls that each take at most 8.5 minutes. Not yet run on a GPU.
#
#   scripts/gpu_check.sh probe     versions, doctor; what only a GPU can show: streams, trace, watch, overlap, bad ends
#   scripts/gpu_check.sh ranks     the rest of tests/gpu with 1, 2 and 4 ranks (sharing one GPU if there is only one)
#   scripts/gpu_check.sh train     train.py --check; a hung peer; a profile; PYNCCL_CHECK=1; launch overhead; perf
#   scripts/gpu_check.sh           all three in a row
#   scripts/gpu_check.sh tests_4   single steps, for another try; --list shows them and what they run
#   OUT=results PYTHON=python3.12 scripts/gpu_check.sh probe --budget 300 --nccl-env NCCL_SOCKET_IFNAME=lo
#
# Results: gpu_check_CALL.json and gpu_check_CALL.log in $OUT (default out), at most 8 files in all; as a page:
# scripts/gpu_check.sh --report $OUT/gpu_check_*.json. PYTHON (python3) must have torch for CUDA, libnccl, cuda-core and
# pytest; this repository is installed into it, without dependencies. Exit code: 0 if nothing failed, also without a GPU,
# where every step is skipped; scripts/gpu/gpu_check.py has the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" scripts/gpu/gpu_check.py "$@"
