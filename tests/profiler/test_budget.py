"""Budget files and their short form: what they mean, and what is refused."""

from datetime import date

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.budget import DEFAULT_EXEMPT, Allow, load_budget, parse_budget, parse_fail_on
from syncfree.profiler.report import Site


def refused(text):
    with pytest.raises(BadInput) as error:
        parse_budget(text, where="b.toml")
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_table_names_a_class_its_limits_and_how_they_are_judged():
    budget = parse_budget(
        """
        [budget.decode]
        syncs = 0
        launches = 60
        phases = ["build"]
        stat = "p99"
        exempt = ["warmup"]
        optional = true
        [budget."*"]
        syncs = 3
        """
    )
    decode, others = budget.classes
    assert decode.batch_class == "decode"
    assert decode.limits == {"syncs": 0, "launches": 60}
    assert (decode.phases, decode.stat, decode.optional) == (("build",), "p99", True)
    assert decode.exempt == {"warmup"}
    assert others.other_than == {"decode"}
    assert (others.phases, others.stat, others.optional, others.exempt) == (None, "max", False, DEFAULT_EXEMPT)


def test_a_class_may_have_several_tables():
    budget = parse_budget("[[budget.decode]]\nduration_us=9\nstat='p50'\n[[budget.decode]]\nsyncs=0\n")
    assert [item.stat for item in budget.classes] == ["p50", "max"]


def test_an_allow_entry_has_a_site_a_reason_and_maybe_a_day():
    budget = parse_budget(
        "[[allow]]\nsite='a.py:f'\nreason='known'\nuntil=2027-03-01\n[[allow]]\nsite='b.py:g'\nreason='r'\nkind='d2h'\n"
    )
    first, second = budget.allow
    assert first.until == date(2027, 3, 1)
    assert not first.expired(date(2027, 3, 1))
    assert first.expired(date(2027, 3, 2))
    assert not second.expired(date(9999, 1, 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[budget.decode]\nsync=0", "b.toml: budget.decode.sync: unknown key (did you mean syncs?)"),
        ("[bugdet.decode]\nsyncs=0", "b.toml: bugdet: unknown key (did you mean budget?)"),
        ("[budget.decode]\nsyncs=-1", "b.toml: budget.decode.syncs: expected a number >= 0, got -1"),
        ("[budget.decode]\nsyncs=nan", "b.toml: budget.decode.syncs: expected a number >= 0, got nan"),
        ("[budget.decode]\nsyncs=true", "b.toml: budget.decode.syncs: expected a number, got a boolean"),
        ("[budget.decode]\nsyncs='0'", "b.toml: budget.decode.syncs: expected a number, got a text"),
        ("[budget.decode]\nstat='max'", "b.toml: budget.decode: expected a limit such as syncs = 0, got none"),
        ("[budget.decode]\nsyncs=0\nstat='p90'", "b.toml: budget.decode.stat: expected one of max, p99, p50, mean"),
        ("[budget.decode]\nsyncs=0\nphases='build'", "b.toml: budget.decode.phases: expected a list of names"),
        ("[budget.decode]\nsyncs=0\nphases=[]", "b.toml: budget.decode.phases: expected at least one phase"),
        ("[budget.decode]\nsyncs=0\nexempt=['warm']", "b.toml: budget.decode.exempt: warm: unknown exemption"),
        ("[budget.decode]\nsyncs=0\noptional=1", "b.toml: budget.decode.optional: expected true or false"),
        ("budget=3", "b.toml: budget: expected tables such as [budget.decode], got a number"),
        ("[budget]\ndecode=3", "b.toml: budget.decode: expected a table of limits, got a number"),
        ("", "b.toml: expected at least one [budget.CLASS] table, got none"),
        ("[budget.decode", "b.toml: expected TOML:"),
        ("[[allow]]\nsite='a.py:f'", "b.toml: allow[0].reason: expected a text, got none"),
        ("[[allow]]\nsite='a.py:f'\nreason=' '", "b.toml: allow[0].reason: expected a text, got an empty one"),
        ("[[allow]]\nsite='a.py'\nreason='r'", "b.toml: allow[0].site: expected file.py:function, got 'a.py'"),
        ("[[allow]]\nsite='a.py:12'\nreason='r'", "b.toml: allow[0].site: expected file.py:function (lines move)"),
        ("[[allow]]\nsite='a.py:f'\nreason='r'\nuntil='soon'", "b.toml: allow[0].until: expected a date"),
        ("[[allow]]\nsite='a.py:f'\nreason='r'\nkind='x'", "b.toml: allow[0].kind: expected one of d2h"),
        ("[[allow]]\nsite='a.py:f'\nreason='r'\nunitl=1", "b.toml: allow[0].unitl: unknown key (did you mean until?)"),
        ("allow=1", "b.toml: allow: expected [[allow]] entries"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(text, expected):
    assert refused(text).startswith(expected)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none\.toml: cannot be read: No such file"):
        load_budget(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(BadInput, match=r"latin\.toml: expected TOML in UTF-8"):
        load_budget(tmp_path / "latin.toml")


def test_the_short_form_is_a_limit_on_the_maximum():
    budget = parse_fail_on(["decode:syncs=0", "*:launches=60, blocked_us=1.5"])
    assert [(c.batch_class, c.limits, c.stat) for c in budget.classes] == [
        ("decode", {"syncs": 0}, "max"),
        ("*", {"launches": 60, "blocked_us": 1.5}, "max"),
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("syncs=0", "--fail-on 'syncs=0': expected CLASS:FIGURE=LIMIT such as decode:syncs=0, got no class"),
        (":syncs=0", "--fail-on ':syncs=0': expected CLASS:FIGURE=LIMIT"),
        ("decode:", "--fail-on 'decode:': expected CLASS:FIGURE=LIMIT such as decode:syncs=0, got 'nothing' after"),
        ("decode:syncs", "--fail-on 'decode:syncs': expected CLASS:FIGURE=LIMIT"),
        ("decode:sync=0", "--fail-on 'decode:sync=0': sync: unknown figure (did you mean syncs?)"),
        ("decode:syncs=x", "--fail-on 'decode:syncs=x': syncs: expected a number, got 'x'"),
        ("decode:syncs=-1", "--fail-on 'decode:syncs=-1': syncs: expected a number >= 0, got -1.0"),
        ("decode:syncs=inf", "--fail-on 'decode:syncs=inf': syncs: expected a number >= 0, got inf"),
        ("decode:syncs<=0", "--fail-on 'decode:syncs<=0': syncs<: unknown figure (did you mean syncs?)"),
    ],
)
def test_a_wrong_short_form_is_one_clear_line(spec, expected):
    with pytest.raises(BadInput) as error:
        parse_fail_on([spec])
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "file", "function", "matches"),
    [
        ("model.py:forward", "/app/vllm/model.py", "Model.forward", True),
        ("model.py:Model.forward", "/app/vllm/model.py", "Model.forward", True),
        ("vllm/model.py:forward", "/app/vllm/model.py", "forward", True),
        ("model.py:forward", "/app/my_model.py", "forward", False),
        ("sglang/model.py:forward", "/app/vllm/model.py", "forward", False),
        ("model.py:ward", "/app/model.py", "forward", False),
        ("model.py:*", "/app/model.py", "anything", True),
        ("model_*.py:forward", "/app/model_v2.py", "forward", True),
        ("model.py:inner", "/app/model.py", "outer.<locals>.inner", True),
        ("/app/model.py:forward", "/app/model.py", "forward", True),
    ],
)
def test_a_site_is_matched_by_the_ends_of_its_path_and_name(entry, file, function, matches):
    allow = Allow(site=entry, reason="r")
    assert allow.matches(Site(file=file, line=1, function=function, kind="d2h")) is matches
