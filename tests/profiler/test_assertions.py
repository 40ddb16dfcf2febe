"""assert_sync_free outside of pytest's hooks."""
# ruff: noqa: PT012 - the block that must fail is what is tested here

import threading

import pytest
from syncfree.planner.errors import BadInput, NothingMeasured
from syncfree.profiler import Profiler, assert_sync_free, pytest_plugin
from syncfree.profiler.assertions import SyncBudgetExceeded


@pytest.fixture
def block(fake_gpu):
    return lambda **about: assert_sync_free(collectors="fake", **about)


def test_a_block_without_a_sync_passes_and_gives_the_profiler(block, fake_gpu):
    with block() as profiler:
        fake_gpu.launch()
    assert isinstance(profiler, Profiler)
    assert profiler.report.steps[0].launches.kernels == 1


def test_a_sync_fails_with_the_line_how_often_and_the_mend(block, fake_gpu):
    with pytest.raises(AssertionError) as error, block():
        for _ in range(3):
            fake_gpu.item()
    text = str(error.value)
    code = test_a_sync_fails_with_the_line_how_often_and_the_mend.__code__
    assert "block: syncs = 3 > 0 (max over 1 step, whole step)" in text
    assert f"test_assertions.py:{code.co_firstlineno + 3} in {code.co_name} (3x, 3 in one step)" in text
    assert "      fake_gpu.item()" in text
    assert "mend: " in text
    assert isinstance(error.value, SyncBudgetExceeded)


def test_other_figures_can_be_limited(block, fake_gpu):
    with block(syncs=1, launches=2):
        fake_gpu.item()
        fake_gpu.launch()
        fake_gpu.launch()
    with pytest.raises(AssertionError, match="launches = 2 > 1"), block(launches=1):
        fake_gpu.launch()
        fake_gpu.launch()
    with block(syncs=None, launches=0):
        fake_gpu.item()


def test_the_blocks_own_error_is_not_hidden(block, fake_gpu):
    with pytest.raises(ZeroDivisionError), block():
        fake_gpu.item()
        raise ZeroDivisionError


def test_a_block_may_open_steps_and_phases_of_its_own(block, fake_gpu):
    with pytest.raises(AssertionError, match=r"decode: syncs = 1 > 0 \(max over 2 steps"), block() as profiler:
        for i in range(2):
            with profiler.step("decode"), profiler.phase("sample"):
                if i:
                    fake_gpu.item()


def test_only_named_phases_count_where_phases_are_given(block, fake_gpu):
    with block(phases="build") as profiler:
        with profiler.phase("build"):
            fake_gpu.launch()
        fake_gpu.item()


def test_a_named_site_may_be_allowed(block, fake_gpu):
    with block(allow=["test_assertions.py:test_a_named_site_may_be_allowed"]):
        fake_gpu.item()
    with pytest.raises(BadInput, match=r"assert_sync_free: allow\[0\]: expected file.py:function"):
        assert_sync_free(allow=["forward"])


def test_other_threads_do_not_count_unless_asked_for(block, fake_gpu):
    def elsewhere():
        thread = threading.Thread(target=fake_gpu.item)
        thread.start()
        thread.join()

    with block():
        elsewhere()
    with pytest.raises(AssertionError, match="syncs = 1 > 0"), block(exempt=()):
        elsewhere()


def test_a_capture_inside_the_block_is_what_the_block_is_about(block, fake_gpu):
    with pytest.raises(AssertionError, match="syncs = 1 > 0"), block():
        fake_gpu.launch(captured=True)
        fake_gpu.item()


def test_it_decorates_functions_that_may_call_themselves(block, fake_gpu):
    @block()
    def run(depth, sync):
        if sync and not depth:
            fake_gpu.item()
        if depth:
            run(depth - 1, sync)

    run(2, sync=False)
    with pytest.raises(AssertionError):
        run(2, sync=True)


def test_without_a_device_nothing_is_measured_and_nothing_passes(monkeypatch):
    monkeypatch.setattr(pytest_plugin, "_run", None)
    with pytest.raises(NothingMeasured) as error, assert_sync_free(collectors=[]):
        pass
    assert "block: syncs: not measured" in str(error.value)
    assert "simulated_device()" in str(error.value)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"sync": 0}, "assert_sync_free: sync: unknown figure"),
        ({"launches": -1}, "assert_sync_free: launches: expected a number >= 0, got -1"),
        ({"launches": float("nan")}, "assert_sync_free: launches: expected a number >= 0, got nan"),
        ({"launches": True}, "assert_sync_free: launches: expected a number >= 0, got True"),
        ({"syncs": None}, "assert_sync_free: expected a limit"),
        ({"exempt": ["gc"]}, "assert_sync_free: exempt: expected some of warmup"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(about, expected):
    with pytest.raises(BadInput, match=expected):
        assert_sync_free(**about)
