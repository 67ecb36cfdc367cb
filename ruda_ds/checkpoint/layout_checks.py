"""Layouts against what each rank's files say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ruda_ds.checkpoint.layout import Logical, Stage3Layout, Topology
from ruda_ds.checkpoint.layout_stage12 import Stage12Layout
from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.checkpoint.rank_states import RankFiles, field_of
from ruda_ds.checkpoint.reader import damaged


def check_stage3(layout: Stage3Layout, files: RankFiles, flats: Sequence[StoredTensor], rank: int) -> None:
    """Compare a ZeRO-3 layout with a rank's own shapes and lengths.

    Raises:
        CheckpointError: the file, and the first difference.
    """
    groups = layout.groups(rank)
    _check_shapes(files, [group.names for group in groups], layout.parameters, layout.topology, rank)
    wanted = [group.numel for group in groups]
    found = [flat.numel for flat in flats]
    if found != wanted:
        raise damaged(files.optim.path, f"flat partitions of {wanted} elements", f"{found}")


def lay_out_stage12(
    groups: Sequence[Sequence[Logical]],
    topology: Topology,
    ranks: Sequence[RankFiles],
    flats: Sequence[Sequence[StoredTensor]],
) -> Stage12Layout:
    """The layout of a ZeRO-1 or 2 job by what its files say of padding, found to fit the parameters.

    Args:
        groups: the parameters of each optimizer group, in the order of its flat tensor.
        flats: by rank: its flat tensors, as they are saved, without the padding at the end.

    Raises:
        CheckpointError: the file, and what in it does not fit.
    """
    partitions = []
    for files, own in zip(ranks, flats, strict=True):
        paddings = field_of(files.optim, files.zero, "group_paddings")
        if not len(own) == len(paddings) == len(groups):
            raise damaged(files.optim.path, f"flat partitions of {len(groups)} optimizer groups", f"{len(own)}")
        partitions.append([flat.numel + pad for flat, pad in zip(own, paddings, strict=True)])
    lengths = [len(group) for group in groups]
    gaps = []
    for files in ranks[: topology.ep_size]:
        gaps.append(files.zero.get("param_alignment_paddings") or [[0] * length for length in lengths])
        if [len(group) for group in gaps[-1]] != lengths:
            raise damaged(files.optim.path, f"padding of {lengths} parameters", f"{[len(g) for g in gaps[-1]]}")
    layout = Stage12Layout(groups, gaps, partitions, topology)
    _check_shapes(ranks[0], [[p.name for p in group] for group in groups], layout.parameters, topology, 0)
    for rank, (files, own) in enumerate(zip(ranks, flats, strict=True)):
        _check_partitions(layout, files, own, rank)
    return layout


def _check_partitions(layout: Stage12Layout, files: RankFiles, flats: Sequence[StoredTensor], rank: int) -> None:
    """Compare over how many ranks each group is cut, and where a rank's part of it ends, with the parameters."""
    groups = range(len(layout.groups))
    counts = [len(layout.ranks(group, rank)) for group in groups]
    if list(files.zero["partition_count"]) != counts:
        expected = f"partition counts {counts}, by the owners of experts that a manifest of ruda_ds alone names"
        raise damaged(files.optim.path, expected, str(files.zero["partition_count"]))
    found = [(flat.numel, pad) for flat, pad in zip(flats, files.zero["group_paddings"], strict=True)]
    sizes = [layout.partitions[layout.ranks(group, rank)[0]][group] for group in groups]
    paddings = [layout.padding(rank, group) for group in groups]
    wanted = [(size - padding, padding) for size, padding in zip(sizes, paddings, strict=True)]
    if found != wanted:
        raise damaged(files.optim.path, f"flat partitions of elements and padding {wanted}", str(found))


def _check_shapes(
    files: RankFiles,
    groups: Sequence[Sequence[str]],
    parameters: Mapping[str, Logical],
    topology: Topology,
    rank: int,
) -> None:
    shapes = field_of(files.model, files.state, "param_shapes")
    found = [[(name, tuple(shape)) for name, shape in group.items()] for group in shapes]
    wanted = [[(name, topology.local_shape(parameters[name], rank)) for name in names] for names in groups]
    if found != wanted:
        wrong = _first_difference(found, wanted)
        raise damaged(files.model.path, f"{wrong[1]} in the flat partitions", str(wrong[0]))


def _first_difference(found: list, wanted: list) -> tuple[Any, Any]:
    flat_found, flat_wanted = ([item for group in groups for item in group] for groups in (found, wanted))
    for left, right in zip(flat_found, flat_wanted, strict=False):
        if left != right:
            return left, right
    return f"{[len(group) for group in found]} parameters", f"{[len(group) for group in wanted]}"
