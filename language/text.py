"""A language model with its tokenizer: text in, text out.

Legend: B texts, L tokens, V vocabulary, D width.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor
from torch.nn import functional

from ..core.kv_cache import KVCache
from ..core.moe import Routing
from ..core.ops.packed import PackingReport
from .chat import Message, Tool, opens_reasoning, render_chat
from .completion import Assembler, Completion, Context, FinishReason, GenerationTimings, Piece
from .generate import cache_for, generate_tokens, room_after
from .model import LanguageModel
from .padding import padded
from .sampling import Choice, Chooser, Sampling, SamplingOptions, sampling_from
from .scheduler import Scheduler, Ticket
from .tokenizer import TextTokenizer

__all__ = [
    "Completion",
    "FinishReason",
    "GenerationTimings",
    "Piece",
    "Pooling",
    "TextModel",
    "TextOptions",
]

Pooling = Literal["mean", "last"]
BATCH_ROWS = 32
BLOCK_SIZE = 16
EXPAND_TOKENS = 96
EXPAND_INSTRUCTION = (
    "You write prompts for an image generator. Rewrite the user's prompt as one richer sentence: keep every object, "
    "number, colour and place that it names, and add light, surroundings and style. Answer with the prompt alone."
)


class ChatOptions(TypedDict, total=False):
    """What a chat template is told beside the messages: tools (JSON schemas, or functions), and whether to think."""

    tools: Sequence[Tool] | None
    enable_thinking: bool | None


class TextOptions(SamplingOptions, ChatOptions, total=False):
    """All options of generation, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextModel:
    """Generates text; it keeps nothing between calls, so threads may share it.

    Options are those of `Sampling` (max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed,
    stop, stop_tokens, logprobs, json_schema, regex) and, for messages, `tools` and `enable_thinking`. `banned` tokens
    never come; `expand_token` asks a model trained for it to rewrite a prompt; `packing` tells the error of weights
    kept in few bits.
    """

    language_model: LanguageModel
    tokenizer: TextTokenizer
    name: str = ""
    banned: tuple[int, ...] = ()
    expand_token: int | None = None
    packing: PackingReport | None = None

    @overload
    def generate(
        self, prompt: str | Sequence[Message], *, cancel: Event | None = None, **options: Unpack[TextOptions]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], *, cancel: Event | None = None, **options: Unpack[TextOptions]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[str],
        *,
        cancel: Event | None = None,
        **options: Unpack[TextOptions],
    ) -> Completion | list[Completion]:
        """Continue a prompt, answer messages ({"role": ..., "content": ...}, through the model's chat template), or
        continue several prompts together, each as it would be alone.

        Special tokens written out in a prompt are plain text; in messages they are tokens, as with transformers, so
        take them out of what users wrote. Once `cancel` is set, what has come so far is returned.

        Raises:
            ValueError: an option out of range, a prompt longer than the context, or messages that the model's chat
                template refuses; before anything is computed.
        """
        sampling, chat = split_options(options)
        if _are_texts(prompt):
            _refuse_chat(chat)
            contexts = [self._plain(each) for each in cast(Sequence[str], prompt)]
            return self._together(contexts, sampling, cancel)
        return self._alone(self.context(cast("str | Sequence[Message]", prompt), chat), sampling, cancel)

    def stream(self, prompt: str | Sequence[Message], **options: Unpack[TextOptions]) -> Iterator[Piece]:
        """The pieces of one completion as they come; their texts join to its text (with the reasoning, if any). Bad
        arguments are refused here, not at the first piece.
        """
        sampling, chat = split_options(options)
        return Run(self, self.context(prompt, chat), sampling).pieces()

    def complete(self, prompt: str, **options: Unpack[TextOptions]) -> str:
        """`prompt` and its continuation, as one text."""
        sampling, chat = split_options(options)
        _refuse_chat(chat)
        completion = self._alone(self._plain(prompt), sampling, None)
        return prompt.rstrip() + completion.text

    def expand(self, prompt: str, **options: Unpack[SamplingOptions]) -> Completion:
        """A fuller description of what a short prompt names, by the model's own token for it, or by its chat.

        Raises:
            ValueError: the model has neither, or as for `generate`.
        """
        if self.expand_token is not None:
            ids = (*self.tokenizer.encode(prompt), self.expand_token)
            return self._alone(Context(text=prompt, ids=ids), sampling_from(options), None)
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{self.name or 'this language model'} has neither a token for expansion nor a chat template"
            )
        messages = ({"role": "system", "content": EXPAND_INSTRUCTION}, {"role": "user", "content": prompt})
        return self.generate(messages, **{"max_tokens": EXPAND_TOKENS, "enable_thinking": False, **options})

    def chat_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, enable_thinking: bool | None = None
    ) -> str:
        """The text that the model reads for messages, special tokens written out.

        Raises:
            ValueError: the model has no chat template, or it refuses them.
        """
        return render_chat(
            self.tokenizer.template_for(tools=bool(tools)),
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            special_tokens=self.tokenizer.template_tokens,
        )

    @torch.no_grad()
    def logits(self, ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, L, V] float32 of the token after each of `ids` [B, L], all of one length.

        Raises:
            ValueError: ids outside the vocabulary, rows of different lengths, or more of them than the context.
        """
        rows = ids if isinstance(ids, Tensor) else _rectangle(ids)
        self._check_ids(rows)
        return self.language_model.logits(rows.to(self._device)).float()

    @torch.no_grad()
    def embed(
        self, texts: str | Sequence[str], *, layer: int | None = None, pooling: Pooling = "mean", normalize: bool = True
    ) -> Tensor:
        """One vector per text, [B, D] float32: the states after `layer` blocks (None: after all, and the final norm),
        averaged over the text's tokens or those of its last one; of length 1 where `normalize`.

        Raises:
            ValueError: no texts, an empty one, an unknown pooling, or a text longer than the context.
        """
        rows = self._rows_to_embed((texts,) if isinstance(texts, str) else texts, pooling)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        ids = padded(rows).to(self._device)
        deepest = self.language_model.config.layers
        states = self.language_model.hidden_states(
            ids, lengths, layer=deepest if layer is None else layer, normed=layer is None
        ).float()
        if pooling == "last":
            vectors = states[torch.arange(len(rows), device=self._device), lengths - 1]
        else:
            vectors = states.sum(1) / lengths[:, None]
        return functional.normalize(vectors, dim=-1) if normalize else vectors

    def context(self, prompt: str | Sequence[Message], chat: ChatOptions) -> Context:
        """What the model reads for a prompt or messages."""
        if isinstance(prompt, bytes) or not isinstance(cast(object, prompt), Sequence):
            raise ValueError(f"the prompt is {prompt!r}; it must be a text, a list of messages or a list of texts")
        if isinstance(prompt, str):
            _refuse_chat(chat)
            return self._plain(prompt)
        text = self.chat_prompt(prompt, **chat)
        ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return Context(text=text, ids=tuple(ids), is_chat=True, opens_reasoning=opens_reasoning(text))

    def _plain(self, prompt: str) -> Context:
        ids = tuple(self.tokenizer.encode(prompt))
        return Context(text=prompt, ids=ids, shown=ids)

    def _alone(self, context: Context, sampling: Sampling, cancel: Event | None) -> Completion:
        run = Run(self, context, sampling)
        for _ in run.pieces():
            if cancel is not None and cancel.is_set():
                break
        return run.completion()

    def _together(self, contexts: Sequence[Context], sampling: Sampling, cancel: Event | None) -> list[Completion]:
        rooms = [min(sampling.max_tokens, room_after(self.language_model, len(each.ids))) for each in contexts]
        stop = stop_tokens(self.tokenizer, sampling)
        choosers = [self.chooser(context, sampling) for context in contexts]
        blocks = [-(-(len(context.ids) + room) // BLOCK_SIZE) for context, room in zip(contexts, rooms, strict=True)]
        scheduler = Scheduler[Choice](
            self.language_model,
            max_rows=min(len(contexts), BATCH_ROWS),
            num_blocks=sum(sorted(blocks)[-BATCH_ROWS:]),
            block_size=BLOCK_SIZE,
        )
        assemblers: dict[Ticket, tuple[Assembler, Chooser]] = {}
        for context, chooser, room in zip(contexts, choosers, rooms, strict=True):
            ticket = scheduler.submit(context.ids, chooser, max_tokens=room, stop_tokens=stop)
            assemblers[ticket] = (Assembler(context, sampling, self.tokenizer, stop=stop, room=room), chooser)
        _drain(scheduler, assemblers, cancel)
        return [each.completion(kv_cache_bytes=scheduler.bytes) for each, _ in assemblers.values()]

    def chooser(self, context: Context, sampling: Sampling) -> Chooser:
        """What chooses one request's tokens.

        Raises:
            ValueError: options that this model's vocabulary does not have, or a constraint that it cannot keep to.
        """
        sampling.check_vocabulary(self.language_model.config.vocab_size)
        return Chooser(sampling, context.ids, sampling.constraint(self.tokenizer), banned=self.banned)

    @property
    def _device(self) -> torch.device:
        return self.language_model.embedding.weight.device

    def _check_ids(self, ids: Tensor) -> None:
        size, shape = self.language_model.config.vocab_size, list(ids.shape)
        if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids have shape {shape} and {ids.dtype}; they must be [rows, tokens] of whole numbers")
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(f"ids go from {int(ids.min())} to {int(ids.max())}; this model has 0 to {size - 1}")

    def _rows_to_embed(self, texts: Sequence[str], pooling: Pooling) -> list[list[int]]:
        if pooling not in ("mean", "last"):
            raise ValueError(f"pooling is {pooling!r}; it must be 'mean' or 'last'")
        if isinstance(texts, bytes) or not isinstance(cast(object, texts), Sequence):
            raise ValueError(f"the texts are {texts!r}; they must be a text or a list of texts")
        rows = [self.tokenizer.encode(text) for text in texts]
        if not rows or not all(rows):
            raise ValueError("embed needs at least one text, and none that has no tokens")
        return rows


class Run:
    """One completion on its way; `cache`, where given, holds the first tokens of the context already.

    Raises:
        ValueError: as for `TextModel.generate`.
    """

    def __init__(self, model: TextModel, context: Context, sampling: Sampling, cache: KVCache | None = None) -> None:
        room = min(sampling.max_tokens, room_after(model.language_model, len(context.ids)))
        self._chooser = model.chooser(context, sampling)
        stop = stop_tokens(model.tokenizer, sampling)
        self._assembler = Assembler(context, sampling, model.tokenizer, stop=stop, room=room)
        self._cache = cache or cache_for(model.language_model, len(context.ids) + room)
        self._routing = Routing() if model.language_model.config.experts is not None else None
        self._choices = generate_tokens(
            model.language_model,
            context.ids[int(self._cache.lengths[0]) :],
            self._chooser,
            max_tokens=room,
            stop_tokens=stop,
            cache=self._cache,
            routing=self._routing,
        )

    def pieces(self) -> Iterator[Piece]:
        """Each piece as it comes."""
        for choice in self._choices:
            yield self._assembler.add(choice, is_complete=self._chooser.is_finished)
            if self._assembler.finish_reason is not None:
                return

    def completion(self) -> Completion:
        """What has come so far."""
        experts = None if self._routing is None else self._routing.touched
        return self._assembler.completion(kv_cache_bytes=self._cache.bytes, experts=experts)


def _drain(
    scheduler: Scheduler[Choice], assemblers: Mapping[Ticket, tuple[Assembler, Chooser]], cancel: Event | None
) -> None:
    """Step until every request has ended, or `cancel` is set."""
    try:
        while scheduler.num_running or scheduler.num_waiting:
            if cancel is not None and cancel.is_set():
                return
            for event in scheduler.step():
                if event.error is not None:
                    raise event.error
                assembler, chooser = assemblers[event.ticket]
                if event.chosen is None or assembler.finish_reason is not None:
                    continue
                assembler.add(event.chosen, is_complete=chooser.is_finished)
                if assembler.finish_reason is not None:
                    scheduler.cancel(event.ticket)
    finally:
        scheduler.close()


def stop_tokens(tokenizer: TextTokenizer, sampling: Sampling) -> frozenset[int]:
    """The tokens that end a completion: the model's end marks, and those that were asked for."""
    return frozenset((*tokenizer.eos, *sampling.stop_tokens))


def split_options(options: TextOptions) -> tuple[Sampling, ChatOptions]:
    """The options of sampling, and those of the chat template."""
    chat = ChatOptions(tools=options.get("tools"), enable_thinking=options.get("enable_thinking"))
    rest = {name: value for name, value in options.items() if name not in ChatOptions.__annotations__}
    return sampling_from(cast(SamplingOptions, rest)), chat


def _are_texts(prompt: object) -> bool:
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return False
    several = cast(Sequence[object], prompt)
    return len(several) > 0 and all(isinstance(each, str) for each in several)


def _refuse_chat(chat: ChatOptions) -> None:
    given = [name for name, value in chat.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} is for messages; a plain prompt does not go through the chat template")


def _rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    try:
        lengths = {len(row) for row in rows}
        if len(lengths) == 1:
            return torch.tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:  # torch has all three for what is no table of numbers
        raise ValueError(f"ids are {reprlib.repr(rows)}; they must be rows of whole numbers") from error
    raise ValueError(f"rows of ids have the lengths {sorted(lengths)}; logits takes at least one, all of one length")
