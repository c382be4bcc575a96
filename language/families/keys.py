"""The names that transformers gives the weights of decoder language models, alike in all families."""

from collections.abc import Iterator, Sequence

from ...core.key_map import KeyMap, Layout, Reshape, Rule
from ...core.moe import ExpertsConfig
from ..config import LanguageModelConfig

HEAD = "lm_head.weight"
_VISION = ("vision_tower.{any*}", "multi_modal_projector.{any*}", "visual.{any*}")


def transformers_key_map(
    config: LanguageModelConfig, *, stems: Sequence[str] = ("model.", ""), drops: tuple[str, ...] = ()
) -> KeyMap:
    """The key map of a config, for files whose names begin with one of `stems` (but the head's).

    A head that is stored beside tied embeddings is dropped: whoever loads makes sure that it is the same.
    """
    layouts = tuple(_layout(config, stem, drops) for stem in stems)
    return KeyMap(layouts)


def seeing_key_map(config: LanguageModelConfig) -> KeyMap:
    """The key map of a text model that is stored alone or inside the model that also sees, whose other weights are left
    out.
    """
    drops = (*_VISION, *(f"model.{name}" for name in _VISION))
    return transformers_key_map(config, stems=("model.", "model.language_model.", ""), drops=drops)


def _layout(config: LanguageModelConfig, stem: str, drops: tuple[str, ...]) -> Layout:
    rules = [Rule(f"{stem}embed_tokens.weight", "embedding.weight"), Rule(f"{stem}norm.weight", "norm.weight")]
    rules += _attention(f"{stem}layers.{{i}}.") + _feed_forward(f"{stem}layers.{{i}}.")
    rules += _norms(f"{stem}layers.{{i}}.", sandwich=config.sandwich)
    if config.experts is not None:
        rules += _experts(config, config.experts, stem)
    if not config.tie_embeddings:
        rules.append(Rule(HEAD, "head.weight"))
    tied = (HEAD,) if config.tie_embeddings else ()
    tables = f"{stem}layers.{{i}}.self_attn.rotary_emb.inv_freq"
    return Layout("transformers", tuple(rules), drops=(tables, *tied, *drops), prefixes=("", "language_model."))


def _attention(layer: str) -> list[Rule]:
    parts = tuple(f"{layer}self_attn.{part}_proj.{{leaf}}" for part in "qkv")
    return [
        Rule(parts, "blocks.{i}.attention.qkv.{leaf}"),
        Rule(f"{layer}self_attn.o_proj.weight", "blocks.{i}.attention.output.weight"),
        Rule(f"{layer}self_attn.q_norm.weight", "blocks.{i}.attention.query_norm.weight"),
        Rule(f"{layer}self_attn.k_norm.weight", "blocks.{i}.attention.key_norm.weight"),
    ]


def _feed_forward(layer: str) -> list[Rule]:
    return [
        Rule((f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"), "blocks.{i}.mlp.gate_up.weight"),
        Rule(f"{layer}mlp.down_proj.weight", "blocks.{i}.mlp.down.weight"),
    ]


def _norms(layer: str, *, sandwich: bool) -> list[Rule]:
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if sandwich:
        names = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    return [Rule(f"{layer}{source}.weight", f"blocks.{{i}}.{target}.weight") for source, target in names.items()]


def _experts(config: LanguageModelConfig, experts: ExpertsConfig, stem: str) -> Iterator[Rule]:
    """Two ways to store experts: one tensor for all, or a tensor for each. The latter are named one by one, since a key
    that is written out is looked up at once, and a large model has tens of thousands.
    """
    yield Rule(f"{stem}layers.{{i}}.mlp.gate.weight", "blocks.{i}.mlp.router.weight")
    for source, target, width in (("gate_up_proj", "gate_up", config.width), ("down_proj", "down", experts.hidden)):
        stack = f"{stem}layers.{{i}}.mlp.experts.{source}"
        yield Rule(stack, f"blocks.{{i}}.mlp.{target}", (Reshape((-1, width)),))
    for layer in filter(experts.is_sparse, range(config.layers)):
        each = [f"{stem}layers.{layer}.mlp.experts.{expert}." for expert in range(experts.count)]
        pairs = tuple(f"{expert}{part}_proj.weight" for expert in each for part in ("gate", "up"))
        yield Rule(pairs, f"blocks.{layer}.mlp.gate_up")
        yield Rule(tuple(f"{expert}down_proj.weight" for expert in each), f"blocks.{layer}.mlp.down")
