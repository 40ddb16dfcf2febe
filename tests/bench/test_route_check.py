"""The GPU program that checks the route on lengths it was not fitted to: what it draws and how it judges."""

import itertools

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def program(load):
    return load("gpu/route_check.py")


def test_lengths_are_of_many_kinds_and_fit(program):
    shapes = list(itertools.islice(program.drawn(7), 300))
    assert {name.split(",")[0] for name, *_ in shapes} == {"uniform", "one long", "lognormal", "two sizes"}
    assert {(heads, query) for _, _, heads, query in shapes} == set(program.HEADS)
    for _, lens, _, _ in shapes:
        assert lens.min() >= 16
        assert lens.max() <= program.LONGEST
        assert lens.sum() <= program.TOKENS + 16 * len(lens)
    again = list(itertools.islice(program.drawn(7), 3))
    assert all((a[1] == b[1]).all() for a, b in zip(shapes, again, strict=False))


@pytest.mark.parametrize(("faster", "slower_by"), [("chosen", 0.0), ("other", 0.25)])
def test_the_choice_is_judged_by_what_was_timed(program, faster, slower_by):
    from syncfree.backends import mla_decode_times as model

    _, lens, heads, query_len = next(program.drawn(7))
    choice = model.choose(model.Shape(lens, query_len, heads, 132))
    fixed = dict.fromkeys(model.SPLITS, 100.0)
    row = {"lengths": "x", "heads": heads, "query_len": query_len, "persistent_us": 100.0, "fixed_us": fixed}
    chosen = 100.0 if faster == "chosen" else 125.0
    if choice.persistent:
        row["persistent_us"] = chosen
    else:
        fixed[choice.splits] = chosen
    assert program.judged(row, lens, 132)["slower_by"] == pytest.approx(slower_by)
