"""What the planning service answers: one message in, one reply out."""

import inspect
import random
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.backends.attention import attention_backend
from syncfree.backends.service import desk as desk_module
from syncfree.backends.service import protocol
from syncfree.backends.service.client import plan_request
from syncfree.backends.service.desk import Desk
from syncfree.planner import Batch, Environment, Limits, MetadataPlan, Planner

BACKENDS = ("aiter_fa", "aiter_mla", "triton")


@pytest.fixture
def desk():
    return greeted(Desk())


def greeted(desk, client=b"me"):
    ask(desk, {"type": "hello", "id": 1, "protocol": protocol.PROTOCOL}, client)
    return desk


def ask(desk, message, client=b"me"):
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return protocol.decode_reply(desk.handle(client, [data]))


def plain(**changes):
    """A plan request as a client without this package writes it."""
    return {"type": "plan", "id": 7, "backend": "triton", "query_lens": [1, 1], "seq_lens": [9, 70], **changes}


def test_hello_tells_versions_and_limits():
    reply = ask(Desk(), {"type": "hello", "id": 3, "protocol": 1, "version": "x", "pid": 5})
    assert (type(reply).__name__, reply.id, reply.protocol, reply.plan) == ("Welcome", 3, 1, "syncfree.plan/1")
    assert reply.max_rows == protocol.MAX_ROWS


def test_another_protocol_is_refused_with_both_numbers():
    reply = ask(Desk(), {"type": "hello", "id": 3, "protocol": 99})
    assert (reply.code, reply.id) == ("protocol", 3)
    assert "protocol 1" in reply.reason
    assert "99" in reply.reason


def test_nothing_is_answered_before_hello():
    for kind in ("health", "stop"):
        assert ask(Desk(), {"type": kind, "id": 2}).code == "hello"
    assert ask(Desk(), plain()).code == "hello"


def test_a_plan_from_plain_lists_is_the_one_planned_here(desk):
    reply = ask(desk, plain())
    mine = Planner(attention_backend("triton")).plan(Batch.from_lengths([1, 1], [9, 70]))
    assert reply.id == 7
    assert reply.plan == mine.to_bytes()
    assert MetadataPlan.from_bytes(reply.plan) == mine


def test_lists_and_little_endian_bytes_are_the_same(desk):
    lists = plain(query_lens=[1, 5], seq_lens=[9, 70], is_prefilling=[False, True], prefill_lens=[4, 80])
    as_bytes = plain(
        query_lens=np.array([1, 5], "<i4").tobytes(),
        seq_lens=np.array([9, 70], "<i4").tobytes(),
        is_prefilling=bytes([0, 1]),
        prefill_lens=np.array([4, 80], "<i4").tobytes(),
    )
    assert ask(desk, lists).plan == ask(desk, as_bytes).plan


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"seq_lens": [9, 0]}, "input", "seq_lens[1]: expected >= query_lens[1] = 1, got 0"),
        ({"query_lens": [1, -1]}, "input", "query_lens[1]: expected >= 0, got -1"),
        ({"seq_lens": [9, 2**40]}, "input", "seq_lens[1]: expected <= 2147483647"),
        ({"seq_lens": [9]}, "input", "seq_lens: expected 2 elements"),
        ({"seq_lens": b"123456789"}, "input", "seq_lens: expected a multiple of 4 bytes"),
        ({"is_prefilling": bytes([0, 7])}, "input", "is_prefilling[1]: expected true or false"),
        ({"backend": "magic"}, "input", "backend: expected one of aiter_fa"),
        ({"decode_threshold": 0}, "input", "decode_threshold: expected 1 to"),
        ({"max_seq_len": 69}, "input", "max_seq_len: expected >= the largest of seq_lens = 70, got 69"),
        ({"flag_lens": [1]}, "input", "flag_lens: expected 2 elements"),
        ({"limits": {"block_size": 7}}, "input", "limits.block_size: expected a multiple of 16"),
        ({"limits": {"num_heads": 2**30}}, "too_large", "limits.num_heads: expected at most"),
        ({"environment": {"num_cu": 2**30}}, "too_large", "environment.num_cu: expected at most"),
        ({"environment": {"num_cu": 2**40}}, "malformed", "num_cu: expected <= 2147483647"),
        ({"environment": {"gfx": "sm_90"}}, "malformed", "gfx: expected a name such as gfx942"),
        ({"environment": {"gfy": "gfx942"}}, "malformed", "unknown field `gfy`"),
        ({"query_lens": "1,1"}, "malformed", "$.query_lens"),
        ({"reorder": 3}, "malformed", "$.reorder"),
        ({"speed": 1}, "malformed", "unknown field `speed`"),
        (
            {"backend": "aiter_fa", "query_lens": [1, 10, 50], "seq_lens": [9, 10, 70]},
            "unordered",
            "rows[2]: expected no context",
        ),
        (
            {"backend": "aiter_fa", "query_lens": [1, 10], "seq_lens": [9, 70], "seq_lens_lower": [9, 60]},
            "inexact",
            "seq_lens[1]: expected an exact length",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_place(desk, changes, code, reason):
    reply = ask(desk, plain(**changes))
    assert (type(reply).__name__, reply.code, reply.id) == ("Refused", code, 7), reply
    assert reason in reply.reason
    assert "\n" not in reply.reason
    assert ask(desk, plain()).plan  # and the next one is served


def test_rubbish_is_refused_and_changes_nothing(desk):
    rng = random.Random(5)
    for _ in range(300):
        reply = ask(desk, rng.randbytes(rng.randint(0, 60)))
        assert reply.code == "malformed"
    whole = msgspec.msgpack.encode(plain())
    for cut in range(len(whole)):
        assert ask(desk, whole[:cut]).code == "malformed"
    for deep in (b"\x91" * 100_000, b"\x81\xa1a" * 50_000):
        assert ask(desk, deep).code == "malformed"
    assert protocol.decode_reply(desk.handle(b"me", [b"a", b"b"])).code == "malformed"
    assert ask(desk, {"type": "health", "id": 9}).plans == 0


def power(most):
    """Small and large alike."""
    return st.integers(0, most).map(lambda bits: 2**bits)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_message_makes_the_service_take_gigabytes(data):
    """Whatever lengths, settings and limits a client sends: planned or refused, within a bound."""
    rows = data.draw(st.lists(st.tuples(power(20), power(30)), min_size=1, max_size=12)) * data.draw(power(10))
    interleave, ranks = data.draw(power(4)), data.draw(power(8))
    environment = {
        "vllm": data.draw(st.sampled_from(["0.26", "0.32"])),
        "num_cu": data.draw(power(14)),
        "kv_sharing": data.draw(st.booleans()),
        "dcp_world_size": ranks,
        "dcp_interleave": interleave,
        "kv_dtype": data.draw(st.sampled_from(["bf16", "fp8"])),
    }
    limits = {
        "workspace_tokens": data.draw(power(30)),
        "block_size": 16,
        "sliding_window": data.draw(st.one_of(st.none(), power(30))),
        "num_heads": data.draw(power(16)),
        "max_num_seqs": 2**20,
        "max_num_batched_tokens": 2**30,
    }
    desk = greeted(Desk())
    message = plain(
        backend=data.draw(st.sampled_from(BACKENDS)),
        query_lens=[query for query, _ in rows],
        seq_lens=[query + context for query, context in rows],
        is_prefilling=[query != 1 for query, _ in rows],
        short_extends_as_decodes=data.draw(st.booleans()),
        reorder=True,
        environment=environment,
        limits=limits,
    )
    tracemalloc.start()
    try:
        reply = ask(desk, message)
        assert tracemalloc.get_traced_memory()[1] < 1.2e9
    finally:
        tracemalloc.stop()
    assert getattr(reply, "code", "planned") in ("planned", "input", "unordered", "inexact", "too_large"), reply


def test_the_largest_plan_allowed_is_made_and_one_larger_is_refused(desk):
    rows = 64
    context = protocol.MAX_CONTEXT_ENTRIES // rows
    message = plain(backend="aiter_fa", query_lens=[2] * rows, seq_lens=[context + 2] * rows)
    assert len(ask(desk, message).plan) > 4 * protocol.MAX_CONTEXT_ENTRIES
    reply = ask(desk, {**message, "seq_lens": [context + 2] * (rows - 1) + [context + 3]})
    assert reply.code == "too_large"
    # the same contexts of decode rows cost nothing, and are planned
    assert ask(desk, {**message, "query_lens": [1] * rows, "seq_lens": [2**30] * rows}).plan


def test_a_reply_over_the_limit_is_refused(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "MAX_REPLY_BYTES", 300)
    assert ask(desk, plain()).code == "too_large"


def test_a_failure_inside_a_backend_is_told_to_its_client_only(desk, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(desk_module, "attention_backend", broken)
    reply = ask(desk, plain(limits={"num_heads": 32}))
    assert reply.code == "error"
    assert "ZeroDivisionError: of all things" in reply.reason
    monkeypatch.undo()
    assert ask(desk, plain()).plan


def test_stop_is_answered_before_the_end(desk):
    assert type(ask(desk, {"type": "stop", "id": 4})).__name__ == "Stopping"
    assert desk.stopping


def test_health_counts(desk):
    ask(desk, plain())
    ask(desk, plain(backend="magic"))
    health = ask(desk, {"type": "health", "id": 1})
    assert (health.plans, health.refused, health.clients, health.planners) == (1, 1, 1, 1)
    assert health.memory_bytes > 1e6


def test_clients_and_planners_are_kept_within_bounds(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "_KNOWN_CLIENTS", 4)
    monkeypatch.setattr(desk_module, "_KEPT_PLANNERS", 6)
    for number in range(20):
        client = str(number).encode()
        greeted(desk, client)
        for heads in (1, 2, 3):
            assert ask(desk, plain(limits={"num_heads": heads}), client).plan
    health = ask(desk, {"type": "health", "id": 1}, b"19")
    assert (health.clients, health.planners) == (4, 6)
    assert ask(desk, plain(), b"0").code == "hello"  # forgotten, so it has to greet again


# ------------------------------------------------------------- the client's messages

LENGTH = st.integers(0, 60)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_batch_a_client_holds_its_plan_is_the_one_planned_here(data):
    """Every kind of knowledge that a batch may carry reaches the service; steps of one client share a planner."""
    desk = greeted(Desk())
    backend = data.draw(st.sampled_from(BACKENDS))
    limits = Limits(num_heads=data.draw(st.sampled_from([16, 32])))
    environment = Environment(gfx=data.draw(st.sampled_from(["gfx942", "gfx950"])))
    for _ in range(data.draw(st.integers(1, 3))):
        batch = drawn_batch(data)
        reorder = data.draw(st.booleans())
        request = plan_request(backend, batch, environment, limits, reorder=reorder)
        request.id = 1
        reply = ask(desk, protocol.encode(request))
        try:
            mine = Planner(attention_backend(backend), environment, limits).plan(batch, reorder=reorder)
        except ValueError as error:
            mine = error
        assert reply.reason == str(mine) if isinstance(mine, ValueError) else reply.plan == mine.to_bytes()


def drawn_batch(data):
    rows = data.draw(st.integers(1, 6))
    query = np.array(data.draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows)), np.int32)
    computed = np.array(data.draw(st.lists(LENGTH, min_size=rows, max_size=rows)), np.int32)
    unknown = st.one_of(st.just(-1), LENGTH)

    def maybe(elements):
        made = data.draw(st.one_of(st.none(), st.lists(elements, min_size=rows, max_size=rows)))
        return None if made is None else np.array(made, np.int32)

    flags = maybe(st.integers(0, 1))
    lower = query + computed - np.minimum(computed, data.draw(st.sampled_from([0, 0, 2])))
    prefill = maybe(unknown)
    return Batch(
        query,
        query + computed,
        computed,
        decode_threshold=data.draw(st.integers(1, 3)),
        short_extends_as_decodes=data.draw(st.booleans()) or (flags is None and prefill is None),
        num_tokens=int(query.sum()) + data.draw(st.sampled_from([0, 4])),
        prefill_lens=prefill,
        cached_lens=maybe(unknown),
        is_prefilling=None if flags is None else flags.astype(bool),
        flag_lens=maybe(unknown),
        seq_lens_lower=lower.astype(np.int32) if data.draw(st.booleans()) else None,
        max_seq_len=data.draw(st.sampled_from([None, 500])),
        causal=data.draw(st.sampled_from([True, False, None])),
    )


def test_everything_that_a_batch_may_know_is_sent():
    """A member that is added to `Batch` has to reach the service too, or its plans differ in silence."""
    known = set(inspect.signature(Batch).parameters)
    derived = {"computed_lens", "req_ids"}  # from query and sequence lengths; in no plan
    assert known - derived <= set(protocol.Plan.__struct_fields__)


def test_every_message_has_a_schema():
    schemas = protocol.message_schemas()
    for name in ("Hello", "Plan", "Health", "Stop", "Welcome", "Planned", "Healthy", "Stopping", "Refused"):
        assert schemas[name]["properties"]["type"] == {"enum": [name.lower()]}
        assert "id" in schemas[name]["required"]
