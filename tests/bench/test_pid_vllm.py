"""The GPU program that attaches to a real vLLM: what it takes for equal, and the engine's own book."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def program(load):
    return load("gpu/pid_vllm.py")


@pytest.fixture
def book(load):
    core = SimpleNamespace(model_executor=SimpleNamespace(execute_model=lambda scheduled: None))
    return load("gpu/pid_engine.py").Book(core)


def scheduled(tokens, new=(), cached=None):
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[1] * prompt, num_computed_tokens=computed)
            for name, prompt, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}), num_computed_tokens=list((cached or {}).values())
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def test_the_engines_book_classifies_by_the_schedulers_words(book):
    steps = [
        (scheduled({"a": 256}, new=[("a", 600, 0)]), "causal_prefill"),
        (scheduled({"a": 256}, cached={"a": 256}), "chunked_prefill"),
        (scheduled({"a": 88}, cached={"a": 512}), "chunked_prefill"),
        (scheduled({"a": 1, "b": 40}, new=[("b", 552, 512)], cached={"a": 600}), "extend"),
        (scheduled({"a": 1, "b": 1}, cached={"a": 601, "b": 552}), "decode"),
        (scheduled({"a": 1, "c": 8}, new=[("c", 8, 0)], cached={"a": 602}), "causal_prefill"),
    ]
    assert [book.read(step)["class"] for step, _ in steps] == [expected for _, expected in steps]


def test_a_step_without_tokens_is_no_step(book):
    assert book.read(scheduled({})) is None
    book.note(1.0, 2.0)
    assert book.steps == []


def test_the_executor_is_watched_and_still_runs(load):
    ran = []
    core = SimpleNamespace(model_executor=SimpleNamespace(execute_model=lambda step, non_block: ran.append(non_block)))
    book = load("gpu/pid_engine.py").Book(core)
    core.model_executor.execute_model(scheduled({"a": 7}, new=[("a", 7, 0)]), non_block=True)
    book.note(1.0, 1.5)
    assert ran == [True]
    assert book.steps == [{"at": 1.0, "ms": 500.0, "class": "causal_prefill", "reqs": 1, "tokens": 7}]


def own(*steps):
    return [{"class": name, "reqs": reqs, "tokens": tokens} for name, reqs, tokens in steps]


def seen(*steps):
    return [{"batch_class": name, "num_reqs": reqs, "num_tokens": tokens} for name, reqs, tokens in steps]


def test_recorded_steps_have_to_stand_in_the_book_in_one_row(program):
    a, b, c = ("decode", 2, 2), ("extend", 2, 41), ("decode", 3, 3)
    assert program.found_in(own(a, b, c, a), seen(b, c)) == 1
    assert program.found_in(own(a, b, c, a), seen(b, a)) is None, "one was lost"
    assert program.found_in(own(a, b, c, a), seen(b, b, c)) is None, "one was told twice"
    assert program.found_in(own(a), seen(a, a)) is None


def test_the_longest_step_of_each_window_is_found(program):
    book = [{"at": float(k), "ms": 10.0 * k} for k in range(5)]
    assert program.longest(book, [[0.5, 2.5], [2.5, 3.5]]) == {"windows": 2, "p50": 25.0, "max": 30.0}
    assert program.longest(book, [[3.02, 3.5]])["max"] == 30.0, "it began before"
    assert program.longest([], [[0, 1]])["max"] == 0
    assert program.longest(book, []) == {}


def test_figures_are_told_by_class_and_rank(program):
    def step(rank, name, launches):
        return {
            "rank": rank,
            "batch_class": name,
            "syncs": {"total": 1},
            "copies": {"d2h": 1, "h2d": None},
            "launches": {"kernels": launches, "graphs": 0},
        }

    report = {"steps": [step(0, "decode", 130), step(1, "decode", 132), step(1, "extend", 126)]}
    assert program.by_class(report)["decode"]["launches"] == [130, 131, 132]
    assert program.by_class(report)["decode"]["h2d"] is None
    assert list(program.by_class(report, 0)) == ["decode"]
    assert program.by_class(report, 1)["extend"]["steps"] == 1
