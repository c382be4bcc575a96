"""Prompts as Wan's pipelines clean them."""

import html
import re

_SPACE = re.compile(r"[^\S\x1c-\x1f]+")  # Unicode's white space, to which these do not belong


def cleaned(prompt: str) -> str:
    """Without HTML escapes, which may be escaped twice, and with one space wherever there is white space, none at the
    ends: what diffusers does where `ftfy` is not installed. (Where it is, it also replaces curly quotes and full-width
    characters, the commas of Wan's own negative prompt among them.)"""
    text = html.unescape(html.unescape(prompt)).strip()
    return _SPACE.sub(" ", text).strip()
