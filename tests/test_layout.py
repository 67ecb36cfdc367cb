"""Where elements lie in DeepSpeed's flat partitions, and the files that hold them: pure, no ranks."""

import io
import os
import pickle
import zipfile
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_ds.accumulation.reshard import LogicalParameter, held_range, zero3_placement
from ruda_ds.checkpoint.layout import (
    SUB_GROUP_SIZE,
    Logical,
    Stage3Layout,
    Topology,
    covers,
    stage3_groups,
)
from ruda_ds.checkpoint.layout_stage12 import Stage12Layout
from ruda_ds.checkpoint.pickles import Foreign, LazyTensor
from ruda_ds.checkpoint.pt_writer import write_pt
from ruda_ds.checkpoint.reader import PtFile
from ruda_ds.errors import CheckpointError, OwnershipError


@st.composite
def jobs(draw):
    """(optimizer groups, topology): odd shapes, uneven and empty ownership, small sub-groups."""
    ep_size = draw(st.integers(1, 4))
    world = ep_size * draw(st.integers(1, 3))
    experts = draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, experts), min_size=ep_size - 1, max_size=ep_size - 1)))
    ownership = {"layer": (0, *cuts, experts)}
    sizes = st.integers(1, 5)
    count = draw(st.integers(1, 7))
    parameters = []
    for index in range(count):
        if draw(st.booleans()):
            parameters.append(Logical(f"p{index}", (experts, draw(sizes), draw(sizes)), "layer"))
        else:
            parameters.append(Logical(f"p{index}", tuple(draw(st.lists(sizes, max_size=3)))))
    cut = draw(st.integers(0, count))
    groups = [group for group in (parameters[:cut], parameters[cut:]) if group]
    return groups, Topology(world, ep_size, ownership, draw(st.sampled_from([1, 7, 40, SUB_GROUP_SIZE])))


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_stage3_segments_cover_every_element_and_agree_with_the_pending_shards(job):
    groups, topology = job
    layout = Stage3Layout(groups, topology)
    for parameter in (p for group in groups for p in group):
        segments = layout.segments(parameter.name)
        assert covers(segments, parameter.numel)
        for segment in segments:
            flat = layout.groups(segment.rank)[segment.group]
            place = flat.names.index(parameter.name)
            assert flat.offsets[place] == segment.start
            assert segment.start + segment.count <= flat.offsets[place + 1]
        prefix = topology.ownership["layer"] if parameter.experts else None
        logical = LogicalParameter(parameter.name, parameter.shape, torch.float32, True)
        for rank in range(topology.world_size):
            place = zero3_placement(logical, rank, topology.world_size, prefix)
            begin, end = held_range(place)
            held = topology.held(parameter, rank)
            assert held[1] - held[0] == end - begin
            assert held == (begin, end) or begin == end
            assert layout.segment(parameter.name, rank).count == end - begin


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_below_stage3_segments_cover_every_element(job):
    groups, topology = job
    # Experts in groups of their own, as they must be there.
    parts = [[p for p in group if topology.is_split(p) is split] for group in groups for split in (False, True)]
    parts = [part for part in parts if part]
    partitions = []
    for rank in range(topology.world_size):
        sizes = []
        for part in parts:
            ranks = topology.partition_ranks(topology.is_split(part[0]), rank)
            total = sum(torch.Size(topology.local_shape(p, rank)).numel() for p in part)
            sizes.append(-(-total // (2 * len(ranks))) * 2)
        partitions.append(sizes)
    layout = Stage12Layout(parts, [[[0] * len(part) for part in parts]] * topology.ep_size, partitions, topology)
    seen = set()
    for parameter in (p for part in parts for p in part):
        segments = layout.segments(parameter.name)
        assert covers(segments, parameter.numel)
        for segment in segments:
            assert segment.start + segment.count <= partitions[segment.rank][segment.group]
            for element in range(segment.start, segment.start + segment.count):
                key = segment.rank, segment.group, element
                assert key not in seen
                seen.add(key)


def test_a_known_layout():
    """2 ranks, experts 2 and 4 of 6: the flat tensors of an actual run."""
    groups = [[Logical("a", (7, 3)), Logical("moe.experts.gate", (6, 2, 5), "moe"), Logical("b", (4,))]]
    topology = Topology(2, 2, {"moe": (0, 2, 6)})
    first, second = (stage3_groups(groups, topology, rank) for rank in range(2))
    assert [(group.names, group.offsets) for group in first] == [
        (("a", "b"), (0, 11, 13)),
        (("moe.experts.gate",), (0, 20)),
    ]
    assert second[1].offsets == (0, 40)
    assert Stage3Layout(groups, topology).segments("a")[1].count == 10  # the last element is padding


def test_sub_groups_are_as_large_as_in_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig(stage=3).sub_group_size == SUB_GROUP_SIZE


def test_a_topology_that_does_not_fit_is_refused():
    with pytest.raises(OwnershipError, match="whole groups"):
        Topology(3, 2)
    with pytest.raises(OwnershipError, match="expected 3 numbers"):
        Topology(2, 2, {"moe": (0, 6)})
    with pytest.raises(OwnershipError, match="is of 5"):
        Topology(2, 2, {"moe": (0, 1, 5)}).owned(Logical("x", (6, 1), "moe"), 0)


# --- files --------------------------------------------------------------------------------------------------------


def content():
    """Tensors of several kinds: views, transposed, empty, scalar, a parameter, shared storage."""
    base = torch.arange(40, dtype=torch.float32)
    return {
        "flat": base,
        "view": base[10:22].view(3, 4),
        "turned": base[:12].view(3, 4).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bf16": torch.randn(5, dtype=torch.bfloat16),
        "counts": torch.arange(4),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "shape": torch.Size([3, 4]),
        "nested": [{"a": (1, 2.5, None, True, "text", b"bytes")}, {3, 4}],
        "dtype": torch.bfloat16,
        "milestones": Counter([1, 3, 3]),
    }


def test_reading_by_range_equals_torch_load(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(content(), path)
    root, wanted = PtFile(path).root, torch.load(path, weights_only=False)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            found = root[name].read()
            assert found.dtype == value.dtype
            assert torch.equal(found, value.detach()), name
            if value.numel() > 3 and name != "turned":
                assert torch.equal(root[name].read(1, 2), value.detach().reshape(-1)[1:3])
        else:
            assert root[name] == value
    assert torch.equal(root["turned"].read(2, 3), wanted["turned"].reshape(-1)[2:5])
    with pytest.raises(CheckpointError, match=r"x\.pt.*elements 39\.\.41"):
        root["flat"].read(39, 2)


def test_what_is_written_is_what_torch_loads(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    path, again = tmp_path / "x.pt", tmp_path / "y.pt"
    torch.save({"scaler": LossScaler(4.0), "stage": ZeroStageEnum.weights, **content()}, path)
    root = PtFile(path).root
    assert isinstance(root["scaler"], Foreign)
    values = torch.randn(1000)
    lazy = LazyTensor((10, 100), torch.float32, lambda: iter(values.split(300)))
    written: list[int] = []
    plain = {name: value for name, value in root.items() if not hasattr(value, "read")}
    entry = write_pt(again, {**plain, "lazy": lazy, "small": torch.tensor([7])}, written.append)
    assert sum(written) == 4000 + 8
    assert entry.bytes == again.stat().st_size
    for mmap in (False, True):
        found = torch.load(again, weights_only=False, mmap=mmap)
        assert torch.equal(found["lazy"], values.view(10, 100))
        assert found["scaler"].cur_scale == 4.0
        assert isinstance(found["scaler"], LossScaler)
        assert found["stage"] is ZeroStageEnum.weights
        assert found["nested"] == content()["nested"]
        assert found["milestones"] == content()["milestones"]
        assert found["shape"] == torch.Size([3, 4])
    with zipfile.ZipFile(again) as archive:
        assert archive.testzip() is None
    assert torch.equal(PtFile(again).root["lazy"].read(), values.view(10, 100))


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(tmp_path):
    flag = tmp_path / "flag"
    for value in ({"x": Touch(flag)}, {"x": torch.nn.Linear(2, 2)}):
        torch.save(value, tmp_path / "bad.pt")
        with pytest.raises(CheckpointError, match=r"bad\.pt: found the global (posix|nt|torch)\S+"):
            PtFile(tmp_path / "bad.pt")
    for call in ("c__builtin__\neval\n(V1\ntR.", "cbuiltins\ngetattr\n(ctorch\nSize\nV__reduce__\ntR."):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("bad/data.pkl", call)
        (tmp_path / "bad.pt").write_bytes(stream.getvalue())
        with pytest.raises(CheckpointError, match="the global"):
            PtFile(tmp_path / "bad.pt")
    assert not flag.exists()


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(content(), path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"x\.pt.*expected a complete file"):
            PtFile(path)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": 1})[:-4])
    path.write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match=r"x\.pt.*readable pickle"):
        PtFile(path)
    torch.save({"x": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="complete file of torch.save"):
        PtFile(path)
