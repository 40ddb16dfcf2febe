"""The GPU program that runs a real vLLM under every mode of the planner: its arguments, its verdict, its file."""

import copy
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def program(load):
    return load("gpu/vllm_planned.py")


def step(batch_class="decode", tokens=8, syncs=1, launches=130, build_us=50.0):
    return {
        "class": batch_class,
        "tokens": tokens,
        "syncs": syncs,
        "launches": launches,
        "build_syncs": 0,
        "build_launches": 2,
        "build_us": build_us,
    }


def run(tokens="abc", planner="off", mismatches=None, counted=None):
    return {
        "tokens": tokens,
        "steps": 2,
        "counted": counted or [step("extend", 256, launches=126), step()],
        "planner": {"mode": planner, "mismatches": mismatches, "first_mismatch": None},
        "notes": [],
        "versions": {"vllm": "0.26.0"},
    }


@pytest.fixture
def results():
    return {
        "off": run(),
        "control": run(),
        "shadow": run(planner="shadow", mismatches=0),
        "on": run(planner="on", counted=[step("extend", 256, launches=124), step()]),
        "wrong": run("xyz", planner="on"),
    }


def test_runs_that_agree_are_good(program, results):
    found = program.verdict_of(results)
    assert found["good"]
    assert (found["tokens_differ_in"], found["worse"], found["steps"]) == ([], [], 2)


def other_tokens(results):
    results["on"]["tokens"] = "abd"


def a_mismatch(results):
    results["shadow"]["planner"] |= {"mismatches": 1, "first_mismatch": "triton_mla: decode.seq_lens"}


def nothing_compared(results):
    results["shadow"]["planner"]["mismatches"] = None


def a_wait_more(results):
    results["on"]["counted"][1] = step(syncs=2)


def a_launch_more(results):
    results["on"]["counted"][0] = step("extend", 256, launches=127)


def an_unknown_figure(results):
    results["on"]["counted"][0] = step("extend", 256, launches=None)


def other_steps(results):
    results["on"]["counted"] = [step()]


def lengths_do_not_matter(results):
    results["wrong"]["tokens"] = "abc"


FAULTS = (
    other_tokens,
    a_mismatch,
    nothing_compared,
    a_wait_more,
    a_launch_more,
    an_unknown_figure,
    other_steps,
    lengths_do_not_matter,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_seen(program, results, fault):
    fault(results)
    assert not program.verdict_of(results)["good"]


def test_tokens_of_an_engine_that_varies_by_itself_say_nothing(program, results):
    results["control"]["tokens"] = "other"
    results["on"]["tokens"] = "abd"
    found = program.verdict_of(results)
    assert found["good"]
    assert found["tokens_vary_without_planner"]


def test_cases_and_scheduling_are_read(program):
    options = program.arguments(["out", "m/llama:TRITON_ATTN", "m/mla:TRITON_MLA", "--scheduling", "sync,async"])
    assert options.cases == [(Path("m/llama"), "TRITON_ATTN"), (Path("m/mla"), "TRITON_MLA")]
    assert (options.scheduling, options.json) == (("sync", "async"), Path("out/planned.json"))
    assert program.name_of(*options.cases[1], "async", False) == "mla_TRITON_MLA_async"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["out", "m/llama"], "expected MODEL_DIR:BACKEND, got 'm/llama'"),
        (["out", "m/llama:X", "--scheduling", "both"], "expected sync or async, got 'both'"),
        (["out", "m/llama:X", "--mode", "maybe"], "invalid choice: 'maybe'"),
        (["out", "a:X", "b:Y", "--mode", "on"], "expected one case and one scheduling"),
    ],
)
def test_bad_arguments_are_refused(program, given, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.arguments(given)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_one_file_keeps_the_cases_of_all_calls(program, results, tmp_path):
    file = tmp_path / "planned.json"
    found = program.verdict_of(results) | {"classes": program.table(results)}
    program.keep(file, "llama_TRITON_ATTN_sync", found)
    program.keep(file, "mla_TRITON_MLA_sync", found)
    worse = copy.deepcopy(found) | {"good": False}
    program.keep(file, "llama_TRITON_ATTN_sync", worse)
    told = json.loads(file.read_text())
    assert {name: kept["good"] for name, kept in told.items()} == {
        "llama_TRITON_ATTN_sync": False,
        "mla_TRITON_MLA_sync": True,
    }
    [row] = [r for r in told["mla_TRITON_MLA_sync"]["classes"] if (r["mode"], r["class"]) == ("on", "extend")]
    assert (row["steps"], row["launches"], row["build_us"]) == (1, 124, 50.0)


def test_the_requests_are_the_same_in_every_process(program):
    first, again = list(program.requests(16)), list(program.requests(16))
    assert first == again
    assert max(len(prompt) for prompt, _ in first) > 256  # past the token budget: cut
    assert first[2][0][:512] == first[6][0][:512]  # a common prefix


def test_an_engine_that_fails_spoils_its_own_case_only(program, results, monkeypatch, tmp_path):
    def run_apart(options, case, scheduling, mode):
        if case[0].name == "mla" and mode == "on":
            raise RuntimeError("mla_on: exit code 1")
        return copy.deepcopy(results[mode])

    monkeypatch.setattr(program, "run_apart", run_apart)
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path), "m/mla:TRITON_MLA", "m/llama:TRITON_ATTN", "--jobs", "4"])
    assert program.main() == 1
    told = json.loads((tmp_path / "planned.json").read_bytes())
    [(name, found)] = told.items()
    assert (name, found["good"]) == ("llama_TRITON_ATTN_sync", True)
    assert "build_us" not in found["classes"][0]
