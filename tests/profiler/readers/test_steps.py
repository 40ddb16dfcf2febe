"""Step annotations: which ranges are steps, and what their names tell."""

import pytest
from syncfree.profiler.readers.process_trace import Range
from syncfree.profiler.readers.steps import RangeFilter, find_steps, overlap_lanes, told_by

AUTO = RangeFilter()
NONE = "sq0sk0sqsq0sqsk0)"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ProfilerStep#12", True),
        ("ProfilerStep*", True),
        ("ProfilerStep#x", False),
        ("execute_context_1(5)_generation_0(0)", True),
        ("execute_new_3_cached_2", True),
        ("step[DECODE bs=32]", True),
        ("step", False),
        ("capture_32_DECODE", True),
        ("model_inference", True),
        ("model_inference_2", False),
        ("[param|model|0|0|0|measure|forward]", True),
        ("[param|model|0|0|0|warmup|forward]", True),
        ("[param|model|0|0|0]", False),
        ("aten::execute_", False),
        ("Optimizer.step#SGD.step", False),
        ("gpu_model_runner: forward", False),
    ],
)
def test_names_of_the_field(name, wanted):
    assert AUTO.matches(name) is wanted


@pytest.mark.parametrize(
    ("name", "batch_class", "coarse", "mixed", "requests", "tokens"),
    [
        # vLLM, short: the counts alone tell a pure decode, no length tells the context
        ("execute_context_0(0)_generation_8(8)", "decode", False, False, 8, 8),
        ("execute_context_0(0)_generation_8(24)", "decode", True, False, 8, 24),
        ("execute_context_0(0)_generation_2(900)", "unknown", False, False, 2, 900),
        ("execute_context_3(77)_generation_0(0)", "unknown", False, False, 3, 77),
        ("execute_context_3(77)_generation_4(4)", "unknown", False, True, 7, 81),
        ("execute_context_0(0)_generation_0(0)", "empty", False, False, 0, 0),
        # vLLM, 2025: tokens and the sum of their squares
        ("execute_context_1(888_788544)_generation_0(0)", "unknown", False, False, 1, 888),
        ("execute_context_0(0)_generation_16(16_16)", "decode", False, False, 16, 16),
        # vLLM and SGLang, detailed
        ("execute_48_context_1(sq48sk48sqsq2304sqsk2304)_generation_0(" + NONE, "causal_prefill", False, False, 1, 48),
        ("execute_9_context_1(sq8sk8sqsq64sqsk64)_generation_1(sq1sk9sqsq1sqsk9)", "causal_prefill", False, True, 2, 9),
        ("execute_48_context_1(sq48sk148sqsq2304sqsk7104)_generation_0(" + NONE, "chunked_prefill", True, False, 1, 48),
        ("execute_8_context_0(sq0sk0sqsq0sqsk0)_generation_8(sq8sk999sqsq8sqsk999)", "decode", False, False, 8, 8),
        # SGLang alone
        ("step[DECODE bs=32]", "decode", False, False, 32, 32),
        ("step[TARGET_VERIFY bs=4]", "decode", True, False, 4, None),
        ("step[EXTEND bs=2 toks=500]", "unknown", False, None, 2, 500),
        ("step[IDLE]", "empty", False, None, None, None),
        ("ProfilerStep#3", "unknown", False, None, None, None),
    ],
)  # fmt: skip
def test_what_a_name_tells(name, batch_class, coarse, mixed, requests, tokens):
    told = told_by(name)
    assert (told.batch_class, told.coarse, told.mixed) == (batch_class, coarse, mixed)
    assert (told.num_reqs, told.num_tokens) == (requests, tokens)


def test_warmup_and_capture_are_told_apart():
    assert told_by("capture_32_DECODE").warmup_cause == "capture"
    assert told_by("[param|m|0|0|0|warmup|forward]").warmup_cause == "warmup"
    assert told_by("[param|m|0|0|0|measure|forward]").warmup_cause == ""


def steps_of(*ranges, wanted=AUTO):
    return find_steps([Range(name, start, end, 1) for name, start, end in ranges], wanted)


def test_of_nested_steps_the_outer_counts_and_knows_what_the_inner_tells():
    steps = steps_of(
        ("step[DECODE bs=4]", 20, 80),
        ("execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk40sqsq4sqsk40)", 10, 90),
        ("ProfilerStep#0", 0, 100),
        ("ProfilerStep#1", 100, 200),
    )
    assert [(s.name, s.start_ns, s.end_ns, s.batch_class, s.num_reqs) for s in steps] == [
        ("ProfilerStep#0", 0, 100, "decode", 4),
        ("ProfilerStep#1", 100, 200, "unknown", None),
    ]


def test_a_step_around_steps_of_different_classes_is_of_no_class():
    steps = steps_of(
        ("ProfilerStep#0", 0, 100),
        ("execute_context_0(0)_generation_4(4)", 10, 20),
        ("execute_context_2(9)_generation_0(0)", 30, 40),
    )
    assert [(s.batch_class, s.num_reqs) for s in steps] == [("unknown", None)]


def test_a_step_that_captures_is_preparation():
    (step,) = steps_of(("ProfilerStep#0", 0, 100), ("capture_1_FULL", 10, 90))
    assert (step.warmup, step.warmup_cause) == (True, "capture")


def test_equal_and_touching_and_overlapping_ranges():
    steps = steps_of(
        ("ProfilerStep#0", 0, 10), ("execute_x", 0, 10), ("ProfilerStep#1", 10, 20), ("ProfilerStep#2", 15, 30)
    )
    assert [(s.start_ns, s.end_ns) for s in steps] == [(0, 10), (10, 20), (15, 30)]
    assert [[s.index for s in lane] for lane in overlap_lanes(steps)] == [[0, 1], [2]]


def test_named_ranges_and_none():
    ranges = [("ProfilerStep#0", 0, 10), ("decode 1", 20, 30), ("decode 2", 40, 50), ("other", 60, 70)]
    assert [s.name for s in steps_of(*ranges, wanted=RangeFilter("decode *"))] == ["decode 1", "decode 2"]
    assert [s.name for s in steps_of(*ranges, wanted=RangeFilter(["other", "decode 2"]))] == ["decode 2", "other"]
    assert steps_of(*ranges, wanted=RangeFilter("none")) == []


def test_phases_are_the_engines_own_scopes_on_the_threads_step():
    ranges = [
        Range("execute_context_0(0)_generation_1(1)", 0, 100, 1),
        Range("gpu_model_runner: preprocess", 5, 20, 1),
        Range("gpu_model_runner: forward", 20, 60, 1),
        Range("gpu_model_runner: forward", 25, 30, 1),  # inside the first: left out
        Range("gpu_model_runner: sample", 65, 70, 2),  # another thread
        Range("gpu_model_runner: bookkeep", 95, 110, 1),  # goes beyond the step
    ]
    (step,) = find_steps(ranges, AUTO)
    assert [(p.name, p.start_ns, p.end_ns) for p in step.phases] == [("build", 5, 20), ("forward", 20, 60)]
