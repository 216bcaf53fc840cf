"""Models with parts for parameters, saved and loaded as the unsharded ones they stand for."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

WIDTH, HIDDEN, WORDS = 8, 24, 13  # the vocabulary divides by no number of ranks
NAMES = ["embedding.weight", "up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]
NAMES += ["norm_scale", "head.weight"]


class Head(nn.Module):
    """Logits of the whole vocabulary from the embedding's own weight."""

    def __init__(self, embedding: Any, comm: Communicator | None = None) -> None:
        super().__init__()
        self.weight, self.comm = embedding.weight, comm
        self.splits = None if comm is None else embedding.splits

    def forward(self, x: Tensor) -> Tensor:
        if self.comm is None:
            return F.linear(x, self.weight)
        y = F.linear(ad.copy(x, self.comm), self.weight)
        return ad.all_gather(y, self.comm, -1, grad="replicated", splits=self.splits)


class Model(nn.Module):
    """A language model of one block; of parts, if there is a communicator."""

    def __init__(self, comm: Communicator | None = None, words: int = WORDS) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.float64}
        if comm is None:
            self.embedding: nn.Module = nn.Embedding(words, WIDTH, **kind)
            self.up: nn.Module = nn.Linear(WIDTH, HIDDEN, **kind)
            self.down: nn.Module = nn.Linear(HIDDEN, WIDTH, **kind)
        else:
            self.embedding = ad.VocabParallelEmbedding(words, WIDTH, comm, **kind)
            self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **kind)
            self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **kind)
        self.norm = nn.LayerNorm(WIDTH, **kind)
        self.norm_scale: Tensor
        self.register_buffer("norm_scale", torch.tensor(1.5, dtype=torch.float32))
        self.head = Head(self.embedding, comm)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = self.head(self.norm(x + self.down(torch.tanh(self.up(x)))) * self.norm_scale)
        return y


def whole_model(seed: int = 5) -> Model:
    torch.manual_seed(seed)
    model = Model()
    nn.init.normal_(model.norm.weight)
    model.norm_scale.fill_(seed)
    return model


def words() -> Tensor:
    return torch.arange(WORDS).reshape(1, WORDS)


def same_output(model: nn.Module, seed: int = 5) -> None:
    torch.testing.assert_close(model(words()), whole_model(seed)(words()), rtol=1e-12, atol=1e-12)


def loaded(comm: Communicator, seed: int = 5) -> Model:
    """Of parts, with the values of the whole model of that seed."""
    model = Model(comm)
    ad.load_full_state_dict(model, whole_model(seed).state_dict())
    return model


# ------------------------------------------------------------------------------------------------- state dicts


def there_and_back(comm: Communicator) -> None:
    expected = whole_model().state_dict()
    model = loaded(comm)
    same_output(model)
    for rank0_only in (True, False):
        found = ad.full_state_dict(model, rank0_only=rank0_only)
        if rank0_only and comm.rank:
            assert found == {}
            continue
        assert list(found) == list(expected) and set(found) == set(NAMES)
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
        assert found["head.weight"] is found["embedding.weight"]
        found["norm.weight"].zero_()  # a copy
    same_output(model)
    plain = Model()
    if comm.rank == 0:
        plain.load_state_dict(ad.full_state_dict(model))
        same_output(plain)
    else:
        ad.full_state_dict(model)


@each_size
def test_the_full_state_dict_is_that_of_the_unsharded_model(ranks: RankPool, n: int) -> None:
    ranks.run(n, there_and_back)


def from_rank_0(comm: Communicator, path: str) -> None:
    model = Model(comm)
    state = whole_model().state_dict() if comm.rank == 0 else None
    assert ad.load_full_state_dict(model, state) == ([], [])
    same_output(model)
    ad.save_full_state_dict(model, path)
    again = Model(comm)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    same_output(again)
    with torch.device("meta"):
        empty = Model(comm)
    ad.load_full_state_dict(empty, state)
    same_output(empty)


@each_size
def test_rank_0_may_have_the_checkpoint_alone(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, from_rank_0, str(tmp_path / "model.safetensors"))


def half(comm: Communicator) -> None:
    model = loaded(comm).to(torch.bfloat16)
    found = ad.full_state_dict(model, comm, rank0_only=False)
    for name, value in whole_model().to(torch.bfloat16).state_dict().items():
        assert torch.equal(found[name], value) and found[name].dtype == torch.bfloat16
    flags = nn.Module()
    flags.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    flags.mask.shard = ad.Shard(comm, 0, (2 * comm.size,))  # type: ignore[attr-defined]
    assert ad.full_state_dict(flags, rank0_only=False)["mask"].tolist() == [True, False] * comm.size
    ad.load_full_state_dict(flags, {"mask": torch.ones(2 * comm.size, dtype=torch.bool)} if comm.rank == 0 else None)
    assert flags.mask.all()


def test_of_any_type(ranks: RankPool) -> None:
    ranks.run(2, half)


# ------------------------------------------------------------------------------------------------- files


def saves(comm: Communicator, path: str, max_shard_bytes: float, seed: int = 5) -> None:
    ad.save_full_state_dict(loaded(comm, seed), path, max_shard_bytes)


def loads(comm: Communicator, path: str, seed: int = 5) -> None:
    model = Model(comm)
    assert ad.load_full_state_dict(model, path) == ([], [])
    same_output(model, seed)
    with torch.device("meta"):
        empty = Model(comm)
    ad.load_full_state_dict(empty, Path(path))
    assert empty.head.weight is empty.embedding.weight
    assert isinstance(empty.up.weight, nn.Parameter) and isinstance(empty.up.weight.shard, ad.Shard)  # type: ignore[attr-defined]
    same_output(empty, seed)


@pytest.mark.parametrize("several", [False, True])
def test_what_4_ranks_save_2_and_1_load(ranks: RankPool, tmp_path: Path, several: bool) -> None:
    ranks.run(4, saves, str(tmp_path), 2000 if several else 5e9)
    for n in (2, 3):
        ranks.run(n, loads, str(tmp_path))
    alone = Model()
    ad.load_full_state_dict(alone, tmp_path)
    same_output(alone)
    files = sorted(path.name for path in tmp_path.iterdir())
    if not several:
        assert files == ["model.safetensors"]
        plain = Model()
        load_model(plain, tmp_path / "model.safetensors")  # the package's own
        same_output(plain)
        return
    assert files[:2] == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = {
        name: value for file in files if file.endswith("s") for name, value in load_file(tmp_path / file).items()
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert set(index["weight_map"]) == set(tensors) == set(NAMES) - {"head.weight"}
    for name, value in whole_model().state_dict().items():
        assert name == "head.weight" or torch.equal(tensors[name], value)
    for file in files[:2]:
        assert (tmp_path / file).stat().st_size < 2000 + 1000


def fails_midway(comm: Communicator, path: str, monkey: int) -> None:
    """The disk is full after some tensors, on rank 0 alone."""
    import pynccl_autograd.layers.safetensors_files as module

    files: Any = module

    before, left = files._write_tensor, [monkey]

    def full(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        before(*args)

    files._write_tensor = full
    try:
        with pytest.raises(RuntimeError if comm.rank else OSError, match="No space left on device"):
            ad.save_full_state_dict(loaded(comm, 2), path, 2000)
    finally:
        files._write_tensor = before


def test_a_disk_that_is_full_raises_on_every_rank_and_leaves_the_last_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, saves, str(tmp_path), 2000)
    for after in (1, 4, 8):
        ranks.run(2, fails_midway, str(tmp_path), after)
        ranks.run(2, loads, str(tmp_path))


def test_a_folder_is_of_the_last_checkpoint_alone(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for seed, size in ((1, 2000), (2, 2000), (3, 5e9), (4, 1500), (5, 2000)):
        ranks.run(2, saves, str(tmp_path), size, seed)
        ranks.run(2, loads, str(tmp_path), seed)
        files = {path.name for path in tmp_path.iterdir()} - {"config.json"}
        if size == 5e9:
            assert files == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert files == {"model.safetensors.index.json", *index["weight_map"].values()}


KILLED = """
    import json, os, sys
    from pathlib import Path
    import torch
    import pynccl_autograd as ad
    import pynccl_autograd.layers.safetensors_files as files

    def model(seed):
        made = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        return made.requires_grad_(False), [p.fill_(seed) for p in made.parameters()]

    def killed_at(step, folder, size):
        '''Save in a child that is killed before its step-th call that changes the disk; whether it came so far.'''
        if not (child := os.fork()):
            left = [step]
            def counted(function):
                def call(*args, **options):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), 9)
                    return function(*args, **options)
                return call
            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (files, "_bytes")):
                setattr(owner, name, counted(getattr(owner, name)))
            made, _ = model(2)
            ad.save_full_state_dict(made, folder, size)
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0

    rows = []
    for before, after in ((90, 90), (1e9, 90), (90, 1e9), (1e9, 1e9), (None, 90)):
        step, ended = 0, False
        while not ended:
            folder = Path(sys.argv[1]) / f"{before}-{after}-{step}"
            made, _ = model(1)
            if before is not None:
                ad.save_full_state_dict(made, folder, before)
            ended = not killed_at(step, folder, after)
            there = model(0)[0]
            try:
                ad.load_full_state_dict(there, folder)
            except FileNotFoundError:
                assert before is None
            found = {float(value) for p in there.parameters() for value in p.flatten()}
            ad.save_full_state_dict(model(3)[0], folder, 90)  # goes on after it
            ad.load_full_state_dict(there, folder)
            index = json.loads((folder / files.INDEX).read_text())
            clean = {path.name for path in folder.iterdir()} == {files.INDEX, *index["weight_map"].values()}
            rows.append([before, after, step, sorted(found), ended, clean, float(there[1].bias[0])])
            step += 1
    print(json.dumps(rows))
"""


def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before each call that changes the disk, for each way in which one checkpoint replaces another."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for before, _after, _step, found, ended, clean, then in rows:
        assert found in ([[2.0]] if ended else [[1.0 if before else 0.0], [2.0]])
        assert clean and then == 3.0
    steps = {(before, after): step + 1 for before, after, step, *_ in rows}
    assert len(steps) == 5 and min(steps.values()) >= 8  # it was killed that often
    both = {(before, after, found[0]) for before, after, _, found, *_ in rows}
    assert all(
        (before, after, 1.0 if before else 0.0) in both and (before, after, 2.0) in both for before, after in steps
    )


# ------------------------------------------------------------------------------------------------- memory


WIDE, LAYERS = (1024, 2048), 8  # of 8 MB each


def resident(key: str) -> int:
    """Bytes of this process, mapped pages of files included; VmHWM is their highest number."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def peak_of_loading(comm: Communicator, path: str) -> tuple[int, int]:
    small = nn.Linear(2, 2)
    ad.save_full_state_dict(small, f"{path}-{comm.rank}.safetensors")
    ad.load_full_state_dict(small, f"{path}-{comm.rank}.safetensors", comm=comm)  # what is imported and made once
    with torch.device("meta"):
        column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
        layers = [column(*WIDE, comm, False) if i % 2 else row(*WIDE, comm, False) for i in range(LAYERS)]
    model = nn.Sequential(*layers)
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    ad.load_full_state_dict(model, path)
    return resident("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters())


def test_loading_a_file_takes_the_own_part_and_one_tensor(tmp_path: Path) -> None:
    """Resident memory, at most S/N and the largest tensor, of 64 MB on 2 ranks."""
    path = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.ones(WIDE[1], WIDE[0]) for i in range(LAYERS)}, path)
    pool = RankPool()  # whose memory nobody has used
    try:
        for peak, own in pool.run(2, peak_of_loading, str(path)):
            assert own == 32 << 20
            assert own <= peak <= own + (8 << 20) + (2 << 20)
    finally:
        pool.close()


# ------------------------------------------------------------------------------------------------- optimizers


def steps(model: nn.Module, kind: Any, count: int, optimizer: Any = None) -> Any:
    optimizer = optimizer or kind(model.parameters())
    for _ in range(count):
        optimizer.zero_grad()
        (model(words()) - 1).square().sum().backward()
        optimizer.step()
    return optimizer


KINDS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": (listed := list(parameters))[:2], "lr": 0.1}, {"params": listed[2:]}], lr=0.05
    ),
}


def goes_on(comm: Communicator, kind: str, path: str) -> None:
    """Of a whole optimizer's state on rank 0: two steps more, as the whole model takes them."""
    whole = whole_model()
    whole_optimizer = steps(whole, KINDS[kind], 5)
    model = Model(comm)
    checkpoint = torch.load(path) if comm.rank == 0 else {"model": None, "optimizer": None}
    ad.load_full_state_dict(model, checkpoint["model"])
    optimizer = KINDS[kind](model.parameters())
    ad.load_full_optimizer_state_dict(model, optimizer, checkpoint["optimizer"])
    steps(model, None, 2, optimizer)
    same = ad.full_state_dict(model, rank0_only=False)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(same[name], value, rtol=1e-9, atol=1e-12)
    found = ad.full_optimizer_state_dict(model, optimizer)
    assert found == {} if comm.rank else list(found) == ["state", "param_groups"]
    found = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for name, parameter in whole.named_parameters():
        expected = whole_optimizer.state[parameter]
        assert set(found["state"][name]) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=1e-9, atol=1e-12)
    names = [name for name, _ in whole.named_parameters()]
    assert [name for group in found["param_groups"] for name in group["params"]] == names
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in whole_optimizer.param_groups]


def stops(comm: Communicator, kind: str, path: str) -> None:
    model = loaded(comm)
    optimizer = steps(model, KINDS[kind], 3)
    checkpoint = {"model": ad.full_state_dict(model), "optimizer": ad.full_optimizer_state_dict(model, optimizer)}
    if comm.rank == 0:
        torch.save(checkpoint, path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "all.pt")
    ranks.run(4, stops, kind, path)
    ranks.run(2, goes_on, kind, path)


def optimizers_refused(comm: Communicator) -> None:
    model, other = loaded(comm), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 2\] that is not the model's"):
        ad.full_optimizer_state_dict(model, torch.optim.SGD(other.parameters()))
    optimizer = steps(model, KINDS["adam"], 1)
    state = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    with pytest.raises(TypeError, match=r"expected what full_optimizer_state_dict makes"):
        ad.load_full_optimizer_state_dict(model, optimizer, {"params": []})
    with pytest.raises(RuntimeError, match=r"exp_avg of up.weight: found \[3, 8\], expected \[24, 8\]"):
        wrong = {**state["state"], "up.weight": {"exp_avg": torch.zeros(3, 8)}}
        ad.load_full_optimizer_state_dict(model, optimizer, {**state, "state": wrong})
    with pytest.raises(ValueError, match=r"other parameters: without \['up.bias'\]"):
        names = [name for name in state["param_groups"][0]["params"] if name != "up.bias"]
        ad.load_full_optimizer_state_dict(model, optimizer, {**state, "param_groups": [{"params": names}]})
    if comm.rank == 1:
        del optimizer.state[model.up.weight]
    with pytest.raises(ValueError, match=r"the ranks have other state: this one (of up.weight: \[\]|as rank 0)"):
        ad.full_optimizer_state_dict(model, optimizer)
    optimizer.state[model.up.weight] = {"row": torch.zeros(5)}
    with pytest.raises(
        ValueError, match=r"row of up.weight has shape \[5\], expected that of this rank's part, \[12, 8\]"
    ):
        ad.full_optimizer_state_dict(model, optimizer)


def test_optimizers_that_do_not_fit_are_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, optimizers_refused)


# ------------------------------------------------------------------------------------------------- DCP


def with_group(comm: Communicator, store: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    return dist


def dcp_saves(comm: Communicator, folder: str, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model = loaded(comm)
        if asynchronous:
            done = dcp.async_save(ad.dcp_state_dict(model), checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.detach().zero_()  # it has been copied
            done.result()  # type: ignore[union-attr]
        else:
            dcp.save(ad.dcp_state_dict(model), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def dcp_loads(comm: Communicator, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model = Model(comm)
        dcp.load(ad.dcp_state_dict(model), checkpoint_id=folder)
        same_output(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_torch_distributed_checkpoint_of_4_ranks_loads_on_2_and_1(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    ranks.run(4, dcp_saves, folder, asynchronous)
    ranks.run(2, dcp_loads, folder)
    alone = Model()  # of plain torch
    state = {name: value for name, value in alone.state_dict().items() if name != "head.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody else is there, as intended
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    same_output(alone)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = {name: [list(chunk.sizes) for chunk in one.chunks] for name, one in metadata.items()}  # type: ignore[union-attr]
    assert sorted(chunks["embedding.weight"]) == [[3, WIDTH]] * 3 + [[4, WIDTH]]
    assert chunks["down.weight"] == [[WIDTH, HIDDEN // 4]] * 4 and chunks["down.bias"] == [[WIDTH]]


# ------------------------------------------------------------------------------------------------- other shards


class QueryKey(ad.Shard):
    """Of query and key in one parameter [2 * s, ..]: each rank has its rows of both, one after the other."""

    @property
    def half(self) -> ad.Shard:
        return ad.Shard(self.comm, 0, (self.shape[0] // 2, *self.shape[1:]))

    def own(self, whole: Tensor) -> Tensor:
        return torch.cat([self.half.own(half) for half in whole.chunk(2)])

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat([self.half.gather(half.contiguous()) for half in part.chunk(2)])

    def boxes(self) -> list[Any]:
        (query,) = self.half.boxes()
        below = query._replace(whole=(query.whole[0] + self.shape[0] // 2, 0), part=(query.size[0], 0))
        return [query, below]


def fused(comm: Communicator, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    whole = torch.arange(48.0).reshape(24, 2)

    def model() -> Any:
        made = nn.Module()
        made.weight = nn.Parameter(torch.zeros(24 // comm.size, 2))
        made.weight.shard = QueryKey(comm, 0, (24, 2))  # type: ignore[attr-defined]
        return made

    given, read, told = model(), model(), model()
    ad.load_full_state_dict(given, {"weight": whole})
    half = 12 // comm.size
    mine = slice(comm.rank * half, (comm.rank + 1) * half)
    assert torch.equal(given.weight.detach(), torch.cat([whole[:12][mine], whole[12:][mine]]))
    assert torch.equal(ad.full_state_dict(given, rank0_only=False)["weight"], whole)
    ad.save_full_state_dict(given, f"{folder}/whole.safetensors")
    ad.load_full_state_dict(read, f"{folder}/whole.safetensors")
    assert torch.equal(read.weight, given.weight)
    dist = with_group(comm, f"{folder}-store-{comm.size}-fused")
    try:
        if comm.size == 4:
            dcp.save(ad.dcp_state_dict(given), checkpoint_id=f"{folder}/dcp")
        dcp.load(ad.dcp_state_dict(told), checkpoint_id=f"{folder}/dcp")
    finally:
        dist.destroy_process_group()
    assert torch.equal(told.weight, given.weight)


def test_parts_that_are_put_together_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    for n in (4, 3, 2):
        ranks.run(n, fused, str(tmp_path))


def without_rows(comm: Communicator, folder: str) -> None:
    """A vocabulary of fewer words than ranks."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    state = Model(words=2).state_dict()

    def same(model: nn.Module) -> bool:
        found = ad.full_state_dict(model, rank0_only=False)
        return all(torch.equal(found[name], value) for name, value in state.items())

    given, read, told = (Model(comm, 2) for _ in range(3))
    ad.load_full_state_dict(given, state if comm.rank == 0 else None)
    ad.save_full_state_dict(given, folder, 500)
    ad.load_full_state_dict(read, folder)
    dist = with_group(comm, f"{folder}-store-few")
    try:
        dcp.save(ad.dcp_state_dict(given), checkpoint_id=f"{folder}/dcp")
        dcp.load(ad.dcp_state_dict(told), checkpoint_id=f"{folder}/dcp")
    finally:
        dist.destroy_process_group()
    assert same(given) and same(read) and same(told)
    optimizer = torch.optim.AdamW(given.parameters())
    given(torch.tensor([[0, 1]])).sum().backward()
    optimizer.step()
    found = ad.full_optimizer_state_dict(given, optimizer, rank0_only=False)
    assert found["state"]["embedding.weight"]["exp_avg"].shape == (2, WIDTH)
    ad.load_full_optimizer_state_dict(given, optimizer, found)


def test_a_rank_may_have_no_rows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, without_rows, str(tmp_path / "few"))


# ------------------------------------------------------------------------------------------------- bad input


def states_refused(comm: Communicator) -> None:
    model, state = loaded(comm), whole_model().state_dict()

    lacking = {name: value for name, value in state.items() if not name.startswith("up")}
    text = r'Error.s. in loading state_dict for Model:\n\tUnexpected key.s. in state_dict: "other". \n\t'
    text += r'Missing key.s. in state_dict: "up.weight", "up.bias"'
    with pytest.raises(RuntimeError, match=text):
        ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)} if comm.rank == 0 else None)
    same_output(model)
    found = ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight", "up.bias"] and found.unexpected_keys == ["other"]
    ad.load_full_state_dict(model, {name: value for name, value in state.items() if name != "head.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight: found \[12, 8\], expected \[24, 8\]"):
        ad.load_full_state_dict(model, {**state, "up.weight": torch.ones(12, 8)}, strict=False)


def files_refused(comm: Communicator, folder: str) -> None:
    model, state = loaded(comm), whole_model().state_dict()
    with pytest.raises(RuntimeError if comm.rank else ValueError, match=r"one.safetensors is no whole file"):
        ad.load_full_state_dict(model, f"{folder}/one.safetensors" if comm.rank == 0 else state)
    with pytest.raises(FileNotFoundError, match=r"has no file .safetensors that is whole"):
        ad.load_full_state_dict(model, f"{folder}/empty")
    with pytest.raises(ValueError, match=r"has one.safetensors, two.safetensors; say which one to load"):
        ad.load_full_state_dict(model, folder)
    with pytest.raises(ValueError, match=r"bad.safetensors.index.json is no index: it needs a weight_map"):
        ad.load_full_state_dict(model, f"{folder}/bad/bad.safetensors.index.json")
    with pytest.raises(ValueError, match=r"model.bin, expected a file .safetensors, an index"):
        ad.load_full_state_dict(model, f"{folder}/model.bin")
    with pytest.raises(
        TypeError if comm.rank == 1 else RuntimeError, match=r"state is 3, expected a state dict, a path"
    ):
        ad.load_full_state_dict(model, 3 if comm.rank == 1 else state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state is None on ranks \[0\]; expected it on none, or on all but rank 0"):
        ad.load_full_state_dict(model, state if comm.rank == 1 else None)
    same_output(model)


def models_refused(comm: Communicator, folder: str) -> None:
    model, state = loaded(comm), whole_model().state_dict()
    with pytest.raises(
        RuntimeError, match=r"(?s)up.weight is the whole parameter.*pynccl_autograd.load_full_state_dict"
    ):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())

    file = f"{folder}/model.bin/below"  # model.bin is a file
    with pytest.raises(RuntimeError if comm.rank else NotADirectoryError, match="Not a directory"):
        ad.save_full_state_dict(model, file)
    with pytest.raises(ValueError, match=r"max_shard_bytes is 0, expected a number above 0"):
        ad.save_full_state_dict(model, folder, 0)
    with pytest.raises(TypeError, match=r"x is torch.complex128, which files of safetensors cannot hold"):
        wide = nn.Module()
        wide.x = nn.Parameter(torch.ones(2, dtype=torch.complex128))
        ad.save_full_state_dict(wide, folder)
    with pytest.raises(TypeError, match=r"full_state_dict: model is 3, expected a torch.nn.Module"):
        ad.full_state_dict(3)  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = Model(comm)
        empty.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"norm_scale is on the meta device: it has no values"):
        ad.full_state_dict(empty)
    with pytest.raises(RuntimeError, match=r"since not persistent: table; compute them first"):
        ad.load_full_state_dict(empty, state)
    same_output(model)


def test_bad_input_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors", "model.bin"):
        (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad.safetensors.index.json").write_text('{"weight_map": {"x": "../one.safetensors"}}')
    ranks.run(2, states_refused)
    ranks.run(2, files_refused, str(tmp_path))
    ranks.run(2, models_refused, str(tmp_path))


def two_communicators(comm: Communicator) -> None:
    mesh = ad.Mesh(comm, {"dp": 2, "tp": 2})
    model = nn.Sequential(
        ad.ColumnParallelLinear(4, 8, mesh["tp"], bias=False), ad.ColumnParallelLinear(8, 4, mesh["dp"], bias=False)
    )
    with pytest.raises(ValueError, match=r"cut over 2 communicators; pass comm="):
        ad.full_state_dict(model)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)).state_dict()
    ad.load_full_state_dict(model, whole if comm.rank == 0 else None, comm=comm)
    found = ad.full_state_dict(model, comm)
    assert set(found) == (set() if comm.rank else set(whole))
    assert all(torch.equal(found[name], whole[name]) for name in found)
    mesh.close()


def test_parameters_cut_over_several_communicators(ranks: RankPool) -> None:
    ranks.run(4, two_communicators)


def keeps_blocks(comm: Communicator, folder: str) -> None:
    """Queries, keys and values in one layer, from [in, out] as transformers' Conv1D has them."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(24))

    torch.manual_seed(5)
    whole = Conv1D()
    layer = ad.ColumnParallelLinear.from_linear(whole, comm, blocks=3)
    rows = torch.cat([one.chunk(comm.size)[comm.rank] for one in whole.weight.t().chunk(3)])
    assert torch.equal(layer.weight, rows)
    found = ad.full_state_dict(layer, rank0_only=False)
    assert torch.equal(found["weight"], whole.weight) and torch.equal(found["bias"], whole.bias)
    empty = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    ad.load_full_state_dict(empty, found)
    assert torch.equal(empty.weight, layer.weight) and torch.equal(empty.bias, layer.bias)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    own = f"{folder}/{comm.rank}"
    boxes = [box.whole for box in layer.weight.shard.boxes()]  # type: ignore[attr-defined]
    assert boxes == [(0, 8 * block + 8 // comm.size * comm.rank) for block in range(3)]
    save(ad.dcp_state_dict(layer), storage_writer=FileSystemWriter(own), no_dist=True)
    load(ad.dcp_state_dict(empty), storage_reader=FileSystemReader(own), no_dist=True)
    assert torch.equal(empty.weight, layer.weight) and torch.equal(empty.bias, layer.bias)


def test_blocks_and_transposed_weights_are_put_together(ranks: RankPool, tmp_path: Path) -> None:
    for n in (2, 4):
        ranks.run(n, keeps_blocks, str(tmp_path / str(n)))
