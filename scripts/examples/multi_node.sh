#!/usr/bin/env bash
# Start a program on several nodes, one rank per GPU, with one of three launchers. SCRIPT can be hello.py.
#
#   multi_node.sh torchrun HEAD NODES RANKS SCRIPT [ARG ...]    run the same command on every node: HEAD is the name of
#                                                               one of them, RANKS the number of ranks per node
#   sbatch --nodes=2 --ntasks-per-node=8 multi_node.sh srun SCRIPT [ARG ...]            or srun inside salloc
#   multi_node.sh mpirun HOST:RANKS,HOST:RANKS SCRIPT [ARG ...]                         Open MPI, MPICH, Intel MPI
#
# pynccl.init() needs RANK, WORLD_SIZE, LOCAL_RANK (selects the GPU), and MASTER_ADDR and MASTER_PORT, where rank 0 is
# reachable. torchrun sets them; SLURM and MPI use other names for the first three, which this script translates. Every
# rank must see all GPUs of its node: omit --gpus-per-task, which hides them. PYTHON (python3) is the interpreter,
# PORT (29500) the port. With several networks, set NCCL_SOCKET_IFNAME=eth0. NCCL_DEBUG=INFO logs what NCCL does.
set -euo pipefail

PYTHON=${PYTHON:-python3}
export MASTER_PORT=${PORT:-29500}
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Translates the launcher's variable names on each rank. SLURM's come last: mpirun in an allocation inherits them.
AS_RANK='export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-}}}
export WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_NTASKS:-}}}
export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-}}}
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
    case $(mpirun --version) in # each forwards only the variables named
    *"Open MPI"*) forward=(-x MASTER_ADDR -x MASTER_PORT) ;;
    *) forward=(-genvlist MASTER_ADDR,MASTER_PORT) ;;
    esac
    exec mpirun --host "$hosts" "${forward[@]}" bash -c "$AS_RANK" rank "$PYTHON" "$@"
    ;;
*) usage ;;
esac
