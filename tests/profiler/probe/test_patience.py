"""frida's clock in the helper: as it was for a while, then slow, then all but standing."""

import ctypes
import struct
import time

import pytest
from syncfree.profiler.probe import patience

frida = pytest.importorskip("frida")


@pytest.fixture
def clock():
    from pathlib import Path

    return patience.SlowClock(str(Path(frida._frida.__file__).resolve()))


def reads(clock, which=time.CLOCK_MONOTONIC):
    """(what it says, the real time before, after), ns."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(clock.address)
    buffer = ctypes.create_string_buffer(16)
    before = time.clock_gettime_ns(which)
    assert function(which, ctypes.addressof(buffer)) == 0
    seconds, ns = struct.unpack("<qq", buffer.raw)
    assert 0 <= ns < 1_000_000_000
    return seconds * 1_000_000_000 + ns, before, time.clock_gettime_ns(which)


def test_outside_of_an_attachment_it_is_the_real_clock(clock):
    for which in (time.CLOCK_MONOTONIC, time.CLOCK_REALTIME):
        said, before, after = reads(clock, which)
        assert before <= said <= after


def test_within_the_usual_time_it_is_the_real_clock(clock):
    with clock.patient(usual=3600):
        said, before, after = reads(clock)
        assert before <= said <= after


def test_later_it_is_slow_by_the_factor_and_other_clocks_are_not(clock):
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with clock.patient(usual=-1000):  # as if it had begun a thousand seconds ago
        entered = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        said, _, after = reads(clock)
        start, end = began - 1000 * 10**9, entered - 1000 * 10**9
        assert start + (began - start) // patience.SLOW <= said <= end + (after - start) // patience.SLOW + 1
        said, before, after = reads(clock, time.CLOCK_REALTIME)
        assert before <= said <= after
    said, before, after = reads(clock)
    assert before <= said <= after


def test_in_the_end_it_all_but_stands_and_never_goes_back(clock):
    with clock.patient(usual=0, stalled=0.05):
        last = reads(clock)[0]
        pace = ctypes.c_int64.from_address(clock.address + patience._PACE)
        while pace.value != clock.address + patience._STALLED:
            said = reads(clock)[0]
            assert said >= last
            last = said
        first, _, began = reads(clock)
        assert first >= last
        time.sleep(0.05)
        second, ended, _ = reads(clock)
        assert 0 <= second - first <= (ended - began) // 1000 + 1000


def test_a_library_that_is_not_there_or_does_not_ask_for_the_time_is_left_alone():
    with pytest.raises(LookupError, match="not loaded"):
        patience.SlowClock("/no/such/library.so")
    with pytest.raises(LookupError, match="does not import"):
        patience.import_slot(patience_library(), b"no_such_function")


def patience_library():
    from pathlib import Path

    return str(Path(frida._frida.__file__).resolve())
