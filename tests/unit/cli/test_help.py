"""Help, options and the imports of the command line."""

import subprocess
import sys

import click
import msgspec
import pytest

from clusterkit.cli import VERBS
from clusterkit.cli import cli as group
from clusterkit.run.folder import RunFolder
from tests.unit.cli.commands import ANSWERS

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_help_lists_every_verb_with_one_line(cli):
    done = cli("--help")
    assert done.code == 0
    for verb, line in VERBS.items():
        assert f"  {verb} " in done.out
        assert line in done.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_example_and_described_options(verb):
    command = cli_command(verb)
    assert command.name == verb
    assert command.help
    assert f"clusterkit {verb}" in (command.epilog or "")
    assert (command.epilog or "").startswith("Example")
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def cli_command(verb):
    found = group.get_command(click.Context(group), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_accepts_both_help_flags(cli, verb, flag):
    done = cli(verb, flag)
    assert done.code == 0
    assert done.out.startswith(f"Usage: clusterkit {verb}")


@pytest.mark.parametrize("verb", ANSWERS)
def test_query_verbs_have_json_option(verb):
    assert "--json" in [flag for option in cli_command(verb).params for flag in option.opts]


def test_command_line_without_verb_prints_help(cli):
    assert cli() == cli("--help")
    assert cli().code == 0


def test_mistyped_verb_suggests_nearest_verb(cli):
    done = cli("sumbit")
    assert done.code == 125
    assert "No such command 'sumbit'. Did you mean submit?" in done.err


def test_program_option_before_dashes_is_refused_with_corrected_line(write_job, refused):
    said = refused("plan", write_job(), "--nodes", "2", "--steps", "3")
    assert said.startswith("error: No such option '--steps'.\n")
    assert "clusterkit plan --nodes 2 job.yaml -- --steps 3\n" in said
    assert "Did you mean --nodes?" in refused("plan", "job.yaml", "--nodez", "2")


@pytest.mark.parametrize("words", [("plan", "job.yaml", "--nodes"), ("init", "--hosts"),
                                   ("logs", "last", "--rank"), ("estimate", "--gpus")])  # fmt: skip
def test_missing_option_value_hints_at_command_help(refused, words):
    assert f" hint: clusterkit {words[0]} --help\n" in refused(*words)


@pytest.mark.parametrize("words", [
    ("convert", "-o", "no/job.yaml", "--", "python", "train.py"),
    ("convert", "--clusters-out", "no/c.yaml", "--", "torchrun", "train.py"),
])  # fmt: skip
def test_convert_refuses_output_in_missing_folder(refused, words, cwd):
    assert f"{words[2]}: there is no folder no\n hint: mkdir -p no\n" in refused(*words)
    assert not (cwd / "no").exists()


def test_plot_and_web_report_refuse_missing_folder(cli, ended, cwd):
    for words in (("metrics", "last", "--plot", "no/loss.png"), ("web", "last", "-o", "no/r.html")):
        done = cli(*words)
        assert done.code == 125
        assert "there is no folder no\n" in done.err
    assert not (cwd / "no").exists()


def test_plan_refuses_output_folder_that_cannot_be_made(cli, write_job):
    done = cli("plan", write_job(), "-o", "/proc/x")
    assert done.code == 125
    assert "name another folder" in done.err


def test_rm_removes_run_named_twice_once(cli, ended):
    assert cli("rm", "last", "last").out == f"{ended.id}\n"


def test_estimate_refuses_unknown_model_and_suggests_nearest(refused):
    said = refused("estimate", "llama-3-8c", "--gpus", "8", "--gpu-memory", "80GB")
    assert said.startswith("error: --model llama-3-8c: ")
    assert "did you mean llama-3-8b?" in said


def test_status_omits_training_share_for_short_run(cli, ended):
    folder = RunFolder(ended.path)
    status = folder.saved_status()
    for seconds, shown in ((0.6, False), (60.0, True)):
        finished = status.started_at + seconds
        folder.write_json("state.json", msgspec.structs.replace(status, finished_at=finished))
        assert ("% of the time was training" in cli("status", "last").out) == shown


def test_web_refuses_unresolvable_host(cli):
    done = cli("web", "--host", "nope.invalid")
    assert done.code == 125
    assert done.err.startswith("error: --host nope.invalid: ")
    assert "can be reached" not in done.err


def test_unknown_option_is_refused(cli):
    done = cli("plan", "--nodez", "2")
    assert done.code == 125
    assert "No such option" in done.err


def test_version_option_prints_version(cli):
    import clusterkit

    assert cli("--version").out.strip() == f"clusterkit, version {clusterkit.__version__}"


HEAVY = {
    "torch", "rich", "yaml", "matplotlib", "hypothesis", "subprocess", "concurrent.futures",
    "tempfile", "secrets", "importlib.resources", "importlib.metadata",
    "clusterkit.lifecycle.launch", "clusterkit.lifecycle.supervisor", "clusterkit.transport",
    "clusterkit.assemble", "clusterkit.jobfile.command", "clusterkit.agent",
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "light"),
    [
        (["--help"], {"msgspec", "clusterkit.api"}),
        (["ls"], {"clusterkit.output.tracebacks"}),
        (["status", "last"], {"clusterkit.output.tracebacks"}),
        (["logs", "last"], set()),
    ],
)
def test_help_and_query_verbs_start_without_heavy_imports(verb, light, ended):
    code = (
        "import sys\nfrom clusterkit.cli import main\n"
        f"try: main({verb})\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY | light} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_orchestrator_imports_without_torch():
    code = (
        "import sys, pkgutil, importlib, clusterkit\n"
        "for m in pkgutil.walk_packages(clusterkit.__path__, 'clusterkit.'):\n"
        "    if not m.name.startswith(('clusterkit.runtime', 'clusterkit.__main__')):\n"
        "        importlib.import_module(m.name)\n"
        "print(sorted({'torch', 'deepspeed', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
