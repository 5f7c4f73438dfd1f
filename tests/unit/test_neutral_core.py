"""The core names no hardware and loads no formats that can run code; and tests of the check itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def load_checker():
    spec = importlib.util.spec_from_file_location("neutral_core", REPOSITORY / "ci" / "neutral_core.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checker = load_checker()


def offences(source: str) -> list[str]:
    return [offence.text for offence in checker.check_source(source)]


@pytest.mark.exhaustive
def test_the_core_names_no_hardware():
    """The linters of each run check it, too."""
    modules = list(checker.CORE.rglob("*.py"))
    assert len(modules) > 40, f"looked in the wrong place: {checker.CORE}"
    assert checker.check_paths([checker.CORE]) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import cuda", "cuda"),
        ("from vendor import is_cuda_alike", "cuda"),
        ("def is_rocm(): ...", "rocm"),
        ("class CudaGraphRunner: ...", "cuda"),
        ("class XPUWorker: ...", "xpu"),
        ("environment['CUDA_VISIBLE_DEVICES'] = '0'", "cuda"),
        ("pattern = 'torch_npu'", "npu"),
        ("x = 1  # faster on NVIDIA", "nvidia"),
        ('"""Works on TPUs as well."""', "tpu"),
        ("def f():\n    '''Notes on Ascend.'''", "ascend"),
        ("raise ValueError(f'no {n} GPU found')", "gpu"),
        ("version = 'cuda12'", "cuda"),
        ("backend = 'nccl'", "nccl"),
        ("torch.mps.synchronize()", "mps"),
        ("torch.backends.cudnn.enabled = False", "cudnn"),
        ("f(intel=True)", "intel"),
        ("tensor.cuda()", "cuda"),
    ],
)
def test_vendor_names_are_detected_in_every_kind_of_source(source, word):
    assert any(f"({word})" in text for text in offences(source)), offences(source)


@pytest.mark.parametrize(
    ("source", "sign"),
    [
        ("torch.empty(1, device='cpu')", "device string"),
        ("torch.device('cuda:0')", "device string"),
        ("device = 'CPU'", "device string"),
        ("if device.type == 'mps': ...", "device string"),
        ("kind = f'{name}' or 'xla:1'", "device string"),
        ("torch.accelerator.synchronize()", "torch.accelerator"),
        ("from torch import accelerator", "torch.accelerator"),
        ("torch.cpu.synchronize()", "torch.cpu"),
    ],
)
def test_literal_device_names_are_detected(source, sign):
    assert any(sign in text for text in offences(source)), offences(source)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("getattr(torch, 'cu' + 'da')", "cuda"),
        ("getattr(torch, 'cu' 'da')", "cuda"),
        ("hasattr(torch, f'{\"x\"}pu')", "xpu"),
        ("getattr(torch, 'aduc'[::-1])", "cuda"),
        ("getattr(torch, 'XPU'.lower())", "xpu"),
        ("name = ''.join(['n', 'p', 'u'])", "npu"),
        ("name = ''.join(('c', chr(117), 'da'))", "cuda"),
        ("name = '%sip' % 'h'", "hip"),
        ("name = '{}{}'.format('mp', 's')", "mps"),
        ("name = 'c-u-d-a'.replace('-', '')", "cuda"),
        ("name = '\\x63uda'", "cuda"),
        ("name = b'cuda'.decode()", "cuda"),
        ("importlib.import_module('torch.' + 'x' + 'pu')", "xpu"),
        ("torch.\uff43\uff55\uff44\uff41.synchronize()", "cuda"),
        ("torch.hip.synchronize()", "hip"),
        ("torch.npu.synchronize()", "npu"),
        ("torch.xpu.synchronize()", "xpu"),
        ("torch.cuda.synchronize()", "cuda"),
        ("if platform.is_xpu(): ...", "xpu"),
        ("if is_hygon: ...", "hygon"),
        ("torch.utils.rename_privateuse1_backend('x')", "privateuse1"),
    ],
)
def test_disguised_vendor_names_are_detected(source, word):
    assert any(f"({word})" in text for text in offences(source)), offences(source)


@pytest.mark.parametrize("name", ["is_apple", "is_apple_silicon", "has_metal", "use_metal_kernels", "is_really_neuron"])
def test_checks_for_vendors_with_ordinary_names_are_detected(name):
    assert any("asks for a maker" in text for text in offences(f"if {name}(): ...")), offences(name)


@pytest.mark.parametrize(
    "source",
    [
        "import torch as t\nt.accelerator.synchronize()",
        "import torch\nt = torch\nt.accelerator.synchronize()",
        "t = importlib.import_module('torch')\nt.accelerator.synchronize()",
        "getattr(__import__('torch'), 'accelerator')",
        "import torch.accelerator",
        "import torch.accelerator as host",
        "from torch.accelerator import synchronize",
        "from torch import accelerator as host",
        "getattr(torch, 'accelerator')",
        "getattr(torch, 'accel' + 'erator')",
        "getattr(torch, name)",
        "getattr(torch, f'{device.type}').synchronize()",
        "hasattr(torch, kind)",
        "torch.__dict__[name]",
        "torch.__getattribute__(name)",
        "vars(torch)[name]",
        "operator.attrgetter('accelerator')(torch)",
        "operator.attrgetter(name)(torch)",
        "importlib.import_module(f'torch.{name}')",
        "importlib.import_module('torch.' + name)",
        "importlib.import_module('torch.' + 'cpu')",
        "torch.get_device_module(device)",
        "torch._C._accelerator_synchronizeDevice(0)",
        "torch.backends.cpu.get_cpu_capability()",
        "torch.device(0)",
        "tensor.is_cpu",
        "getattr(tensor, 'is_cpu')",
        "device = 'c' + 'pu'",
        "device = 'CPU'.lower()",
        "impl('PrivateUse1')",
    ],
)
def test_device_access_through_torch_is_detected(source):
    assert offences(source), source


@pytest.mark.parametrize(
    ("source", "sign"),
    [
        ("import pickle", "pickle"),
        ("from cloudpickle import dumps", "cloudpickle"),
        ("importlib.import_module('pickle')", "pickle"),
        ("eval('1')", "eval()"),
        ("exec(code)", "exec()"),
        ("torch.load(path)", "torch.load()"),
        ("torch.load(path, weights_only=True)", "torch.load()"),
        ("from torch import load", "torch.load"),
        ("yaml.load(text)", "yaml.load()"),
        ("subprocess.run('ls', shell=True)", "shell="),
        ("subprocess.run('ls', shell=flag)", "shell="),
        ("os.system('ls')", "os.system()"),
    ],
)
def test_loading_formats_that_can_run_code_is_detected(source, sign):
    assert any(sign in text for text in offences(source)), offences(source)


@pytest.mark.parametrize("source", ["import core.mvllm", "from core import mvllm", "from core.mvllm.errors import X"])
def test_the_second_copy_of_the_package_is_banned(source):
    assert any("second copy" in text for text in offences(source))


@pytest.mark.parametrize("source", ["import mvllm_cpu", "from mvllm_acme.plugin import x"])
def test_the_core_imports_no_plugin(source):
    assert any("imports no plugin" in text for text in offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "chip, ship, whip = tip(relationship)",
        "getattr(torch, 'float32')",
        "getattr(model, name)",
        "dtypes = {name: value for name, value in vars(torch).items()}",
        "importlib.import_module(name)",
        "importlib.import_module(f'mvllm.{name}')",
        "torch.device(name)",
        "text = 'torch has one place for a foreign device (PrivateUse1)'",
        "is_applicable, has_metallic, on_armed = 1, 2, 3",
        "text = 'a' + b + 'c' * 5",
        "text = '%d of %d' % (1, 2)",
        "x = model.eval()",
        "on_the_host = tensor.cpu()",
        "regex.compile(r'a')",
        "num = os.cpu_count()",
        "'''On a cpu this is slow.'''",
        "text = 'the cpu is busy'",
        "config.gpu_memory_utilization = 0.9",
        "torch.load_inline",
        "re.exec_count",
        "subprocess.run(['ls'], shell=False)",
        "amdahl, intelligence, ascending = 1, 2, 3",
        "tokens_per_input = helper('input')",
        "import core_utils",
    ],
)
def test_allowed_code_passes(source):
    assert offences(source) == []


def test_an_offence_has_its_location():
    [offence] = checker.check_source("a = 1\n\nb = '''x\nand NVIDIA\n'''\n")
    assert offence.line == 4
