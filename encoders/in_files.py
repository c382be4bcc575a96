"""Text encoders that weights files hold, alone or beside other parts of a model: their configs, which no file has.

Sizes come from shapes; what shapes do not show (widths of heads, activations, epsilons, rotary bases) is as published:
OpenAI's CLIP-L, OpenCLIP's H and bigG, Google's T5 1.1, UMT5 and ByT5, Qwen2.5-VL 7B, Qwen3, Mistral Small 3.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..core.checkpoint import Within, read_checkpoint
from ..core.component_files import weights_files
from ..core.shapes import Shapes
from ..language.checkpoints import StoredModel

Entries: TypeAlias = Callable[[Shapes], Mapping[str, Any]]
"""What stands for a config.json, from shapes. ValueError where they are not those of such a model."""
CLIP_HEAD, DECODER_HEAD, VISION_HEAD = 64, 128, 80  # widths of heads
_OF_CLIP = {"layer_norm_eps": 1e-5, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_OF_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True}
_OF_QWEN2_5_VL = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 128000, "image_token_id": 151655}
_OF_MISTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e9, "max_position_embeddings": 131072, "sliding_window": None}
_SIGHT = {
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@dataclass(frozen=True)
class Inside:
    """What the names of an encoder begin with in a file that holds several parts, and how its config is told."""

    prefix: str
    entries: Entries


def stored_encoder(file: Path, known: Iterable[Inside]) -> StoredModel | None:
    """The first of the `known` encoders that a file holds, None where it holds none.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged, or the encoder is not one of its kind.
    """
    files = weights_files(file)
    names = read_checkpoint(files)
    found = next((each for each in known if any(name.startswith(each.prefix) for name in names)), None)
    if found is None:
        return None
    part = Within(files, found.prefix)
    try:
        return StoredModel(file=file, files=part, entries=found.entries(Shapes.read(part)))
    except ValueError as error:
        raise ValueError(f"{file}: no text encoder can be read from {found.prefix or 'it'}: {error}") from None


def clip_l(shapes: Shapes) -> Mapping[str, Any]:
    """OpenAI's CLIP, by transformers' names; a projection is not read."""
    return _clip(shapes, "quick_gelu", None)


def projected_clip_l(shapes: Shapes) -> Mapping[str, Any]:
    """The same, to be read with a projection that changes nothing."""
    width = int(clip_l(shapes)["hidden_size"])
    return _clip(shapes, "quick_gelu", width)


def clip_g(shapes: Shapes) -> Mapping[str, Any]:
    """OpenCLIP's, by transformers' names or its own."""
    return _clip(shapes, "gelu", _projected(shapes))


def clip_h(shapes: Shapes) -> Mapping[str, Any]:
    """OpenCLIP's of Stable Diffusion 2, by its own names, without the last block and the projection, which that model
    does not read."""
    whole = _clip(shapes, "gelu", None)
    return {**whole, "num_hidden_layers": whole["num_hidden_layers"] - 1}


def t5(shapes: Shapes) -> Mapping[str, Any]:
    """T5 1.1's encoder."""
    block = "encoder.block.0.layer."
    buckets, heads = shapes.of(f"{block}0.SelfAttention.relative_attention_bias.weight")
    rows, width = shapes.of(f"{block}0.SelfAttention.q.weight")
    return {
        "architectures": ["T5EncoderModel"],
        "vocab_size": shapes.of("shared.weight")[0],
        "d_model": width,
        "d_kv": _whole(rows, heads, "queries"),
        "d_ff": shapes.of(f"{block}1.DenseReluDense.wi_0.weight")[0],
        "num_heads": heads,
        "num_layers": shapes.count("encoder.block."),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": False,
    }


def umt5(shapes: Shapes) -> Mapping[str, Any]:
    """UMT5's encoder."""
    return {**t5(shapes), "architectures": ["UMT5EncoderModel"]}


def qwen3(shapes: Shapes) -> Mapping[str, Any]:
    """Qwen3, dense."""
    return {"architectures": ["Qwen3Model"], **_decoder(shapes), **_OF_QWEN3}


def mistral(shapes: Shapes) -> Mapping[str, Any]:
    """Mistral Small 3's text model; or Qwen3, which models of one family read as well: it normalises queries."""
    if shapes.within("model.").has("layers.0.self_attn.q_norm.weight"):
        return qwen3(shapes)
    return {"architectures": ["MistralForCausalLM"], **_decoder(shapes), **_OF_MISTRAL}


def qwen2_5_vl(shapes: Shapes) -> Mapping[str, Any]:
    """Qwen2.5-VL 7B, with its eyes where they are there."""
    text = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **_decoder(shapes), **_OF_QWEN2_5_VL}
    sight = next((stem for stem in ("visual.", "model.visual.") if shapes.has(f"{stem}patch_embed.proj.weight")), None)
    return text if sight is None else {**text, "vision_config": _vision(shapes.within(sight))}


def _clip(shapes: Shapes, activation: str, projected: int | None) -> Mapping[str, Any]:
    """The encoder's config; `projected` is the width of its projection, None where it has none."""
    names = shapes.within("text_model.")
    vocabulary, width = names.of("embeddings.token_embedding.weight", "token_embedding.weight")
    hidden = names.of("encoder.layers.0.mlp.fc1.weight", "transformer.resblocks.0.mlp.c_fc.weight")[0]
    return {
        **_OF_CLIP,
        "architectures": ["CLIPTextModel" if projected is None else "CLIPTextModelWithProjection"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": names.count("encoder.layers.", "transformer.resblocks."),
        "num_attention_heads": _whole(width, CLIP_HEAD, "states"),
        "max_position_embeddings": names.of("embeddings.position_embedding.weight", "positional_embedding")[0],
        "projection_dim": projected or width,
        "hidden_act": activation,
    }


def _projected(shapes: Shapes) -> int | None:
    """The width of the projection, which OpenCLIP stores the other way round; None where there is none."""
    if shapes.has("text_projection.weight"):
        return shapes.of("text_projection.weight")[0]
    return shapes.of("text_projection")[1] if shapes.has("text_projection") else None


def _decoder(shapes: Shapes) -> dict[str, Any]:
    """What all decoders share, by transformers' names."""
    layer = "layers.0."
    names = shapes.within("model.language_model.", "model.")
    norm = names.shapes.get(f"{layer}self_attn.q_norm.weight")
    head = norm[0] if norm else DECODER_HEAD
    vocabulary, width = names.of("embed_tokens.weight")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": names.of(f"{layer}mlp.gate_proj.weight")[0],
        "num_hidden_layers": names.count("layers."),
        "num_attention_heads": _whole(names.of(f"{layer}self_attn.q_proj.weight")[0], head, "queries"),
        "num_key_value_heads": _whole(names.of(f"{layer}self_attn.k_proj.weight")[0], head, "keys"),
        "head_dim": head,
    }


def _vision(shapes: Shapes) -> Mapping[str, Any]:
    width = shapes.of("blocks.0.attn.proj.weight")[0]
    return {
        **_SIGHT,
        "depth": shapes.count("blocks."),
        "hidden_size": width,
        "intermediate_size": shapes.of("blocks.0.mlp.gate_proj.weight")[0],
        "num_heads": _whole(width, VISION_HEAD, "patches"),
        "out_hidden_size": shapes.of("merger.mlp.2.weight")[0],
    }


def _whole(total: int, part: int, what: str) -> int:
    """How many parts make up the total. ValueError where they do not."""
    if total % part:
        raise ValueError(f"{what} are {total} wide, which is no multiple of {part}; its config cannot be told")
    return total // part


CLIP_L = Inside("text_encoders.clip_l.transformer.", clip_l)
PROJECTED_CLIP_L = Inside(CLIP_L.prefix, projected_clip_l)
CLIP_G = Inside("text_encoders.clip_g.transformer.", clip_g)
T5 = Inside("text_encoders.t5xxl.transformer.", t5)
UMT5 = Inside("text_encoders.umt5xxl.transformer.", umt5)
BYT5 = Inside("text_encoders.byt5_small.transformer.", t5)
QWEN3 = tuple(Inside(f"text_encoders.qwen3_{size}.transformer.", qwen3) for size in ("4b", "8b"))
QWEN2_5_VL = Inside("text_encoders.qwen25_7b.transformer.", qwen2_5_vl)
MISTRAL = Inside("text_encoders.mistral3_24b.transformer.", mistral)
"""Those of ComfyUI's files."""
SD_CLIP = Inside("cond_stage_model.transformer.", clip_l)
SD_2_CLIP = Inside("cond_stage_model.model.", clip_h)
SDXL_CLIP = Inside("conditioner.embedders.0.transformer.", clip_l)
SDXL_CLIP_2 = tuple(Inside(f"conditioner.embedders.{n}.model.", clip_g) for n in (1, 0))
"""Those of Stability AI's and CompVis' files; the refiner has the larger CLIP alone, as its first."""
