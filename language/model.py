"""A decoder language model over the shared self-attention blocks.

Legend: B rows, L tokens, D width, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.blocks.decoder import DecoderBlock
from ..core.kv_cache import KVCache
from ..core.moe import Routing
from ..core.norms import RMSNorm
from ..core.ops.row_product import Linear, linear, working_dtype
from ..core.rotary import rotary_table
from ..core.stream import AttentionInputs, BlockInputs, Cache, NoCache, Runner, Stream, all_tokens, run_blocks
from .config import LanguageModelConfig

__all__ = ["LanguageModel", "LanguageModelConfig", "Layer", "NoHead"]

_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Layer:
    """Where states are read: after the first `index` blocks (0: the embeddings), through the final norm if `normed`."""

    index: int
    normed: bool


class LanguageModel(nn.Module):
    """Embedding, decoder blocks, norm, and a head that is the embedding transposed unless `tie_embeddings` is false."""

    def __init__(self, config: LanguageModelConfig, *, attention: AttentionSelector | None = None) -> None:
        super().__init__()
        self.config = config
        self.attention = attention or attention_selector()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config.block(i)) for i in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps, offset=config.norm_offset)
        self.head: nn.Module | None = None
        if not config.tie_embeddings:
            self.head = Linear(config.width, config.vocab_size, bias=False)
        self._full = [i for i in range(config.layers) if not config.is_sliding(i)]
        self._sliding = [i for i in range(config.layers) if config.is_sliding(i)]
        self._initialise()

    def hidden_states(self, ids: Tensor, lengths: Tensor, *, layer: int, normed: bool) -> Tensor:
        """States [B, L, D] after the first `layer` blocks (0: the embeddings), through the final norm where `normed`.
        Later blocks do not run.

        `ids` [B, L] int64 are padded at the end; row b holds `lengths[b]` tokens, and its states past them are zero.

        Raises:
            ValueError: no such layer, or more tokens than the context length.
        """
        (x,) = self.read(self.embed(ids), (Layer(layer, normed),))
        valid = torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]
        return torch.where(valid[..., None], x, torch.zeros_like(x))

    def read(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        *,
        positions: Tensor | None = None,
        mask: AttentionMask | None = None,
    ) -> list[Tensor]:
        """States [B, L, D] of embedded tokens `x` [B, L, D] at each of `layers`, in one pass. Blocks after the last one
        do not run.

        `positions` [B or 1, L, A] are those of the rotary embedding (None: 0, 1, ...), A 1 or the number of the
        config's `rope_sections`. `mask` says what each token sees (None: those before it); sliding layers narrow it.

        Raises:
            ValueError: no such layer, or more tokens than the context length.
        """
        for layer in layers:
            if not isinstance(cast(object, layer.index), int) or not 0 <= layer.index <= self.config.layers:
                raise ValueError(f"layer is {layer.index!r}; this model has layers 0 to {self.config.layers}")
        num_tokens = x.shape[1]
        self._check_length(num_tokens)
        where = torch.arange(num_tokens, device=x.device)[:, None] if positions is None else positions.to(x.device)
        seen = AttentionMask(causal=True) if mask is None else mask
        prepared = self._block_inputs(where, lambda _: seen, num_tokens, None)
        stream = Stream(x=x.to(working_dtype(x)))
        found = {0: stream.x}
        for i, block in enumerate([*self.blocks][: max(layer.index for layer in layers)]):
            stream = block(stream, prepared, NoCache(), i)
            found[i + 1] = stream.x
        states = [self.norm(found[layer.index]) if layer.normed else found[layer.index] for layer in layers]
        return [each.to(x.dtype) for each in states]

    def embed(self, ids: Tensor) -> Tensor:
        """What the first block reads of `ids` [B, L] int64, [B, L, D]."""
        x = self.embedding(ids)
        if self.config.embedding_scale == 1:
            return x
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()  # rounded as the weights are

    def logits(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        last_only: bool = False,
        routing: Routing | None = None,
        runner: Runner = run_blocks,
    ) -> Tensor:
        """Logits [B, L, V] of the token after each of `ids` [B, L] int64 (rows padded at the end).

        With a `cache`, `ids` follow what it holds, and it then holds the first `counts[b]` [B] of row b's too (default:
        all L). `last_only` gives those after each row's last real token alone, [B, 1, V]. `routing` is told which
        experts were used. The `runner` walks the blocks where there is one new token a row.

        Raises:
            ValueError: more tokens than the context length.
        """
        num_new = ids.shape[1]
        if num_new == 1:
            x = self._run_one(ids, cache, routing, runner)
        else:
            x = self._run(ids, cache, routing, _Last(counts) if last_only else all_tokens)
        if cache is not None:
            cache.advance([num_new] * len(ids) if counts is None else counts)
        return self._head(x)

    def forward(self, ids: Tensor) -> Tensor:
        """`logits(ids)`."""
        return self.logits(ids)

    def _run(
        self, ids: Tensor, cache: KVCache | None, routing: Routing | None, kept: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The states after all blocks of the tokens that `kept` picks; the last block computes little else, unless it
        must tell a `routing` of all.
        """
        prepared, keep = self._prepared(ids, cache, routing)
        *blocks, last = self.blocks
        stream = run_blocks(blocks, Stream(x=self.embed(ids)), prepared, keep)
        if routing is not None:
            return kept(last(stream, prepared, keep, len(blocks)).x)
        return last(stream, dataclasses.replace(prepared, kept=kept), keep, len(blocks)).x

    def _run_one(self, ids: Tensor, cache: KVCache | None, routing: Routing | None, runner: Runner) -> Tensor:
        """The states after all blocks of one new token of each row."""
        prepared, keep = self._prepared(ids, cache, routing)
        return runner([*self.blocks], Stream(x=self.embed(ids)), prepared, keep).x

    def _prepared(self, ids: Tensor, cache: KVCache | None, routing: Routing | None) -> tuple[BlockInputs, Cache]:
        """What the blocks read for new tokens, and where they keep theirs."""
        num_new = ids.shape[1]
        self._check_length(num_new + (0 if cache is None else int(cache.lengths.max())))
        positions = torch.arange(num_new)[:, None] if cache is None else cache.positions(num_new)

        def mask_of(block: int) -> AttentionMask:
            return AttentionMask(causal=True) if cache is None else cache.mask(block, num_new)

        prepared = self._block_inputs(positions.to(ids.device), mask_of, num_new, routing)
        return prepared, NoCache() if cache is None else cache

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.config.context_length:
            context = self.config.context_length
            raise ValueError(f"{num_tokens} tokens do not fit; the context length is {context}")

    def _block_inputs(
        self, positions: Tensor, mask_of: Callable[[int], AttentionMask], num_new: int, routing: Routing | None
    ) -> BlockInputs:
        """What most blocks read, and what sliding ones beside full ones do."""

        def inputs(layers: list[int]) -> AttentionInputs:
            is_local = layers is self._sliding
            mask = mask_of(layers[0])
            if is_local:
                mask = _narrowed(mask, self.config.window, num_new)
            rotary = self.config.local_rotary if is_local else self.config.rotary
            return AttentionInputs(rotary=rotary_table(rotary, positions), mask=mask)

        sliding = inputs(self._sliding) if self._sliding else None
        common = inputs(self._full) if self._full or sliding is None else sliding
        special = {} if sliding is None or sliding is common else dict.fromkeys(self._sliding, sliding)
        return BlockInputs(
            rotary=common.rotary, mask=common.mask, attention=self.attention, special=special, routing=routing
        )

    def _head(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _initialise(self) -> None:
        """Normal weights of 0.02; what is added to the residual stream is smaller by sqrt(2 layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not parameter.is_meta:
                into_stream = name.endswith(("attention.output.weight", "mlp.down.weight", "mlp.down"))
                std = _EMBEDDING_STD / (2 * self.config.layers) ** 0.5 if into_stream else _EMBEDDING_STD
                nn.init.normal_(parameter, std=std)


class NoHead(nn.Module):
    """In place of the head, in a model that was loaded to read its states only."""

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError."""
        raise ValueError("this language model was loaded to read its states: it has no head, and may lack blocks")


def _narrowed(mask: AttentionMask, window: int | None, num_new: int) -> AttentionMask:
    """A sliding layer's mask. A cache made without the window keeps all tokens and does not know it; one that knows it
    has set it, or gives back only keys that are seen.
    """
    if window is None or mask.window is not None:
        return mask
    if mask.causal:
        return dataclasses.replace(mask, window=window)
    lengths = mask.key_lengths
    if num_new > 1 or lengths is None or int(lengths.max()) <= window:
        return mask
    return AttentionMask(causal=True, query_offset=lengths - 1, window=window)


@dataclass(frozen=True, eq=False)
class _Last:
    """Picks each row's last real token of [B, L, D], [B, 1, D]; `counts` [B] are real (None: all)."""

    counts: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.counts is None:
            return x[:, -1:]
        last = self.counts.to(x.device).clamp(min=1) - 1
        return x[torch.arange(len(x), device=x.device), last][:, None]
