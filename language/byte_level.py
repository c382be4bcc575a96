"""The alphabet of byte-level tokenizers."""

import functools
from collections.abc import Mapping


@functools.cache
def byte_alphabet() -> Mapping[int, str]:
    """The visible character that stands for each byte: itself where it is printable, else those from U+0100 on (GPT-2,
    Radford et al. 2019).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
