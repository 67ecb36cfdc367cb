"""ZeRO-3 checkpoints of random values, of any size and any number of ranks, made without training."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, VOCABULARY, SIDE = 8, 8, 32000, 64


def shapes_of(parameters: int, dense: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of about so many elements; Mixtral's names, or a dense model's."""
    hidden = 64
    while True:
        inner = 2 * hidden
        shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
        for layer in range(LAYERS):
            block = f"model.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                shapes[f"{block}.self_attn.{name}.weight"] = (hidden, hidden)
            shapes[f"{block}.input_layernorm.weight"] = (hidden,)
            if dense:
                for expert in range(EXPERTS):
                    for name in ("gate", "up"):
                        shapes[f"{block}.mlp.{name}{expert}.weight"] = (inner, hidden)
                    shapes[f"{block}.mlp.down{expert}.weight"] = (hidden, inner)
            else:
                moe = f"{block}.mlp.moe"
                shapes[f"{moe}.router.weight"] = (EXPERTS, hidden)
                shapes[f"{moe}.experts.gate"] = shapes[f"{moe}.experts.up"] = (EXPERTS, inner, hidden)
                shapes[f"{moe}.experts.down"] = (EXPERTS, hidden, inner)
        total = sum(_count(shape) for shape in shapes.values())
        if total >= parameters:
            return shapes
        hidden += 64 if total > parameters // 2 else 128


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def make(root: Path, shapes: dict[str, tuple[int, ...]], world: int, prefix: list[int]) -> int:
    """Write a checkpoint of random values with a manifest; its bytes."""
    import torch

    from ruda_ds.checkpoint.layout import Logical, Stage3Layout, Topology
    from ruda_ds.checkpoint.pt_writer import write_pt
    from ruda_ds.checkpoint.reshard_stage3 import partition_metadata

    layers = {name: name.partition(".experts.")[0] for name in shapes if ".experts." in name}
    ownership = dict.fromkeys(layers.values(), tuple(prefix))
    topology = Topology(world, len(prefix) - 1 if layers else 1, ownership)
    logical = [Logical(name, shape, layers.get(name)) for name, shape in shapes.items()]
    layout = Stage3Layout([logical], topology)
    values = _noise()
    tag = root / "bench"
    tag.mkdir(parents=True)
    files = {}
    for rank in range(world):
        groups = layout.groups(rank)
        local = {p.name: torch.Size(topology.local_shape(p, rank)) for p in logical}
        metadata = partition_metadata(groups, topology, rank)
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        for name, content in (
            ("optim", _optim(groups, metadata, world, values)),
            ("model", _model(groups, local, world)),
        ):
            path = tag / f"{stem}_{name}_states.pt"
            files[path.name] = write_pt(path, content, lambda nbytes: None)
    if layers:
        _write_manifest(tag, layout, logical, files)
    (root / "latest").write_text("bench")
    return sum(path.stat().st_size for path in tag.iterdir())


def _noise() -> Callable[[int], Any]:
    """Gives a lazy tensor of so many random values."""
    import torch

    from ruda_ds.checkpoint.pickles import LazyTensor

    noise = torch.randn((1 << 20) + 11) * 0.02

    def values(count: int) -> LazyTensor:
        def chunks() -> Any:
            for start in range(0, count, len(noise)):
                yield noise[: min(len(noise), count - start)]

        return LazyTensor((count,), torch.float32, chunks)

    return values


def _optim(groups: list[Any], metadata: Any, world: int, values: Callable[[int], Any]) -> dict[str, Any]:
    """The content of a rank's optimizer states."""
    import torch

    from ruda_ds.checkpoint.pickles import foreign

    base = {
        "state": {
            index: {"step": torch.tensor(1.0), "exp_avg": values(group.numel), "exp_avg_sq": values(group.numel)}
            for index, group in enumerate(groups)
        },
        "param_groups": [{"lr": 1e-3, "params": list(range(len(groups)))}],
    }
    zero = {
        "zero_stage": foreign("deepspeed.runtime.zero.config", "ZeroStageEnum")(3),
        "partition_count": world,
        "optimizer_state_dict": base,
        "fp32_flat_groups": [values(group.numel) for group in groups],
    }
    return {"optimizer_state_dict": zero | ({} if metadata is None else {"ds_zero_partition_groups": metadata})}


def _model(groups: list[Any], local: dict[str, Any], world: int) -> dict[str, Any]:
    """The content of a rank's model states."""
    import torch

    return {
        "module": OrderedDict((name, torch.empty(0)) for name in local),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, local[name]) for name in group.names) for group in groups],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "global_steps": 1,
        "skipped_steps": 0,
        "dp_world_size": world,
        "ds_version": "0.19.8",
    }


def _write_manifest(tag: Path, layout: Any, logical: list[Any], files: dict[str, Any]) -> None:
    from ruda_ds.checkpoint.manifest import ExpertsEntry, Manifest, ModelEntry, ParameterEntry

    topology = layout.topology
    window = {"kind": "AccumulationState", "dtype": "float32", "loss_scale": 1.0, "global_count": 0}
    window |= {"microbatches": 0, "loss": (0.0).hex()}
    Manifest(
        tag="bench",
        zero_stage=3,
        world_size=topology.world_size,
        window=window,
        global_steps=1,
        micro_steps=1,
        parameters=tuple(
            ParameterEntry(p.name, p.shape, "bfloat16", True, p.experts, i) for i, p in enumerate(logical)
        ),
        groups=(tuple(name for group in layout.groups(0) for name in group.names),),
        tied={},
        experts=ExpertsEntry(topology.ep_size, dict(topology.ownership)),
        model=ModelEntry("MixtralForCausalLM", {"model_type": "mixtral", "num_local_experts": EXPERTS}),
        optimizer="AdamW",
        scheduler=None,
        versions={},
        files=files | _pending(tag, topology.world_size, window),
    ).write(tag)


def _pending(tag: Path, world: int, window: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import save_file

    from ruda_ds.checkpoint import rank_files
    from ruda_ds.checkpoint.manifest import FileEntry, sha256_of

    made = {}
    for rank in range(world):
        path = tag / rank_files.pending_name(rank, world)
        metadata = {"format": "ruda_pending", "version": "1", "rank": str(rank), "world_size": str(world)}
        save_file({}, path, metadata={**metadata, "window": json.dumps(window, sort_keys=True)})
        made[path.name] = FileEntry(path.stat().st_size, sha256_of(path))
    return made


def small_shapes() -> dict[str, tuple[int, ...]]:
    """64 layers of tiny tensors, as many names as a large model has."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SIDE, SIDE)}
    for layer in range(64):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (SIDE, SIDE)
        moe = f"model.layers.{layer}.mlp.moe"
        shapes[f"{moe}.router.weight"] = (8, SIDE)
        shapes |= {f"{moe}.experts.{cube}": (8, SIDE, SIDE) for cube in ("gate", "up", "down")}
    return shapes
