"""Keys and values kept from call to call, for models that go on from what they have read."""

from .base import KVCache
from .contiguous import ContiguousKVCache
from .layered import LayeredKVCache
from .paged import PagedKVCache
from .pool import PagedPool, PagedSequence, TokenChain, share_prefix
from .ring import RingKVCache

__all__ = [
    "ContiguousKVCache",
    "KVCache",
    "LayeredKVCache",
    "PagedKVCache",
    "PagedPool",
    "PagedSequence",
    "RingKVCache",
    "TokenChain",
    "share_prefix",
]
