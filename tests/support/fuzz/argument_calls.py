"""Valid calls of every public function, each of whose keyword arguments argument_ranks.py replaces by nonsense.

A call is an expression over the names of `names_of`; what is passed by position stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pynccl
import pynccl_autograd as ad

from .call_values import NAMES

BINDING = """
comm.all_reduce(send=x, recv=y, op='sum', stream=None, config=None)
comm.all_reduce(x, config=pynccl.CollConfig(min_ctas=1, max_ctas=2, nvls_ctas=1, cga_cluster_size=1, \
alg_selection='ring', force_alg_selection=False, cta_policy=0, user_profiler_tag=0, launch_completion_event=None))
comm.broadcast(send=x, recv=y, root=0, stream=None, config=None)
alone.reduce(send=x, recv=y, op='sum', root=0, stream=None, config=None)
comm.all_gather(send=x, recv=None, stream=None, config=None)
comm.reduce_scatter(send=x, recv=None, op='sum', stream=None, config=None)
comm.all_to_all(send=x, recv=y, stream=None, config=None)
alone.gather(send=x, recv=None, root=0, stream=None, config=None)
alone.scatter(send=x, recv=None, root=0, stream=None, config=None)
comm.all_gather_v(send=x, recv=None, counts=[16] * n, stream=None)
comm.reduce_scatter_v(send=x, recv=None, op='sum', counts=[16 // n] * n, stream=None)
comm.all_to_all_v(send=x, recv=None, send_counts=[16 // n] * n, recv_counts=[16 // n] * n, stream=None)
alone.gather_v(send=x, recv=None, root=0, counts=[16], stream=None)
alone.scatter_v(send=x, recv=None, root=0, counts=[16], stream=None)
grouped(lambda: (comm.send(buf=x, peer=partner, stream=None), comm.recv(y, partner)))
grouped(lambda: (comm.send(x, partner), comm.recv(buf=y, peer=partner, stream=None)))
comm.plan.all_reduce(send=x, recv=y, op='sum', stream=None, config=None)
comm.plan.group(plans=[comm.plan.all_reduce(x, y)])
comm.plan.all_reduce(x, y)(stream=None)
comm.split(color=0, key=0, config=None)
alone.shrink(exclude=[])
alone.grow(nranks=1)
comm.register(buf=memory)
comm.window(buf=memory, flags=None)
alone.put_signal(buf=memory, peer=0, window=alone_window, offset=0, signal=0, context=0, stream=None)
alone.signal(peer=0, signal=0, context=0, stream=stream)
alone.signal(0, stream=stream) or alone.wait_signal(counts={0: 1}, signal=0, context=0, stream=stream)
comm.pre_mul_sum(scalar=2.0, dtype='float32')
pynccl.Communicator.init(nranks=1, unique_id=pynccl.get_unique_id(), rank=0, device=None, config=None, timeout=3.0, \
library=None)
pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, config=pynccl.CommConfig(blocking=True, cga_cluster_size=1, \
min_ctas=1, max_ctas=1, net_name='Socket', split_share=False, traffic_class=1, comm_name='a', collnet_enable=False, \
cta_policy=0, shrink_share=False, nvls_ctas=1, n_channels_per_net_peer=1, nvlink_centric_sched=None, \
graph_usage_mode=None, num_rma_ctx=None, max_p2p_peers=None, graph_stream_ordering=None, launch_order_implicit=None, \
num_rma_sig=None, rma_eager_init=None, host_cft_mode=None, nvls_host_mode=None))
pynccl.Communicator.init_all(devices=1, library=None)
pynccl.Communicator.join_grown(nranks=1, unique_id=bytes(128), rank=0, device=None, config=None, timeout=0.2, \
library=None)
pynccl.Communicator.from_process_group(group=group)
pynccl.from_store(store=store, rank=0, nranks=1, device=None, config=None, timeout=1.0, library=None, local_rank=0, \
elastic=False)
elastic(store).commit(timeout=1.0)
elastic(store).agree(step=1, timeout=1.0)
elastic(store).survivors(timeout=1.0)
behind(elastic(store)).sync_state(x, timeout=1.0)
pynccl.from_file(path=fresh, rank=0, nranks=1, device=None, config=None, timeout=1.0, library=None, \
local_rank=0)
pynccl.init(device=None, config=None, timeout=1.0, library=None, elastic=False)
pynccl.init_all(devices=1, library=None)
pynccl.abort(comms=[], timeout=1.0)
pynccl.create_event(device=None, timing=False, library=None)
pynccl.create_stream(device=None, priority=None, library=None)
pynccl.current_stream(device=None, library=None)
pynccl.get_unique_id(library=None)
pynccl.load(spec='host')
pynccl.mem_alloc(shape=4, dtype='uint8', device=None, library=None)
pynccl.mem_pool(library=None)
pynccl.param(key='PYNCCL_HOST_TIMEOUT', library=None)
pynccl.params(library=None)
pynccl.set_encryption(psk=None, library=None)
stream.record(event=None)
stream.wait(*pair(event=stream.record()))
"""

AUTOGRAD = """
ad.all_reduce(x=x, comm=comm, op='sum', grad='sum', reduce_dtype=None)
ad.all_reduce(x, comm, ad.PreMul(scale=2.0), grad='sum')
ad.copy(x=x, comm=comm, reduce_dtype=None)
ad.reduce_scatter(x=x, comm=comm, dim=0, op='sum', splits=None, reduce_dtype=None)
ad.all_gather(x=x, comm=comm, dim=0, grad='sum', splits=None, reduce_dtype=None)
ad.split(x=x, comm=comm, dim=0, splits=None)
ad.broadcast(x=x, comm=comm, root=0, grad='sum', reduce_dtype=None)
ad.reduce(x=x, comm=comm, root=0, op='sum', reduce_dtype=None)
ad.scatter(x=x, comm=alone, root=0, dim=0, splits=None)
ad.gather(x=x, comm=comm, root=0, dim=0, splits=None)
ad.all_to_all(x=x, comm=comm, split_dim=0, concat_dim=0, send_splits=None, recv_splits=None)
ad.permute(x=x, comm=comm, edges=[(0, 0)])
ad.send_recv(x=x, comm=comm, target=None, source=None)
ad.halo_exchange(x=x, comm=comm, dim=0, halo=1)
ad.anchor(x.sum(), *pair(outputs=x))
ad.anchor(*pair(loss=x.sum()), x)
ad.start(ad.all_reduce, x=x, comm=comm, op='sum', grad='sum', reduce_dtype=None).wait()
ad.start(*pair(operation=ad.copy), x, comm).wait()
ad.set_side_stream(comm=alone, stream=stream)
ad.key_of(comm=comm)
ad.all_gather_matmul(x=x, w=w, comm=comm, bias=None, overlap='auto', reduce_dtype=None, \
grad_accumulation_fusion=False, return_gathered=False, owner=None)
ad.copy_matmul(x=x, w=w, comm=comm, bias=None, overlap='auto', reduce_dtype=None, grad_accumulation_fusion=False, \
owner=None)
ad.matmul_all_reduce(x=x, w=w, comm=comm, bias=None, overlap='auto', reduce_dtype=None, \
grad_accumulation_fusion=False, hand_off=False, owner=None)
ad.matmul_reduce_scatter(x=x, w=w, comm=comm, bias=None, overlap='auto', reduce_dtype=None, \
grad_accumulation_fusion=False, owner=None)
ad.OverlapConfig(method='slices', chunks=2, aggregate=False, compute_streams=2, num_comm_ctas=None, priority=-1, \
deterministic=False, save_gathered=True, dgrad=None)
ad.ColumnParallelLinear(in_features=4, out_features=4, comm=comm, bias=True, sequence_parallel=False, device=None, \
dtype=None, overlap='auto', reduce_dtype=None, grad_accumulation_fusion=False, seq_dim=0, blocks=1, gather_input=True, \
gather_output=False)(x=x)
ad.RowParallelLinear(in_features=4 * n, out_features=4, comm=comm, bias=True, sequence_parallel=False, device=None, \
dtype=None, overlap='auto', reduce_dtype=None, grad_accumulation_fusion=False, seq_dim=0, blocks=1)(x=x)
ad.KeyValueLinear(in_features=4, out_features=4, comm=comm, shared=alone)(x=x)
ad.VocabParallelEmbedding(num_embeddings=4, embedding_dim=4, comm=comm, padding_idx=None, sequence_parallel=False, \
device=None, dtype=None, seq_dim=0, reduce_dtype=None)(ids=ids)
ad.VocabParallelHead(embedding_dim=4, num_embeddings=4, comm=comm, bias=False, device=None, dtype=None, \
gather_output=False)(x=x)
ad.Dropout(p=0.5, comm=comm, sharded=True, inplace=False)(x=x)
ad.ColumnParallelLinear.from_linear(linear=nn.Linear(4, 4), comm=comm, sequence_parallel=False, seq_dim=0)
ad.ColumnParallelLinear.like(linear=nn.Linear(4, 4), comm=comm, sequence_parallel=False, seq_dim=0)
ad.RowParallelLinear.from_linear(linear=nn.Linear(4, 4), comm=comm, sequence_parallel=False)
ad.KeyValueLinear.from_linear(linear=nn.Linear(4, 4), comm=comm, sequence_parallel=False, shared=alone)
ad.VocabParallelEmbedding.from_embedding(embedding=nn.Embedding(4, 4), comm=comm, sequence_parallel=False)
ad.VocabParallelEmbedding.like(embedding=nn.Embedding(4, 4), comm=comm, sequence_parallel=False)
ad.VocabParallelHead.from_linear(linear=nn.Linear(4, 4), comm=comm, gather_output=False)
ad.VocabParallelHead.like(linear=nn.Linear(4, 4), comm=comm, gather_output=False)
ad.ColumnParallelLinear(4, 4, comm).load_full(weight=x, bias=x[0])
ad.RowParallelLinear(4, 4, comm).load_full(weight=x, bias=x[0])
ad.VocabParallelEmbedding(4, 4, comm).load_full(weight=x, bias=None)
ad.VocabParallelHead(4, 4, comm, True).load_full(weight=x, bias=x[0])
ad.ColumnParallelLinear(4, 4, comm).take(module=nn.Linear(4, 4))
ad.vocab_parallel_cross_entropy(logits=x, target=ids, comm=comm, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, \
reduction='mean', splits=None)
ad.parallelize(model=net(), comm=comm, plan=plan, sequence_parallel=False, seq_dim=1, overlap='auto', \
reduce_dtype=None, gather_logits=True, init=None)
ad.parallelize(net(), comm, {'0': pair(role='column')[0], '2': 'row'}, False)
ad.parallelize(net(), comm, {'0': ('column', pair(options={})[0]), '2': 'row'}, False)
ad.describe(model=model)
ad.keep_shards(model=model)
ad.GradScaler(comm=comm, device=None)
ad.DataParallelGradients(model=net(), comm=comm, bucket_bytes=25e6, reduce_dtype=None, gradient_as_bucket_view=False, \
broadcast=True)
ad.DataParallelGradients(net(), comm).use(comm=comm)
ad.finish_gradients(parameters=model, bucket_bytes=64e6)
ad.finish_gradients_in_backward(parameters=model)
ad.clip_grad_norm_(parameters=model, max_norm=1.0, norm_type=2.0, error_if_nonfinite=False)
ad.full_state_dict(model=model, comm=None, rank0_only=True)
ad.load_full_state_dict(model=model, state=ad.full_state_dict(model, None, False), strict=True, comm=None, \
device=None)
ad.save_full_state_dict(model=model, path=folder + '/model.safetensors', max_shard_bytes=5e9, comm=None)
ad.full_optimizer_state_dict(model=model, optimizer=adam(model), comm=None, rank0_only=True)
ad.load_full_optimizer_state_dict(model=model, optimizer=adam(model), \
state=ad.full_optimizer_state_dict(model, adam(model), None, False), comm=None)
ad.dcp_state_dict(model=model)
ad.dcp_optimizer_state_dict(model=model, optimizer=adam(model))
ad.Shard(comm=comm, dim=0, shape=(4, 4), splits=None, partial=False, blocks=1, transposed=False)
ad.Shard(comm, 0, (4, 4)).gather(part=x[:4 // n])
ad.Shard(comm, 0, (4, 4)).local(full=x)
ad.set_shard(parameter=nn.Parameter(x[:4 // n].detach()), shard=ad.Shard(comm, 0, (4, 4)))
ad.Mesh(comm=comm, shape={'tp': n})
ad.Mesh(comm, {'tp': n}).coordinate_of(rank=0)
ad.Mesh(comm, {'tp': n}).size(*pair(axes='tp'))
ad.Mesh(comm, {'tp': n}).__getitem__(axes='tp')
ad.Mesh(pynccl.from_store(store, 0, 1, elastic=True), {'tp': 1}).survivors(timeout=5.0).comm.destroy()
ad.Mesh(alone, {'tp': 1}).to_device_mesh(device_type='cpu')
ad.Mesh.from_device_mesh(mesh=device_mesh, timeout=1.0)
ad.Partition(comm=comm, ranks=[0])
ad.CartesianPartition(comm=comm, shape=(n,), ranks=None)
line.axes_comm(axes=0).size
line.coordinates_of(position=0)
line.rank_at(coordinates=(0,))
ad.AllSumReduce(partition=line, axes_reduce=0)(x=x)
ad.partition.Broadcast(P_x=line, P_y=line)(x=x)
ad.SumReduce(P_x=line, P_y=line)(x=x)
ad.Repartition(P_x=line, P_y=line)(x=x[0])
ad.zero_volume_tensor(dtype=None, device=None)
ad.trace(path=folder + '/trace', comm=comm, model=None, timeout=3.0)
tracing.span(name='a')
ad.CommOverlapHelper(comm=comm)
ad.CommOverlap(helper=ad.CommOverlapHelper(comm), tensor_shape=(4, 4), dtype=torch.float32, num_splits=4, \
num_comm_ctas=None, priority=-1, deterministic=False, save_gathered=False, copy_engines=False)
ad.CommOverlapP2P(helper=ad.CommOverlapHelper(comm), tensor_shape=(4, 4), dtype=torch.float32, aggregate=False, \
num_comm_ctas=None, priority=-1, save_gathered=False)
ad.CommOverlapHelper(comm).all_gather(send=x, recv=None)
userbuffers.all_gather_matmul(x=x, w=w, bias=None)
userbuffers.matmul_all_reduce(x=x, w=w, bias=None)
userbuffers.matmul_reduce_scatter(x=x, w=w, bias=None)
userbuffers.bulk(collective='all_reduce', send=x, recv=y)
ad.nn.AllReduce(comm=comm, op='sum', grad='sum', reduce_dtype=None)(x=x)
ad.nn.Copy(comm=comm, reduce_dtype=None)(x=x)
ad.nn.ReduceScatter(comm=comm, dim=0, op='sum', splits=None, reduce_dtype=None)(x=x)
ad.nn.AllGather(comm=comm, dim=0, grad='sum', splits=None, reduce_dtype=None)(x=x)
ad.nn.Split(comm=comm, dim=0, splits=None)(x=x)
ad.nn.Broadcast(comm=comm, root=0, grad='sum', reduce_dtype=None)(x=x)
ad.nn.Reduce(comm=comm, root=0, op='sum', reduce_dtype=None)(x=x)
ad.nn.Scatter(comm=alone, root=0, dim=0, splits=None)(x=x)
ad.nn.Gather(comm=comm, root=0, dim=0, splits=None)(x=x)
ad.nn.AllToAll(comm=comm, split_dim=0, concat_dim=0, send_splits=None, recv_splits=None)(x=x)
ad.nn.Permute(comm=comm, edges=[(0, 0)])(x=x)
ad.nn.HaloExchange(comm=comm, dim=0, halo=1)(x=x)
ad.nn.Sequential(nn.Linear(4, 4), *pair(modules=nn.ReLU()), overlap='auto')(x)
ad.overlap.decisions(model=model)
ad.overlap.load(path=decisions)
ad.overlap.save(path=folder + '/saved')
ad.overlap.report(model=model)
ad.overlap.retry(model=model)
ad.rng.seed(seed=1, comm=comm)
ad.rng.replicated(comm=comm)
ad.rng.sharded(comm=comm)
ad.rng.set_state(state=ad.rng.get_state())
ad.testing.check_adjoint(fn=torch.clone, x=x.double(), comm=comm, replicated=False, tolerance=None, seed=0)
ad.testing.check_gradients(fn=torch.sin, inputs=x.double(), comm=comm, replicated=False, second_order=False, \
samples=2, step=1e-6, rtol=1e-5, atol=1e-7, seed=0)
ad.testing.check_model(*pair(model=model), *pair(reference=net()), x, comm=comm, loss=loss, batch_dim=None, \
finish=None, tolerance=None)
"""

CALLS = [line for text in (BINDING, AUTOGRAD) for line in text.strip().splitlines()]


def pair(**one: Any) -> tuple[Any]:
    """Return the value of a parameter that is passed by position."""
    return tuple(one.values())  # type: ignore[return-value]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x).square().mean()
    return y


PLAN = {"0": "column", "2": "row"}


def grouped(calls: Callable[[], Any]) -> Any:
    with pynccl.group():
        return calls()


def elastic(store: Any) -> pynccl.Communicator:
    return pynccl.from_store(store, 0, 1, elastic=True)


def behind(comm: pynccl.Communicator) -> pynccl.Communicator:
    comm.agree(1)
    return comm


def names_of(env: Any, call: str) -> dict[str, Any]:
    """Return the names that this call may use. Its tensors and modules are new: an earlier call may have kept or
    changed others."""
    kept = ("comm", "alone", "stream", "memory", "alone_window", "tracing", "userbuffers", "decisions", "group")
    model: Any = ad.parallelize(net(), env.comm, PLAN, False) if "model" in call else None
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    return {
        **NAMES,
        **{name: getattr(env, name) for name in (*kept, "device_mesh")},
        "n": env.size,
        "partner": env.size - 1 - env.rank,
        "line": env.partition,
        "folder": env.folder.name,
        "fresh": f"{env.folder.name}/{id(x)}",
        "x": x,
        "y": torch.zeros(4, 4),
        "w": torch.ones(4, 4),
        "ids": torch.tensor([0, 1, 2, 3]),
        "nn": nn,
        "pair": pair,
        "net": net,
        "adam": adam,
        "plan": PLAN,
        "model": model,
        "loss": loss,
        "grouped": grouped,
        "elastic": elastic,
        "behind": behind,
        "store": torch.distributed.HashStore(),
    }
