"""A small decoder to train from scratch, and Hugging Face's in its place.

Letters: B rows of a micro-batch, S row length, V vocabulary, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder.

    Attributes:
        vocabulary: V.
        width: D, a multiple of ``heads``.
        layers: blocks.
        heads: attention heads.
        experts: SwiGLU experts in each block; 0 for one dense SwiGLU.
        top_k: experts a token.
        shared: a dense expert beside them, for every token.
        ownership: prefix of the experts' owners, see ruda_ds.moe.ExpertOwnership; None: every rank holds all.
        rank: this process's, among the owners.
        checkpointing: recompute each block in the backward.
    """

    vocabulary: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 0
    top_k: int = 2
    shared: bool = False
    ownership: tuple[int, ...] | None = None
    rank: int = 0
    checkpointing: bool = False

    @property
    def inner(self) -> int:
        """Width of a SwiGLU: about 8/3 of the model's for a dense one, half of that for an expert; a multiple of 16."""
        return -(-8 * self.width // (6 if self.experts else 3) // 16) * 16


class SwiGLU(torch.nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, inner, bias=False)
        self.up = torch.nn.Linear(width, inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(torch.nn.Module):
    """Routed experts split over ranks, and a shared one beside them if asked for."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        from ruda_ds.moe import ExpertOwnership, ExpertParallelMoE, ExpertParallelSwiGLUExperts, MoEOptions

        shape = (config.experts, config.inner, config.width)
        # Drawn whole on every rank and then cut, so that the model does not depend on who owns what.
        gate, up = (torch.nn.Parameter(torch.randn(shape) * 0.02) for _ in range(2))
        down = torch.nn.Parameter(torch.randn(shape).transpose(1, 2) * (0.02 / (2 * config.layers) ** 0.5))
        ownership = ExpertOwnership(config.ownership or (0, config.experts))
        experts = ExpertParallelSwiGLUExperts.from_full(gate, up, down, ownership, config.rank)
        router = torch.nn.Linear(config.width, config.experts, bias=False)
        # The bias is moved after each window towards an even use of the experts; without it a few take all tokens.
        bias = torch.zeros(config.experts)
        self.routed = ExpertParallelMoE(router, experts, bias, MoEOptions(top_k=config.top_k))
        self.shared = SwiGLU(config.width, config.inner) if config.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        routed = self.routed(x)
        return routed if self.shared is None else routed + self.shared(x)


class Block(torch.nn.Module):
    """Attention, then a SwiGLU or experts, each after an RMSNorm and around a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.before_attention = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.before_mlp = torch.nn.RMSNorm(width)
        self.mlp = Experts(config) if config.experts else SwiGLU(width, config.inner)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """x [B, S, D], mask [B, 1, S, S] bool, rotation [2, B, 1, S, D / heads] -> [B, S, D]."""
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv:2104.09864, eq. 34), halves in place of pairs."""
    one, two = x.chunk(2, dim=-1)
    return (x * rotation[0] + torch.cat([-two, one], dim=-1) * rotation[1]).to(x.dtype)


def rotations(positions: torch.Tensor, size: int) -> torch.Tensor:
    """cos and sin [2, B, 1, S, size] for positions [B, S]."""
    frequencies = 10000 ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = (positions.unsqueeze(-1) * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return torch.stack([angles.cos(), angles.sin()])


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] bool: a position sees itself and what stood before it in its own document, [B, S]."""
    size = documents.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=documents.device).tril()
    return (documents.unsqueeze(1) == documents.unsqueeze(2)).logical_and(causal).unsqueeze(1)


class Decoder(torch.nn.Module):
    """Token ids to logits; the embedding is tied to the output."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocabulary, config.width)
        self.blocks = torch.nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = torch.nn.RMSNorm(config.width)
        self.head = torch.nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                torch.nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """tokens, positions, documents [B, S] -> logits [B, S, V]."""
        x = self.embedding(tokens)
        mask = document_mask(documents)
        rotation = rotations(positions, self.config.width // self.config.heads)
        for block in self.blocks:
            if self.config.checkpointing and self.training:
                x = checkpoint(block, x, mask, rotation, use_reentrant=False)
            else:
                x = block(x, mask, rotation)
        return self.head(self.norm(x))


class ModelError(ValueError):
    """A model that cannot be trained on packed rows, or not with this tokenizer; the message says why."""


class FolderModel(torch.nn.Module):
    """A causal language model of transformers behind the same call.

    Documents of a packed row are kept apart by a 4-D additive mask, which takes the place of any sliding window of the
    model's own. A model that does not heed it is refused, since it would see the tokens that it is to predict.

    Args:
        folder: of the configuration, and the weights if there are any.
        checkpointing: recompute each block in the backward.
        vocabulary: tokens that the tokenizer can give.
        experts: `ruda.experts` of the config. The MoE blocks of a known family are then ours, and each rank reads the
            experts that it owns and no others.
        place: of this rank among those that share the experts.

    Raises:
        ModelError: too small a vocabulary, or a mask without effect.
    """

    def __init__(self, folder: str, checkpointing: bool, vocabulary: int, experts: Any = None, place: int = 0) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        from ruda_ds.checkpoint.pretrained import load_pretrained
        from ruda_ds.moe.families import FAMILIES

        has_weights = any(Path(folder).glob("*.safetensors")) or any(Path(folder).glob("*.bin"))
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        split = experts is not None and config.model_type in FAMILIES
        if split:
            _require_masked(AutoModelForCausalLM.from_config(_smallest(config), dtype=torch.float32), folder)
        if split and has_weights:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _split(self.model, experts, place)
            load_pretrained(self.model, folder)
        elif has_weights:
            self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        else:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            if split:
                _split(self.model, experts, place)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        known = self.model.get_input_embeddings().num_embeddings
        if known < vocabulary:
            raise ModelError(f"{folder}: the tokenizer has {vocabulary} tokens, the model knows {known}")
        if not split:
            _require_masked(self.model, folder)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """tokens, positions, documents [B, S] -> logits [B, S, V]."""
        return _logits(self.model, tokens, positions, documents)


def _logits(model: Any, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    seen = document_mask(documents)
    # Added to the scores: transformers' eager attention would add a bool mask as 0 and 1, which hides nothing.
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
    return model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits


def _split(model: Any, experts: Any, place: int) -> None:
    """Make the MoE blocks ours, with this rank's experts."""
    from ruda_ds.moe import ownership_of, replace_moe_blocks
    from ruda_ds.moe.families import FAMILIES

    count = FAMILIES[model.config.model_type].num_experts(model.config)
    ownership = ownership_of(experts.ownership, count, experts.ep_size)
    replace_moe_blocks(model, ownership, rank=place, balance_loss=experts.balance_loss, z_loss=experts.z_loss)


def _smallest(config: Any) -> Any:
    """One layer with narrow experts: its attention is the model's own, and one process can hold it."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    for width in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(small, width):
            setattr(small, width, 16)
    return small


@torch.no_grad()
def _require_masked(model: Any, folder: str) -> None:
    """Change the last token, then the first document; logits that neither should reach must stay."""
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, 8, dtype=torch.long)
    places, documents = torch.arange(4).repeat(1, 2), torch.tensor([[0] * 4 + [1] * 4])
    last, first = tokens.clone(), tokens.clone()
    last[0, 7], first[0, :4] = 1, 1
    try:
        before, later, other = (_logits(model, given, places, documents) for given in (tokens, last, first))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"{folder}: the model does not take a 4-D attention mask ({error})") from error
    model.train(was_training)
    for what, changed, part in (("a later token", later, slice(0, 7)), ("another document", other, slice(4, 8))):
        if not torch.allclose(before[:, part], changed[:, part], rtol=1e-4, atol=1e-4):
            raise ModelError(f"{folder}: a position sees {what}, expected an attention that heeds a 4-D mask")


@torch.no_grad()
def generate(
    model: Callable[..., torch.Tensor], prompt: list[int], end: int, length: int, context: int, seed: int
) -> list[int]:
    """Sample ``length`` tokens after a prompt; every rank calls it, and all draw the same ones.

    Args:
        model: the engine, in eval mode.
        end: stop at this token.
        context: tokens that the model is shown at most.
    """
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    draw = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        shown = torch.tensor([tokens[-context:]], device=device)
        places = torch.arange(shown.shape[1], device=device).unsqueeze(0)
        logits = model(shown, places, torch.zeros_like(shown))[0, -1].float().cpu()
        tokens.append(int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=draw)))
        if tokens[-1] == end:
            break
    return tokens
