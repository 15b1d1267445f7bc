"""Every backend file joins these tests by being there."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first DTensor imports it: once here instead of in every forked rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.contract import FileRecord, find_backend, known_backends
from meshwright.checkpoint.files import measure
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError
from tests.ranks.group import run_ranks

SHAPES = {"weights/a": (7, 3), "weights/b": (2,), "exp_avg/a": (7, 3), "weights/c": (1, 5), "weights/d": (301, 50)}


def full(name):
    torch.manual_seed(sum(map(ord, name)))
    return torch.randn(SHAPES[name])


def part(value, places, mesh):
    """This rank's part of a tensor, and the DTensor around it; built by hand, since DTensor's own way starts slowly."""
    local = value
    for axis, place in enumerate(places):
        if place.is_shard():
            parts = list(torch.chunk(local, mesh.size(axis), place.dim))
            parts += [parts[0].narrow(place.dim, 0, 0)] * (mesh.size(axis) - len(parts))
            local = parts[mesh.get_local_rank(axis)]
    return DTensor.from_local(local.clone(), mesh, places, run_check=False, shape=value.shape, stride=value.stride())


def state(layout, fill=True):
    """The state under a layout: DTensors of a mesh, a plain copy, a scalar and a bf16 tensor."""
    values = {name: full(name) if fill else torch.zeros(SHAPES[name]) for name in SHAPES}
    plain = {
        "weights/h": (torch.arange(6) * fill).bfloat16(),
        "exp_avg/s": torch.tensor(2.5 * fill, dtype=torch.float64),
    }
    if not layout:
        return values | plain
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    places = [{"replicate": Replicate(), "shard": Shard(0), "tp": Shard(1)}[name] for name in layout]
    flat = [Replicate() if place == Shard(1) else place for place in places]
    return {name: part(value, places if value.ndim > 1 else flat, mesh) for name, value in values.items()} | plain


def equal(state, wanted):
    """Whether each tensor, or this rank's part of it, has the bits of the one that is wanted."""
    for name, tensor in state.items():
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            other = part(wanted[name], tensor.placements, tensor.device_mesh).to_local()
        else:
            other = wanted[name]
        if not torch.equal(local, other):
            return False
    return set(state) == set(wanted)


def save(rank, root, layout, step, backend):
    torch.distributed.barrier()
    store = CheckpointStore.build(root, CheckpointConfig(backend=backend, wait_s=60))
    return store.save(step, state(layout), {"layout": list(layout.items())})


def load(rank, root, layout, backend):
    store = CheckpointStore.build(root, CheckpointConfig(backend=backend, wait_s=60))
    targets = state(layout, fill=False)
    loaded = store.load(targets)
    return loaded.step, dict(loaded.meta), equal(targets, state({}))


@pytest.fixture(params=sorted(known_backends()))
def backend(request):
    return request.param


def test_one_process_round_trip(tmp_path, backend):
    unit = find_backend(backend)
    files = unit.write(tmp_path, state({}), None)
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    for name, record in files.items():
        assert isinstance(record, FileRecord) and measure(tmp_path / name, record.checksum.partition(":")[0]) == record
    table = unit.describe(tmp_path)
    assert {name: (tuple(t.shape), str(t.dtype)) for name, t in state({}).items()} == {
        name: (record.shape, f"torch.{record.dtype}") for name, record in table.items()
    }
    targets = state({}, fill=False)
    targets["weights/a"].requires_grad_()
    unit.read(tmp_path, targets, None)
    assert equal(targets, state({}))
    order = ["weights/d", "exp_avg/s", "weights/a"]
    found = list(unit.read_full(tmp_path, order))
    assert [name for name, _ in found] == order and all(torch.equal(t, state({})[name]) for name, t in found)
    with pytest.raises(CheckpointError, match="nothing"):
        list(unit.read_full(tmp_path, ["nothing"]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"replicate": 2}, [{}, {"shard": 3}]),
        ({"replicate": 2, "shard": 2}, [{"shard": 3}, {}]),
        ({"shard": 3}, [{"replicate": 2}]),
        ({"shard": 2, "tp": 2}, [{"replicate": 2, "shard": 2}, {"tp": 3}]),
    ],
    ids=str,
)
def test_saved_under_one_layout_loads_under_another(tmp_path, backend, before, after):
    ranks = 1
    for degree in before.values():
        ranks *= degree
    saved = run_ranks(ranks, save, tmp_path, before, 5, backend)
    assert len({item.path for item in saved}) == 1
    size = sum(path.stat().st_size for path in saved[0].path.iterdir())
    assert 60_200 < size < 100_000, "copies are written once"
    for layout in after:
        ranks = 1
        for degree in layout.values():
            ranks *= degree
        results = run_ranks(ranks, load, tmp_path, layout, backend) if layout else [load(0, tmp_path, {}, backend)]
        assert all(step == 5 and same for step, _, same in results), layout
    store = CheckpointStore(tmp_path)
    found = store.find()
    assert equal(dict(store.read_full(found)), state({}))


def stages(rank, root):
    store = CheckpointStore.build(root, CheckpointConfig(wait_s=60))
    mine = {f"weights/layer.{rank}": torch.full((3,), float(rank + 1))}
    store.save(1, mine | {"weights/tied": torch.ones(2)}, {})
    targets = {f"weights/layer.{1 - rank}": torch.zeros(3), "weights/tied": torch.zeros(2)}
    store.load(targets)
    return targets[f"weights/layer.{1 - rank}"].tolist()


def test_ranks_may_hold_other_names(tmp_path):
    assert run_ranks(2, stages, tmp_path) == [[2.0] * 3, [1.0] * 3]
