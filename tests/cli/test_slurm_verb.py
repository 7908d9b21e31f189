"""`rloo slurm`: the script it prints, the job it sends, and what it refuses."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from slurm_cases import NODES, Job, Slurm

from rloo_cli.cli import slurm as verb
from rloo_cli.cli.slurm_cluster import parse_slurm_time
from rloo_cli.cli.slurm_template import DEFAULT_LEAD_S, fill_batch_script
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.schema import SlurmConfig
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

SERVED = ("generation=vllm_server", "generation.server.num_nodes=1")


def options(text: str) -> dict[str, str]:
    """The #SBATCH lines of a script."""
    lines = [line.split("--", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def words(text: str) -> list[str]:
    """What the script is about, as bash reads it."""
    line = next(line for line in text.splitlines() if line.startswith("set -- "))
    return shlex.split(line)[2:]


def rendered(*given: str) -> str:
    options = parse_verb("slurm", ["render", *given])
    text = fill_batch_script(verb.job_from_args(options.kind, options.run, options.overrides))
    ended = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    return text


# Rendering, which needs no Slurm.


def test_a_recipe_fills_a_script_without_torch_or_slurm(
    rloo_without_torch: Rloo, sentence: Callable[..., None]
) -> None:
    ended = rloo_without_torch("slurm", "render", "+recipe=smoke", "algorithm.beta=0.1")
    assert ended.code == 0, ended.said
    assert words(ended.out) == ["smoke", "algorithm.beta=0.1", "$@"]
    given = options(ended.out)
    assert given["job-name"] == "smoke" and given["nodes"] == "1"
    assert given["output"] == "runs/slurm/%x-%j.log" and given["signal"] == f"USR1@{DEFAULT_LEAD_S}"
    # Slurm opens the log before the script begins: its folder has to be there.
    assert rloo_without_torch.left() == ["runs", "runs/slurm"]
    sentence(ended.err)


def test_a_log_folder_that_cannot_be_made_or_is_there_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for output in ("logs/%x/%j.log", "%j.log"):  # Slurm makes no folder of a name that it fills in
        limit = "slurm.time=04:00:00"
        assert verb.run(["render", "+recipe=smoke", limit, f"slurm.output={output}"]) == 0
        assert capsys.readouterr().err == "" and [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    assert verb.run(["render", "+recipe=smoke", "slurm.output=file/logs/%j.log"]) == 0
    assert "mkdir -p file/logs" in capsys.readouterr().err


def test_what_the_config_says_of_the_job_is_in_its_head() -> None:
    text = rendered(
        "+recipe=smoke", "name=mine", "slurm.partition=gpu", "slurm.account=me", "slurm.qos=long",
        "slurm.time=1-12:00:00", "slurm.cpus_per_task=16", "slurm.exclusive=false",
        "slurm.mem=200G", "slurm.lead_s=90", "slurm.options.constraint=a100",
        "slurm.options.contiguous=null",
        "slurm.output=/logs/%j",
    )  # fmt: skip
    given = options(text)
    assert given | {
        "job-name": "mine", "partition": "gpu", "account": "me", "qos": "long", "mem": "200G",
        "time": "1-12:00:00", "cpus-per-task": "16", "gpus-per-node": "1", "signal": "USR1@90",
        "constraint": "a100", "contiguous": "", "output": "/logs/%j",
    } == given  # fmt: skip
    assert "#SBATCH --exclusive" not in text
    assert words(text) == ["smoke", "name=mine", "$@"]


def test_nodes_and_gpus_follow_from_processes_and_servers() -> None:
    spread = ("distributed=zero3", "distributed.num_nodes=4", "distributed.num_processes=8")
    text = rendered("+recipe=tldr_1b", *spread, *SERVED)
    given = options(text)
    assert given["nodes"] == "5" and given["gpus-per-node"] == "8"
    assert "RLOO_SERVE_NODES=1\n" in text
    assert words(text) == [
        "tldr_1b", "distributed=zero3", "distributed.num_processes=8", "generation=vllm_server",
        "$@",
    ]  # fmt: skip
    alone = options(rendered("+recipe=tldr_1b"))
    asked = ("gpus-per-node", "cpus-per-task", "mem")
    assert [alone[name] for name in asked] == ["1", "8", "64G"]
    whole = rendered("+recipe=tldr_1b", "slurm.exclusive=true")
    assert options(whole)["gpus-per-node"] == "1" and options(whole)["mem"] == "0"
    assert "#SBATCH --exclusive" in whole and "cpus-per-task" not in options(whole)
    none = options(rendered("+recipe=tldr_1b", "slurm.gpus_per_node=0"))
    assert not {*asked} & {*none}
    assert options(rendered("train", "+recipe=tldr_1b", *spread[:2]))["nodes"] == "4"


def test_a_run_of_several_processes_says_that_one_gpu_is_requested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = "slurm.time=04:00:00"
    spread = ["render", "+recipe=smoke", "distributed=fsdp2", limit]
    for words in (spread, ["render", "sweep", "+recipe=smoke", "distributed=ddp", "seed=1,2"]):
        assert verb.run(words) == 0
        assert "distributed.num_processes=8" in capsys.readouterr().err
    for number in ("distributed.num_processes=2", "slurm.gpus_per_node=1"):
        assert verb.run([*spread, number]) == 0
        assert capsys.readouterr().err == ""
    for number, note in (("8", "reserves 8 GPUs per node, and the run uses 1"), ("1", "")):
        assert verb.run(["render", "+recipe=smoke", f"slurm.gpus_per_node={number}", limit]) == 0
        assert (note in (said := capsys.readouterr().err)) and bool(said) == bool(note)


@pytest.mark.parametrize("limit", ["00:05:00", "4:59", "0-00:05"])
def test_a_limit_in_which_each_attempt_would_be_told_to_stop_at_once_is_not_rendered(
    limit: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        verb.run(["render", "+recipe=smoke", f"slurm.time='{limit}'"])
    assert refused.value.problems[0].where == "slurm.time"
    assert verb.run(["render", "+recipe=smoke", f"slurm.time='{limit}'", "slurm.lead_s=60"]) == 0


def test_lines_of_setup_and_the_most_requeues_stand_before_the_run() -> None:
    setup = "slurm.setup=['module load cuda','source env.sh']"
    text = rendered("+recipe=smoke", setup, "slurm.max_requeues=3")
    lines = text.splitlines()
    at = lines.index("module load cuda")
    assert lines[at : at + 3] == ["module load cuda", "source env.sh", "max_requeues=3"]
    assert at < next(n for n, line in enumerate(lines) if line.startswith("set -- smoke"))
    assert "${SLURM_RESTART_COUNT:-0} < ${max_requeues:-100}" in text


def test_a_kind_that_serves_takes_a_server_whatever_the_recipe_samples_with() -> None:
    given = options(rendered("train_and_serve", "+recipe=smoke"))
    assert given["nodes"] == "2"


def test_the_lead_time_is_what_a_step_and_a_save_took(tmp_path: Path) -> None:
    run = tmp_path / "smoke"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"save_seconds": 40.5}))
    rows = [{"step": 0}, {"step": 1, "step_time": 10.0}, {"step": 2, "step_time": 31.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = options(rendered("+recipe=smoke", f"root={tmp_path}"))
    assert given["signal"] == "USR1@132"  # 31 + 40.5 + 60, rounded up
    (run / "metrics.jsonl").write_bytes(b"\xa1\n{}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        rendered("+recipe=smoke", f"root={tmp_path}")


def test_a_sweep_is_an_array_of_its_combinations() -> None:
    text = rendered("sweep", "+recipe=smoke", "algorithm.beta=0.01,0.05", "seed=1,2", "max_steps=3")
    given = options(text)
    assert given["array"] == "1-4" and given["output"] == "runs/slurm/%x-%A_%a.log"
    assert words(text) == ["smoke", "$runs", "max_steps=3", "$@"]
    line = next(line for line in text.splitlines() if line.startswith("printf"))
    assert shlex.split(line)[2:6] == [
        f"algorithm.beta={beta} seed={seed}" for beta in ("0.01", "0.05") for seed in (1, 2)
    ]


def test_a_word_that_a_shell_would_read_is_quoted() -> None:
    text = rendered("+recipe=smoke", "data.template='$(touch x) {prompt}'")
    assert words(text)[1] == "data.template='$(touch x) {prompt}'"


def test_what_the_page_says_can_be_said() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "scale.md").read_text()
    lines = page.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("rloo slurm ")]
    rendering = [line for line in words if line[2] in ("render", "submit")]
    assert len(rendering) == 5
    for line in rendering:
        assert rendered(*line[3:])
    sent = [line for line in lines if line.startswith("sbatch ")]
    assert len(sent) == 5
    for name in re.findall(r"scripts/slurm/(\w+\.sbatch)", page):
        assert (paths.SLURM / name).is_file()
    for section in re.findall(r"slurm\.(\w+)", page):
        assert section in SlurmConfig.model_fields or section == "md"


REFUSED = {
    "": "rloo slurm",
    "rendr +recipe=smoke": "rloo slurm rendr",
    "render serve +recipe=smoke": "'serve'",
    "render --nodes=3 +recipe=smoke": "--nodes",
    "render": "recipe",
    "render sweep +recipe=smoke": "sweep",
    "render +recipe=smoke algorithm.num_generation=4": "algorithm.num_generation",
    "render +recipe=smoke slurm.time=soon": "slurm.time",
    "render +recipe=smoke slurm.time=14400": "slurm.time = 14400",
    "render +recipe=smoke slurm.options={Rm:1}": "slurm.options",
    f"render train +recipe=smoke {' '.join(SERVED)}": "generation.server.num_nodes",
    "render sweep +recipe=smoke algorithm.beta=0.1,-1": "algorithm.beta",
    f"render +recipe=smoke {SERVED[0]} generation.server.num_nodes=1"
    " generation.server.base_url=http://a:1": "generation.server.num_nodes",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_makes_no_job_is_refused(line: str, sentence: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as caught:
        verb.run(line.split())
    problem = assert_refused(caught, key=REFUSED[line])
    if "command line:" not in problem.where:  # a rule of any config
        sentence(caught)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1800), ("2:30", 150), ("1:00:00", 3600), ("1-12", 129600), ("2-0:0:1", 172801),
     ("infinite", None), ("n/a", None)],
)  # fmt: skip
def test_slurms_times_are_read(text: str, expected: int | None) -> None:
    assert parse_slurm_time(text) == expected


# Sending it.


def test_without_sbatch_nothing_is_sent(rloo: Rloo, sentence: Callable[..., None]) -> None:
    ended = rloo("slurm", "submit", "+recipe=smoke", PATH="/usr/bin:/bin")
    assert_refused(ended, 3, key="sbatch", fix="rloo slurm render")
    sentence(ended)
    assert rloo.left() == []


UNFIT = {  # BM-7: words -> the numbers and names that are said, from sinfo's facts
    "slurm.partition=hgih": ["'hgih'", "slurm.partition=high", "3 nodes"],
    "slurm.partition=small train_and_serve": ["2 nodes: 1 to train", "small (1 node, 4 min)"],
    "distributed=ddp distributed.num_nodes=4": ["4 nodes: 4 to train"],
    "slurm.partition=small": ["4 min"],
    "slurm.time=1:30:00": ["slurm.time = 1:30:00"],
}


@pytest.mark.slow_but("slurm.partition=hgih", "slurm.time=1:30:00")
@pytest.mark.slurm
@pytest.mark.parametrize("line", UNFIT)
def test_a_job_that_could_never_run_is_refused_with_the_clusters_facts(
    slurm: Slurm, line: str, tmp_path: Path
) -> None:
    ended = slurm.command("rloo", "slurm", "submit", "+recipe=smoke", f"root={tmp_path / 'runs'}",
                          *line.split())  # fmt: skip
    assert ended.returncode == 3, ended.stdout
    for part in (*UNFIT[line], "sinfo: low (3 nodes, 1 h); high"):
        assert part in ended.stdout, ended.stdout
    assert not (tmp_path / "runs").exists() and slurm.run("squeue", "--noheader") == ""


@pytest.mark.slurm
def test_a_job_is_sent_and_its_number_and_log_are_said(slurm: Slurm, tmp_path: Path) -> None:
    root, stand_in = tmp_path / "runs", tmp_path / "rloo"
    stand_in.write_text('#!/bin/sh\necho "$@"\nexit 4\n')
    stand_in.chmod(0o700)
    path = f"{tmp_path}:{slurm.environment['PATH']}"
    words = ("+recipe=smoke", f"root={root}", "seed=3", "slurm.gpus_per_node=0")
    ended = slurm.command("rloo", "slurm", "submit", *words, PATH=path)
    assert ended.returncode == 0, ended.stdout
    first, *rest = [line for line in ended.stdout.splitlines() if not line.startswith("note:")]
    number = first.split()[1].rstrip(":")
    assert first == f"job {number}: train on 1 node"
    assert f"  log   {root}/slurm/smoke-{number}.log" in rest
    facts = Job(slurm, number).wait(60)
    assert facts["ExitCode"] == "4:0" and facts["NodeList"] == NODES[0]
    log = (root / "slurm" / f"smoke-{number}.log").read_text()
    assert "attempt 1, on" in log and f"train +recipe=smoke root={root} seed=3\n" in log


@pytest.mark.slurm
def test_what_sbatch_refuses_is_said_in_its_words(slurm: Slurm, tmp_path: Path) -> None:
    ended = slurm.command("rloo", "slurm", "submit", "+recipe=smoke", f"root={tmp_path / 'runs'}",
                          "slurm.gpus_per_node=8")  # fmt: skip
    assert ended.returncode == 3 and "sbatch: error:" in ended.stdout
