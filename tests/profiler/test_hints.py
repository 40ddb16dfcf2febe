"""The usual mend, from the kind of sync and its source line."""

import pytest
from syncfree.profiler.hints import hint_for, in_loop
from syncfree.profiler.report import Site, SiteStep


def hint(kind, source, file="/nowhere.py", line=1, most=1, **about):
    steps = [SiteStep(0, 0, most)]
    return hint_for(
        Site(
            file=file,
            line=line,
            function="f",
            kind=kind,
            source=source,
            count=most,
            steps=steps,
            repeated=most > 1,
            **about,
        )
    )


@pytest.mark.parametrize(
    ("kind", "source", "mend"),
    [
        ("d2h", "req = torch.repeat_interleave(rows, q)", "output_size="),
        ("d2h", "rows = mask.nonzero()", "nonzero_static"),
        ("d2h", "return torch.where(mask)", "three arguments"),
        ("d2h", "y = torch.masked_select(x, m)", "keep a mask"),
        ("d2h", "u = torch.unique(x)", "size of the result depends on the data"),
        ("d2h", "y = F.one_hot(x)", "num_classes="),
        ("d2h", "print(x)", "log outside the step"),
        ("d2h", "logger.info('x %s', x)", "log outside the step"),
        ("d2h", "if torch.any(done):", "torch.where"),
        ("d2h", "while flag:", "stay on the device"),
        ("d2h", "return torch.equal(a, b)", "condition on device data"),
        ("d2h", "out.copy_(x, non_blocking=True)", "pageable"),
        ("d2h", "y = x[x > 0.5]", "indexing by a mask"),
        ("d2h", "return torch.linalg.inv(x)", "check_errors=False"),
        ("d2h", "n = lens.max().item()", "host copy of what the scheduler knows"),
        ("d2h", "a = x.cpu()", "pinned memory"),
        ("h2d", "t = torch.tensor(3.0, device=d)", "device scalar made from a Python number"),
        ("h2d", "t = torch.tensor(len(q) + 1, dtype=torch.int32, device=self.device)", "device scalar"),
        ("h2d", "t = torch.tensor([1, 2], device=d)", "pin_memory=True"),
        ("h2d", "t = torch.tensor(lens, device=d)", "a single number needs no copy"),
        ("h2d", "x[0] = 5.0", "fill_"),
        ("h2d", "y = x[[1, 2, 3]]", "index tensor on the device"),
        ("h2d", "x.copy_(host, non_blocking=True)", "pin the source"),
        ("h2d", "y = host.to(device)", "non_blocking=True"),
        ("device", "torch.cuda.synchronize()", "wait_stream"),
        ("device", "torch.cuda.empty_cache()", "off the step path"),
        ("stream", "stream.synchronize()", "wait_stream"),
        ("event", "event.synchronize()", "query the event"),
        ("memset", "x.zero_()", "zero_()"),
        ("maybe", "x = torch.empty(1 << 30, device=d)", "allocate before the loop"),
    ],
)
def test_each_kind_of_line_has_its_mend(kind, source, mend):
    assert mend in hint(kind, source)


def test_three_armed_where_is_no_data_dependent_size():
    assert "three arguments" not in hint("d2h", "y = torch.where(m, a, b).cpu()")


def test_a_line_that_repeats_within_a_step_says_how_often():
    text = hint("d2h", "n = lens.max()", most=61)
    assert "61x in one step" in text
    assert "read once a step" in text


def test_a_repeated_read_of_one_value_is_named_as_that():
    text = hint("d2h", "n = lens.max().item()", most=61, same_value=True)
    assert "the same value is read again and again (61x in one step)" in text


LOOPS = """\
def f(lens):
    first = lens[0].item()
    for i in range(4):
        x = lens[i].item()
    y = [lens[i].item() for i in range(4)]
    while lens.item():
        pass

    for i in range(4):
        def g():
            return lens.item()
"""


@pytest.mark.parametrize(("line", "looped"), [(2, False), (4, True), (5, True), (6, True), (11, False)])
def test_a_loop_of_the_same_function_is_seen(tmp_path, line, looped):
    file = tmp_path / "loops.py"
    file.write_text(LOOPS)
    assert in_loop(str(file), line) is looped


def test_item_in_a_loop_is_to_be_read_once_before_it(tmp_path):
    file = tmp_path / "loops.py"
    file.write_text(LOOPS)
    assert "one element a round" in hint("d2h", "x = lens[i].item()", str(file), 4, most=4)
    assert "one element a round" not in hint("d2h", "first = lens[0].item()", str(file), 2, most=4)


def test_a_file_that_cannot_be_read_or_parsed_has_no_loops(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("for (")
    assert not in_loop(str(broken), 1)
    assert not in_loop(str(tmp_path / "none.py"), 1)


def test_a_region_the_engine_allows_says_only_that():
    assert hint("d2h", "x.item()", allowed_upstream=True) == "inside a region the engine's own checker allows"
