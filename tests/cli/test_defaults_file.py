"""Options have defaults out of a file: which file, what it may say, and what counts more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from skyctl.cli.app import app
from skyctl.cli.launch_command import LaunchOptions
from skyctl.cli.option_pairs import PAPER_PARAMETERS, PLANNED, RESUMED, UNUSED, settled_parameters

Run = Callable[..., tuple[int, str, str]]
GPT = "gpt:layers=2,hidden=32,heads=2,context=16"
PROBLEM = Path(__file__).resolve().parents[2] / "docs" / "examples" / "problem.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, transport: local}]\n")
    return tmp_path


def write(text: str, name: str = "skyctl.toml") -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def values(skyctl: Run, *words: str) -> dict[str, tuple[object, str, str | None]]:
    """By command and option its value, and where it is from, as ``skyctl config`` says."""
    code, out, err = skyctl("config", *words, "--json")
    assert code == 0, err
    rows = json.loads(out)["values"]
    return {f"{row['command']} {row['option']}": (row["value"], row["source"], row["place"]) for row in rows}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("skyctl.toml", "[launch]\nsteps = 7\n"),
        ("pyproject.toml", '[project]\nname = "x"\n[tool.skyctl.launch]\nsteps = 7\n'),
    ],
)
def test_a_commands_option_has_its_default_from_the_file(skyctl: Run, name: str, text: str) -> None:
    write(text, name)
    code, out, err = skyctl("launch", GPT, "--dry-run")
    assert (code, err) == (0, f"from {name}: --steps 7\n")
    assert "train 7 steps" in out
    code, out, err = skyctl("launch", GPT, "--dry-run", "--steps", "9")
    assert (code, err) == (0, "")
    assert "train 9 steps" in out
    assert skyctl("launch", GPT, "--dry-run", "-q")[2] == ""


def test_the_environment_counts_more_than_the_file(
    skyctl: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('[defaults]\ncluster = "home.yaml"\n')
    assert values(skyctl)["launch --cluster"] == ("home.yaml", "file", "defaults")
    assert values(skyctl, "launch")["launch --steps"] == (None, "default", None)
    monkeypatch.setenv("SKYCTL_CLUSTER", "cluster.yaml")
    assert values(skyctl, "launch")["launch --cluster"] == ("cluster.yaml", "environment", "SKYCTL_CLUSTER")
    assert skyctl("launch", GPT, "--dry-run")[0] == 0  # there is no home.yaml


def test_a_commands_table_counts_more_than_what_commands_share(skyctl: Run) -> None:
    write(
        "[defaults]\ntimeout = 20\nbatch-size = 64\n[probe]\ntimeout = 30.5\n[checkpoint.ls]\ntimeout = 1\n"
    )
    sources = values(skyctl)
    assert sources["check --timeout"] == (20.0, "file", "defaults")
    assert sources["probe --timeout"] == (30.5, "file", "probe")
    assert sources["checkpoint ls --timeout"] == (1.0, "file", "checkpoint.ls")
    assert sources["plan --batch-size"] == (64, "file", "defaults")
    assert not any(name.startswith("ps ") for name in sources)


def test_the_file_lies_next_to_the_cluster_file_that_is_named(
    skyctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("[launch]\nsteps = 5\n")
    write('[launch]\nsteps = 6\ndata = "book.txt"\nship = ["a", "b"]\n', "other/skyctl.toml")
    write("nodes: [{name: a, transport: local}]\n", "other/cluster.yaml")
    assert values(skyctl)["launch --steps"][0] == 5
    sources = values(skyctl, "launch", "-c", "other/cluster.yaml")
    assert sources["launch --steps"][0] == 6
    assert sources["launch --data"][0] == "other/book.txt"  # a path counts from the file's folder
    assert sources["launch --ship"][0] == ["a", "b"]
    monkeypatch.setenv("SKYCTL_CLUSTER", "other/cluster.yaml")
    assert values(skyctl, "launch")["launch --steps"][0] == 6


def test_two_files_are_refused_and_another_tools_is_none(skyctl: Run) -> None:
    write("[launch]\nsteps = 5\n")
    write('[project]\nname = "skyctl-user"\n', "pyproject.toml")
    assert values(skyctl)["launch --steps"][0] == 5
    write("[tool.skyctl.launch]\nsteps = 5\n", "pyproject.toml")
    code, out, err = skyctl("ps", "--json")
    assert code == 2
    assert "both skyctl.toml and [tool.skyctl] of pyproject.toml have defaults" in err
    assert json.loads(out)["error"]["exit_code"] == 2
    Path("skyctl.toml").unlink()
    write("is no TOML at all", "pyproject.toml")
    assert skyctl("config")[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lanch]\nsteps = 3", "skyctl.toml: lanch is no command; did you mean 'launch'?"),
        ("[bench_sync]\nrepeat = 3", "bench_sync is no command; did you mean 'bench-sync'?"),
        ("[lab.upp]\nname = 'x'", "lab.upp is no command; did you mean 'lab.up'?"),
        ("[lab]\nup = 3", "lab.up is no table"),
        ("lab = 3", "lab is no table"),
        ("launch = 3", "launch is no table"),
        ("steps = 3", "steps stands in no command's table\n  next: options stand in a table: [defaults]"),
        ("detach = true\n[launch]", "detach stands in no command's table"),
        ("[launch]\nstpes = 3", "launch.stpes is no option of launch; did you mean 'steps'?"),
        ("[launch]\nno-trial = true", "launch.no-trial is no option of launch; did you mean 'trial'?"),
        ("[launch]\nhelp = true", "launch.help is no option of launch"),
        ("[defaults]\nstpes = 3", "defaults.stpes is no option of any command; did you mean 'steps'?"),
        ("[launch]\nsteps = 'abc'", "launch.steps can't be 'abc': Input should be a valid integer"),
        ("[launch]\nsteps = '5'", "launch.steps is a number, not the text '5'"),
        ("[launch]\nsteps = 0", "launch.steps can't be 0: Input should be greater than or equal to 1"),
        ("[launch]\nsteps = 1.5", "launch.steps can't be 1.5"),
        ("[launch]\nsteps = true", "launch.steps takes N, not true"),
        ("[launch]\nsteps = [1]", "launch.steps takes N, not [1]"),
        ("[launch]\nhold = inf", "launch.hold takes SECONDS, not inf"),
        (f"[launch]\nsteps = {'9' * 5000}", "skyctl.toml is not TOML"),
        (f"[launch]\nsteps = 0x{'f' * 5000}", "launch.steps can't be"),
        ("[launch]\nship = [['a']]", "launch.ship takes NAME, not ['a']"),
        ("[launch]\ndetach = 1", "launch.detach is true or false, not 1"),
        ("[launch]\ndata = 3", "launch.data is a path, not 3"),
        ("[launch]\nhold = 1979-05-27", "launch.hold takes SECONDS, not 1979-05-27"),
        ("[launch]\nbatch-size = 3\nbatch_size = 3", "launch.batch_size stands there twice"),
        ("[defaults]\nrepeat = 0", "defaults.repeat can't be 0 (skyctl bench-sync)"),
        ("[launch", "skyctl.toml is not TOML"),
        ("[plan]\nassign = 'a=0:5'\nstrategy = 'even'", "--strategy does not go with --assign a=0:5"),
    ],
)
def test_what_cannot_be_is_refused_by_file_and_key(skyctl: Run, text: str, message: str) -> None:
    """Also where another command's table has it."""
    write(text)
    code, _, err = skyctl("plan", GPT)
    assert code == 2
    assert message in err
    assert skyctl("plan", "--help")[0] == 0


def test_text_that_is_no_text_is_refused(skyctl: Run) -> None:
    Path("skyctl.toml").write_bytes(b"[launch]\ndata = '\xff'\n")
    code, _, err = skyctl("ps")
    assert (code, err) == (2, "error: skyctl.toml is not UTF-8 text: byte 17\n")


def test_a_folder_that_is_not_there_has_no_file(skyctl: Run) -> None:
    for cluster in (
        "nowhere/cluster.yaml",
        "~nobody-of-that-name/cluster.yaml",
        "x" * 5000 + "/cluster.yaml",
    ):
        code, out, _ = skyctl("config", "-c", cluster)
        assert (code, out.splitlines()[0][:8]) == (0, "no file ")


def test_what_is_typed_settles_what_the_file_says(skyctl: Run) -> None:
    write('[plan]\nstrategy = "even"\nbatch-size = 8\nmicrobatches = 4\n')
    code, out, err = skyctl("plan", "--problem", str(PROBLEM), "--json", "--time-limit", "1")
    assert code == 0, err
    assert json.loads(out)["strategy"] == "even"
    assert err.startswith("from skyctl.toml: --strategy even, --microbatches 4\n")
    write('[launch]\nbatch-size = 64\nstrategy = "even"\nsteps = 7\n')
    write("{}", "plan.json")
    _, _, err = skyctl("launch", "plan.json")
    assert "from skyctl.toml: --steps 7\n" in err
    assert "has settled that" not in err
    _, _, err = skyctl("launch", "--resume", "nothing")
    assert "from skyctl.toml" not in err


def test_a_typed_option_outdoes_one_of_the_file_that_would_leave_it_unused(skyctl: Run) -> None:
    write("[launch]\ncheckpoint-every = 0\n")
    _, _, err = skyctl("launch", "missing.json", "--keep", "3")
    assert "does not go with" not in err
    assert "from skyctl.toml" not in err
    assert "from skyctl.toml: --checkpoint-every 0" in skyctl("launch", "missing.json")[2]


def test_a_checkpoints_cluster_is_its_runs() -> None:
    from skyctl.cli.defaults_file import read_defaults

    write('[defaults]\ncluster = "home.yaml"\n')
    application = typer.main.get_command(app)
    defaults = read_defaults(Path(), application, typer.Context(application))
    assert defaults is not None
    assert {"launch", "probe"} <= defaults.commands.keys()
    assert not any(name.startswith("checkpoint") for name in defaults.commands)


def test_what_a_plan_or_a_run_settles_is_known_by_name() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    flags = {flag: parameter.name for parameter in commands["launch"].params for flag in parameter.opts}
    assert {flags[flag] for flag in LaunchOptions().settled_by_plan()} <= set(PLANNED) <= names["launch"]
    assert set(RESUMED) <= names["launch"]
    assert set(PAPER_PARAMETERS) <= names["compare"]
    for name, rules in UNUSED.items():
        for rule in rules:
            typed = {rule.parameter: "x" if rule.value is None else str(rule.value)}
            assert all(other in settled_parameters(name, typed) for other in rule.others)
    assert "steps" in settled_parameters("compare", {"paper": True})
    assert "time_limit" not in settled_parameters("compare", {"paper": True})


def test_config_says_that_there_is_no_file(skyctl: Run) -> None:
    code, out, _ = skyctl("config")
    assert code == 0
    assert out.startswith("no file of defaults: neither skyctl.toml nor [tool.skyctl] in pyproject.toml\n")
    code, out, _ = skyctl("config", "--json")
    assert json.loads(out) == {"file": None, "values": []}
    code, _, err = skyctl("config", "lanch")
    assert code == 2
    assert "there is no command 'lanch'; did you mean 'launch'?" in err


def test_config_names_all_options_of_a_command(skyctl: Run) -> None:
    write("[checkpoint.export]\nstep = 3\n")
    sources = values(skyctl, "checkpoint", "export")
    assert sources["checkpoint export --step"] == (3, "file", "checkpoint.export")
    assert sources["checkpoint export --timeout"] == (15.0, "default", None)
    assert not any("--help" in name for name in sources)
