"""Quotas of tenants: token bucket, counts, tickets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_contracts.errors import (
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    Overloaded,
    QuotaExceeded,
    Unavailable,
)
from loraplex_runtime.auth import EVERYBODY, ROUTER, Identity, TenantLimits
from loraplex_runtime.quotas import FASTEST_TOKENS_PER_S, TenantQuotas, Ticket, TokenBucket


class Clock:
    """Seconds that tests move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tenant(name: str = "acme", **limits: int) -> Identity:
    return Identity(name, limits=TenantLimits(**limits))


def refusal(quotas: TenantQuotas, identity: Identity, **call: Any) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        quotas.take(identity, **call)
    return caught.value


# --- the bucket -------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(0, 300), st.integers(1, 10**5)), max_size=40),
)
def test_what_leaves_a_bucket_is_bounded_in_every_window(per_minute: int, asked: list[tuple[float, int]]) -> None:
    """Tokens that leave a bucket are bounded in every window, for requests that take only what the bucket has."""
    now, bucket = 0.0, TokenBucket(per_minute, 0.0)
    taken: list[tuple[float, int]] = []
    for pause_s, num_tokens in asked:
        now += pause_s
        bucket.refill(per_minute, now)
        if num_tokens <= per_minute and not bucket.wait_s(num_tokens):
            bucket.take(num_tokens)
            taken.append((now, num_tokens))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window_s = taken[last][0] - taken[first][0]
            total = sum(num for _, num in taken[first : last + 1])
            assert total <= per_minute * (1 + window_s / 60) + 1e-3


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**7))
def test_after_the_wait_that_it_says_it_has_them(per_minute: int, wanted: int, debt: int) -> None:
    bucket = TokenBucket(per_minute, 5.0)
    bucket.take(debt)
    now = 5.0 + bucket.wait_s(wanted)
    bucket.refill(per_minute, now)
    assert bucket.wait_s(wanted) < 1e-6
    assert bucket.level <= per_minute


def test_a_bucket_never_holds_more_than_a_minutes_tokens() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.refill(60, 1000.0)
    assert bucket.level == 60
    bucket.take(10)
    bucket.give_back(50)
    assert bucket.level == 60
    bucket.refill(6, 1000.0)
    assert bucket.level == 6


def test_time_that_goes_backwards_adds_nothing() -> None:
    bucket = TokenBucket(60, 50.0)
    bucket.take(60)
    bucket.refill(60, 10.0)
    assert bucket.level == 0
    bucket.refill(60, 60.0)
    assert bucket.level == 10


# --- requests at a time -----------------------------------------------------------------------------------------------


def test_requests_are_counted_until_they_end() -> None:
    quotas, acme = TenantQuotas(), tenant(max_concurrent_requests=2)
    first, _second = quotas.take(acme), quotas.take(acme)
    error = refusal(quotas, acme)
    assert (error.metadata["quota"], error.retry_after_s) == ("concurrent_requests", 1.0)
    first.close()
    first.close()
    third = quotas.take(acme)
    refusal(quotas, acme)
    third.close()
    quotas.take(tenant("other", max_concurrent_requests=1))


def test_each_completion_counts() -> None:
    quotas, acme = TenantQuotas(), tenant(max_concurrent_requests=4)
    ticket = quotas.take(acme, num_requests=3)
    assert refusal(quotas, acme, num_requests=2).retry_after_s == 1.0
    assert str(refusal(quotas, acme, num_requests=3)) == (
        "this counts as 3 requests at once, and tenant 'acme' has 3 requests under way here and may have 4; try again "
        "when 2 have ended"
    )
    ticket.close()
    assert refusal(quotas, acme, num_requests=5).retry_after_s is None
    quotas.take(acme, num_requests=4)


def test_a_large_call_for_embeddings_takes_all_that_the_tenant_may_have() -> None:
    quotas, acme = TenantQuotas(), tenant(max_concurrent_requests=4)
    running = quotas.take(acme)
    with pytest.raises(QuotaExceeded):
        quotas.take_pooling(acme, 2000, 2000)
    running.close()
    ticket = quotas.take_pooling(acme, 2000, 2000)
    refusal(quotas, acme)
    ticket.close()
    quotas.take_pooling(acme, 3, 3)
    quotas.take(acme)
    refusal(quotas, acme)


@pytest.mark.parametrize(("share", "most"), [(1.0, 10), (0.5, 5), (0.29, 2), (0.3, 3), (0.01, 1)])
def test_a_server_gives_its_share_and_at_least_one(share: float, most: int) -> None:
    quotas, acme = TenantQuotas(share), tenant(max_concurrent_requests=10)
    for _ in range(most):
        quotas.take(acme)
    refusal(quotas, acme)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(InvalidArgument, match="--quota-share"):
        TenantQuotas(share)


def test_a_limit_that_is_set_while_requests_run_counts_them() -> None:
    quotas = TenantQuotas()
    running = [quotas.take(tenant()) for _ in range(3)]
    refusal(quotas, tenant(max_concurrent_requests=3))
    running[0].close()
    quotas.take(tenant(max_concurrent_requests=3))


@pytest.mark.parametrize("caller", [EVERYBODY, Identity("acme", frozenset({ROUTER}), ("*",), TenantLimits(1, 1))])
def test_what_a_router_has_counted_is_not_counted_again(caller: Identity) -> None:
    quotas = TenantQuotas()
    for _ in range(50):
        quotas.take(caller, num_prompt_tokens=1000)
    quotas.take(tenant(max_concurrent_requests=1))


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_request_takes_its_prompt_and_max_tokens_and_gives_back_what_it_did_not_use() -> None:
    clock = Clock()
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=100)
    ticket = quotas.take(acme, num_prompt_tokens=20, max_tokens=60, room=1000)
    error = refusal(quotas, acme, num_prompt_tokens=20, max_tokens=10, room=1000)
    assert error.metadata["quota"] == "tokens_per_minute"
    assert error.retry_after_s == pytest.approx(6.0)  # 10 more, of 100 a minute
    ticket.set_prompt(25)
    ticket.add_tokens(10)
    ticket.add_tokens(5)
    ticket.close()
    # 40 are used.
    assert refusal(quotas, acme, num_prompt_tokens=61).retry_after_s == pytest.approx(0.6)
    quotas.take(acme, num_prompt_tokens=60).close()


def test_tokens_that_were_not_announced_are_taken_as_they_come() -> None:
    clock = Clock()
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=100)
    ticket = quotas.take(acme, num_prompt_tokens=20, room=100_000)
    ticket.add_tokens(280)
    assert refusal(quotas, acme, num_prompt_tokens=1).retry_after_s == pytest.approx(0.6 * 201)
    clock.now += 121
    ticket.close()
    quotas.take(acme, num_prompt_tokens=1)


def test_max_tokens_alone_never_make_a_request_impossible() -> None:
    clock = Clock()
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=100)
    ticket = quotas.take(acme, num_prompt_tokens=10, max_tokens=5000, room=5000)
    refusal(quotas, acme, num_prompt_tokens=1)
    ticket.add_tokens(10)
    ticket.close()
    assert refusal(quotas, acme, num_prompt_tokens=10, max_tokens=5000, room=5000).retry_after_s == pytest.approx(12)
    clock.now += 12
    quotas.take(acme, num_prompt_tokens=10, max_tokens=5000, room=5000)


def test_a_prompt_larger_than_a_minutes_tokens_is_refused_for_good() -> None:
    error = refusal(TenantQuotas(0.5), tenant(tokens_per_minute=100), num_prompt_tokens=51)
    assert error.retry_after_s is None
    assert "may have 50 a minute" in error.message


def test_a_refused_request_takes_nothing() -> None:
    quotas, acme = TenantQuotas(clock=Clock()), tenant(tokens_per_minute=100, max_concurrent_requests=1)
    running = quotas.take(acme)
    refusal(quotas, acme, num_prompt_tokens=90)
    running.close()
    refusal(quotas, acme, num_prompt_tokens=101)
    quotas.take(acme, num_prompt_tokens=100)


def used(quotas: TenantQuotas, acme: Identity, per_minute: int) -> float:
    """Tokens that are gone, of a bucket that was full."""
    error = refusal(quotas, acme, num_prompt_tokens=per_minute)
    assert error.retry_after_s is not None
    return round(error.retry_after_s * per_minute / 60)


@pytest.mark.parametrize(
    ("error", "num_used"), [(None, 50), (Overloaded("x", retry_after_s=1.0), 0), (Unavailable("x"), 0)]
)
def test_a_call_that_the_server_could_not_do_costs_nothing(error: LoraplexError | None, num_used: int) -> None:
    quotas, acme = TenantQuotas(clock=Clock()), tenant(tokens_per_minute=100)
    quotas.take(acme, num_prompt_tokens=50).close(error)
    ticket = quotas.take(acme, num_prompt_tokens=1)
    assert used(quotas, acme, 100) == num_used + 1
    ticket.close()


def test_an_answer_that_is_too_large_was_computed() -> None:
    clock = Clock()
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=100)
    ticket = quotas.take(acme, num_prompt_tokens=50, max_tokens=40, room=40)
    clock.now += 1e-3
    ticket.close(MessageTooLarge("x"))
    assert used(quotas, acme, 100) == 52


def test_what_was_generated_counts_whatever_the_end() -> None:
    quotas, acme = TenantQuotas(clock=Clock()), tenant(tokens_per_minute=100)
    ticket = quotas.take(acme, num_prompt_tokens=50)
    ticket.add_tokens(7)
    ticket.close(Unavailable("x"))
    assert used(quotas, acme, 100) == 57


# --- tokens that are not seen ----------------------------------------------------------------------------------------


def test_a_text_that_is_cancelled_unseen_counts_by_its_time() -> None:
    clock = Clock()
    quotas = TenantQuotas(clock=clock)
    acme = tenant(tokens_per_minute=60_000)
    ticket = quotas.take(acme, num_prompt_tokens=1, room=10**6, num_requests=2)
    clock.now += 0.02
    ticket.close()
    num_generated = 2 * FASTEST_TOKENS_PER_S * 0.02
    assert used(quotas, acme, 60_000) == num_generated + 1 - 20  # that have come meanwhile


def test_it_counts_no_more_than_it_may_have() -> None:
    clock = Clock()
    quotas = TenantQuotas(clock=clock)
    acme = tenant(tokens_per_minute=60)
    ticket = quotas.take(acme, num_prompt_tokens=1, max_tokens=30, room=1000)
    clock.now += 10
    ticket.close()
    assert used(quotas, acme, 60) == 31 - 10


def test_its_speed_is_that_of_texts_that_were_seen() -> None:
    clock = Clock()
    quotas = TenantQuotas(clock=clock)
    acme = tenant(tokens_per_minute=600)
    seen = quotas.take(acme, num_prompt_tokens=1)
    seen.add_tokens(100)
    clock.now += 10
    seen.close()  # 10 tokens a second
    clock.now += 60
    ticket = quotas.take(acme, num_prompt_tokens=1, room=10**6)
    clock.now += 0.05
    ticket.close()
    assert used(quotas, acme, 600) <= 2


def test_a_refused_request_has_generated_nothing() -> None:
    clock = Clock()
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=600)
    ticket = quotas.take(acme, num_prompt_tokens=10, max_tokens=500, room=1000)
    clock.now += 0.1
    ticket.close(InvalidArgument("x"))
    assert used(quotas, acme, 600) == 10 - 1


def test_an_empty_prompt_fills_no_bucket() -> None:
    """A worker refuses it, and the router gives back what it took."""
    quotas = TenantQuotas(clock=Clock())
    acme = tenant(tokens_per_minute=600)
    quotas.take(acme, num_prompt_tokens=500, room=1000)
    ticket = quotas.take(acme, num_prompt_tokens=0, max_tokens=100, room=1000)
    ticket.close(InvalidArgument("x"))
    assert used(quotas, acme, 600) == 500


def test_completions_that_ended_whole_count_and_the_others_by_their_time() -> None:
    clock = Clock()
    quotas = TenantQuotas(clock=clock)
    acme = tenant(tokens_per_minute=600)
    both = quotas.take(acme, num_prompt_tokens=1, num_requests=2, room=1000)
    both.add_completion(5)
    both.add_completion(6)
    clock.now += 1e-3
    both.close()
    assert used(quotas, acme, 600) == 12
    one = quotas.take(acme, num_prompt_tokens=1, num_requests=2, room=20)
    one.add_completion(5)
    clock.now += 1
    one.close()
    assert used(quotas, acme, 600) == 12 + 1 + 40 - 10


# --- all together -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_whatever_calls_do_a_tenant_gets_no_more_than_its_quotas(data: st.DataObject) -> None:
    """Every call names `max_tokens`, some end early, some are cancelled unseen."""
    clock = Clock()
    clock.now = 0.0
    per_minute, most = data.draw(st.integers(50, 500)), data.draw(st.integers(1, 4))
    quotas, acme = TenantQuotas(clock=clock), tenant(tokens_per_minute=per_minute, max_concurrent_requests=most)
    running: list[tuple[Ticket, int, int]] = []
    used_tokens = num_done = 0
    for _ in range(data.draw(st.integers(1, 40))):
        clock.now += data.draw(st.floats(0, 5))
        if running and data.draw(st.booleans()):
            ticket, num_completions, max_tokens = running.pop(data.draw(st.integers(0, len(running) - 1)))
            num_generated = data.draw(st.integers(0, num_completions * max_tokens))
            if data.draw(st.booleans()):
                ticket.add_tokens(num_generated)
                used_tokens += num_generated
            ticket.close(data.draw(st.sampled_from([None, Overloaded("x", retry_after_s=1.0)])))
            num_done += 1
            continue
        num_completions, num_prompt, max_tokens = (data.draw(st.integers(*most)) for most in ((1, 3), (1, 60), (0, 20)))
        if num_prompt + num_completions * max_tokens > per_minute:
            continue  # may go below zero
        try:
            ticket = quotas.take(
                acme, num_requests=num_completions, num_prompt_tokens=num_prompt, max_tokens=max_tokens, room=1000
            )
        except QuotaExceeded:
            continue
        running.append((ticket, num_completions, max_tokens))
        assert sum(num for _, num, _ in running) <= most
        assert used_tokens <= per_minute * (1 + clock.now / 60)
    for ticket, _, _ in running:
        ticket.close()
    clock.now += 60
    quotas.take(acme, num_requests=most, num_prompt_tokens=per_minute)


# --- calls at once ----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(40, 200),
)
def test_calls_are_refused_together_where_one_of_them_always_would_be(
    calls: list[tuple[int, int, int]], most: int | None, per_minute: int | None
) -> None:
    limits = TenantLimits(max_concurrent_requests=most, tokens_per_minute=per_minute)
    acme = Identity("acme", limits=limits)
    together = [(num, num_prompt + num * max_tokens) for num, num_prompt, max_tokens in calls]

    def take_all() -> None:
        quotas = TenantQuotas(clock=Clock())  # with all that the tenant may have
        for num, num_prompt, max_tokens in calls:
            quotas.take(acme, num_requests=num, num_prompt_tokens=num_prompt, max_tokens=max_tokens, room=max_tokens)

    def is_refused(check: Callable[[], None]) -> bool:
        try:
            check()
        except QuotaExceeded:
            return True
        return False

    quotas = TenantQuotas(clock=Clock())
    assert is_refused(lambda: quotas.check_together(acme, together)) == is_refused(take_all)
    quotas.check_together(Identity("", frozenset({ROUTER}), limits=acme.limits), together)


def test_calls_that_are_too_many_together_are_not_to_be_sent_again() -> None:
    acme = tenant(max_concurrent_requests=4, tokens_per_minute=100)
    for calls in ([(2, 1), (3, 1)], [(1, 60), (1, 60)]):
        with pytest.raises(QuotaExceeded) as caught:
            TenantQuotas().check_together(acme, calls)
        assert caught.value.retry_after_s is None
