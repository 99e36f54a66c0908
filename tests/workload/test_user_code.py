from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.parameter_names import weight_name
from skyctl.workload.shipped_files import files_to_ship
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Make = Callable[..., Workload]
MODEL = "def model(): return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))\n"


def test_plain(user: Make) -> None:
    workload = user(MODEL)
    assert workload.names == ["0.Linear", "1.ReLU", "2.Linear"]
    assert [str(workload.boundary(i, 2)[0]) for i in range(4)] == [
        "float32[2, 6]", "float32[2, 5]", "float32[2, 5]", "float32[2, 4]",
    ]  # fmt: skip
    assert [workload.boundary(i, 2)[0].requires_grad for i in range(4)] == [False, True, True, True]
    layers = workload.build(0, 3)
    x, y = next(workload.batches())
    loss = workload.loss(nn.Sequential(*layers)(x), y)
    loss.backward()
    assert isinstance(workload.optimizer(layers[0].parameters()), torch.optim.AdamW)
    workload.optimizer(layers[1].parameters()).step()
    assert workload.spec.path is not None


def test_own_names_loss_and_optimizer(user: Make) -> None:
    workload = user(
        "from collections import OrderedDict\n"
        "def model(): return nn.Sequential(OrderedDict(first=nn.Linear(6, 3), last=nn.Linear(3, 4)))\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets) * 2\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)\n",
        learning_rate=0.125,
    )
    assert workload.names == ["first", "last"]
    optimizer = workload.optimizer(workload.build(0, 1)[0].parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.125
    scores, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    assert workload.loss(scores, targets).item() == pytest.approx(
        2 * nn.functional.cross_entropy(scores, targets).item()
    )


def test_an_optimizer_that_computes_the_loss_anew_is_refused(user: Make) -> None:
    workload = user(
        "def model(): return [nn.Linear(6, 4)]\n"
        "def optimizer(parameters): return torch.optim.LBFGS(parameters)\n"
    )
    with pytest.raises(WorkloadError, match=r"LBFGS's step\(\) needs closure") as refused:
        workload.optimizer(nn.Linear(6, 4).parameters())
    assert "AdamW" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", ["defines no model()"]),
        ("model = 3", ["model must be a function"]),
        ("def model(): return 1 / 0", ["line 9", "ZeroDivisionError", "model()"]),
        (f"{MODEL}1 / 0", ["line 10", "ZeroDivisionError", "importing"]),
        ("def model(:", ["line 9", "SyntaxError"]),
        (
            f"import helpers_that_are_not_there\n{MODEL}",
            ["line 9", "helpers_that_are_not_there", "beside the file"],
        ),
        (f"raise SystemExit(3)\n{MODEL}", ["ended the program"]),
        (f"from .layers import Net as N, a\n{MODEL}", ["line 9", "write `from layers import Net as N, a`"]),
        (f"from . import layers\n{MODEL}", ["line 9", "write `import layers`", "beside the package"]),
        ("def model(): return []", ["gives no layers"]),
        ("def model(): return nn.Sequential()", ["gives no layers"]),
        ("def model(): return 4", ["nn.Module or a list", "int"]),
        ("def model(): return [nn.Linear(6, 4), 3]", ["layer 1", "int"]),
        (
            "def model(): return [nn.Linear(6, 5), nn.Linear(4, 4)]",
            ["layer 1 (Linear) does not take what layer 0 (Linear) gives", "float32[8, 5]", "[4, 4]"],
        ),
        (
            "def model(): return [nn.Linear(7, 4)]",
            ["layer 0 (Linear) does not take the inputs", "float32[8, 6]"],
        ),
        (
            "class Bad(nn.Module):\n    def forward(self, x): pass\ndef model(): return [Bad()]",
            ["layer 0 (Bad)", "NoneType"],
        ),
        ("def model(): return [nn.Linear(6, 4).requires_grad_(False)]", ["no parameter that can be trained"]),
        ("def model(): return [nn.LazyLinear(4)]", ["layer 0", "lazy"]),
        (
            "def loss(outputs, targets): return outputs\ndef model(): return [nn.Linear(6, 4)]",
            ["loss() must give one number", "[8, 4]"],
        ),
        (
            "def loss(outputs, targets): raise KeyError('why')\ndef model(): return [nn.Linear(6, 4)]",
            ["line 9", "loss()", "KeyError", "why"],
        ),
    ],
)
def test_bad_files(user: Make, body: str, words: list[str]) -> None:
    with pytest.raises(WorkloadError) as error:
        user(body)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert error.value.exit_code == 2
    assert len(str(error.value).splitlines()) <= 2


def test_a_package_is_taken_whole_from_a_file_beside_its_folder(user: Make, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "layers.py").write_text("from torch import nn\ndef make(): return nn.Linear(6, 4)\n")
    (package / "train.py").write_text("from .layers import make\ndef model(): return [make()]\n")
    with pytest.raises(WorkloadError, match=r"write `from layers import make`; .* `from pkg\.train import"):
        load_workload(make_spec(str(package / "train.py")))
    assert user("from pkg.train import model").names == ["0.Linear"]


UNGUARDED = """
class Net:
    model = 1
def train(model, path):
    model = path
    [m for m in (model,)]
net = (lambda model: model)(Net())
net.model = Net()
raise SystemExit("it trains")
"""


def test_a_script_without_model_is_not_run(user: Make) -> None:
    with pytest.raises(WorkloadError, match="defines no model"):
        user(UNGUARDED)


@pytest.mark.parametrize(
    "body",
    [
        MODEL,
        "from models import model",
        "from models import build as model",
        "from models import *",
        "import models.parts as model",
        f"if torch.has_it:\n    pass\nelse:\n    {MODEL}",
        f"try:\n    import models\nexcept ImportError:\n    {MODEL}",
        f"with torch.no_grad():\n    {MODEL}",
        "model = make(lambda: [])",
        "a, (b, *model) = make()",
        "if (model := make()): pass",
        "for model in (): pass",
        "match torch:\n    case model: pass",
        "def set_up():\n    global model\n    model = 3",
        "globals()['model'] = 3",
        "exec('model = 3')",
    ],
)
def test_what_may_define_model_is_run(user: Make, body: str) -> None:
    with pytest.raises(WorkloadError, match="KeyError: 'it was run'"):
        user(f"raise KeyError('it was run')\n{body}")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", ["no data()", "--random-inputs"]),
        ("def data(batch_size, seed): return 1 / 0", ["ZeroDivisionError", "data()"]),
        ("def data(batch_size, seed): return []", ["no batch of 8 samples"]),
        ("def data(batch_size, seed): yield torch.zeros(8, 6)", ["(inputs, targets)", "Tensor"]),
        ("def data(batch_size, seed): yield [[1], torch.zeros(8)]", ["inputs[0] is of type int"]),
        (
            "def data(batch_size, seed): yield torch.zeros(8, 6), torch.zeros(7)",
            ["dimension 0", "ts [7]"],
        ),
        ("def data(batch_size, seed): yield torch.zeros(9, 6), torch.zeros(9)", ["9 samples", "8"]),
        ("def data(batch_size, seed): yield torch.zeros(8, 6), torch.zeros(8, 7, 7)", ["loss", "[8, 7, 7]"]),
    ],
)
def test_bad_data(user: Make, data: str, words: list[str]) -> None:
    with pytest.raises(WorkloadError) as error:
        user(MODEL, data=data)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_shape_that_changes(user: Make) -> None:
    workload = user(
        MODEL,
        data="def data(batch_size, seed):\n  for n in (6, 7): yield torch.zeros(8, n), torch.zeros(8).long()",
    )
    batches = workload.batches()
    next(batches)
    with pytest.raises(WorkloadError, match=r"float32\[7\].*step 1.*float32\[6\]"):
        next(batches)


def test_epochs_and_slices(user: Make) -> None:
    workload = user(MODEL, seed=2)
    stream = workload.batches()
    seen = [next(stream) for _ in range(5)]
    generator = torch.Generator().manual_seed(3000)
    assert torch.equal(seen[3][0], torch.randn(8, 6, generator=generator))  # the second epoch: seed 3
    assert torch.equal(next(workload.batches(4))[0], seen[4][0])
    inputs, targets = next(workload.batches(1, 2, 5))
    assert torch.equal(inputs, seen[1][0][2:5])
    assert torch.equal(targets, seen[1][1][2:5])


def test_global_shuffling_is_alike(user: Make) -> None:
    data = (
        "import random\n"
        "def data(batch_size, seed):\n"
        "    while True: yield torch.rand(batch_size, 6) * random.random(), torch.zeros(batch_size).long()\n"
    )
    workload = user(MODEL, data=data)
    stream = workload.batches()
    first = [next(stream)[0] for _ in range(2)]
    torch.manual_seed(5)
    again = workload.batches()
    for batch in first:
        torch.rand(3)
        assert torch.equal(next(again)[0], batch)


def test_ranges_and_partial_batches(user: Make) -> None:
    data = (
        "def data(batch_size, seed, start, stop):\n"
        "    for size in (8, 8, 3):\n"
        "        x = torch.arange(8.)[:size][start:stop, None].expand(-1, 6) + 100 * seed\n"
        "        yield x, torch.zeros(len(x)).long()\n"
    )
    workload = user(MODEL, data=data)
    stream = workload.batches(0, 4, 8)
    batches = [next(stream)[0] for _ in range(3)]
    assert batches[0][:, 0].tolist() == [4, 5, 6, 7]
    assert batches[2][:, 0].tolist() == [104, 105, 106, 107]


def test_random_inputs(user: Make) -> None:
    workload = user(MODEL, random_inputs=True)
    inputs, targets = next(workload.batches())
    assert inputs.shape == (8, 6)
    assert set(targets.tolist()) <= set(range(4))
    example = "def example(batch_size): return torch.zeros(batch_size, 6), torch.arange(batch_size) % 4\n"
    workload = user(MODEL + example, data="", random_inputs=True)
    assert set(next(workload.batches())[1].tolist()) <= set(range(4))
    with pytest.raises(WorkloadError, match="neither data"):
        user(MODEL, data="", random_inputs=True)


def test_node_without_the_data(user: Make) -> None:
    """A stage in the middle never calls data(): the shapes travel with the spec."""
    workload = user(MODEL)
    assert workload.spec.path is not None
    path = Path(workload.spec.path)
    path.write_text(path.read_text().replace("for i in", "assert False\n    for i in"))
    there = load_workload(workload.spec)
    assert there.boundary(1, 3) == workload.boundary(1, 3)
    assert there.structure(1) is None
    there.build(1, 2)


def test_tuples(user: Make) -> None:
    workload = user(
        "class Split(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x @ self.w, torch.arange(x.shape[0], device=x.device), x\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.w = nn.Parameter(torch.randn(6, 4) * 0.5)\n"
        "class Join(nn.Module):\n"
        "    def forward(self, xs): return xs[0] + xs[1][:, None] + xs[2].sum()\n"
        "def model(): return [Split(), Join()]\n"
    )
    specs = workload.boundary(1, 3)
    assert workload.structure(1) == {"tuple": [None, None, None]}
    assert [(s.shape, s.dtype, s.requires_grad) for s in specs] == [
        ((3, 4), "float32", True),
        ((3,), "int64", False),
        ((3, 6), "float32", False),
    ]


def test_helpers_do_not_mix(user: Make, tmp_path: Path) -> None:
    """Two train.py with a helpers.py each, one that hides a standard module, imports inside functions."""
    workloads = []
    for size in (3, 5):
        folder = tmp_path / f"project {size}; $(touch x) 'q' \"d\""
        (folder / "parts").mkdir(parents=True)
        (folder / "helpers.py").write_text(f"import queue\nSIZE = {size}\nassert queue.MINE == {size}\n")
        (folder / "queue.py").write_text(f"MINE = {size}\n")
        (folder / "parts" / "__init__.py").write_text("from .inner import make\n")
        (folder / "parts" / "inner.py").write_text(
            "from torch import nn\ndef make():\n    from helpers import SIZE\n    return nn.Linear(6, SIZE)\n"
        )
        (folder / "late.py").write_text(f"WIDTH = {size}\n")
        body = (
            "import importlib, helpers, parts\n"
            "class Late(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__(); self.l = nn.Linear(helpers.SIZE, 4)\n"
            "    def forward(self, x):\n"
            "        import late\n"
            "        return self.l(x) + late.WIDTH\n"
            "def model():\n"
            "    assert importlib.import_module('late').WIDTH == helpers.SIZE\n"
            "    return [parts.make(), Late()]\n"
        )
        workloads.append((size, folder, user(body, folder=folder)))
    for size, folder, workload in workloads:
        assert workload.boundary(1, 1)[0].shape == (1, size)
        layers = workload.build(0, 2)
        assert layers[1](layers[0](torch.zeros(2, 6))).shape == (2, 4)
        assert sorted(files_to_ship(workload.spec)) == [
            "helpers.py", "late.py", "parts/__init__.py", "parts/inner.py", "queue.py", "train.py",
        ]  # fmt: skip
        assert not list(folder.rglob("__pycache__"))
    import queue

    assert hasattr(queue, "SimpleQueue")
    assert not {"helpers", "late", "parts", "parts.inner"} & set(sys.modules)
    assert not any(str(tmp_path) in entry for entry in sys.path)
    assert workloads[0][2].digest != workloads[1][2].digest


def test_shipped_copy_works(user: Make, tmp_path: Path) -> None:
    folder = tmp_path / "home of it"
    folder.mkdir()
    (folder / "unused.py").write_text("")
    (folder / "net.py").write_text("from torch import nn\ndef make(): return [nn.Linear(6, 4)]\n")
    workload = user("import net\nmodel = net.make\n", folder=folder)
    files = files_to_ship(workload.spec)
    assert sorted(files) == ["net.py", "train.py"]
    copy = tmp_path / "node's cache"
    copy.mkdir()
    for name, content in files.items():
        (copy / name).write_bytes(content)
    there = load_workload(replace(workload.spec, path=str(copy / "train.py")))
    assert there.digest == workload.digest
    assert torch.equal(there.build(0, 1)[0].weight, workload.build(0, 1)[0].weight)
    assert files_to_ship(make_spec("gpt")) == {}


def test_bad_helper(user: Make, tmp_path: Path) -> None:
    (tmp_path / "helper_a.py").write_text("x = 1\n\nx.nothing\n")
    with pytest.raises(WorkloadError, match=r"helper_a\.py, line 3: .*AttributeError"):
        user(f"import helper_a\n{MODEL}")
    assert "helper_a" not in sys.modules


def test_data_for_files_is_refused(user: Make, tmp_path: Path) -> None:
    workload = user(MODEL)
    with pytest.raises(WorkloadError, match="built-in models"):
        make_spec(str(workload.spec.path), data_path=str(workload.spec.path))


def test_importing_imports_no_torch() -> None:
    """spec, recipe and corpus are for the command line too."""
    names = ", ".join(
        f"skyctl.workload.{name}" for name in ("workload_spec", "recipe", "corpus", "user_code")
    )
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_a_virtual_environment_beside_the_file_is_not_the_users(tmp_path: Path) -> None:
    """The README's way: train.py in the checkout, whose .venv holds the very torch that runs."""
    package = tmp_path / ".venv" / "lib" / "python3" / "site-packages" / "installed"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part" / "__init__.py").write_text("TIMES = []\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\nimport installed.part\ninstalled.part.TIMES.append(1)\n"
        "def model(): return [nn.Linear(6, 4)]\n"
        "def data(batch_size, seed):\n"
        "    import installed.part\n"
        "    assert installed.part.TIMES\n"
        "    yield torch.zeros(batch_size, 6), torch.zeros(batch_size, dtype=torch.long)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); import installed.part as part\n"
        "from skyctl.workload.workload import load_workload\n"
        "from skyctl.workload.workload_spec import make_spec\n"
        "workload = load_workload(make_spec('train.py', batch_size=4))\n"
        "assert sys.modules['installed.part'] is part and part.TIMES\n"
        "print(workload.names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['0.Linear']"


def test_complex_weights_have_an_optimizer_by_default(user: Make) -> None:
    body = (
        "class Wave(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))\n"
        "    def forward(self, x): return (x.to(self.weight.dtype) @ self.weight).abs()\n"
        "def model(): return [Wave()]\n"
    )
    workload = user(body)
    layer = workload.build(0, 1)[0]
    before = layer.weight.detach().clone()
    optimizer = workload.optimizer(layer.parameters())
    inputs, targets = next(workload.batches())
    workload.loss(layer(inputs), targets).backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_a_model_with_arguments(user: Make, tmp_path: Path) -> None:
    body = (
        "def model(width=5, depth: int = 1):\n"
        "    inner = [nn.Linear(width, width) for _ in range(depth)]\n"
        "    return [nn.Linear(6, width), *inner, nn.Linear(width, 4)]\n"
        "def loss(outputs, targets, width=0):\n"
        "    return nn.functional.cross_entropy(outputs, targets) * width\n"
    )
    assert user(body).layers == 3
    workload = load_workload(make_spec(f"{tmp_path / 'train.py'},width=7,depth=2", batch_size=8))
    assert workload.layers == 4
    assert str(workload.boundary(1, 2)[0]) == "float32[2, 7]"
    scores, targets = torch.zeros(2, 4), torch.tensor([0, 1])
    expected = 7 * nn.functional.cross_entropy(scores, targets).item()
    assert workload.loss(scores, targets).item() == pytest.approx(expected)
    with pytest.raises(WorkloadError, match="did you mean 'width'"):
        load_workload(make_spec(f"{tmp_path / 'train.py'},widht=7", batch_size=8))


def test_a_shared_parameter_starts_as_its_first_layer_has_it(user: Make) -> None:
    body = (
        "def model():\n"
        "    table, head = nn.Linear(6, 6), nn.Linear(6, 6)\n"
        "    head.weight = table.weight\n"
        "    return [table, head, nn.Linear(6, 4)]\n"
    )
    workload = user(body)
    assert [shared.uses for shared in workload.shared_parameters] == [((0, "weight"), (1, "weight"))]
    table, head, _ = workload.build(0, 3)
    assert table.weight is head.weight
    [alone] = workload.build(1, 2)
    assert torch.equal(alone.weight, table.weight)
    assert torch.equal(alone.bias, head.bias)
    assert weight_name(alone.weight) == weight_name(head.weight) == "0.weight"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("head.weight = nn.Parameter(table.weight.data)", "share the memory of weight and weight"),
        ("table = nn.Embedding(6, 6, sparse=True); head.weight = table.weight", "sparse=True"),
    ],
)
def test_what_layers_can_not_share_is_refused(line: str, words: str, user: Make) -> None:
    body = (
        "def model():\n"
        "    table, head = nn.Linear(6, 6), nn.Linear(6, 6)\n"
        f"    {line}\n"
        "    return [table, head, nn.Linear(6, 4)]\n"
    )
    with pytest.raises(WorkloadError, match=words) as caught:
        user(body)
    assert caught.value.hint
