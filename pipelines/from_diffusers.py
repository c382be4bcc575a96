"""Arguments that diffusers takes and nothing here does: what is said about them. docs/diffusers.md has the table."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_STEPS = "give on_step=, a function that is called with every step, or walk the steps of pipe.stream(...)"
_LATENTS = "a step holds its latents: give on_step=, or walk the steps of pipe.stream(...)"
_EMBEDS = "give conditioning=, a calotype.Prompt of calotype.Conditioning, in place of the prompt"
_ATTENTION = "LoRAs are not loaded yet; how attention is computed is said by calotype.load(..., attention=...)"
IN_CALLS: Mapping[str, str] = {
    "callback_on_step_end": _STEPS,
    "callback_on_step_end_tensor_inputs": _LATENTS,
    "callback": _STEPS,
    "callback_steps": _STEPS,
    "timesteps": "give sigmas=, falling noise levels, or schedule=, a calotype.Schedule",
    **dict.fromkeys(
        (
            *("prompt_embeds", "prompt_embeds_2", "prompt_embeds_mask", "prompt_attention_mask"),
            *("negative_prompt_embeds", "negative_prompt_embeds_2", "negative_prompt_embeds_mask"),
            *("negative_prompt_attention_mask", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
        ),
        _EMBEDS,
    ),
    "return_dict": "leave it out: a calotype.Result is returned, whose pictures are .images",
    "cross_attention_kwargs": _ATTENTION,
    "joint_attention_kwargs": _ATTENTION,
    "attention_kwargs": _ATTENTION,
}
"""Of a pipeline's call, and what stands for them."""
IN_LOADING: Mapping[str, str] = {
    "torch_dtype": "give dtype=",
    "use_safetensors": "leave it out: pickled weights are never loaded",
    "low_cpu_mem_usage": "leave it out: weights are streamed, and never in memory twice",
    "device_map": 'give device=, and offload="encoders" or "blocks" for weights that stay in their files',
}
"""Of `from_pretrained`, and what stands for them."""


def telling(load: Callable[P, R]) -> Callable[P, R]:
    """The same function, which says what stands for arguments of `from_pretrained`. TypeError, as for any unknown
    argument."""

    @wraps(load)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in IN_LOADING:
                raise TypeError(f"{load.__name__}() got an unexpected keyword argument {name!r}: {IN_LOADING[name]}")
        return load(*args, **kwargs)

    return told
