"""Prompts rewritten by a language model before they are encoded."""

import dataclasses

from .plan import Plan
from .request import Request


def expanded(request: Request, plan: Plan) -> tuple[Request, Plan]:
    """Both with every prompt as `request.expand` rewrites it, each distinct one once; as they are where there is none.

    A prompt that the model has nothing to say to stays, with a warning.
    """
    if request.expand is None:
        return request, plan
    rewritten = {prompt: request.expand.expand(prompt).text.strip() for prompt in dict.fromkeys(request.prompts)}
    silent = [prompt for prompt, text in rewritten.items() if not text]
    remarks = tuple(
        f"expand: the language model had nothing to say to {prompt!r}; it stays as it is" for prompt in silent
    )
    longer = {prompt: text or prompt for prompt, text in rewritten.items()}
    return (
        dataclasses.replace(request, prompt=[longer[prompt] for prompt in request.prompts], expand=None),
        dataclasses.replace(
            plan,
            prompts=tuple(longer[prompt] for prompt in plan.prompts),
            unexpanded=plan.prompts,
            warnings=(*plan.warnings, *remarks),
        ),
    )
