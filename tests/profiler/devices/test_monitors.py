"""Choosing a management library; AMD SMI's and NVML's answers in our terms; sampling."""

import ast
import importlib.util
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest
from syncfree.planner import Environment
from syncfree.planner.errors import BadInput, Unreachable
from syncfree.profiler import devices
from syncfree.profiler.devices import DeviceFacts, DeviceSample, Look, amd_smi, open_monitor, telemetry
from syncfree.profiler.devices.telemetry import MAX_SAMPLES, Sampler


class FakeMonitor:
    name, version = "fake", "1"

    def __init__(self, fails_at=None):
        self.calls, self.fails_at, self.closed = [], fails_at, False

    def facts(self):
        return [DeviceFacts(index=0, vendor="amd", name="card", arch="gfx950", compute_units=256)]

    def sample(self, pcie=True):
        self.calls.append(pcie)
        if len(self.calls) == self.fails_at:
            raise OSError("driver went away")
        return [DeviceSample(index=0, utilisation_percent=len(self.calls), power_watts=None)]

    def close(self):
        self.closed = True


def unreachable(text):
    def make():
        raise Unreachable(text)

    return make


def test_the_first_library_that_finds_a_device_is_taken_and_the_others_say_why_not(monkeypatch):
    monkeypatch.setattr(devices, "SOURCES", {"a": unreachable("a: missing"), "b": FakeMonitor, "c": FakeMonitor})
    monitor, reasons = open_monitor()
    assert isinstance(monitor, FakeMonitor)
    assert reasons == ["a: missing"]
    assert devices.look().devices[0].arch == "gfx950"


def test_without_any_device_there_are_no_facts_but_reasons(monkeypatch):
    monkeypatch.setattr(devices, "SOURCES", {"a": unreachable("a: missing")})
    assert open_monitor() == (None, ["a: missing"])
    assert devices.look() == Look(reasons=["a: missing"])


def test_telemetry_without_a_device_says_why(monkeypatch):
    monkeypatch.setattr(telemetry, "look_aside", lambda: Look(reasons=["a: missing"]))
    with Sampler() as sampler:
        sampler.join()
    result = sampler.result()
    assert (result["source"], result["reason"], result["devices"]) == (None, "a: missing", [])


def test_the_planners_environment_is_that_of_the_first_amd_card(monkeypatch):
    cards = [
        DeviceFacts(index=0, vendor="nvidia", arch="sm_90", compute_units=132),
        DeviceFacts(index=0, vendor="amd", arch="gfx942", compute_units=304),
    ]
    monkeypatch.setattr(devices, "look_aside", lambda: Look(devices=cards))
    assert (devices.environment().gfx, devices.environment().num_cu) == ("gfx942", 304)
    assert devices.environment(num_cu=38, dtype="fp16").num_cu == 38
    monkeypatch.setattr(devices, "look_aside", lambda: Look(devices=cards[:1]))
    assert devices.environment() == Environment()


def test_a_library_that_ends_its_process_ends_nothing_else(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'Assertion failed' >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    found = devices.look_aside()
    assert found.devices == []
    assert found.reasons == ["devices: a management library ended the look with signal 6: Assertion failed"]


def test_a_look_aside_sees_what_a_look_sees():
    assert devices.look_aside() == devices.look()


def test_an_unknown_library_is_refused():
    with pytest.raises(BadInput, match="devices: expected one of auto, amdsmi, rocm_smi, nvml; got 'smi'"):
        open_monitor("smi")


def test_samples_are_summed_up_and_what_is_unknown_stays_so():
    sampler = Sampler(monitor=FakeMonitor())
    for _ in range(4):
        sampler.take()
    device = sampler.result()["devices"][0]
    assert device["utilisation_percent"] == {"mean": 2.5, "max": 4, "last": 4}
    assert device["power_watts"] is None
    assert device["compute_units"] == 256


def test_long_profiles_keep_a_bounded_number_of_samples_spread_over_all_of_it():
    monitor = FakeMonitor()
    sampler = Sampler(interval_s=0.5, monitor=monitor)
    for _ in range(5 * MAX_SAMPLES):
        sampler.take()
    result = sampler.result()
    kept = result["devices"][0]["series"]["utilisation_percent"]
    assert len(kept) <= MAX_SAMPLES
    steps = {b - a for a, b in pairwise(kept)}
    assert len(steps) == 1
    assert result["interval_s"] == 0.5 * steps.pop()
    assert kept[-1] > 4.9 * MAX_SAMPLES
    assert result["samples"] == 5 * MAX_SAMPLES


def test_a_library_that_fails_ends_the_sampling_and_says_so():
    monitor = FakeMonitor(fails_at=3)
    with Sampler(interval_s=0.0, monitor=monitor) as sampler:
        sampler.join()
    result = sampler.result()
    assert result["reason"] == "OSError: driver went away"
    assert result["samples"] == 2


# ------------------------------------------------------------------ AMD SMI


class AmdSmiException(Exception):
    pass


def fake_amdsmi(**answers):
    """A stand-in with the shape of the package's answers (7.0): dictionaries with "N/A" where a card has no figure."""
    module = types.ModuleType("amdsmi")
    module.AmdSmiException = AmdSmiException
    module.AmdSmiTemperatureType = types.SimpleNamespace(EDGE=0, HOTSPOT=1)
    module.AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT=0)
    module.amdsmi_init = lambda: None
    module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_lib_version = lambda: {"major": 26, "minor": 0, "release": 2, "build": ""}
    module.amdsmi_get_processor_handles = lambda: ["handle"]
    module.amdsmi_get_temp_metric = lambda handle, sensor, metric: answers["temperature"][sensor]
    for name in amd_smi.USED:

        def answer(handle, name=name):
            value = answers[name]
            if isinstance(value, Exception):
                raise value
            return value

        setattr(module, name, answer)
    return module


ANSWERS = {
    "temperature": ["N/A", 61],
    "amdsmi_get_gpu_device_bdf": "0000:0c:00.0",
    "amdsmi_get_gpu_asic_info": {
        "market_name": "AMD Instinct MI355X",
        "num_compute_units": 256,
        "target_graphics_version": "gfx950",
    },
    "amdsmi_get_gpu_vram_usage": {"vram_total": 294896, "vram_used": 283},
    "amdsmi_get_gpu_activity": {"gfx_activity": 12, "umc_activity": "N/A", "mm_activity": "N/A"},
    "amdsmi_get_power_info": {"socket_power": "N/A", "current_socket_power": "N/A", "average_socket_power": 243},
    "amdsmi_get_gpu_pci_throughput": AmdSmiException("not supported"),
}


def test_amd_smis_answers_become_facts_and_figures(monkeypatch):
    monkeypatch.setattr(amd_smi, "library_found", lambda: True)
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(**ANSWERS))
    monitor = amd_smi.AmdSmi()
    assert monitor.version == "26.0.2"
    (facts,) = monitor.facts()
    assert (facts.name, facts.arch, facts.compute_units) == ("AMD Instinct MI355X", "gfx950", 256)
    assert (facts.memory_bytes, facts.pci) == (294896 << 20, "0000:0c:00.0")
    (sample,) = monitor.sample()
    assert sample == DeviceSample(
        index=0,
        utilisation_percent=12.0,
        memory_used_bytes=283 << 20,
        power_watts=243.0,
        temperature_celsius=61.0,
    )


def test_amd_smi_without_its_library_is_unreachable_and_prints_nothing(capfd):
    if amd_smi.library_found():
        pytest.skip("libamd_smi is installed here")
    with pytest.raises(Unreachable, match="amdsmi: libamd_smi not found: install amd-smi-lib"):
        amd_smi.AmdSmi()
    assert capfd.readouterr() == ("", "")


def test_a_package_older_than_its_library_is_unreachable(monkeypatch, tmp_path):
    (tmp_path / "amdsmi.py").write_text("raise AttributeError('undefined symbol: amdsmi_new')\n")
    monkeypatch.setattr(amd_smi, "library_found", lambda: True)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unreachable, match="cannot be used: undefined symbol: amdsmi_new"):
        amd_smi.AmdSmi()


def test_what_is_called_exists_in_the_installed_amdsmi_package():
    spec = importlib.util.find_spec("amdsmi")
    if spec is None:
        pytest.skip("the amdsmi package is not installed")
    source = ast.parse((Path(spec.submodule_search_locations[0]) / "amdsmi_interface.py").read_text())
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    for name in amd_smi.USED:
        assert len(functions[name].args.args) == 1, name
    for name in ("amdsmi_init", "amdsmi_shut_down", "amdsmi_get_processor_handles", "amdsmi_get_lib_version"):
        assert name in functions
    assert len(functions["amdsmi_get_temp_metric"].args.args) == 3


# ------------------------------------------------------------------ NVML


class NVMLError(Exception):
    pass


def not_supported(*arguments):
    raise NVMLError("Not Supported")


def fake_pynvml(**replaced):
    space = types.SimpleNamespace
    module = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle{index}",
        "nvmlSystemGetDriverVersion": lambda: "580.95",
        "nvmlDeviceGetName": lambda h: "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda h: (9, 0),
        "nvmlDeviceGetNumGpuCores": lambda h: 16896,
        "nvmlDeviceGetMemoryInfo": lambda h: space(total=150754820096, used=1000),
        "nvmlDeviceGetPciInfo": lambda h: space(busId="00000000:4E:00.0"),
        "nvmlDeviceGetUtilizationRates": lambda h: space(gpu=55, memory=7),
        "nvmlDeviceGetPowerUsage": lambda h: 76512,
        "nvmlDeviceGetTemperature": lambda h, sensor: 31,
        "nvmlDeviceGetPcieThroughput": lambda h, counter: {0: 10, 1: 20}[counter],
    }
    for name, value in (answers | replaced).items():
        setattr(module, name, value)
    module.NVMLError = NVMLError
    module.NVML_PCIE_UTIL_TX_BYTES, module.NVML_PCIE_UTIL_RX_BYTES, module.NVML_TEMPERATURE_GPU = 0, 1, 0
    return module


def test_nvmls_answers_become_facts_and_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml())
    monitor, _ = open_monitor("nvml")
    (facts,) = monitor.facts()
    assert facts == DeviceFacts(
        index=0,
        vendor="nvidia",
        name="NVIDIA H200",
        arch="sm_90",
        compute_units=132,
        memory_bytes=150754820096,
        pci="0000:4e:00.0",
    )
    (sample,) = monitor.sample()
    assert sample == DeviceSample(
        index=0,
        utilisation_percent=55,
        memory_utilisation_percent=7,
        memory_used_bytes=1000,
        power_watts=76.512,
        temperature_celsius=31,
        pcie_rx_bytes_per_s=20480.0,
        pcie_tx_bytes_per_s=10240.0,
    )
    assert monitor.sample(pcie=False)[0].pcie_rx_bytes_per_s is None


def test_what_a_card_or_container_does_not_tell_is_unknown(monkeypatch):
    replaced = dict.fromkeys(
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetNumGpuCores"), not_supported
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(**replaced))
    monitor, _ = open_monitor("nvml")
    assert monitor.facts()[0].compute_units is None
    assert monitor.sample()[0].power_watts is None
    assert monitor.sample()[0].utilisation_percent is None


def test_nvml_without_a_driver_is_unreachable(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(nvmlInit=not_supported))
    monitor, reasons = open_monitor("nvml")
    assert monitor is None
    assert reasons == ["nvml: no NVIDIA driver here: Not Supported"]


@pytest.mark.gpu
def test_a_real_card_is_described():
    monitor, reasons = open_monitor()
    if monitor is None:
        pytest.skip(f"no GPU here: {reasons}")
    facts, samples = monitor.facts(), monitor.sample()
    assert len(facts) == len(samples) >= 1
    for one in facts:
        assert one.name != "unknown"
        assert one.arch
        assert one.compute_units
        assert one.memory_bytes > 1 << 30
    for sample in samples:
        assert 0 <= sample.utilisation_percent <= 100
        assert sample.power_watts > 1
        assert sample.memory_used_bytes >= 0
    monitor.close()
