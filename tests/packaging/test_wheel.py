"""The package as others get it: what a wheel holds, and what is imported from where.

Wheel and installs are made from a copy of the sources, so that no earlier build leaks in, and nothing is
downloaded.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    page.relative_to(REPOSITORY).as_posix()
    for page in REPOSITORY.glob("docs/**/*.md")
    if "dev" not in page.parts
]
# What npu_replay needs, and what it could import by mistake where it is installed.
LENT = [
    "torch",
    "numpy",
    *(["megatron.core"] if find_spec("megatron") else []),
    *(["transformers"] if find_spec("transformers") else []),
]
FRAMEWORKS = ("megatron", "transformers", "mindspeed", "torch_npu", "vllm", "sglang", "verl")

# One worker runs them all: the wheel and the environments are made once.
pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path, path: Path | str = "") -> str:
    """The output of `command`, run where no variable can lend it this checkout; a git hook sets GIT_DIR."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("GIT_")
    } | {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment, the folder to run from, without any Python in it at first, and a PYTHONPATH."""

    python: Path
    elsewhere: Path
    path: Path | str = ""

    @classmethod
    def make(cls, folder: Path, *options: str) -> "Environment":
        run(sys.executable, "-m", "venv", *options, folder / "venv", cwd=folder)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        return cls(folder / "venv" / "bin" / "python", elsewhere)

    def lend(self, *modules: str) -> None:
        """Make what holds `modules` here importable there too, after what is installed there."""
        folders = [str(Path(find_spec(name).origin).parents[name.count(".") + 1]) for name in modules]
        site = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(site, "lent.pth").write_text("\n".join(dict.fromkeys(folders)) + "\n")

    def run(self, *arguments: str) -> str:
        return run(self.python, *arguments, cwd=self.elsewhere, path=self.path)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made from, known to git where there is one."""
    copy = tmp_path_factory.mktemp("copy") / "sources"
    copy.mkdir()
    for folder in ("npu_replay", "npu_replay_autoload", "compat"):
        shutil.copytree(REPOSITORY / folder, copy / folder, True, shutil.ignore_patterns("__pycache__"))
    (copy / "docs" / "zh").mkdir(parents=True)
    for page in PAGES:
        shutil.copy(REPOSITORY / page, copy / page)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / name, copy / name)
    if shutil.which("git") is not None:
        run("git", "init", "--quiet", cwd=copy)
        run("git", "add", "--all", cwd=copy)
    return copy


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--wheel-dir", folder, sources),
        cwd=folder,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel in it, by a pip of its own."""
    environment = Environment.make(tmp_path_factory.mktemp("installed"))
    run(
        *(environment.python, "-m", "pip", "install", "--no-deps", "--no-index", wheel),
        cwd=environment.elsewhere,
    )
    environment.lend(*LENT)
    return environment


def installed_from(folder: Path, *sources: str | Path) -> Environment:
    """An environment with what its pip builds of sources.

    It has no pip and setuptools of its own: those of the test environment are lent to it, and are newer.
    """
    environment = Environment.make(folder, "--without-pip")
    environment.lend(*LENT, "setuptools", "pip")
    run(
        *(environment.python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--ignore-installed", *sources),
        cwd=environment.elsewhere,
    )
    return environment


@pytest.fixture(scope="session")
def editable_install(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed_from(tmp_path_factory.mktemp("editable_install"), "--editable", sources)


@pytest.fixture(scope="session")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as build; build.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=sources)
    (built,) = folder.iterdir()
    with tarfile.open(built) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="session")
def sdist_install(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed_from(tmp_path_factory.mktemp("sdist_install"), sdist)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without npu_replay."""
    environment = Environment.make(tmp_path_factory.mktemp("bare"), "--without-pip")
    environment.lend(*LENT)
    return environment


@pytest.fixture(scope="session")
def clone(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another copy of the sources, in which nothing is ever installed or built."""
    folder = tmp_path_factory.mktemp("another clone") / "npu replay"
    shutil.copytree(sources, folder, symlinks=True)
    return folder


@pytest.fixture(scope="session")
def zipped(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A zip of the repository as git makes it, and with it what offers one for download."""
    file = tmp_path_factory.mktemp("zip") / "repository.zip"
    run("git", "archive", f"--output={file}", run("git", "write-tree", cwd=sources).strip(), cwd=sources)
    return zipfile.ZipFile(file)


@pytest.fixture(scope="session")
def unzipped(zipped: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That zip unpacked as unzip does it: a link is made again."""
    folder = tmp_path_factory.mktemp("unzipped")
    zipped.extractall(folder)
    for entry in zipped.infolist():
        if stat.S_ISLNK(entry.external_attr >> 16):
            (folder / entry.filename).unlink()
            (folder / entry.filename).symlink_to(zipped.read(entry).decode())
    return folder


# How npu_replay gets into an environment: what is installed there, where Python is started, what is on its
# path, and from where it has to come. A clone that somebody asks for is the clone that answers.
WAYS = {
    "wheel": ("installed", None, None, "site-packages"),
    "wheel on the path": ("bare", None, "wheel", "wheel"),
    "wheel, standing in a clone": ("installed", "clone", None, "clone"),
    "wheel, a clone on the path": ("installed", None, "clone", "clone"),
    "editable": ("editable_install", None, None, "sources"),
    "editable, standing in it": ("editable_install", "sources", None, "sources"),
    "editable, standing in another clone": ("editable_install", "clone", None, "clone"),
    "editable, another clone on the path": ("editable_install", None, "clone", "clone"),
    "sdist": ("sdist_install", None, None, "site-packages"),
    "sdist on the path": ("bare", None, "sdist", "sdist"),
    "zip of the repository, unpacked": ("bare", None, "unzipped", "unzipped"),
}


def test_wheel_is_pure_python_and_holds_every_module_in_one_package(wheel: Path, sdist: Path) -> None:
    """And an sdist all that a wheel is built of: ci/release.sh builds one."""
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    suffixes = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert not suffixes & {".so", ".pyd", ".dylib", ".c", ".cpp"}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"npu_replay", "npu_replay_autoload"}
    expected = {"npu_replay/py.typed", *(f"npu_replay/{page}" for page in PAGES)}
    folders = {name: name for name in ("npu_replay", "npu_replay_autoload")} | {"compat": "npu_replay/compat"}
    for folder, package in folders.items():
        for module in (REPOSITORY / folder).rglob("*.py"):
            expected.add(f"{package}/{module.relative_to(REPOSITORY / folder).as_posix()}")
    assert expected <= set(names)
    built_of = (*PAGES, "pyproject.toml", "README.md", "LICENSE")
    assert [name for name in built_of if not (sdist / name).is_file()] == []


FOUND = f"""
import importlib, pickle, sys
from importlib.util import find_spec
assert find_spec("npu_replay.compat.probe").name == "npu_replay.compat.probe"
product = pickle.loads(b"cnpu_replay.compat.probe\\nProduct\\n(Vit\\nI01\\ntR.")
assert str(product).startswith("Product(name='it'"), product
import npu_replay
assert not [name for name in {FRAMEWORKS} if name in sys.modules]
npu_replay.compat.vllm
for module in (npu_replay.compat.probe, npu_replay.compat, npu_replay):
    importlib.reload(module)
assert find_spec("npu_replay.compat.nothing") is None
try:
    import compat
except ModuleNotFoundError as error:
    assert error.name == "compat"
else:
    raise SystemExit("compat is a module of its own")
print(npu_replay.__file__, npu_replay.compat.__file__, sep="\\n")
"""


@pytest.mark.parametrize("way", WAYS)
def test_compat_is_a_part_of_npu_replay_alone_and_no_framework_is_imported(
    way: str, request: pytest.FixtureRequest
) -> None:
    """In a process of its own, so that nothing has imported npu_replay before it is unpickled."""
    name, standing, path, source = WAYS[way]
    environment: Environment = request.getfixturevalue(name)
    if standing:
        environment = replace(environment, elsewhere=request.getfixturevalue(standing))
    if path:
        environment = replace(environment, path=request.getfixturevalue(path))
    ours, compat = (Path(line).parent for line in environment.run("-c", FOUND).splitlines())
    assert compat == ours / "compat"
    if source == "site-packages":
        assert ours.parent.name == source
    else:
        assert ours.parent == request.getfixturevalue(source)


def test_it_runs_as_a_module(installed: Environment) -> None:
    """doctor, since it needs torch and numpy alone; and it starts processes that import npu_replay too."""
    diagnosis = json.loads(installed.run("-m", "npu_replay", "doctor", "--json"))
    assert diagnosis["works"]
    assert [trial["problem"] for trial in diagnosis["self_test"]] == [""]


@pytest.mark.parametrize("half", ["copied alone", "unpacked without links"])
def test_half_a_clone_is_an_error_that_says_so(
    bare: Environment, clone: Path, zipped: zipfile.ZipFile, tmp_path: Path, half: str
) -> None:
    if half == "copied alone":
        shutil.copytree(clone / "npu_replay", tmp_path / "npu_replay", symlinks=True)
    else:
        zipped.extractall(tmp_path)
    code = """
try:
    import npu_replay
except ImportError as error:
    print(error)
"""
    message = replace(bare, path=tmp_path).run("-c", code)
    assert message.startswith(f"npu_replay/compat in {tmp_path / 'npu_replay'} is no folder")
