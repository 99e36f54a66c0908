"""User code: imports the user's file without side effects on the process, and finds the modules it imports.

Modules in the file's folder are found first while the file, or any module there, runs an import statement,
and only then: they never stay in ``sys.modules``, so two different train.py with a ``helpers.py`` each can
live in one process, and a user's ``queue.py`` breaks no other imports. No torch here.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import itertools
import shlex
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from skyctl.errors import WorkloadError

SHIP_LIMIT_BYTES = 64 << 20
_LOCK = threading.RLock()
_NUMBERS = itertools.count()


class _UserLoader(importlib.machinery.SourceFileLoader):
    """Loads from source without bytecode, and gives the module an ``import`` that sees the user's folder."""

    def __init__(self, fullname: str, path: str, scope: UserImports) -> None:
        super().__init__(fullname, path)
        self.scope = scope

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self.scope.import_}
        self.scope.modules[module.__name__] = module
        try:
            with self.scope.running():
                super().exec_module(module)
        except BaseException:
            self.scope.modules.pop(module.__name__, None)
            raise


SKYCTL_FOLDER = Path(__file__).resolve().parent.parent
"""The folder of skyctl's own files, which an error in the user's code is never blamed on."""


class UserImports:
    """The import finder of one user folder, with the modules loaded from it so far.

    At the ``front`` of the import system while an import statement of the user's code asks for one of them;
    at its ``back`` while the user's code runs, for ``import_module``; out of it otherwise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, ModuleType] = {}
        self._place: str | None = None
        self._stashed: dict[str, ModuleType] = {}

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        """The finder protocol of ``sys.meta_path``: finds modules in the folder, namespace packages last."""
        where = [str(self.folder)] if path is None else list(path)
        if path is not None and not self._is_place(name.rpartition(".")[0], where):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, where)
        if spec is None:
            return None
        if spec.origin is None and path is None:
            return None if importlib.machinery.PathFinder.find_spec(name) is not None else spec
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader) and spec.origin is not None:
            spec.loader = _UserLoader(name, spec.origin, self)
        return spec

    def import_(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The ``__import__`` of the user's modules, also when one of their functions imports later."""
        level = args[3] if len(args) > 3 else kwargs.get("level", 0)
        local = level > 0 or self.find_spec(name.partition(".")[0]) is not None
        with self._at("front" if local else None):
            return builtins.__import__(name, *args, **kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps a run of the user's code, so that its ``import_module`` finds the folder's modules."""
        with self._at("back"):
            yield

    @contextmanager
    def _at(self, place: str | None) -> Iterator[None]:
        with _LOCK:
            before = self._place
            self._move(place)
            try:
                yield
            finally:
                self._move(before)

    def _move(self, place: str | None) -> None:
        if self._place == place:
            return
        if self._place is not None:
            sys.meta_path.remove(self)
            for name, module in list(sys.modules.items()):
                if self._holds(name, module):
                    self.modules[name] = sys.modules.pop(name)
            sys.modules.update(self._stashed)
            self._stashed = {}
        self._place = place
        if place == "front":
            tops = {name.partition(".")[0] for name in sys.modules}
            entries = {entry.name.removesuffix(".py") for entry in self.folder.iterdir()}
            local = {top for top in tops & entries if self.find_spec(top) is not None}
            local |= {name.partition(".")[0] for name in self.modules}
            self._stashed = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in local}
            for name in self._stashed:
                del sys.modules[name]
            sys.modules.update(self.modules)
            sys.meta_path.insert(0, self)
        elif place == "back":
            for name, module in self.modules.items():
                sys.modules.setdefault(name, module)
            sys.meta_path.append(self)

    def _holds(self, name: str, module: Any) -> bool:
        if self.modules.get(name) is module:
            return True
        inside = getattr(module, "__dict__", {})  # not getattr(module, …): some modules make up attributes
        loader = getattr(inside.get("__spec__"), "loader", None)
        if isinstance(loader, _UserLoader):
            return loader.scope is self
        return self._is_place(name, list(inside.get("__path__") or []))

    def _is_place(self, package: str, paths: list[str]) -> bool:
        """Whether a package of that name in those folders is the user's; a virtual environment is not."""
        own = self.folder.joinpath(*package.split("."))
        return bool(paths) and all(Path(path) == own for path in paths)


def import_file(path: Path) -> tuple[ModuleType, UserImports]:
    """Imports the user's file → (module, the imports of its folder).

    The module stays in ``sys.modules`` under a name of its own, for dataclasses and pickles; run its
    functions inside ``scope.running()`` where they may call ``import_module``.

    Raises:
        WorkloadError: there is no such file, it can have no ``model`` (and is not run), or it raises; names
            the line of the user's own code.
    """
    if not path.is_file():
        raise WorkloadError(f"there is no workload file {path}")
    refuse_without_model(path)
    importlib.invalidate_caches()
    name = f"_skyctl_workload_{next(_NUMBERS)}"
    scope = UserImports(path.parent)
    loader = _UserLoader(name, str(path), scope)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_errors(path, "importing it"), own_arguments(path):
            loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    sys.modules[name] = module
    return module, scope


@contextmanager
def user_errors(path: Path, doing: str) -> Iterator[None]:
    """Turns errors of the user's code inside into a WorkloadError that names file, line and error.

    Args:
        doing: what the code was run for, as in ``model()``.
    """
    try:
        yield
    except WorkloadError:
        raise
    except SystemExit as exc:
        raise WorkloadError(
            f"{locate_error(exc, path) or path.name}: {doing} ended the program (exit {exc.code})",
            hint=_exit_hint(exc, path),
        ) from exc
    except Exception as exc:
        raise WorkloadError(
            f"{locate_error(exc, path) or path.name}: {doing} failed: {_describe_in_folder(exc, path)}",
            hint=_missing_hint(exc, path),
        ) from exc


@contextmanager
def own_arguments(path: Path) -> Iterator[None]:
    """Inside, ``sys.argv`` is that of ``python train.py``: argparse does not read skyctl's own."""
    before, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def describe_exception(exc: BaseException) -> str:
    """An exception as one line of bounded length, as in ``ZeroDivisionError: division by zero``."""
    text = " ".join(str(exc).split()) or "no message"
    if len(text) > 400:  # an error in a DataLoader's worker comes with a traceback, its cause last
        text = f"{text[:200]} … {text[-200:]}"
    return f"{type(exc).__name__}: {text}"


def _describe_in_folder(exc: BaseException, path: Path) -> str:
    """The exception with names relative to the user's folder, which on a node is one of the cache."""
    described = describe_exception(exc)
    return described.replace(f"{path.parent}/", "") if path.is_absolute() else described


def locate_error(exc: BaseException, path: Path) -> str | None:
    """The innermost line of the user's files in the traceback, as in ``train.py, line 12``; None: none."""
    if isinstance(exc, SyntaxError) and exc.filename and Path(exc.filename).is_relative_to(path.parent):
        return f"{Path(exc.filename).relative_to(path.parent)}, line {exc.lineno}"
    frame = _innermost_frame(exc, path)
    return None if frame is None else f"{frame[0].relative_to(path.parent)}, line {frame[1]}"


def _innermost_frame(exc: BaseException, path: Path) -> tuple[Path, int] | None:
    """The file of the user's and its line where the error came from."""
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        file = Path(frame.filename)
        if (
            file.is_relative_to(path.parent)
            and not file.is_relative_to(SKYCTL_FOLDER)
            and "site-packages" not in file.parts
        ):
            return file, frame.lineno or 0
    return None


def _exit_hint(exc: SystemExit, path: Path) -> str:
    """The advice on a file that ends the program."""
    script = 'below if __name__ == "__main__":'
    if any(Path(frame.filename).name == "argparse.py" for frame in traceback.extract_tb(exc.__traceback__)):
        return (
            f"the file is run without arguments: give each a default, or parse them {script}; "
            f"model(width) is given what {path.name},width=512 says; a script with its own arguments: "
            f"skyctl run {path.name} ARGS"
        )
    return f"what only the script itself should do belongs {script}"


_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The variables that a script asks for if it expects torchrun to start it."""


def _missing_hint(exc: BaseException, path: Path) -> str | None:
    """The advice on a module, file or variable that is missing; None for other errors."""
    if isinstance(exc, KeyError) and exc.args and exc.args[0] in _RANK_VARIABLES:
        return f"a script that torchrun would start: skyctl run {path.name}"
    if isinstance(exc, ModuleNotFoundError):
        return (
            f"no {exc.name!r} lies beside the file: install it, and name it in the requirements.txt beside "
            f"the file, which `skyctl setup {shlex.quote(str(path))}` brings to the nodes"
        )
    # Only an import without a package to be relative to names no module.
    unnamed = isinstance(exc, ImportError) and exc.name is None
    if unnamed and (relative := _failed_relative_import(exc, path)) is not None:
        return (
            f"a workload's file is run by itself, not as a part of a package: write `{relative}`; or give a "
            f"file beside the package's folder with `from {path.parent.name}.{path.stem} import …`"
        )
    if isinstance(exc, FileNotFoundError) and isinstance(exc.filename, str) and path.name:
        file = Path(exc.filename)
        inside = file.is_relative_to(path.parent)
        if file.is_absolute() and not inside:
            return (
                f"every node that runs {path.name} needs {file} at that path; what is beside {path.name} "
                "can be shipped: --ship NAME"
            )
        name = file.relative_to(path.parent).as_posix() if inside else exc.filename
        return (
            f"a node has what is shipped: --ship {name}, or ship = [{name!r}] in {path.name}, opened as "
            f"Path(__file__).parent / {name!r}; or put it at the same absolute path on every node"
        )
    return None


def _failed_relative_import(exc: BaseException, path: Path) -> str | None:
    """The relative import statement that failed, as an absolute one; None: it was none."""
    frame = _innermost_frame(exc, path)
    if frame is None:
        return None
    for node in ast.walk(parse_module(frame[0], read_file(frame[0]))):
        if isinstance(node, ast.ImportFrom) and node.level and node.lineno == frame[1]:
            names = ", ".join(
                f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in node.names
            )
            return f"from {node.module} import {names}" if node.module else f"import {names}"
    return None


def imported_files(path: Path) -> dict[str, bytes]:
    """Finds the modules of the file's folder that it imports, without running it → contents by relative name.

    Follows import statements (also inside functions) and literal ``import_module("…")`` through modules and
    packages in the folder; a package is taken whole. The file itself is among them.

    Raises:
        WorkloadError: a file can't be read or has a syntax error, or together they are over 64 MiB.
    """
    folder = path.parent
    files: dict[str, bytes] = {}
    todo = [path]
    while todo:
        current = todo.pop()
        name = current.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = read_file(current)
        if sum(map(len, files.values())) > SHIP_LIMIT_BYTES:
            raise WorkloadError(
                f"{path.name} and what it imports beside it are over {SHIP_LIMIT_BYTES >> 20} MiB "
                f"(at {name})",
                hint="keep data out of the packages beside it",
            )
        if current.suffix == ".py":
            for top in _imported_names(current, files[name]):
                todo += _module_files(folder, top)
    return dict(sorted(files.items()))


def read_file(path: Path) -> bytes:
    """The file's bytes; WorkloadError where it can't be read."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise WorkloadError(f"{path} can't be read: {exc.strerror or exc}") from exc


def parse_module(path: Path, source: bytes) -> ast.Module:
    """The source as a syntax tree; WorkloadError with the line where it has a syntax error."""
    try:
        return ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError) as exc:
        line = getattr(exc, "lineno", None)
        raise WorkloadError(f"{path.name}, line {line}: {describe_exception(exc)}") from exc


def refuse_without_model(path: Path) -> None:
    """Refuses a file that can define no ``model``, without running it: it may be a script that trains.

    Raises:
        WorkloadError: it has none, can't be read, or has a syntax error.
    """
    if not _may_bind(parse_module(path, read_file(path)), "model"):
        raise no_model_error(path.name)


def no_model_error(name: str) -> WorkloadError:
    """The error for a file of that name that defines no ``model``."""
    return WorkloadError(
        f"{name} defines no model()",
        hint=f"a script that trains by itself: skyctl run {name}; to be planned and cut into layers it needs "
        "def model(): return nn.Sequential(…)",
    )


def _may_bind(module: ast.Module, name: str) -> bool:
    """Whether running the module may give it that name."""
    todo: list[ast.AST] = [module]
    while todo:
        node = todo.pop()
        bound: str | None
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.alias):
            bound = (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name):
            bound = node.id if isinstance(node.ctx, ast.Store) else None
        else:  # a function, a class, a name in a pattern
            bound = getattr(node, "name", None)
        if bound == name:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return any(
        name in node.names if isinstance(node, ast.Global) else node.id in ("globals", "exec")
        for node in ast.walk(module)
        if isinstance(node, ast.Global | ast.Name)
    )


def _imported_names(path: Path, source: bytes) -> set[str]:
    """The top-level names of the modules that the source imports."""
    names: set[str] = set()
    for node in ast.walk(parse_module(path, source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    return {name.partition(".")[0] for name in names}


def _module_files(folder: Path, top: str) -> list[Path]:
    package = folder / top
    if package.is_dir() and (
        (package / "__init__.py").is_file() or (importlib.machinery.PathFinder.find_spec(top) is None)
    ):
        return sorted(
            p
            for p in package.rglob("*.py")
            if p.is_file()
            and not any(q == "__pycache__" or q.startswith(".") for q in p.relative_to(package).parts)
        )
    single = folder / f"{top}.py"
    return [single] if single.is_file() else []
