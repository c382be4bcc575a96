"""A decoder language model over the shared self-attention blocks.

Legend: B rows, L tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.blocks.decoder import DecoderBlock, DecoderConfig
from ..core.kv_cache import ContiguousKVCache
from ..core.norms import RMSNorm
from ..core.rotary import RotaryConfig, rotary_table
from ..core.stream import BlockInputs, Cache, NoCache, Stream, run_blocks

_EMBEDDING_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of a decoder language model; rotary embedding is by halves over one axis."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm: bool = False
    context_length: int = 2048
    tie_embeddings: bool = True

    @property
    def block(self) -> DecoderConfig:
        """The sizes of one block."""
        return DecoderConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            qk_norm=self.qk_norm,
        )

    @property
    def rotary(self) -> RotaryConfig:
        """The rotary embedding's settings."""
        return RotaryConfig(axes=(self.head_width,), theta=self.rope_theta, pairing="half")


class LanguageModel(nn.Module):
    """Embedding, decoder blocks, norm, and a head that is the embedding transposed unless `tie_embeddings` is false."""

    def __init__(self, config: LanguageModelConfig, *, attention: AttentionSelector | None = None) -> None:
        super().__init__()
        self.config = config
        self.attention = attention or attention_selector()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config.block) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()

    def hidden_states(self, ids: Tensor, lengths: Tensor, *, layer: int, normed: bool) -> Tensor:
        """States [B, L, D] after the first `layer` blocks (0: the embeddings), through the final norm where `normed`.
        Later blocks do not run.

        `ids` [B, L] int64 are padded at the end; row b holds `lengths[b]` tokens, and its states past them are zero.
        """
        if not 0 <= layer <= self.config.layers:
            raise ValueError(f"layer is {layer}; this model has layers 0 to {self.config.layers}")
        x = self._from_nothing(ids, layer)
        x = self.norm(x) if normed else x
        valid = torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]
        return torch.where(valid[..., None], x, torch.zeros_like(x))

    def logits(self, ids: Tensor, *, cache: ContiguousKVCache | None = None, counts: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of the token after each of `ids` [B, L] int64 (rows padded at the end).

        With a `cache`, `ids` follow what it holds, and it then holds the first `counts[b]` [B] of row b's too (default:
        all L).

        Raises:
            ValueError: more tokens than the context length.
        """
        if cache is None:
            return self._head(self._from_nothing(ids, self.config.layers))
        self._check_fits(int(cache.lengths.max()) + ids.shape[1])
        x = self._run(ids, self.config.layers, cache, cache.positions(ids.shape[1]), cache.mask())
        cache.advance([ids.shape[1]] * len(ids) if counts is None else counts)
        return self._head(x)

    def forward(self, ids: Tensor) -> Tensor:
        """`logits(ids)`."""
        return self.logits(ids)

    def _run(self, ids: Tensor, layer: int, cache: Cache, positions: Tensor, mask: AttentionMask) -> Tensor:
        rotary = rotary_table(self.config.rotary, positions)
        prepared = BlockInputs(rotary=rotary, mask=mask, attention=self.attention)
        return run_blocks(list(self.blocks)[:layer], Stream(x=self.embedding(ids)), prepared, cache).x

    def _head(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _from_nothing(self, ids: Tensor, layer: int) -> Tensor:
        self._check_fits(ids.shape[1])
        positions = torch.arange(ids.shape[1], device=ids.device)[:, None]
        return self._run(ids, layer, NoCache(), positions, AttentionMask(causal=True))

    def _check_fits(self, num_tokens: int) -> None:
        if num_tokens > self.config.context_length:
            raise ValueError(f"{num_tokens} tokens do not fit; the context length is {self.config.context_length}")

    def _initialise(self) -> None:
        """Normal weights of 0.02; what is added to the residual stream is smaller by sqrt(2 layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not parameter.is_meta:
                into_stream = name.endswith(("attention.output.weight", "mlp.down.weight"))
                std = _EMBEDDING_STD / (2 * self.config.layers) ** 0.5 if into_stream else _EMBEDDING_STD
                nn.init.normal_(parameter, std=std)
