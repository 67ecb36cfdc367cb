"""The installed DeepSpeed is one whose internals we know; these fail when a new version moves one of them."""

import inspect
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2

from ruda_ds import _deepspeed
from ruda_ds.errors import VersionError


def test_the_replaced_methods_are_as_they_were_read():
    _deepspeed.require_supported_version()
    _deepspeed.require_methods(stage3.DeepSpeedZeroOptimizer_Stage3, _deepspeed.STAGE3_METHODS)
    _deepspeed.require_methods(stage_1_and_2.DeepSpeedZeroOptimizer, _deepspeed.STAGE12_METHODS)
    _deepspeed.require_methods(DeepSpeedEngine, _deepspeed.ENGINE_METHODS)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            stage3,
            [
                "self.grad_partitions_flat_buffer",
                "__param_id_to_grad_partition",
                "_offload_boundary_param_ids",
                "self.fp32_partitioned_groups_flat",
                "self.ipg_buckets",
                "self.contiguous_gradients",
                "def clear_params",
                "self.sub_group_to_group_id",
                "def _zero3_partition_group_metadata",
            ],
        ),
        (
            stage_1_and_2,
            [
                "self.round_robin_bit16_groups",
                "self.round_robin_bit16_offsets",
                "self.partition_size",
                "self.real_dp_process_group",
                "self.single_partition_of_fp32_groups",
                "self.averaged_gradients",
                "class GradPartitionBufferGroup",
                "flat_partition",
                "self.groups_padding",
                "self.has_moe_layers",
                "def is_moe_group",
                "self.expert_dp_process_group[group['name']]",
            ],
        ),
        (
            inspect.getmodule(DeepSpeedEngine),
            [
                "self._running_engine_step",
                "self._step_applied",
                "self.skipped_steps",
                "self._unmanaged_backward_count",
                "def was_step_applied",
                "def _copy_recovery_script",
                "has_moe_layers=self.has_moe_layers",
            ],
        ),
        (
            inspect.getmodule(ZeROOptimizer),
            ["_backward_active_depth", "def exit_backward", "def clear_backward_seen_flag"],
        ),
    ],
)
def test_the_attributes_that_are_read_are_there(module, names):
    source = inspect.getsource(module)
    assert [name for name in names if name not in source] == []


def test_another_version_is_refused_by_number(monkeypatch):
    for version in ("0.19.7", "0.20.0", "1.0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(VersionError, match=f"DeepSpeed is {version}, expected >=0.19.8,<0.20"):
            _deepspeed.require_supported_version()


def test_a_method_that_moved_or_changed_is_named():
    class Moved:
        def partition_grads(self, params):
            """Takes other parameters."""

    with pytest.raises(VersionError, match="Moved.partition_grads takes"):
        _deepspeed.require_methods(Moved, {"partition_grads": ["self", "params_to_release", "grad_partitions"]})
    with pytest.raises(VersionError, match="Moved.step is missing"):
        _deepspeed.require_methods(Moved, {"step": ["self"]})


def test_the_shared_memory_buffer_is_named_as_it_is_removed():
    source = (Path(deepspeed.__file__).parent / "ops/csrc/cpu/comm/shm.cpp").read_text()
    for part in ('"deepspeed_allreduce_buffer"', '"%s_%d_%s_%s"', '"%s_%d", shm_name_prefix, rank'):
        assert part in source
