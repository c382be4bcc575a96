"""The decoder block against its formulas, written out token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from calotype.core.attention.base import AttentionMask
from calotype.core.attention.registry import attention_selector
from calotype.core.blocks.decoder import DecoderBlock, DecoderConfig
from calotype.core.modulation import ScaleGate, ShiftScaleGate
from calotype.core.moe import ExpertsConfig, Routing
from calotype.core.rotary import RotaryConfig, apply_rotary, rotary_table
from calotype.core.stream import AttentionInputs, BlockInputs, NoCache, Stream, run_blocks

WIDTH, HEAD = 12, 8


def make_block(
    *, kv_heads: int = 2, qk_norm: bool = False, sandwich: bool = False, qkv_bias: bool = False
) -> DecoderBlock:
    config = DecoderConfig(
        width=WIDTH,
        heads=4,
        kv_heads=kv_heads,
        head_width=HEAD,
        hidden=20,
        norm_eps=1e-3,
        qk_norm=qk_norm,
        sandwich=sandwich,
        qkv_bias=qkv_bias,
    )
    block = DecoderBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return block


def inputs(
    length: int, mask: AttentionMask, modulation: tuple[tuple[ScaleGate | ShiftScaleGate, ...], ...] = ()
) -> BlockInputs:
    rotary = rotary_table(RotaryConfig(axes=(HEAD,), pairing="half"), torch.arange(length)[:, None])
    return BlockInputs(rotary=rotary, mask=mask, attention=attention_selector("reference"), modulation=modulation)


def rms(x: Tensor, norm: nn.Module) -> Tensor:
    weight = dict(norm.named_parameters()).get("weight")
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def attention(x: Tensor, block: DecoderBlock, prepared: BlockInputs) -> Tensor:
    """One row [L, D], causal, one head at a time."""
    layer = block.attention
    heads, kv_heads = layer.config.heads, layer.config.kv_heads
    projected = x @ layer.qkv.weight.T
    if layer.config.qkv_bias:
        projected = projected + layer.qkv.bias
    parts = projected.unflatten(-1, (heads + 2 * kv_heads, HEAD))
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    q, k = rms(q, layer.query_norm), rms(k, layer.key_norm)
    q, k = (apply_rotary(part.transpose(0, 1)[None], prepared.rotary)[0] for part in (q, k))
    out = []
    for h in range(heads):
        scores = q[h] @ k[h // (heads // kv_heads)].T / HEAD**0.5
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        out.append(scores.softmax(-1) @ v[:, h // (heads // kv_heads)])
    return torch.cat(out, dim=-1) @ layer.output.weight.T


def written_out(x: Tensor, block: DecoderBlock, prepared: BlockInputs) -> Tensor:
    scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = 0.0, 0.0, 1.0, 0.0, 0.0, 1.0
    if prepared.modulation:
        first, second = prepared.modulation[0]
        assert isinstance(first, ShiftScaleGate)
        assert isinstance(second, ScaleGate)
        scale_1, shift_1, gate_1, scale_2, gate_2 = (
            first.scale[0],
            first.shift[0],
            first.gate[0],
            second.scale[0],
            second.gate[0],
        )
    h = rms(x, block.attention_norm) * (1 + scale_1) + shift_1
    x = x + gate_1 * rms(attention(h, block, prepared), block.attention_post_norm)
    h = rms(x, block.mlp_norm) * (1 + scale_2) + shift_2
    gate, up = (h @ block.mlp.gate_up.weight.T).chunk(2, dim=-1)
    h = (nn.functional.silu(gate) * up) @ block.mlp.down.weight.T
    return x + gate_2 * rms(h, block.mlp_post_norm)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("with_everything", [False, True])
@torch.no_grad()
def test_the_block_is_its_formula(with_everything: bool, kv_heads: int) -> None:
    block = make_block(kv_heads=kv_heads, qk_norm=with_everything, sandwich=with_everything, qkv_bias=with_everything)
    modulation = ()
    if with_everything:
        shift, scale, gate = torch.randn(3, 1, 1, WIDTH)
        modulation = ((ShiftScaleGate(shift=shift, scale=scale, gate=gate), ScaleGate(scale=gate, gate=scale)),)
    prepared = inputs(5, AttentionMask(causal=True), modulation)
    x = torch.randn(2, 5, WIDTH)
    before = x.clone()
    out = block(Stream(x=x), prepared, NoCache(), 0)
    expected = torch.stack([written_out(row, block, prepared) for row in x])
    torch.testing.assert_close(out.x, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)


@torch.no_grad()
def test_the_runner_walks_in_order_and_gives_each_block_its_own_modulation() -> None:
    block, other = make_block(), make_block(qk_norm=True)
    gates = [ScaleGate(scale=torch.randn(1, 1, WIDTH), gate=torch.randn(1, 1, WIDTH)) for _ in range(4)]
    modulation = ((gates[0], gates[1]), (gates[2], gates[3]))
    causal, context = AttentionMask(causal=True), torch.randn(2, 3, WIDTH)
    start = Stream(x=torch.randn(2, 5, WIDTH), context=context)
    middle = block(start, inputs(5, causal, modulation[:1]), NoCache(), 0)
    by_hand = other(middle, inputs(5, causal, modulation[1:]), NoCache(), 0)
    run = run_blocks([block, other], start, inputs(5, causal, modulation), NoCache())
    assert torch.equal(run.x, by_hand.x)
    assert run.context is context


@torch.no_grad()
def test_padding_changes_nothing_where_key_lengths_hide_it() -> None:
    block = make_block()
    x = torch.randn(1, 7, WIDTH)
    alone = block(Stream(x=x[:, :4]), inputs(4, AttentionMask()), NoCache(), 0).x
    padded = block(Stream(x=x), inputs(7, AttentionMask(key_lengths=torch.tensor([4]))), NoCache(), 0).x
    torch.testing.assert_close(padded[:, :4], alone, rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient() -> None:
    block = make_block(qk_norm=True, sandwich=True, qkv_bias=True)
    block(
        Stream(x=torch.randn(1, 5, WIDTH)), inputs(5, AttentionMask(causal=True)), NoCache(), 0
    ).x.square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_norms_may_multiply_by_one_more() -> None:
    sizes = {"width": WIDTH, "heads": 4, "kv_heads": 2, "head_width": HEAD, "hidden": 20}
    plain = DecoderBlock(DecoderConfig(**sizes, qk_norm=True, sandwich=True))
    offset = DecoderBlock(DecoderConfig(**sizes, qk_norm=True, sandwich=True, norm_offset=1.0))
    offset.load_state_dict({n: w - 1 if "norm" in n else w for n, w in plain.state_dict().items()})
    x, prepared = Stream(x=torch.randn(1, 5, WIDTH)), inputs(5, AttentionMask(causal=True))
    torch.testing.assert_close(offset(x, prepared, NoCache(), 0).x, plain(x, prepared, NoCache(), 0).x)


def test_scores_may_have_their_own_scale() -> None:
    sizes = {"width": WIDTH, "heads": 4, "kv_heads": 2, "head_width": HEAD, "hidden": 20}
    plain, scaled = DecoderBlock(DecoderConfig(**sizes)), DecoderBlock(DecoderConfig(**sizes, attention_scale=0.5))
    weights = plain.state_dict()
    queries = weights["attention.qkv.weight"][: 4 * HEAD]
    scaled.load_state_dict(weights | {"attention.qkv.weight": weights["attention.qkv.weight"].clone()})
    x, prepared = Stream(x=torch.randn(1, 5, WIDTH)), inputs(5, AttentionMask(causal=True))
    out = scaled(x, prepared, NoCache(), 0).x
    assert not torch.allclose(out, plain(x, prepared, NoCache(), 0).x)
    with torch.no_grad():
        queries.mul_(0.5 * HEAD**0.5)
    torch.testing.assert_close(out, plain(x, prepared, NoCache(), 0).x)


@torch.no_grad()
def test_some_blocks_may_read_another_mask_and_other_tables() -> None:
    block, x = make_block(qk_norm=True), Stream(x=torch.randn(1, 5, WIDTH))
    common, other = inputs(5, AttentionMask(causal=True)), inputs(5, AttentionMask(causal=True, window=2))
    turned = rotary_table(RotaryConfig(axes=(HEAD,), theta=7.0, pairing="half"), torch.arange(5)[:, None])
    local = AttentionInputs(rotary=turned, mask=other.mask)
    mixed = replace(common, special={1: local})
    assert torch.equal(block(x, mixed, NoCache(), 0).x, block(x, common, NoCache(), 0).x)
    assert torch.equal(block(x, mixed, NoCache(), 1).x, block(x, replace(other, rotary=turned), NoCache(), 1).x)
    assert not torch.allclose(block(x, mixed, NoCache(), 1).x, block(x, common, NoCache(), 1).x)
    assert mixed.of(1) is local
    assert mixed.of(0).mask is common.mask


@torch.no_grad()
@pytest.mark.parametrize("sandwich", [False, True])
def test_some_tokens_may_be_kept_alone(sandwich: bool) -> None:
    block, x = make_block(sandwich=sandwich), Stream(x=torch.randn(2, 5, WIDTH))
    prepared = inputs(5, AttentionMask(causal=True))
    kept = block(x, replace(prepared, kept=lambda x: x[:, 1::2]), NoCache(), 0).x
    torch.testing.assert_close(kept, block(x, prepared, NoCache(), 0).x[:, 1::2])


@torch.no_grad()
def test_experts_may_stand_in_the_place_of_the_mlp() -> None:
    experts = ExpertsConfig(count=4, active=2, hidden=6)
    sizes = {"width": WIDTH, "heads": 4, "kv_heads": 2, "head_width": HEAD, "hidden": 20}
    block = DecoderBlock(DecoderConfig(**sizes, experts=experts))
    for parameter in block.parameters():
        parameter.normal_()
    routing, x = Routing(), torch.randn(2, 5, WIDTH)
    prepared = replace(inputs(5, AttentionMask(causal=True)), routing=routing)
    out = block(Stream(x=x), prepared, NoCache(), 3).x
    middle = x + block.attention(block.attention_norm(x), prepared, NoCache(), 3)
    torch.testing.assert_close(out, middle + block.mlp(block.mlp_norm(middle)))
    assert sum(routing.visits[3]) == 2 * 5 * 2


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="4 heads cannot share 3 key/value heads"):
        DecoderConfig(width=8, heads=4, kv_heads=3, head_width=2, hidden=8)
