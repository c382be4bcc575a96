"""A chat that goes on: what was read stays in the key/value cache from turn to turn."""

from collections.abc import Generator, Iterator
from typing import Unpack

from ..core.kv_cache import KVCache
from .chat import Message
from .completion import Completion, Context, Piece
from .generate import cache_for
from .text import Run, TextModel, TextOptions, split_options


class Conversation:
    """Messages with a model, and its answers. It belongs to one thread.

    A turn reads only what the cache does not hold yet. Where the template rewrites the past (some drop the reasoning of
    earlier answers), the whole is read again. `last` has the figures of the last complete answer.
    """

    def __init__(self, model: TextModel, *, system: str | None = None) -> None:
        self.model = model
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.last: Completion | None = None
        self._cache: KVCache | None = None
        self._read: tuple[int, ...] = ()
        self._open: Generator[Piece] | None = None

    def say(self, text: str, **options: Unpack[TextOptions]) -> Iterator[Piece]:
        """The answer to `text`, piece by piece. Once it is complete, both are part of `messages`; an answer that is
        broken off, as by the next `say`, leaves the conversation as it was.

        Raises:
            ValueError: an option out of range, or a conversation that no longer fits the context.
        """
        sampling, chat = split_options(options)
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        context = self.model.context(messages, chat)
        if self._open is not None:
            self._open.close()
        run = Run(self.model, context, sampling, self._cache_for(context))
        self._open = self._answer(run, context, messages)
        return self._open

    def _cache_for(self, context: Context) -> KVCache:
        """The cache as it is, if it holds a beginning of the context; else an empty one."""
        known = len(self._read)
        if self._cache is None or known >= len(context.ids) or context.ids[:known] != self._read:
            self._cache = cache_for(self.model.language_model, self.model.language_model.config.context_length)
            self._read = ()
        return self._cache

    def _answer(self, run: Run, context: Context, messages: list[Message]) -> Generator[Piece]:
        chosen: list[int] = []
        try:
            for piece in run.pieces():
                chosen.append(piece.token_id)
                yield piece
        finally:
            assert self._cache is not None
            self._read = (*context.ids, *chosen)[: int(self._cache.lengths[0])]
        self.last = run.completion()
        self.messages = [*messages, {"role": "assistant", "content": self.last.text}]
