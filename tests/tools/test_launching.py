"""docs/launching.md: each command, file and program of the page starts ranks that find each other, on CPUs.

Two nodes are namespaces (tests/support/nodes.py). SLURM and Kubeflow's operator are replaced by programs, or a
function, that set the variables which the originals set.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pages
import pytest
from nodes import Node, two_nodes
from rendezvous_servers import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "launching.md"
JOB = ROOT / "scripts" / "examples" / "pytorchjob.yaml"
SECONDS = 300  # for a busy machine
OF_A_LAUNCHER = ("SLURM_", "OMPI_", "PMI_", "PET_")  # the tests may run in a job
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "PYNCCL_LIBRARY": "host",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ADDRESS": "local",
}
pytestmark = pytest.mark.timeout(400)
HELLO = "scripts/examples/hello.py"
# The beginnings of all commands of the page that start ranks. Each is run below.
COMMANDS = (
    *("torchrun --standalone", "torchrun --nnodes", "scripts/examples/multi_node.sh torchrun", "sbatch"),
    *("scripts/examples/multi_node.sh mpirun", "mpirun -n 2 python mpi.py", "python -m torch.distributed.launch"),
)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def command(start: str) -> str:
    """Return the command of the page that begins so, with 2 ranks a node in place of 8."""
    [line] = {text for _, text in pages.commands(PAGE) if text.startswith(start)}
    return re.sub(r"\b8\b", "2", line)


def block(first: str) -> str:
    """Return the fenced block of the page with this first line."""
    [text] = [one.text for one in pages.blocks(PAGE) if one.text.startswith(first)]
    return text


def run(*commands: Sequence[str | Path], folder: Path = ROOT, **variables: str) -> list[str]:
    """Run the commands at the same time. Return the lines that they print; each must exit with 0."""
    options: dict[str, Any] = {"cwd": folder, "env": ENVIRONMENT | variables, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(["timeout", f"{SECONDS}", *words], **options, **pipes) for words in commands]
    ended = [(process.communicate(), process.returncode) for process in started]
    for (out, err), code in ended:
        assert code == 0, f"{code}: {out}{err}"
    return [line for (out, _), _ in ended for line in out.splitlines()]


def ranks_in(lines: list[str]) -> list[str]:
    """Return what the page's programs print. Launchers add text, and may lose the end of a line among two ranks."""
    return sorted(re.findall(r"rank \d of 2: 2", "\n".join(lines)))


def hello(*hosts: str) -> list[str]:
    """Return the lines that hello.py prints, one for the host of each rank."""
    n = len(hosts)
    total = n * (n + 1) // 2
    return [f"hello: rank {rank} of {n} on cpu of {host}: the sum is {total}" for rank, host in enumerate(hosts)]


def test_every_command_of_the_page_is_run_here() -> None:
    texts = {text for _, text in pages.commands(PAGE) if re.search(r"\.py\b|launch$", text)}
    assert len(texts) == len(COMMANDS) and all(command(start) for start in COMMANDS)


# ---------------------------------------------------------------------------------------------- torchrun


@pytest.mark.slow
def test_torchrun_on_one_node_and_on_two(nodes: tuple[Node, Node]) -> None:
    here = command("torchrun --standalone").replace("--standalone", "--standalone --local-addr=127.0.0.1")
    assert sorted(run(shlex.split(here))) == hello(*[socket.gethostname()] * 2)
    everywhere = hello("node0", "node0", "node1", "node1")
    first = command("torchrun --nnodes")
    second = first.replace("--node-rank=0", "--node-rank=1")
    assert (
        sorted(run(*(node.command(*shlex.split(line)) for node, line in zip(nodes, (first, second), strict=True))))
        == everywhere
    )
    same = shlex.split(command("scripts/examples/multi_node.sh torchrun"))
    assert sorted(run(*(node.command(*same) for node in nodes))) == everywhere


@pytest.mark.slow
def test_without_names_torchrun_needs_a_node_rank_and_addresses(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    first = command("torchrun --nnodes").replace("node0", "10.77.0.1")
    second = first.replace("--node-rank=0", "--node-rank=1")
    lines = run(*(node.command(*shlex.split(line)) for node, line in zip(nodes, (first, second), strict=True)))
    assert sorted(lines) == hello("node0", "node0", "node1", "node1")
    same = shlex.split(command("scripts/examples/multi_node.sh torchrun").replace("node0", "10.77.0.1"))
    done = subprocess.run(
        nodes[0].command(*same), env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "socket.gaierror: [Errno -3] Temporary failure in name resolution" in done.stderr


@pytest.mark.slow
def test_launch_and_accelerate_run_torchrun(tmp_path: Path) -> None:
    expected = hello(*[socket.gethostname()] * 2)
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", HELLO]
    assert sorted(run([*shlex.split(command("python -m torch.distributed.launch")), *options])) == expected
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("needs accelerate (pip install accelerate)")
    ports = ["--num_processes=2", f"--main_process_port={free_port()}", HELLO]
    assert sorted(run(["accelerate", "launch", "--multi_gpu", *ports])) == expected


# ---------------------------------------------------------------------------------------------- errors

LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
# Variables, and what the page quotes of the error; "..." on the page is anything.
ERRORS: list[tuple[dict[str, str], str]] = [
    ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
    ({"SLURM_PROCID": "1"}, "srun sets SLURM_PROCID instead"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "mpirun sets OMPI_COMM_WORLD_RANK instead"),
    ({"PET_NODE_RANK": "1"}, "Kubeflow without torchrun sets PET_NODE_RANK instead"),
    (LAUNCH, "`rank 0 could not serve the store` ... `Address already in use`"),
]


@pytest.mark.slow
def test_the_page_quotes_the_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        options = ["--node-rank=0", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", HELLO]
        cases: list[tuple[list[str], dict[str, str], str]] = [
            ([HELLO], variables | ({"MASTER_PORT": port} if variables == LAUNCH else {}), quote)
            for variables, quote in ERRORS
        ]
        quote = "`The server socket has failed to listen` ... `EADDRINUSE`"
        cases.append((["-m", "torch.distributed.run", *options], {}, quote))
        for words, variables, quote in cases:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=ENVIRONMENT | variables,
                capture_output=True,
                text=True,
                check=False,
            )
            assert quote in PAGE.read_text() and done.returncode == 1, quote
            assert re.search(".*".join(map(re.escape, quote.strip("`").split("` ... `"))), done.stderr), done.stderr


# ---------------------------------------------------------------------------------------------- SLURM

# The batch script runs on the first node, from a copy, with the variables of its only task. NODES has a command that
# enters each node. srun starts the tasks.
SBATCH = """#!/bin/sh
[ "$1 $2" = "--nodes=2 --ntasks-per-node=2" ] || exit 9
shift 3
cp "$1" "$SPOOL" && shift
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[0-1]' SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0
exec bash "$SPOOL" "$@"
"""
SRUN = """#!/usr/bin/env python3
import os, shlex, subprocess, sys
assert sys.argv.pop(1) == "--kill-on-bad-exit=1"
tasks = []
for number, node in enumerate(os.environ["NODES"].splitlines()):
    for local in range(2):
        task = {"SLURM_PROCID": f"{2 * number + local}", "SLURM_LOCALID": f"{local}", "SLURM_NODEID": f"{number}"}
        tasks.append(subprocess.Popen([*shlex.split(node), *sys.argv[1:]], env=os.environ | task))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[0-1]" ] && echo node0 && echo node1
"""


@pytest.mark.slow
def test_sbatch_and_salloc_start_a_task_per_gpu_on_two_nodes(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "SPOOL": str(tmp_path / "slurm_script")}
    slurm["NODES"] = "\n".join(shlex.join(node.command()) for node in nodes)
    batch = shlex.split(command("sbatch"))
    everywhere = hello("node0", "node0", "node1", "node1")
    assert sorted(run(batch, **slurm)) == everywhere
    allocation = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NTASKS": "4", "PORT": "29600"}
    assert sorted(run(batch[batch.index("scripts/examples/multi_node.sh") :], **slurm, **allocation)) == everywhere


# ---------------------------------------------------------------------------------------------- Kubernetes


def pods(job: Any) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command and the variables of each pod's container, those of the operator included.

    As setPodEnv does in pkg/controller.v1/pytorch/envvar.go of the training operator, release 1.9."""
    replicas, name = job["spec"]["pytorchReplicaSpecs"], job["metadata"]["name"]
    count = sum(kind["replicas"] for kind in replicas.values())
    per_node = job["spec"]["nprocPerNode"]
    found: list[tuple[list[str], dict[str, str]]] = []
    for kind in ("Master", "Worker"):
        for _ in range(replicas[kind]["replicas"]):
            [container] = replicas[kind]["template"]["spec"]["containers"]
            assert container["name"] == "pytorch"
            variables = {one["name"]: one["value"] for one in container["env"]}
            where = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456"}
            variables |= {**where, **{f"PET_{key}": value for key, value in where.items()}, "PYTHONUNBUFFERED": "0"}
            variables |= {"WORLD_SIZE": f"{count * int(per_node)}", "RANK": f"{len(found)}"}
            variables |= {"PET_NNODES": f"{count}", "PET_NPROC_PER_NODE": per_node, "PET_NODE_RANK": f"{len(found)}"}
            found.append((container["command"], variables))
    return found


OF_TRAIN_JOB = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "shm"),
    [("as it is", "64m"), ("as it is", "1m"), ("two ranks per pod", "1m"), ("python", "64m"), ("TrainJob", "64m")],
)
def test_the_pods_of_a_pytorchjob_find_each_other(tmp_path: Path, how: str, shm: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml (pip install pyyaml)")
    job = yaml.safe_load(JOB.read_text())
    if how == "two ranks per pod":
        job["spec"]["nprocPerNode"] = "2"
    hosts = ("hello-master-0", "hello-worker-0")
    commands = []
    with two_nodes(tmp_path, hosts) as nodes:
        for node, (words, variables) in zip(nodes, pods(job), strict=True):
            if how == "python":
                words, variables["LOCAL_RANK"] = ["python", *words[1:]], "0"
            elif how == "TrainJob":
                variables = {key: variables[key] for key in OF_TRAIN_JOB}
            commands.append(
                node.command("env", *(f"{key}={value}" for key, value in variables.items()), *words, shm=shm)
            )
        lines = run(*commands)
    assert sorted(lines) == hello(*(host for host in hosts for _ in range(int(job["spec"]["nprocPerNode"]))))


# ---------------------------------------------------------------------------------------------- MPI


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (apt-get install openmpi-bin)")
def test_mpirun_starts_ranks_on_two_nodes(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """In place of ssh, a program enters the second node."""
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(nodes[1].command("sh", "-c"))} "$*"\n')
    agent.chmod(0o755)
    words = shlex.split(command("scripts/examples/multi_node.sh mpirun"))
    inside_slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    lines = run(nodes[0].command(*words), OMPI_MCA_plm_rsh_agent=str(agent), **inside_slurm)
    assert sorted(re.findall("hello: .*? the sum is 10", " ".join(lines))) == hello("node0", "node0", "node1", "node1")


@pytest.mark.slow
def test_mpirun_with_mpi4py(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpirun and mpi4py (apt-get install openmpi-bin; pip install mpi4py)")
    (tmp_path / "mpi.py").write_text(block("# mpi.py"))
    line = command("mpirun -n 2 python mpi.py")
    assert ranks_in(run(shlex.split(line), folder=tmp_path)) == ["rank 0 of 2: 2", "rank 1 of 2: 2"]
    assert run(shlex.split(line.partition("-n 2 ")[2]), folder=tmp_path) == ["rank 0 of 1: 1"]


# ---------------------------------------------------------------------------------------------- mp.spawn, a loop, Ray


@pytest.mark.slow
def test_spawn_and_the_shell_loop(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(block("# spawn.py").replace("29500", str(free_port())))
    assert ranks_in(run([sys.executable, tmp_path / "spawn.py"])) == ["rank 0 of 2: 2", "rank 1 of 2: 2"]
    loop = block("export MASTER_ADDR").replace("29500", str(free_port()))
    assert sorted(run(["bash", "-c", loop])) == hello(*[socket.gethostname()] * 2)


# An actor dies; its place is taken by a new one at the same store. Of three elastic ones, the two others go on.
ACTORS_DIE = """
import os, ray, torch, pynccl
from ray_actors import TCPStore, Trainer

class Rank(Trainer):
    def die(self):
        os._exit(1)

class Elastic:
    def __init__(self, rank, nranks, address):
        self.comm = pynccl.from_store(TCPStore(*address), rank, nranks, elastic=True)

    def step(self, dies):
        if dies:
            os._exit(1)
        try:
            self.comm.all_reduce(torch.ones(1))
            self.comm.commit()
        except pynccl.NcclError:
            self.comm = self.comm.survivors(timeout=30)
        return self.comm.all_reduce(torch.ones(1)).item()

ray.init(num_cpus=3)
store = TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
address = store.host, store.port
batch = torch.ones(4, 4)
start = ray.remote(num_cpus=1)(Rank).remote
first, second = (start(rank, 2, address) for rank in range(2))
ray.get([first.gradient.remote(batch), second.gradient.remote(batch)])
waits = first.gradient.remote(batch)
second.die.remote()
for call in (waits, second.gradient.remote(batch)):
    try:
        ray.get(call)
    except pynccl.NcclRemoteError as error:
        print("NcclRemoteError:", *str(error).splitlines())
    except ray.exceptions.ActorDiedError:
        print("ActorDiedError")
ray.kill(first)
again = [start(rank, 2, address) for rank in range(2)]
print(len(ray.get([one.gradient.remote(batch) for one in again])))
for one in again:
    ray.kill(one)
elastic = [ray.remote(num_cpus=1)(Elastic).remote(rank, 3, address) for rank in range(3)]
print(ray.get([one.step.remote(rank == 0) for rank, one in enumerate(elastic)][1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts three times
def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray (pip install 'ray[train]')")
    (tmp_path / "ray_train.py").write_text(block("# ray_train.py"))
    (tmp_path / "actors_die.py").write_text(ACTORS_DIE)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts" / "recipes")))
    printed = run([sys.executable, ROOT / "scripts" / "recipes" / "ray_actors.py"])
    assert printed == ["ray_actors: 2 actors: the averaged gradients are those of one process"]
    printed = run([sys.executable, tmp_path / "ray_train.py"], RAY_DEDUP_LOGS="0")
    assert sorted(set(ranks_in(printed))) == ["rank 0 of 2: 2", "rank 1 of 2: 2"]
    printed = [
        line for line in run([sys.executable, tmp_path / "actors_die.py"], PYTHONPATH=path) if "raylet" not in line
    ]
    assert re.search(r"^NcclRemoteError: .*rank 1's process \d+ was killed or crashed", printed[0])
    assert printed[1:] == ["ActorDiedError", "2", "[2.0, 2.0]"]


# Ray's files of a node are in /tmp/ray.
HEAD = """
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
export RAY_ADDRESS=10.77.0.1:6379
ray start --head --node-ip-address=10.77.0.1 --port=6379 --num-cpus=1 --include-dashboard=false > /dev/null
until ray status 2> /dev/null | grep -q '/2.0 CPU'; do sleep 0.2; done
python scripts/recipes/ray_actors.py
"""
WORKER = """
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
until python -c 'import socket; socket.create_connection(("10.77.0.1", 6379), 1)' 2> /dev/null; do sleep 0.2; done
exec ray start --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --num-cpus=1 --block
"""


@pytest.mark.slow
def test_actors_of_ray_on_two_nodes(nodes: tuple[Node, Node]) -> None:
    """With one CPU on each node, and one for each actor."""
    pytest.importorskip("ray", reason="needs ray (pip install 'ray[train]')")
    words = nodes[1].command("sh", "-c", WORKER, shm="512m")
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, **quiet) as worker:
        try:
            printed = run(nodes[0].command("sh", "-c", HEAD, shm="512m"))
        finally:
            worker.kill()
    assert printed == ["ray_actors: 2 actors: the averaged gradients are those of one process"]
