"""Make the ranks actors of Ray: the driver serves their store, and calls the methods of the actors.

Needs ray (the extra `ray`). Each actor reserves a GPU, the only one that it sees, or a CPU if there are no GPUs.

examples:
  python scripts/recipes/ray_actors.py
  python scripts/recipes/ray_actors.py --ranks 1
"""

from __future__ import annotations

import torch
from torch.distributed import TCPStore

import pynccl
from pynccl.tools import command


class Trainer:
    """A rank: a replica of the model, and the communicator."""

    def __init__(self, rank: int, nranks: int, address: tuple[str, int]) -> None:
        self.comm = pynccl.from_store(TCPStore(*address), rank, nranks)
        torch.manual_seed(0)  # the same weights on every rank
        self.model = torch.nn.Linear(4, 2).to(self.comm.device)

    def gradient(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the batch's mean: the average over the ranks of that of their shards."""
        shard = batch.chunk(self.comm.size)[self.comm.rank].to(self.comm.device)
        loss = self.model(shard).square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.model.weight])
        self.comm.all_reduce(gradient, gradient, "avg")
        return gradient.cpu()

    def close(self) -> None:
        self.comm.destroy()


def main() -> None:
    parser = command.Parser(__doc__, failed="a rank failed, or the result differs from one process's")
    parser.add_argument("--ranks", type=command.integer(1, 64), default=2, help="number of actors (%(default)s)")
    nranks = parser.parse_args().ranks
    import ray

    ray.init()
    resources = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    store = TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
    actor, address = ray.remote(**resources)(Trainer), (store.host, store.port)
    trainers = [actor.remote(rank, nranks, address) for rank in range(nranks)]

    batch = torch.randn(64 * nranks, 4)
    gradients = ray.get([trainer.gradient.remote(batch) for trainer in trainers])  # all at once: they wait for another
    ray.get([trainer.close.remote() for trainer in trainers])

    torch.manual_seed(0)
    whole = torch.nn.Linear(4, 2)
    whole(batch).square().mean().backward()
    for gradient in gradients:
        torch.testing.assert_close(gradient, whole.weight.grad)
    print(f"ray_actors: {nranks} actors: the averaged gradients are those of one process")


if __name__ == "__main__":
    command.run(main)
