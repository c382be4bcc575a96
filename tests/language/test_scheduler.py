"""Many requests at once: each as alone, blocks freed at once, first come first served."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from calotype.language.generate import generate_ids, generate_tokens
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.sampling import Choice, Chooser, Sampling
from calotype.language.scheduler import Scheduler, Ticket, TokenEvent

VOCAB, CONTEXT = 211, 96


def _model(window: int | None = None, sliding: tuple[bool, ...] = ()) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=VOCAB,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_width=8,
        hidden=24,
        context_length=CONTEXT,
        window=window,
        sliding=sliding,
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return _model()


@dataclass(frozen=True, kw_only=True)
class Request:
    ids: tuple[int, ...]
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()

    def alone(self, model: LanguageModel) -> list[int]:
        chooser, length = Chooser(self.sampling, self.ids), self.sampling.max_tokens
        tokens = generate_tokens(model, self.ids, chooser, max_tokens=length, stop_tokens=self.stop_tokens)
        return [chosen.token_id for chosen in tokens]

    def submit(self, scheduler: Scheduler[Choice]) -> Ticket:
        return scheduler.submit(
            self.ids,
            Chooser(self.sampling, self.ids),
            max_tokens=self.sampling.max_tokens,
            stop_tokens=self.stop_tokens,
        )


def _requests(count: int, seed: int, longest: int = 30) -> list[Request]:
    """Random prompts, a third of which begin alike or are equal; greedy and sampled; some end at stop tokens."""
    dice = random.Random(seed)
    shared = [dice.randrange(VOCAB) for _ in range(longest)]
    requests: list[Request] = []
    for n in range(count):
        ids = [dice.randrange(VOCAB) for _ in range(dice.randint(1, longest))]
        if n % 3 == 0:
            ids = shared[: dice.randint(1, longest)] + ids[: dice.choice((0, 0, 3))]
        sampling = Sampling(
            max_tokens=dice.randint(1, 10),
            temperature=dice.choice((0.0, 0.7, 1.5)),
            top_k=dice.choice((None, 20)),
            repetition_penalty=dice.choice((1.0, 1.3)),
            seed=n,
        )
        stop = tuple(dice.sample(range(VOCAB), 10)) if n % 2 else ()
        requests.append(Request(ids=tuple(ids), sampling=sampling, stop_tokens=stop))
    return requests


def _is_empty(scheduler: Scheduler[Choice]) -> bool:
    no_one = scheduler.num_running == scheduler.num_waiting == 0
    return no_one and all(pool.num_free == pool.num_blocks for pool in scheduler.pools)


def _ids(chosen: Sequence[Choice]) -> list[int]:
    return [choice.token_id for choice in chosen]


def _chosen(events: Sequence[TokenEvent[Choice]], ticket: Ticket) -> list[Choice]:
    return [event.chosen for event in events if event.ticket == ticket and event.chosen is not None]


def _steps(scheduler: Scheduler[Choice], count: int) -> list[TokenEvent[Choice]]:
    return [event for _ in range(count) for event in scheduler.step()]


@pytest.mark.parametrize(
    ("num_blocks", "window", "sliding"),
    [(60, None, ()), (12, None, ()), (12, 7, ()), (12, 7, (True, False))],
    ids=["roomy", "tight", "sliding", "both"],
)
def test_each_gets_what_it_would_get_alone(num_blocks: int, window: int | None, sliding: tuple[bool, ...]) -> None:
    """With 12 blocks of 4 tokens, requests wait, and give their blocks back to older ones."""
    model, requests = _model(window, sliding), _requests(24, seed=1)
    scheduler = Scheduler[Choice](model, max_rows=6, num_blocks=num_blocks, block_size=4, prefill_chunk=9)
    tickets = [request.submit(scheduler) for request in requests]
    results = scheduler.run_all()
    assert [_ids(results[ticket]) for ticket in tickets] == [request.alone(model) for request in requests]
    assert _is_empty(scheduler)


class Recording(Chooser):
    """Also keeps how far apart the two best logits were, relative to the best."""

    def __init__(self, sampling: Sampling, ids: Sequence[int]) -> None:
        super().__init__(sampling, ids)
        self.gaps: list[float] = []

    def choose(self, logits: Tensor) -> Choice:
        best, second = logits.topk(2).values.tolist()
        self.gaps.append((best - second) / abs(best))
        return super().choose(logits)


def test_in_bfloat16_tokens_part_only_where_two_are_alike() -> None:
    """bfloat16 keeps 8 bits: logits within 2^-5 of each other count as alike here."""
    model, requests = _model().bfloat16(), _requests(6, seed=3, longest=12)
    scheduler = Scheduler[Choice](model, max_rows=4, num_blocks=40, block_size=4, prefill_chunk=16)
    prompts = [request.ids for request in requests]
    tickets = [scheduler.submit(ids, Chooser(Sampling(), ids), max_tokens=8) for ids in prompts]
    results = scheduler.run_all()
    num_equal = 0
    for ids, ticket in zip(prompts, tickets, strict=True):
        chooser = Recording(Sampling(), ids)
        alone, together = _ids(list(generate_tokens(model, ids, chooser, max_tokens=8))), _ids(results[ticket])
        parts = [n for n in range(8) if alone[n] != together[n]]
        assert not parts or chooser.gaps[parts[0]] < 2**-5
        num_equal += not parts
    assert num_equal >= 3


def test_two_hundred_requests_that_come_and_go(model: LanguageModel) -> None:
    dice, requests = random.Random(5), _requests(200, seed=2)
    scheduler = Scheduler[Choice](model, max_rows=8, num_blocks=40, block_size=8, prefill_chunk=32)
    coming, tickets = list(range(200)), dict[Ticket, int]()
    results: dict[int, list[int]] = {n: [] for n in coming}
    cancelled: set[int] = set()
    ended: dict[int, str] = {}
    while coming or scheduler.num_running or scheduler.num_waiting:
        for _ in range(min(len(coming), dice.randint(0, 4))):
            n = coming.pop(0)
            tickets[requests[n].submit(scheduler)] = n
        for event in scheduler.step():
            n = tickets[event.ticket]
            assert event.chosen is not None
            assert n not in cancelled and n not in ended
            results[n].append(event.chosen.token_id)
            if event.finish_reason is not None:
                ended[n] = event.finish_reason
        if dice.random() < 0.15:
            ticket = dice.choice([ticket for ticket, n in tickets.items() if n not in cancelled])
            assert scheduler.cancel(ticket) == (tickets[ticket] not in ended)
            if tickets[ticket] not in ended:
                cancelled.add(tickets[ticket])
    assert _is_empty(scheduler)
    assert len(cancelled) > 5
    for n, request in enumerate(requests):
        alone = request.alone(model)
        if n in cancelled:
            assert results[n] == alone[: len(results[n])]
        else:
            assert results[n] == alone
            assert ended[n] == ("stop" if alone[-1] in request.stop_tokens else "length")


def _plain(num_prompt: int, max_tokens: int, first: int = 0) -> Request:
    ids = tuple((first + 3 * n) % VOCAB for n in range(num_prompt))
    return Request(ids=ids, sampling=Sampling(max_tokens=max_tokens))


def test_others_decode_while_a_prompt_is_read(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=30, block_size=4, prefill_chunk=8)
    first = _plain(3, 20).submit(scheduler)
    assert [event.ticket for event in scheduler.step()] == [first]
    second = _plain(60, 2).submit(scheduler)
    seen = [[event.ticket for event in scheduler.step()] for _ in range(9)]
    assert seen == [[first]] * 7 + [[first, second]] * 2
    assert _plain(60, 2).alone(model)


def test_short_prompts_are_read_together(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=8, num_blocks=60, block_size=4, prefill_chunk=20)
    tickets = [_plain(n, 3, first=10 * n + i).submit(scheduler) for i, n in enumerate((4, 5, 3, 5, 2))]
    assert [event.ticket for event in scheduler.step()] == tickets[:4]  # 4 rows of 5
    assert [event.ticket for event in scheduler.step()] == tickets
    scheduler.close()
    assert _is_empty(scheduler)


def test_the_first_come_is_served_first(model: LanguageModel) -> None:
    """A request that needs much is not overtaken by a small one behind it, though that would fit."""
    scheduler = Scheduler[Choice](model, max_rows=4, num_blocks=12, block_size=4, prefill_chunk=64)
    sizes = ((20, 8), (40, 2), (2, 2))
    running, big, small = (_plain(*size, first=n).submit(scheduler) for n, size in enumerate(sizes))
    order = [event.ticket for event in scheduler.step()]
    while scheduler.num_running or scheduler.num_waiting:
        assert scheduler.num_waiting in (0, 2)
        order += [event.ticket for event in scheduler.step()]
    assert order == [running] * 8 + [big, big, small, small]


def test_equal_prompts_hold_their_blocks_once(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=4, num_blocks=40, block_size=4, prefill_chunk=200)
    request, pool = _plain(33, 4), scheduler.pools[0]
    tickets = [request.submit(scheduler) for _ in range(4)]
    events = scheduler.step()  # one reads, the others wait for its blocks
    assert ([event.ticket for event in events], 40 - pool.num_free) == (tickets[:1], 9)
    events += scheduler.step()
    assert 40 - pool.num_free == 8 + 4
    events += _steps(scheduler, 3)
    for ticket in tickets:
        assert _ids(_chosen(events, ticket)) == request.alone(model)
    assert _is_empty(scheduler)


def test_what_can_never_fit_is_refused_with_the_numbers(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=5, block_size=4)
    assert _plain(17, 4).submit(scheduler)  # the last token is not read: 20 tokens
    with pytest.raises(ValueError, match=r"17 prompt \+ 5 new tokens need 6 blocks of 4 tokens; the pool has 5"):
        _plain(17, 5).submit(scheduler)
    with pytest.raises(ValueError, match="the prompt has 96 tokens; at most 95 leave room in the context of 96"):
        _plain(96, 1).submit(scheduler)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        _plain(0, 1).submit(scheduler)
    with pytest.raises(ValueError, match="max_tokens is 0; it must be at least 1"):
        scheduler.submit([1], Chooser(Sampling(), [1]), max_tokens=0)
    with pytest.raises(ValueError, match="max_rows is 0; it must be at least 1"):
        Scheduler[Choice](model, max_rows=0, num_blocks=5)
    for ids, message in (
        ([1, -1], "the prompt has the id -1; ids go from 0 to"),
        ([model.config.vocab_size], f"the prompt has the id {model.config.vocab_size}; ids go from 0 to"),
        ([1.5], r"the prompt is \[1.5\]; it must be a list of tokens' ids"),
        (5, "the prompt is 5; it must be a list of tokens' ids"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.submit(ids, Chooser(Sampling(), [1]), max_tokens=1)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=message):
            generate_ids(model, ids, Sampling(), stop=())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"max_tokens is 1\.5; it must be a whole number"):
        scheduler.submit([1], Chooser(Sampling(), [1]), max_tokens=1.5)  # pyright: ignore[reportArgumentType]
    assert scheduler.num_waiting == 1


def test_it_ends_where_the_context_does(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=24, block_size=4)
    ticket = _plain(94, 50).submit(scheduler)
    assert len(scheduler.run_all()[ticket]) == 2


def test_padding_never_counts_against_the_context(model: LanguageModel) -> None:
    """A row near the end of the context is not padded past it by a neighbour's chunk."""
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=60, block_size=4, prefill_chunk=46)
    requests = [_plain(94, 2), _plain(20, 2, first=1)]
    tickets = [request.submit(scheduler) for request in requests]
    results = scheduler.run_all()
    assert [_ids(results[ticket]) for ticket in tickets] == [request.alone(model) for request in requests]


def test_cancelling_frees_blocks_at_once(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=60, block_size=4, prefill_chunk=8)
    decoding, reading, waiting = (_plain(n, 9, first=n).submit(scheduler) for n in (5, 50, 7))
    _steps(scheduler, 3)
    pool = scheduler.pools[0]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    held = 60 - pool.num_free
    assert scheduler.cancel(reading)  # within its prompt
    assert 60 - pool.num_free == 2 < held
    assert scheduler.cancel(waiting)
    assert scheduler.num_waiting == 0
    assert {event.ticket for event in _steps(scheduler, 2)} == {decoding}
    assert scheduler.cancel(decoding)
    assert _is_empty(scheduler)
    assert not scheduler.cancel(decoding)
    assert scheduler.step() == []


def test_the_youngest_gives_way_and_is_read_again(model: LanguageModel) -> None:
    requests = [_plain(8, 24), _plain(8, 24, first=1)]
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=10, block_size=4)
    tickets = [request.submit(scheduler) for request in requests]
    events, gave_way = list[TokenEvent[Choice]](), False
    while scheduler.num_running or scheduler.num_waiting:
        events += scheduler.step()
        gave_way |= scheduler.num_waiting == 1 and any(event.ticket == tickets[1] for event in events)
    assert gave_way
    for ticket, request in zip(tickets, requests, strict=True):
        assert _ids(_chosen(events, ticket)) == request.alone(model)


class Failing:
    """Chooses token 1 twice, then finds nothing."""

    def __init__(self) -> None:
        self.left = 2

    def choose(self, logits: Tensor) -> Choice:
        if not self.left:
            raise ValueError("no token is allowed here")
        self.left -= 1
        return Choice(token_id=1)


def test_an_error_ends_its_request_alone(model: LanguageModel) -> None:
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=20, block_size=4)
    bad, request = scheduler.submit([5, 6], Failing(), max_tokens=9), _plain(6, 9)
    good = request.submit(scheduler)
    events = _steps(scheduler, 3)
    ends = [event for event in events if event.ticket == bad and event.finish_reason is not None]
    assert [(event.finish_reason, str(event.error), event.chosen) for event in ends] == [
        ("error", "no token is allowed here", None)
    ]
    assert _ids([*_chosen(events, good), *scheduler.run_all()[good]]) == request.alone(model)
    scheduler.submit([5, 6], Failing(), max_tokens=9)
    request.submit(scheduler)
    with pytest.raises(ValueError, match="no token is allowed here"):
        scheduler.run_all()
    assert _is_empty(scheduler)


def test_logits_that_are_not_finite_are_named() -> None:
    model = _model()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=20)
    _plain(3, 2).submit(scheduler)
    with pytest.raises(FloatingPointError, match="the logits of token 0 of request 0 are not finite"):
        scheduler.run_all()
    assert _is_empty(scheduler)


def test_a_step_that_failed_can_be_taken_again(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [_plain(5, 6), _plain(30, 6, first=1)]
    scheduler = Scheduler[Choice](model, max_rows=2, num_blocks=20, block_size=4, prefill_chunk=8)
    tickets = [request.submit(scheduler) for request in requests]
    events, logits = scheduler.step(), LanguageModel.logits
    calls = iter((False, True, True))

    def flaky(self: LanguageModel, ids: Tensor, **options: object) -> Tensor:
        if next(calls):
            raise MemoryError
        return logits(self, ids, **options)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "logits", flaky)
        for _ in range(2):
            with pytest.raises(MemoryError):
                scheduler.step()
    while scheduler.num_running:
        events += scheduler.step()
    for ticket, request in zip(tickets, requests, strict=True):
        assert _ids(_chosen(events, ticket)) == request.alone(model)


def test_a_windows_pool_is_no_larger_than_its_rows_need() -> None:
    scheduler = Scheduler[Choice](_model(7, (True, False)), max_rows=2, num_blocks=100, block_size=4, prefill_chunk=8)
    assert [(pool.window, pool.num_blocks) for pool in scheduler.pools] == [(None, 100), (7, 2 * 5)]
    assert scheduler.bytes == (102 + 12) * 2 * 4 * 8 * 4
    scheduler = Scheduler[Choice](_model(CONTEXT, (True, False)), max_rows=2, num_blocks=9)
    assert [pool.window for pool in scheduler.pools] == [None]  # the window never ends within the context
