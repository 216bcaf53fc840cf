#!/usr/bin/env bash
# A program on several machines, a rank per GPU, by each of the three launchers that there are. SCRIPT may be hello.py.
#
#   multi_node.sh torchrun HEAD NODES RANKS SCRIPT [ARG ...]    the same line on every machine: HEAD is the name of one of
#                                                               them, RANKS how many each has
#   sbatch --nodes=2 --ntasks-per-node=8 multi_node.sh srun SCRIPT [ARG ...]            or srun within salloc
#   multi_node.sh mpirun HOST:RANKS,HOST:RANKS SCRIPT [ARG ...]                         Open MPI, MPICH, Intel MPI
#
# pynccl.init() needs RANK, WORLD_SIZE, LOCAL_RANK (which GPU), MASTER_ADDR and MASTER_PORT, where rank 0 can be reached.
# torchrun sets them; SLURM and MPI have names of their own for the first three, which are handed on below. Every rank has
# to see all GPUs of its machine: leave out --gpus-per-task, which shows it one. PYTHON (python3) is the interpreter, PORT
# (29500) the port. Several networks: NCCL_SOCKET_IFNAME=eth0. What NCCL does: NCCL_DEBUG=INFO.
set -euo pipefail

PYTHON=${PYTHON:-python3}
export MASTER_PORT=${PORT:-29500}
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# In each rank: the launcher's names, as a launch has them.
AS_RANK='export RANK=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}}
export WORLD_SIZE=${SLURM_NTASKS:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}}
export LOCAL_RANK=${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-}}}
exec "$@"'

launcher=${1:-}
case $launcher in
torchrun)
    [ $# -ge 5 ] || usage
    head=$2 nodes=$3 ranks=$4
    shift 4
    exec "$PYTHON" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$ranks" \
        --rdzv-backend=c10d --rdzv-endpoint="$head:$MASTER_PORT" --rdzv-id=pynccl "$@"
    ;;
srun)
    [ $# -ge 2 ] || usage
    shift
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    export MASTER_ADDR
    exec srun --kill-on-bad-exit=1 bash -c "$AS_RANK" rank "$PYTHON" "$@"
    ;;
mpirun)
    [ $# -ge 3 ] || usage
    hosts=$2
    shift 2
    export MASTER_ADDR=${hosts%%[:,]*}
    case $(mpirun --version) in # each hands on what is named
    *"Open MPI"*) forward=(-x MASTER_ADDR -x MASTER_PORT) ;;
    *) forward=(-genvlist MASTER_ADDR,MASTER_PORT) ;;
    esac
    exec mpirun --host "$hosts" "${forward[@]}" bash -c "$AS_RANK" rank "$PYTHON" "$@"
    ;;
*) usage ;;
esac
