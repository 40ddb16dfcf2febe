"""The pytest plugin, in pytest runs of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from syncfree.profiler import report_schema
from syncfree.profiler.pytest_plugin import report_name

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, fake_gpu):
    """Runs test source in this process, on the fake GPU; returns the result."""

    def go(source, *args, collectors="fake"):
        pytester.makepyfile(source)
        given = [f"--syncfree-collectors={collectors}"] if collectors else []
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *given, *args)

    return go


def test_a_mark_judges_the_whole_body(run):
    result = run(
        """
        import fake_gpu, pytest

        @pytest.mark.sync_budget(syncs=0, launches=1)
        def test_good():
            fake_gpu.launch()

        @pytest.mark.sync_budget(syncs=0)
        def test_bad():
            for _ in range(4):
                fake_gpu.item()

        def test_unmarked():
            fake_gpu.item()
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*sync budget exceeded*",
            "*test: syncs = 4 > 0 (max over 1 step, whole step)*",
            "*d2h test_a_mark_judges_the_whole_body.py:10 in test_bad (4x, 4 in one step)*",
            "*fake_gpu.item()*",
            "*mend: *",
        ]
    )


def test_a_nearer_mark_comes_before_one_of_the_class_figure_by_figure(run):
    result = run(
        """
        import fake_gpu, pytest

        @pytest.mark.sync_budget(syncs=0, launches=1)
        class TestIt:
            @pytest.mark.sync_budget(syncs=1)
            def test_own_limit(self):
                fake_gpu.item()
                fake_gpu.launch()

            @pytest.mark.sync_budget(syncs=1)
            def test_the_other_limit_of_the_class_still_counts(self):
                fake_gpu.launch()
                fake_gpu.launch()

            @pytest.mark.sync_budget(syncs=1, batch_class="decode")
            def test_another_class_is_another_limit(self, sync_profiler):
                with sync_profiler.step(batch_class="decode"):
                    fake_gpu.item()

            @pytest.mark.sync_budget(syncs=None, launches=0)
            def test_no_limit_is_one_too(self):
                fake_gpu.item()

            def test_without_one(self):
                fake_gpu.item()

        @pytest.mark.sync_budget(syncs=1)
        @pytest.mark.sync_budget(syncs=0)
        def test_two_of_one_place_both_count():
            fake_gpu.item()
        """,
        "-rA",
    )
    result.assert_outcomes(passed=2, failed=4)
    lines = ["PASSED *test_own_limit", "PASSED *test_no_limit_is_one_too"]
    result.stdout.fnmatch_lines_random([*lines, "*launches = 2 > 1*"])


def test_a_failure_shows_nothing_of_the_plugin_itself(run):
    result = run(
        """
        import fake_gpu, pytest
        from syncfree.profiler import assert_sync_free

        @pytest.mark.sync_budget(syncs=0)
        def test_mark():
            fake_gpu.item()

        def test_block():
            with assert_sync_free():
                fake_gpu.item()
        """
    )
    result.assert_outcomes(failed=2)
    result.stdout.no_fnmatch_line("*def enforce*")
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")
    result.stdout.no_fnmatch_line("*def __exit__*")


def test_steps_are_judged_by_class_and_phase(run):
    result = run(
        """
        import fake_gpu, pytest

        def steps(profiler, batch_class, phase):
            for _ in range(2):
                with profiler.step(batch_class), profiler.phase(phase):
                    fake_gpu.item()

        @pytest.mark.sync_budget(syncs=0, batch_class="decode")
        def test_other_class(sync_profiler):
            steps(sync_profiler, "extend", "build")
            with sync_profiler.step("decode"), sync_profiler.phase("build"):
                fake_gpu.launch()

        @pytest.mark.sync_budget(syncs=0, phase="build")
        def test_other_phase(sync_profiler):
            with sync_profiler.step("decode"):
                with sync_profiler.phase("build"):
                    fake_gpu.launch()
                with sync_profiler.phase("output"):
                    fake_gpu.item()

        @pytest.mark.sync_budget(syncs=0, batch_class="decode")
        @pytest.mark.sync_budget(syncs=1, batch_class="extend")
        def test_both(sync_profiler):
            steps(sync_profiler, "decode", "build")
            steps(sync_profiler, "extend", "build")

        @pytest.mark.sync_budget(syncs=0, batch_class="decode")
        def test_class_never_stepped(sync_profiler):
            steps(sync_profiler, "extend", "build")
        """
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*decode: syncs = 1 > 0 (max over 2 steps, build + forward)*",
            "*decode: syncs: not measured: no such step was recorded (recorded: extend)*",
        ]
    )


def test_what_the_body_does_outside_its_own_steps_is_not_judged(run):
    result = run(
        """
        import fake_gpu, pytest

        @pytest.mark.sync_budget(syncs=0)
        def test_steps(sync_profiler):
            fake_gpu.item()
            with sync_profiler.step("decode"):
                fake_gpu.launch()
            fake_gpu.item()
            report = sync_profiler.stop()
            assert [s.batch_class for s in report.steps] == ["decode"]
            assert report.totals.syncs.total == 2
        """
    )
    result.assert_outcomes(passed=1)


def test_the_profiler_may_be_driven_by_hand(run):
    result = run(
        """
        import fake_gpu, pytest

        @pytest.mark.sync_budget(syncs=0)
        def test_with(sync_profiler):
            fake_gpu.item()
            with sync_profiler:
                with sync_profiler.step("decode"):
                    fake_gpu.launch()
            fake_gpu.item()
            assert sync_profiler.report.steps[0].launches.kernels == 1

        def test_no_mark(sync_profiler):
            fake_gpu.item()
            assert sync_profiler.stop().steps[0].syncs.total == 1
        """
    )
    result.assert_outcomes(passed=2)


def test_a_failing_test_keeps_its_own_failure(run):
    result = run(
        """
        import fake_gpu, pytest

        @pytest.mark.sync_budget(syncs=0)
        def test_broken():
            fake_gpu.item()
            assert 1 == 2

        @pytest.mark.xfail(strict=True)
        @pytest.mark.sync_budget(syncs=0)
        def test_known():
            fake_gpu.item()

        @pytest.mark.sync_budget(syncs=0)
        def test_skipped():
            pytest.skip("not today")
        """
    )
    result.assert_outcomes(failed=1, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])


NOTHING = """
import pytest
from syncfree.profiler import assert_sync_free

@pytest.mark.sync_budget(syncs=0)
def test_mark():
    pass

def test_block():
    with assert_sync_free():
        pass

def test_unrelated():
    pass
"""


def test_nothing_measured_never_passes(run):
    result = run(NOTHING, collectors=None)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*nothing measured*", "*not measured*", "*to mend: *sync_device*--syncfree-missing=skip*"]
    )


def test_nothing_measured_is_skipped_where_that_is_asked_for(run, pytester):
    result = run(NOTHING, "--syncfree-missing=skip", "-rs", collectors=None)
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*SKIPPED*syncs: not measured*"])
    pytester.makeini("[pytest]\nsyncfree_missing = skip\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, skipped=2)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("sync=0", "sync: unknown figure"),
        ("0", "expected keyword arguments such as syncs=0, got 0"),
        ("syncs=-1", "syncs: expected a number >= 0, got -1"),
        ("stat='p90', syncs=0", "stat: expected one of max"),
        ("batch_class='decode'", "expected a limit such as syncs=0"),
        ("batch_class=5, syncs=0", "batch_class: expected a name such as 'decode', got 5"),
        ("phase=3, syncs=0", "phase: expected a name or a list of names, got 3"),
        ("exempt=5, syncs=0", "exempt: expected a name or a list of names, got 5"),
        ("exempt='warm', syncs=0", "exempt: expected some of warmup, *, got 'warm'"),
    ],
)
def test_a_wrong_mark_is_an_error_of_one_line(run, mark, expected):
    result = run(
        f"""
        import pytest

        @pytest.mark.sync_budget({mark})
        def test_it():
            raise SystemExit("must not run")
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*syncfree: @pytest.mark.sync_budget(*): {expected}*"])


def test_a_collector_that_cannot_work_is_an_error_before_the_test_runs(run):
    source = "import pytest\n@pytest.mark.sync_budget(syncs=0)\ndef test_it(): raise SystemExit('must not run')\n"
    result = run(source, collectors="nonsense")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*syncfree: collectors: expected one of auto, *; got 'nonsense'*"])


BUDGETED = """
import fake_gpu, pytest

def known():
    fake_gpu.item()

def test_steps(sync_profiler):
    with sync_profiler.step("decode"):
        known()
        fake_gpu.item()

@pytest.mark.sync_budget(syncs=0)
def test_allowed():
    known()

def test_no_steps(sync_profiler):
    fake_gpu.item()
"""


def test_a_budget_file_judges_the_steps_a_test_makes_and_lends_its_allow_list(run, pytester):
    budget = "[budget.decode]\nsyncs=0\n[budget.extend]\nsyncs=0\n[[allow]]\nsite='{}:known'\nreason='known'\n"
    name = "test_a_budget_file_judges_the_steps_a_test_makes_and_lends_its_allow_list.py"
    pytester.path.joinpath("b.toml").write_text(budget.format(name))
    result = run(BUDGETED, "--syncfree-budget=b.toml")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*decode: syncs = 1 > 0 (max over 1 step, whole step)*", "*in test_steps (1x)*"])
    pytester.makeini("[pytest]\nsyncfree_budget = b.toml\n")
    pytester.runpytest_inprocess("--syncfree-collectors=fake").assert_outcomes(passed=2, failed=1)


def test_a_budget_file_that_is_wrong_is_named(run, pytester):
    pytester.path.joinpath("b.toml").write_text("[budget.decode]\nsync=0\n")
    result = run(BUDGETED, "--syncfree-budget=b.toml")
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["*b.toml: budget.decode.sync: unknown key (did you mean syncs?)*"])


ON_DEVICE = """
import pytest, torch
from syncfree.profiler import assert_sync_free, simulated_device

@pytest.mark.sync_budget(syncs=0)
def test_fixture(sync_device, sync_profiler):
    x = torch.ones(4, device=sync_device)
    with sync_profiler.step("decode"):
        x + 1

@pytest.mark.sync_budget(syncs=0)
def test_fixture_waits(sync_device):
    torch.ones(4, device=sync_device).sum().item()

@pytest.mark.sync_budget(syncs=0)
def test_device_opened_inside(sync_profiler):
    with simulated_device() as device:
        with sync_profiler.step("decode"):
            torch.ones(4, device=device).sum().item()

def test_hazard(sync_device):
    x = torch.ones(4, device=sync_device)
    host = torch.empty(4, pin_memory=True)
    with assert_sync_free():
        host.copy_(x, non_blocking=True)
        float(host[0])
"""


@pytest.fixture
def run_apart(pytester):
    """Runs `ON_DEVICE` in a process of its own: a process can be given a simulated device by one copy of the code."""
    # Not imported here: pytester takes modules out again that a test has loaded, and torch cannot be loaded twice.
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        pytest.skip("a GPU may be here: this is about machines without one")

    def go(*args):
        pytester.makepyfile(ON_DEVICE)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)

    return go


def test_without_a_gpu_the_device_is_a_simulated_one(run_apart):
    result = run_apart()
    result.assert_outcomes(passed=2, failed=2, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*test: syncs = 1 > 0 (max over 1 step, whole step)*",
            "*in test_fixture_waits (1x)*",
            "*torch.ones(4, device=sync_device).sum().item()*",
            "*decode: syncs = 1 > 0 (max over 1 step, whole step)*",
            "*in test_device_opened_inside (1x)*",
        ]
    )
    result.stdout.fnmatch_lines(["*SyncHazard: *:25: *pinned memory*"])


def test_a_hazard_fails_where_warnings_do(run_apart):
    result = run_apart("-W", "error::syncfree.profiler.assertions.SyncHazard", "-k", "test_hazard")
    result.assert_outcomes(failed=1, deselected=3)


def test_a_gpu_that_was_asked_for_and_is_not_there_is_no_pass(run_apart):
    result = run_apart("--syncfree-device=cuda", "-k", "test_fixture")
    result.assert_outcomes(errors=2, deselected=2)
    result.stdout.fnmatch_lines(["*sync_device: --syncfree-device=cuda, but torch sees no GPU here*"])
    skipped = run_apart("--syncfree-device=cuda", "--syncfree-missing=skip", "-k", "test_fixture")
    skipped.assert_outcomes(skipped=2, deselected=2)


REPORTED = """
import fake_gpu, pytest
from syncfree.profiler import assert_sync_free

@pytest.mark.sync_budget(syncs=1)
@pytest.mark.parametrize("size", [1, 2])
def test_one(size):
    fake_gpu.item()

def test_blocks():
    for _ in range(3):
        with assert_sync_free(syncs=1, collectors="fake"):
            fake_gpu.item()

def test_bad():
    with assert_sync_free(collectors="fake"):
        fake_gpu.item()

def test_nothing():
    pass
"""


def load_reports(folder):
    schema = report_schema()
    found = {}
    for file in folder.iterdir():
        document = json.loads(file.read_text())
        jsonschema.validate(document, schema)
        test = next(note["text"] for note in document["notes"] if note["kind"] == "test")
        found[test.split("::")[1]] = document
    return found


def test_each_measuring_test_leaves_one_report(run, pytester):
    result = run(REPORTED, "--syncfree-report=out/reports")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["4 reports in out/reports"])
    reports = load_reports(pytester.path / "out" / "reports")
    assert sorted(reports) == ["test_bad", "test_blocks", "test_one[1]", "test_one[2]"]
    assert [s["index"] for s in reports["test_blocks"]["steps"]] == [0, 1, 2]
    (site,) = reports["test_blocks"]["sites"]
    assert (site["count"], site["steps"]) == (3, [[0, 0, 1, 0], [0, 1, 1, 0], [0, 2, 1, 0]])
    assert reports["test_blocks"]["totals"]["syncs"]["total"] == 3


def test_reports_are_written_by_every_worker_of_xdist(pytester):
    pytester.makepyfile(
        """
        import pytest
        from syncfree.profiler import assert_sync_free

        @pytest.mark.parametrize("n", range(6))
        def test_it(n, sync_profiler):
            with sync_profiler.step("decode"):
                pass
        """
    )
    result = pytester.runpytest_subprocess("-n2", "--syncfree-report=out", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["6 reports in out"])
    assert len(list((pytester.path / "out").iterdir())) == 6


def test_the_plugin_loads_nothing_heavy(pytester):
    code = (
        "import sys; import syncfree.profiler.pytest_plugin; "
        "print([m for m in ('torch', 'numpy', 'msgspec', 'rich', 'syncfree.planner') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    pytester.makepyfile(
        """
        def test_plain(request):
            import sys
            assert request.config.pluginmanager.has_plugin("syncfree.profiler.pytest_plugin") or "syncfree" in {
                name for name, _ in request.config.pluginmanager.list_name_plugin()
            }
            heavy = {"torch", "msgspec", "syncfree.planner", "syncfree.profiler.session"} & set(sys.modules)
            assert not heavy
        """
    )
    pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_an_abandoned_setup_leaves_no_collector_running(run):
    result = run(BUDGETED, "--setup-only")
    assert result.ret == 0


def test_report_names_are_readable_and_unique():
    assert report_name("tests/a.py::test_x") != report_name("tests/a.py::test-x")
    assert report_name("test_a.py::test_x") == "test_a.py--test_x.json"
    names = {report_name(f"test_a.py::test_x[{i}-{'y' * 300}]") for i in range(20)}
    assert len(names) == 20
    assert max(map(len, names)) <= 120
    assert all("/" not in name and "[" not in name for name in names)
