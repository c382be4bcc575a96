"""Tiny random decoder language models, with and without eyes, and tokenizers for them, in transformers' layout."""

import re
from collections.abc import Mapping
from typing import Any

from tiny_text_encoders import WORDS, randomised

from calotype.encoders import templates

PROMPTS = ["a photo of a Red fox, on the grass", "", "two dogs\n and a cat"]
LONG = " ".join(WORDS[i % 15] for i in range(40))
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
READS: dict[str, Any] = {
    "min_pixels": 28 * 28 * 6,
    "max_pixels": 28 * 28 * 40,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.25],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
"""A preprocessor_config.json of Qwen2.5-VL."""
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
MISTRAL_CHAT = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- set text = m.content if m.content is string else m.content[0].text %}"
    "{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' }}"
    "{%- else %}{{- '[INST]' + text + '[/INST]' }}{%- endif %}{%- endfor %}"
)
MISTRAL_SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "<pad>",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)


def qwen_tokenizer(*texts: str) -> Any:
    """Qwen's kind: byte-level pairs, special tokens behind them, pads after a text. It also knows the words of
    `texts`."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    vocab, merges = _vocabulary((), texts)
    names = {token: len(vocab) + i for i, token in enumerate(SPECIALS)}
    tokenizer = Qwen2Tokenizer(
        vocab | names, merges, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, chat_template=CHATML
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def mistral_tokenizer() -> Any:
    """Mistral Small's kind: special tokens before byte-level pairs, pads before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab, merges = _vocabulary(MISTRAL_SPECIALS)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in MISTRAL_SPECIALS])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=MISTRAL_CHAT,
    )


def qwen3(tokenizer: Any, **sizes: Any) -> Any:
    """The text encoder of Z-Image and FLUX.2 klein."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = _sizes(tokenizer, head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    return randomised(Qwen3ForCausalLM(Qwen3Config(**{**settings, "tie_word_embeddings": True, **sizes})))


def mistral3(tokenizer: Any, **sizes: Any) -> Any:
    """The text encoder of FLUX.2 dev."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 900.0}
    text = _sizes(tokenizer, model_type="mistral", head_dim=10, sliding_window=None, rope_parameters=rope) | sizes
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "image_size": 56,
        "patch_size": 14,
    }
    mark = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=mark,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return randomised(Mistral3ForConditionalGeneration(config))


def qwen_vl(tokenizer: Any, text: Mapping[str, Any] | None = None, **vision: Any) -> Any:
    """The text encoder of Qwen-Image: three-axis positions, windows in most blocks of the vision tower. Other sizes of
    its text model in `text`."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
    sight = {
        "depth": 4,
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    }
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=_sizes(tokenizer, **{"rope_parameters": rope, **(text or {})}),
        vision_config=sight | vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return randomised(Qwen2_5_VLForConditionalGeneration(config))


class QwenVLProcessor:
    """The calls that diffusers makes to transformers' processor, which needs torchvision for its video half."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer, self.pictures = tokenizer, Qwen2VLImageProcessorPil(**READS)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        seen = {} if images is None else dict(self.pictures(images=images, return_tensors="pt"))
        counts = iter((seen["image_grid_thw"].prod(-1) // 4).tolist()) if seen else iter(())
        pieces = [each.split("<|image_pad|>") for each in text]
        filled = [rest[0] + "".join("<|image_pad|>" * next(counts) + part for part in rest[1:]) for rest in pieces]
        return BatchFeature({**self.tokenizer(filled, padding=padding, return_tensors=return_tensors), **seen})


def _sizes(tokenizer: Any, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 2e-3,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return settings | more


def _vocabulary(first: tuple[str, ...], others: tuple[str, ...] = ()) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges: bytes, and each word of the tests and the templates, as in vocabularies of full size. Words with
    a space before them come first, then longer ones, so that no other word is found inside them.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    texts = (templates.QWEN_IMAGE.text, templates.QWEN_IMAGE_EDIT.text, str(templates.flux2_messages("")), *others)
    pieces = [piece for text in texts for piece in re.findall(r"'s| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+", text)]
    words = [f" {word}" for word in WORDS] + [piece for piece in pieces if piece not in SPECIALS]
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(dict.fromkeys(words), key=lambda word: (word[0] != " ", -len(word), word)):
        symbols = list(word.replace(" ", "Ġ"))
        while len(symbols) > 1:
            merges[symbols[0], symbols[1]] = None
            symbols[:2] = [symbols[0] + symbols[1]]
    tokens = [*first, *letters, *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, list(merges)
