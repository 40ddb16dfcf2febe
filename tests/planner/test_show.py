"""The plan as people and programs see it, and the input it is made from."""

import hashlib
import io
import json
import sys

import jsonschema
import numpy as np
import pytest
from syncfree.backends.attention import BUILT_IN, attention_backend
from syncfree.planner import BadInput, Planner
from syncfree.planner.plan_input import read_input, read_lists
from syncfree.planner.show import LONGEST_LIST, plan_json, plan_schema, run_plan

FA = attention_backend("aiter_fa")


def planned(**arguments):
    out = io.StringIO()
    run_plan(FA, out=out, **arguments)
    return out.getvalue()


def test_tables_name_every_field_with_its_consumer_or_its_reason():
    text = planned(lists={"query_lens": "1,16,64", "seq_lens": "70,500,64"})
    plan = Planner(FA).plan(read_lists({"query_lens": "1,16,64", "seq_lens": "70,500,64"}).batch)
    for name in (*plan.fields, *plan.skipped):
        assert name in text
    assert "cost: 0 syncs, 1 host-to-device copy" in text
    assert "list[int]" in text
    assert "cp_mha_gather_cache" in text


def test_json_follows_its_schema_and_holds_the_plan():
    given = {"query_lens": "1,16,64", "seq_lens": "70,500,64"}
    document = json.loads(planned(lists=given, json=True))
    jsonschema.validate(document, plan_schema(), jsonschema.Draft202012Validator)
    plan = Planner(FA).plan(read_lists(given).batch)
    assert document["schema"] == "syncfree.plan/1"
    assert document["batch_class"] == "extend"
    assert document["rows"] == ["decode", "extend", "causal_prefill"]
    assert [s["rows"] for s in document["segments"]] == [[0, 1], [1, 2], [2, 3]]
    assert document["fields"]["prefill.query_start_loc"]["value"] == [0, 64]
    assert document["fields"]["extend.chunk_context.token_to_batch"]["value"] == [[0] * 484]
    assert document["fields"]["common.seq_lens"] == {
        "source": "device",
        "dtype": "int32",
        "shape": [3],
        "value": None,
        "consumer": plan["common.seq_lens"].consumer,
    }
    assert set(document["skipped"]) == set(plan.skipped)
    assert document["cost"]["syncs"] == 0


def test_long_arrays_are_told_by_their_digest():
    given = read_lists({"query_lens": "16,16", "seq_lens": "3000,2500"})
    plan = Planner(FA).plan(given.batch)
    value = plan["extend.chunk_context.token_to_batch"].value
    assert value.size > LONGEST_LIST
    document = json.loads(plan_json(plan))
    jsonschema.validate(document, plan_schema())
    assert document["fields"]["extend.chunk_context.token_to_batch"]["value"] == {
        "sha256": hashlib.sha256(np.ascontiguousarray(value, "<i4").tobytes()).hexdigest(),
        "shape": [1, 5468],
        "head": [0] * 16,
    }


LONG_CONTEXT = {
    "query_lens": [4] * 3,
    "seq_lens": [4 + 100, 4 + 90001, 4 + 50],
    "environment": {"dcp_world_size": 2},
    "limits": {"workspace_tokens": 32},
}


def test_long_lists_are_told_by_their_digest_too_even_ragged_ones():
    mla = attention_backend("aiter_mla")
    ragged = read_input(json.dumps(LONG_CONTEXT))
    plan = Planner(mla, ragged.environment, ragged.limits).plan(ragged.batch)
    document = json.loads(plan_json(plan))
    jsonschema.validate(document, plan_schema())
    name = "prefill.chunked_context.padded_local_seq_lens"
    flat = [length for chunk in plan[name].value for length in chunk]
    assert len(flat) > len(plan[name].value) > 2000
    assert len(flat) <= LONGEST_LIST
    assert document["fields"][name]["value"] == plan[name].value
    longer = read_input(json.dumps({**LONG_CONTEXT, "seq_lens": [4 + 100, 4 + 190001, 4 + 50]}))
    plan = Planner(mla, longer.environment, longer.limits).plan(longer.batch)
    document = json.loads(plan_json(plan))
    jsonschema.validate(document, plan_schema())
    flat = [length for chunk in plan[name].value for length in chunk]
    digest = hashlib.sha256(np.array(flat, "<i4").tobytes()).hexdigest()
    assert document["fields"][name]["value"] == {"sha256": digest, "shape": [len(flat)], "head": flat[:16]}
    pairs = "prefill.chunked_context.request_slice"
    assert document["fields"][pairs]["value"]["shape"] == [len(plan[pairs].value), 2]


def test_file_and_standard_input_give_the_plan_of_the_lists(tmp_path, monkeypatch):
    data = {"query_lens": [1, 16], "seq_lens": [70, 500], "environment": {"gfx": "gfx942"}, "limits": {"num_heads": 8}}
    file = tmp_path / "batch.json"
    file.write_text(json.dumps(data))
    lists = planned(
        lists={"query_lens": "1, 16", "seq_lens": "70,500"},
        settings=["environment.gfx=gfx942", "limits.num_heads=8"],
        json=True,
    )
    assert planned(file=file, json=True) == lists
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert planned(file="-", json=True) == lists


def test_a_version_given_as_a_setting_is_a_version():
    given = read_lists(
        {"query_lens": "1", "seq_lens": "9"},
        ["environment.vllm=0.26", "environment.aiter=0.1.17", "limits.num_heads=8"],
    )
    assert (given.environment.release, given.environment.aiter_version) == ((0, 26), (0, 1, 17))
    assert given.limits.num_heads == 8


def test_every_key_of_the_input_reaches_the_batch():
    given = read_input(
        json.dumps(
            {
                "query_lens": [3, 5, 0],
                "seq_lens": [9, 5, 0],
                "prefill_lens": [6, None, 0],
                "cached_lens": [0, 0, None],
                "is_prefilling": [False, True, False],
                "seq_lens_lower": [7, 5, 0],
                "decode_threshold": 3,
                "short_extends_as_decodes": False,
                "num_tokens": 12,
                "environment": None,
                "limits": {"sliding_window": 64, "graph_sizes": [1, 2]},
            }
        )
    )
    batch = given.batch
    assert batch.prefill_lens.tolist() == [6, -1, 0]
    assert batch.cached_lens.tolist() == [0, 0, -1]
    assert batch.is_prefilling.tolist() == [False, True, False]
    assert batch.seq_lens_lower.tolist() == [7, 5, 0]
    assert (batch.decode_threshold, batch.short_extends_as_decodes, batch.num_tokens) == (3, False, 12)
    assert given.limits.sliding_window == 64
    assert given.environment.kv_dtype == "fp8"


ONE = '{"query_lens": [1], "seq_lens": [1]'
BAD = [
    ("", "input: expected one JSON object"),
    ('{"query_lens": [1', "input: expected one JSON object"),
    ("[1]", "input: expected a JSON object, got a list"),
    ("null", "input: expected a JSON object, got null"),
    ('{"query_lens": [1]}', "seq_lens: expected a list of integers, one a request; it is missing"),
    ('{"query_lens": [1], "seq_lens": [NaN]}', "seq_lens[0]: expected an integer, got nan"),
    ('{"query_lens": [1, -Infinity], "seq_lens": [1, 2]}', "query_lens[1]: expected an integer, got -inf"),
    ('{"query_lens": [1], "seq_lens": [1' + "0" * 5000 + "]}", "input: expected one JSON object"),
    (ONE + ', "num_tokens": NaN}', "num_tokens: expected an integer, got nan"),
    (ONE + ', "is_prefilling": [null]}', "is_prefilling[0]: expected true or false, got None"),
    (ONE + ', "environment": {"num_cu": NaN}}', "environment.num_cu: expected int, got float"),
    (ONE + ', "environment": {"num_cu": 2147483648}}', "environment.num_cu: expected <= 2147483647, got 2147483648"),
    (
        ONE + ', "environment": {"dcp_world_size": 4, "dcp_interleave": 1073741824}}',
        "environment.dcp_interleave: expected <= 536870911, got 1073741824",
    ),
    (ONE + ', "limits": {"max_num_seqs": 4294967296}}', "limits.max_num_seqs: expected <= 2147483647, got 4294967296"),
    ('{"query_lens": [1], "seq_lens": [1.5]}', "seq_lens[0]: expected an integer, got 1.5"),
    ('{"query_lens": [1, null], "seq_lens": [1, 2]}', "query_lens[1]: expected an integer, got None"),
    ('{"query_lens": [1], "seq_lens": "1"}', "seq_lens: expected a list, got a string"),
    ('{"query_lens": [1], "seq_lens": [99999999999999999999]}', "seq_lens[0]: expected <= 2147483647, got"),
    (ONE + ', "prefill": [1]}', "input: unknown key 'prefill'; did you mean prefill_lens?"),
    (ONE + ', "decode_threshold": "2"}', "decode_threshold: expected an integer, got '2'"),
    (ONE + ', "num_tokens": -1}', "num_tokens: expected 0 to 2147483647, got -1"),
    (ONE + ', "environment": 3}', "environment: expected an object, got a number"),
    (ONE + ', "environment": {"gfx": 950}}', "environment.gfx: expected str, got int"),
    (ONE + ', "environment": {"gfx": "mi300"}}', "environment.gfx: expected a name such as gfx942"),
    (ONE + ', "environment": {"vllm": "0.19"}}', "environment.vllm: expected 0.26 or 0.32"),
    (ONE + ', "environment": {"aiter": "new"}}', "environment.aiter: expected a version such as 0.32, got 'new'"),
    (ONE + ', "environment": {"kv_dtype": "int4"}}', "environment.kv_dtype: expected bf16 or fp16 or fp8, got 'int4'"),
    (ONE + ', "environment": {"dcp_rank": 1}}', "environment.dcp_rank: expected 0 to 0, got 1"),
    (ONE + ', "limits": {"num_headz": 1}}', "limits: unknown key 'num_headz'; did you mean num_heads?"),
    (ONE + ', "limits": {"num_heads": 0}}', "limits.num_heads: expected >= 1, got 0"),
    (ONE + ', "limits": {"num_heads": null}}', "limits.num_heads: expected int, got null"),
    (ONE + ', "limits": {"sliding_window": true}}', "limits.sliding_window: expected int | null, got bool"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_with_its_place_on_one_line(text, message, tmp_path):
    file = tmp_path / "batch.json"
    file.write_text(text)
    out = io.StringIO()
    with pytest.raises(BadInput) as caught:
        run_plan(FA, file=file, out=out)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert out.getvalue() == ""


def test_options_that_cannot_be_right_are_refused(tmp_path):
    for arguments, message in (
        ({}, "plan: expected --query-lens and --seq-lens, or --input FILE"),
        ({"lists": {"query_lens": "1"}}, "plan: expected --query-lens and --seq-lens"),
        ({"lists": {"query_lens": "1,x", "seq_lens": "1,2"}}, r"query_lens\[1\]: expected an integer, got 'x'"),
        ({"lists": {"query_lens": "1,", "seq_lens": "1,2"}}, r"query_lens\[1\]: expected an integer, got ''"),
        ({"file": tmp_path / "no.json"}, r"no\.json: cannot be read: No such file"),
        ({"file": tmp_path}, "cannot be read: Is a directory"),
        ({"file": "x", "lists": {"seq_lens": "1"}}, "plan: expected a file or lists, got a file and seq_lens"),
        ({"lists": {"query_lens": "1", "seq_lens": "1"}, "settings": ["gfx=a"]}, "'gfx=a': expected environment.NAME="),
    ):
        with pytest.raises(BadInput, match=message):
            run_plan(FA, **arguments)


def test_backends_are_found_by_name():
    for name in BUILT_IN:
        assert attention_backend(name).name == name
    with pytest.raises(
        BadInput, match=r"^backend: expected one of aiter_fa, aiter_mla, triton, triton_mla; got 'flash'$"
    ):
        attention_backend("flash")
