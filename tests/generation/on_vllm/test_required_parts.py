"""Another vLLM than those that were tried: let through with a warning, or refused by what it lacks.

Its sources are made here, out of the list of what is asked, with one part left out at a time.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm import arguments, generator, required_parts, versions
from rloo_cli.generation.vllm.required_parts import Parts
from rloo_cli.inspection.environment import installed_packages
from rloo_cli.inspection.environment.check_lines import CheckLines

OTHER = "0.34.1"
SECTIONS = ("colocate", "server")
LLM = "vllm.entrypoints.llm:LLM"
KINDS = (  # classes of which the fields are asked for
    "vllm.engine.arg_utils:EngineArgs", "vllm.outputs:CompletionOutput",
    "vllm.logprobs:FlatLogprobs", "vllm.lora.request:LoRARequest",
    "vllm.sampling_params:SamplingParams", "vllm.sampling_params:RequestOutputKind",
)  # fmt: skip


def write_vllm(folder: Path, parts: Parts) -> None:
    """Sources of a vLLM that has these parts and nothing else."""
    modules: dict[str, dict[str, list[str]]] = {}
    for name, wanted in parts.items():
        source, _, inner = name.partition(":")
        source = source if "." in source else versions.MOVED_VLLM_MODULES[source][1]
        owner, _, method = inner.partition(".")
        lines = modules.setdefault(source, {}).setdefault(owner, [])
        if method:
            lines.append(f"    def {method}(self, {', '.join(wanted)}): ...")
        elif name in KINDS:
            lines += [f"    {field}: int = 0" for field in wanted] or ["    ..."]
        else:
            lines.append(f"def {owner}({', '.join(wanted)}): ...")
    for module, owners in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "\n".join(
                "\n".join(lines if lines[0].startswith("def") else [f"class {owner}:", *lines])
                for owner, lines in owners.items()
            )
        )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a vLLM of version OTHER with these parts."""

    def install(parts: Parts) -> None:
        write_vllm(tmp_path, parts)
        monkeypatch.setattr(required_parts, "vllm_folder", lambda: tmp_path / "vllm")
        required_parts._module_tree.cache_clear()
        for module in (arguments, versions):
            monkeypatch.setattr(module, "installed_vllm_version", lambda: OTHER)

    yield install
    required_parts._module_tree.cache_clear()


def refusals(section: str, *words: str) -> list[Any]:
    given = ["+recipe=smoke", f"generation=vllm_{section}", *words]
    run = check.check_config(compose_config(given))
    return [p for p in arguments.engine_problems(run) if p.where == "generation.backend"]


def parts_of(section: str, sleep: str = "none") -> Parts:
    return required_parts.required_parts(OTHER, section, sleep)


@pytest.mark.parametrize("section", SECTIONS)
def test_another_version_that_has_every_part_is_let_through(section: str, installed: Any) -> None:
    installed(parts_of(section))
    assert refusals(section) == []
    warning = required_parts.untried_warning(OTHER)
    assert OTHER in warning and "untested" in warning and "0.32 on CPUs" in warning


LOST = [(section, name) for section in SECTIONS for name in parts_of(section)]


@pytest.mark.parametrize(("section", "name"), LOST)
def test_a_part_that_is_missing_is_named(section: str, name: str, installed: Any) -> None:
    parts = parts_of(section)
    installed({key: wanted for key, wanted in parts.items() if key != name})
    (problem,) = refusals(section)
    assert problem.what.startswith(f"vLLM {OTHER} lacks {name.partition(':')[2]} (")
    assert "pip install 'rloo-cli[" in problem.fix and "0.32" in problem.why


def test_a_parameter_that_is_missing_is_named(installed: Any) -> None:
    installed(parts_of("colocate") | {f"{LLM}.finish_weight_update": ()})
    (problem,) = refusals("colocate")
    assert problem.what == f"vLLM {OTHER} lacks LLM.finish_weight_update(weight_version)"


def test_a_field_that_is_missing_is_named(installed: Any) -> None:
    kept = tuple(n for n in required_parts.COMMON_PARTS[KINDS[0]] if n != "logprobs_mode")
    installed(parts_of("colocate") | {KINDS[0]: kept})
    (problem,) = refusals("colocate")
    assert problem.what == f"vLLM {OTHER} lacks EngineArgs(logprobs_mode)"


def test_a_part_is_only_asked_for_where_the_run_uses_it(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: ["GPU-1"])
    installed(parts_of("colocate", "weights"))
    assert refusals("colocate", "generation.colocate.sleep=weights") == []
    (problem,) = refusals("colocate", "generation.colocate.sleep=kv")
    assert "lacks LLM.release_kv_cache_memory" in problem.what


def test_a_method_may_come_from_a_class_of_another_module(installed: Any, tmp_path: Path) -> None:
    installed(parts_of("colocate"))
    file = tmp_path / "vllm" / "entrypoints" / "llm.py"
    file.with_name("base.py").write_text(file.read_text().replace("class LLM", "class Base"))
    file.write_text("from vllm.entrypoints.base import Base\nclass LLM(Base): ...\n")
    assert refusals("colocate") == []
    file.with_name("base.py").write_text("class Base: ...\n")
    required_parts._module_tree.cache_clear()
    assert "LLM.get_weight_version" in refusals("colocate")[0].what


def test_versions_that_were_tried_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(required_parts, "vllm_folder", lambda: None)
    for version in ("0.32.0", "0.32.1+cpu", "0.22.1"):
        assert required_parts.missing_parts(version, "server") == []
        assert required_parts.untried_warning(version) == ""
    assert required_parts.untried_warning("0.32.0", on_gpu=False) == ""
    assert required_parts.untried_warning("0.22.1", on_gpu=True) == ""
    assert "untested" in required_parts.untried_warning("0.32.0", on_gpu=True)
    assert "untested" in required_parts.untried_warning("0.22.1", on_gpu=False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("section", SECTIONS)
def test_the_installed_vllm_has_every_part(section: str) -> None:
    parts = required_parts.required_parts(versions.installed_vllm_version(), section, "kv")
    assert list(required_parts._lacking(parts)) == []


def test_a_colocated_engine_of_another_version_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Started(Exception):
        pass

    def start(*given: object) -> None:
        raise Started

    noted: list[str] = []
    run = check.check_config(
        compose_config(["+recipe=smoke", "model.path=make:tiny", "generation=vllm_colocate"])
    )
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=None)]))
    monkeypatch.setattr(generator, "child_gpu_environment", lambda device, count: {})
    monkeypatch.setattr(generator, "ColocatedEngine", start)
    for version, count in (("0.32.0", 0), (OTHER, 1)):
        monkeypatch.setattr(versions, "installed_vllm_version", lambda v=version: v)
        with pytest.raises(Started):
            generator.build_colocate_generator(model, None, run, 2048, tmp_path, noted.append)
        assert len(noted) == count
    assert noted[0].startswith("warning: vLLM 0.34.1") and "untested" in noted[0]


def test_doctor_warns_of_another_version_and_names_what_it_lacks(installed: Any) -> None:
    both = parts_of("colocate") | parts_of("server")
    for parts, said in (
        (both, "untested"),
        ({n: w for n, w in both.items() if "get_weight_version" not in n},
         "lacks, for generation=vllm_colocate: LLM.get_weight_version"),
    ):  # fmt: skip
        installed(parts)
        lines = CheckLines()
        installed_packages.check_vllm_version(lines)
        (line,) = lines.lines
        assert line.status == "warn" and OTHER in line.found and said in line.found
