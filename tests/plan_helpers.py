"""What real ranks hand to their collectives, counted below every library: at torch's ProcessGroup."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

import ruda_ds

# Method of ProcessGroup -> (name of the collective, which argument is what a rank sends in).
# torch 2.13 calls the "single" ones; those before, the "base" ones.
COUNTED = {
    "allreduce": ("all-reduce", 0),
    "all_gather_single": ("all-gather", 1),
    "all_gather_single_coalesced": ("all-gather", 1),
    "allgather_into_tensor_coalesced": ("all-gather", 1),
    "_allgather_base": ("all-gather", 1),
    "allgather": ("all-gather", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "_reduce_scatter_base": ("reduce-scatter", 1),
    "all_to_all_single": ("all-to-all-v", 1),
    "alltoall_base": ("all-to-all-v", 1),
}
COUNTED = {method: what for method, what in COUNTED.items() if hasattr(dist.ProcessGroup, method)}


RELEASED = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


class Count:
    """``with Count() as count:`` then ``count.bytes[(collective, dtype, ranks)]``, of this rank's inputs."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str, int], int] = defaultdict(int)
        self._saved: dict[str, Any] = {}

    def __enter__(self) -> Count:
        for method, (name, place) in COUNTED.items():
            self._saved[method] = getattr(dist.ProcessGroup, method)
            setattr(dist.ProcessGroup, method, self._counting(self._saved[method], name, place))
        return self

    def __exit__(self, *_: object) -> None:
        for method, saved in self._saved.items():
            setattr(dist.ProcessGroup, method, saved)

    def _counting(self, call: Any, name: str, place: int) -> Any:
        def counting(group: Any, *args: Any, **named: Any) -> Any:
            given = args[place]
            for tensor in given if isinstance(given, (list, tuple)) else [given]:
                key = (name, str(tensor.dtype).removeprefix("torch."), group.size())
                self.bytes[key] += tensor.numel() * tensor.element_size()
            return call(group, *args, **named)

        return counting


def count_a_window(
    folder: str, ep_size: int, dtype: str, sequences: int, length: int, micro_batches: int, kept: bool
) -> dict:
    """Bytes by collective, of this rank, in the second window of a model made from a folder's config.json.

    Args:
        kept: whether gathered parameters stay from the forward to the backward, as in a model below MAX_LIVE.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": sequences,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **({} if kept else RELEASED)},
        "bf16": {"enabled": dtype == "bfloat16"},
        "gradient_clipping": 0.0,
    }
    if ep_size:
        settings["ruda"] = {"experts": {"ep_size": ep_size}}
    engine, *_ = ruda_ds.initialize(
        model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), config=settings
    )
    for _window in range(2):  # the first also traces the order of the modules
        with Count() as count:
            for _ in range(micro_batches):
                tokens = torch.randint(0, config.vocab_size, (sequences, length))
                logits = engine(input_ids=tokens, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens.flatten(), reduction="sum"
                )
                engine.accumulator.backward_sum(loss, local_count=tokens.numel())
            engine.accumulator.step()
    return dict(count.bytes)
