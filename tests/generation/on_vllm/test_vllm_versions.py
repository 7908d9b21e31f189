"""What an older vLLM lacks, and what stands in for it: held to the names and parameters of 0.22.1
as its own sources have them (`record_vllm.py`). No such vLLM is installed here.
"""

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm import (
    arguments,
    lora_slot,
    required_parts,
    sampling_params,
    transfer_gloo,
    transfer_send,
    versions,
)
from rloo_cli.generation.vllm.weights import ModelWeightSource, TensorMeta
from rloo_cli.utils.errors import GenerationError

RECORD = json.loads((Path(__file__).parent / "vllm_0221.json").read_text())
OLD, NEW = "0.22.1", "0.32.0"
GPU = "GPU-1"


def recorded(name: str) -> list[str] | None:
    """Parameters or fields of `module:name` in 0.22.1; None where it has no such thing."""
    module, _, inner = name.partition(":")
    found = RECORD["modules"][module]
    return None if found is None else found[inner]


def call_of(name: str, answer: Any = None) -> Callable[..., Any]:
    """A method that takes what 0.22.1's takes and nothing else; its calls are in `.calls`."""
    names = [n for n in recorded(name) or [] if n not in ("self", "cls")]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [
        inspect.Parameter(n, kind, default=None) for n in names if not n.startswith("*")
    ]  # which of them have a default is not recorded
    signature = inspect.Signature(given)

    def called(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        called.calls.append(dict(bound.arguments))  # type: ignore[attr-defined]
        return answer(**bound.arguments) if callable(answer) else answer

    called.calls = []  # type: ignore[attr-defined]
    return called


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 0.22.1 were installed."""
    monkeypatch.setattr(versions, "installed_vllm_version", lambda: OLD)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: OLD)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of this name, with this in it."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


# Names of modules, arguments, environment.


def test_modules_that_moved_are_where_the_record_has_them() -> None:
    for new, *_, before in versions.MOVED_VLLM_MODULES.values():
        assert RECORD["modules"][new] is None and RECORD["modules"][before] is not None
    for name in ("entry:build_app", "entry:run_server_worker", "cli_args:make_arg_parser",
                 "cli_args:validate_parsed_serve_args", "api_utils:with_cancellation"):  # fmt: skip
        module, _, wanted = name.partition(":")
        assert recorded(f"{versions.MOVED_VLLM_MODULES[module][-1]}:{wanted}") is not None
    found = recorded("vllm.entrypoints.openai.api_server:run_server_worker")
    assert found is not None and found[:3] == ["listen_address", "sock", "args"]


def test_a_module_is_taken_by_whichever_name_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.MOVED_VLLM_MODULES, "entry", ("gone_before.entry", "older_place"))
    stand_in(monkeypatch, "older_place", here=True)
    assert versions.import_vllm_module("entry").here
    stand_in(monkeypatch, "newer_place", here=2)
    monkeypatch.setitem(versions.MOVED_VLLM_MODULES, "entry", ("newer_place", "older_place"))
    assert versions.import_vllm_module("entry").here == 2


def test_a_module_that_cannot_load_is_not_taken_for_one_that_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_there.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(versions.MOVED_VLLM_MODULES, "entry", ("half_there", "json"))
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        versions.import_vllm_module("entry")


@pytest.mark.parametrize("backend", ["vllm_server", "vllm_colocate"])
@pytest.mark.parametrize("gpus", [[GPU], []])
def test_every_argument_of_an_engine_is_known_to_it(
    backend: str, gpus: list[str], old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: gpus)
    words = ["+recipe=smoke", f"generation={backend}", "model.path=make:tiny", "+model/lora=lora"]
    words = words[:-1]
    run = check.check_config(compose_config(words))
    keys = run.generation.own_keys
    given = arguments.build_engine_arguments(run, keys, 0)
    assert given["worker_extension_cls"] == versions.WORKER_CALLS
    known = set(recorded("vllm.engine.arg_utils:EngineArgs") or [])
    assert (
        given.keys() | {"enable_lora", "max_loras", "max_lora_rank", "enable_sleep_mode"} <= known
    )
    assert {"data_parallel_size", *arguments.SAME_NAME_KEYS} <= known
    assert recorded("vllm.config.weight_transfer:WeightTransferConfig") == ["backend"]
    ours = {
        n for n in arguments.engine_environment(run.model, run.generation) if n.startswith("VLLM_")
    }
    ours |= {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_BATCH_INVARIANT", arguments.PICKLE_VARIABLE}
    assert ours - {"VLLM_API_KEY"} <= set(RECORD["variables"])


def test_an_engine_of_today_is_started_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.old_engine_arguments(NEW) == versions.old_engine_arguments("") == {}
    assert versions.supported_server_arguments({"enable_scale_out": True}, NEW) == {
        "enable_scale_out": True
    }
    assert versions.with_weight_labels(llm := SimpleNamespace(get_weight_version=None)) is llm


def test_an_argument_of_the_server_that_it_lacks_is_left_out() -> None:
    module = "vllm.entrypoints.openai.cli_args"
    known = {*(recorded(f"{module}:BaseFrontendArgs") or [])}
    known |= {*(recorded(f"{module}:FrontendArgs") or [])}
    ours = [
        "host", "port", "enable_scale_out", "disable_fastapi_docs", "middleware", "lora_modules",
        "disable_uvicorn_access_log", "uvicorn_log_level", "log_error_stack",
    ]  # fmt: skip
    left = versions.supported_server_arguments(dict.fromkeys(ours), OLD)
    assert left.keys() == {*ours} - {"enable_scale_out"} and left.keys() <= known
    assert recorded("vllm.entrypoints.openai.models.protocol:LoRAModulePath")[:2] == [  # type: ignore[index]
        "name", "path",
    ]  # fmt: skip


def test_every_sampling_parameter_is_known_to_it() -> None:
    run = check.check_config(compose_config(["+recipe=smoke", "generation=vllm_colocate"]))
    asked = sampling_params.completion_params(run.generation, [1], 7, False, 0.5)
    known = set(recorded("vllm.sampling_params:SamplingParams") or [])
    assert asked.keys() | {"flat_logprobs", "output_kind"} <= known
    assert "FINAL_ONLY" in (recorded("vllm.sampling_params:RequestOutputKind") or [])
    flat = set(recorded("vllm.logprobs:FlatLogprobs") or [])
    assert {"start_indices", "token_ids", "logprobs"} <= flat
    add = recorded("vllm.v1.engine.llm_engine:LLMEngine.add_request") or []
    assert add[1:4] == ["request_id", "prompt", "params"] and "lora_request" in add


# What it cannot do.


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["generation=vllm_colocate", "generation.colocate.sleep=kv"], "generation.colocate.sleep"),
        (["generation=vllm_colocate", "generation.colocate.sleep=weights"], None),
        (["generation=vllm_colocate", "model.lm_head_fp32=true"], "model.lm_head_fp32"),
        (["generation=vllm_server", "model.lm_head_fp32=true"], "model.lm_head_fp32"),
        (["generation=vllm_server", "generation.server.api_server_count=2"],
         "generation.server.api_server_count"),
        (["generation=vllm_server", "generation.server.api_server_count=1"], None),
        (["generation=vllm_server"], None),
    ],
)  # fmt: skip
def test_what_cannot_exist_there_is_refused_with_its_key_and_the_version(
    words: list[str], where: str | None, old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU])
    run = check.check_config(compose_config(["+recipe=smoke", *words]))
    problems = list(arguments.engine_problems(run))
    assert [p.where for p in problems] == ([] if where is None else [where])
    assert all(OLD in p.why and "0.32" in p.what for p in problems)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: NEW)
    assert not list(arguments.engine_problems(run))


def test_what_is_refused_is_what_the_record_lacks() -> None:
    assert recorded("vllm.entrypoints.llm:LLM.release_kv_cache_memory") is None
    assert recorded("vllm.entrypoints.llm:LLM.sleep") == ["self", "level", "mode"]
    assert recorded("vllm.entrypoints.llm:LLM.wake_up") == ["self", "tags"]


def test_the_record_has_what_an_older_vllm_is_asked_for() -> None:
    for section in ("colocate", "server"):
        for name, wanted in required_parts.required_parts(OLD, section, "weights").items():
            module, _, inner = name.partition(":")
            modules = versions.MOVED_VLLM_MODULES.get(module, (module,))
            (found,) = [r for m in modules if (r := recorded(f"{m}:{inner}")) is not None]
            assert set(wanted) <= set(found), name


# Inside its workers.


def test_no_method_that_its_workers_gain_is_one_of_theirs() -> None:
    gained = {n for n in dir(versions.WorkerCalls) if not n.startswith("__")}
    assert not gained & set(RECORD["worker"])
    assert all(n.removeprefix("_").startswith("rloo_") for n in gained)


class Old:
    """0.22.1's base class of transfer engines, by its record."""

    def __init__(self, config: Any, parallel_config: Any, model: Any):
        self.config, self.parallel_config, self.model = config, parallel_config, model

    init_info_cls: Any = dict
    update_info_cls: Any = dict

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)

    def receive_weights(self, update_info: Any, load_weights: Any) -> None:
        load_weights([("a", update_info)])


def test_the_base_class_here_is_that_of_the_record() -> None:
    for name in ("__init__", "parse_init_info", "parse_update_info", "receive_weights"):
        theirs = recorded(f"vllm.distributed.weight_transfer.base:WeightTransferEngine.{name}")
        assert list(inspect.signature(getattr(Old, name)).parameters) == theirs
    for name in ("start_weight_update", "finish_weight_update"):
        key = f"vllm.distributed.weight_transfer.base:WeightTransferEngine.{name}"
        assert recorded(key) is None


def reload_module(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    stand_in(
        monkeypatch,
        versions.RELOAD_PACKAGE,
        initialize_layerwise_reload=lambda model: calls.append(("start", model)),
        finalize_layerwise_reload=lambda model, how: calls.append(("finish", model, how)),
    )


class Worker(versions.WorkerCalls):
    """One with an engine of weights, on the CPU."""

    def __init__(self, engine: Any):
        self.weight_transfer_engine, self.device = engine, None
        self.model_runner = SimpleNamespace(device=torch.device("cpu"))
        self.vllm_config = SimpleNamespace(model_config="the model's config")


def test_an_update_has_the_life_and_the_label_of_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    reload_module(monkeypatch, calls)

    class Engine(versions.TransferEngineShim, Old):
        def init_transfer_engine(self, init_info: Any) -> None:
            calls.append(init_info)

    model = SimpleNamespace(load_weights=lambda weights: calls.append([*weights]))
    worker = Worker(Engine(None, None, model))
    assert worker.rloo_weights() == "default"
    for closed in (worker.rloo_finish, lambda: worker.rloo_update({})):
        with pytest.raises(RuntimeError, match="start_weight_update comes first"):
            closed()
    worker.rloo_init({"port": 3})
    worker.rloo_start()
    assert worker.rloo_weights() == versions.UPDATE_UNDER_WAY
    with pytest.raises(RuntimeError, match="finish_weight_update comes first"):
        worker.rloo_start()
    worker.rloo_update({"x": 1})
    worker.rloo_finish("run:1")
    assert worker.rloo_weights() == "run:1"
    assert calls == [
        {"port": 3}, ("start", model), [("a", {"x": 1})], ("finish", model, "the model's config"),
    ]  # fmt: skip
    worker.rloo_start()
    worker.rloo_finish()
    assert worker.rloo_weights() == "run:1"  # as in 0.32


def test_an_update_that_is_refused_stays_open_until_it_is_closed_and_has_no_label() -> None:
    refused = [ValueError("weights are missing: a"), None]

    def finish() -> None:
        if (error := refused.pop(0)) is not None:
            raise error

    worker = Worker(SimpleNamespace(start_weight_update=lambda: None, finish_weight_update=finish))
    worker.rloo_label = "run:1"
    worker.rloo_start()
    with pytest.raises(ValueError, match="missing"):
        worker.rloo_finish("run:2")
    assert worker.rloo_weights() == versions.UPDATE_UNDER_WAY
    worker.rloo_finish()
    assert worker.rloo_weights() == versions.UPDATE_REFUSED


def test_an_update_that_fails_on_the_way_is_closed_with_its_layers() -> None:
    calls: list[str] = []

    def broken(info: Any) -> None:
        raise ValueError("no such weight")

    worker = Worker(SimpleNamespace(
        start_weight_update=lambda: calls.append("start"), parse_update_info=dict,
        receive_weights=broken, finish_weight_update=lambda: calls.append("finish"),
    ))  # fmt: skip
    for _ in range(2):
        worker.rloo_start()
        with pytest.raises(ValueError, match="no such weight"):
            worker.rloo_update({})
        assert worker.rloo_weights() == versions.UPDATE_REFUSED
    assert calls == ["start", "finish"] * 2


def test_layers_and_names_are_told_by_whichever_vllm_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "vllm.model_executor.layers.attention"
    assert recorded(f"{module}:is_deferred_attention_layer") is None
    assert RECORD["assigned"][f"{versions.RELOAD_PACKAGE}.meta"] == ["SKIP_TENSORS"]
    assert recorded("vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper") is None
    stand_in(monkeypatch, module, Attention=int, MLAAttention=str)
    stand_in(monkeypatch, f"{versions.RELOAD_PACKAGE}.meta", SKIP_TENSORS={"a"})
    assert (
        versions.is_deferred_layer(3)
        and versions.is_deferred_layer("x")
        and not versions.is_deferred_layer(0.5)
    )
    assert versions.uncounted_parameters() == {"a"}
    mapper = SimpleNamespace()
    assert versions.rename_mapper(mapper) is mapper
    stand_in(monkeypatch, module, is_deferred_attention_layer=lambda layer: layer == 0.5)
    stand_in(
        monkeypatch, f"{versions.RELOAD_PACKAGE}.meta", SKIP_TENSORS={"a"}, SKIP_LOAD_TENSORS={"b"}
    )
    assert versions.is_deferred_layer(0.5) and not versions.is_deferred_layer(3)
    assert versions.uncounted_parameters() == {"b"}
    assert versions.rename_mapper(SimpleNamespace(get_rename_mapper=lambda: "only")) == "only"


# Around the engine.


def test_the_colocated_engine_is_asked_by_methods_that_it_has() -> None:
    worker = Worker(SimpleNamespace(
        parse_init_info=dict, parse_update_info=dict, init_transfer_engine=dict,
        start_weight_update=lambda: None, receive_weights=dict, finish_weight_update=lambda: None,
    ))  # fmt: skip

    def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(worker, method)(*args)]

    llm = SimpleNamespace(collective_rpc=call_of("vllm.entrypoints.llm:LLM.collective_rpc", rpc))
    assert recorded("vllm.entrypoints.llm:LLM.get_weight_version") is None
    engine = versions.with_weight_labels(llm)
    engine.init_weight_transfer_engine({"init_info": {"a": 1}})
    engine.start_weight_update()
    assert engine.get_weight_version() == versions.UPDATE_UNDER_WAY
    engine.update_weights({"update_info": {"b": 2}})
    engine.finish_weight_update("run:7")
    assert engine.get_weight_version() == "run:7"
    assert versions.joined_label(["run:7", "run:6", "run:7"]) == "run:6 and run:7"


def test_a_completion_has_the_labels_from_when_it_began_and_ended() -> None:
    names = recorded("vllm.outputs:CompletionOutput")
    assert names is not None and "weight_versions" not in names
    old = SimpleNamespace(logprobs=None)
    assert versions.completion_weight_versions(old, "run:1", "run:1") == ["run:1"]
    assert versions.completion_weight_versions(old, "run:1", "run:2") == ["run:1", "run:2"]
    new = SimpleNamespace(weight_versions=[SimpleNamespace(version="run:3")])
    assert versions.completion_weight_versions(new, None, None) == ["run:3"]
    assert (
        versions.completion_weight_versions(SimpleNamespace(weight_versions=None), None, None) == []
    )


async def answer(app: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Ask an ASGI application."""
    sent: list[dict[str, Any]] = []
    text = b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http", "method": method, "path": path, "headers": [], "query_string": b"",
        "root_path": "", "scheme": "http", "server": ("x", 1), "http_version": "1.1",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    content = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], json.loads(content or b"null")


@pytest.mark.vllm
def test_an_older_server_answers_todays_routes() -> None:
    # vLLM brings it; only this test needs it.
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    missing = {"GET /weight_info", "POST /shutdown_weight_transfer_engine"}
    ours = {f"{method} {path}" for path, (method, _) in versions.old_vllm_routes().items()}
    assert not missing & set(RECORD["routes"]) and missing <= ours
    theirs = {"POST /pause", "POST /resume", "GET /is_paused", "GET /get_world_size", "GET /health",
              "GET /version", "GET /v1/models", "POST /inference/v1/generate"}  # fmt: skip
    assert theirs <= set(RECORD["routes"])
    calls: list[Any] = []
    labels = ["default"]

    async def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        calls.append((method, *args))
        if method == "rloo_finish":
            labels[:] = [args[0] or labels[0]]
        return labels if method == "rloo_weights" else [None]

    async def yes() -> bool:
        return True

    async def vllms(request: Request) -> Any:
        return JSONResponse("vLLM's own")

    name = "vllm.v1.engine.async_llm:AsyncLLM"
    app: Any = Starlette(routes=[Route("/finish_weight_update", vllms, methods=["POST"])])
    app.state.engine_client = SimpleNamespace(
        collective_rpc=call_of(f"{name}.collective_rpc", rpc),
        reset_prefix_cache=call_of(f"{name}.reset_prefix_cache", yes),
    )
    versions.attach_old_routes(app, OLD)

    async def everything() -> list[Any]:
        found = [
            await answer(app, "POST", "/init_weight_transfer_engine", {"init_info": {"a": 1}}),
            await answer(app, "POST", "/start_weight_update"),
        ]
        assert app.state.rloo_label == versions.UPDATE_UNDER_WAY
        found.append(await answer(app, "POST", "/update_weights", {"update_info": {"b": 2}}))
        body = {"weight_version": "run:1"}
        found.append(await answer(app, "POST", "/finish_weight_update", body))
        assert app.state.rloo_label == "run:1"
        found.append(await answer(app, "POST", "/shutdown_weight_transfer_engine"))
        assert {status for status, _ in found} == {200}
        status, said = await answer(app, "POST", "/update_weights", {})
        assert status == said["error"]["code"] == 500 and "update_info" in said["error"]["message"]
        return [
            await answer(app, "GET", "/weight_info"),
            await answer(app, "POST", "/reset_prefix_cache"),
        ]

    info, reset = asyncio.run(everything())
    assert info == (200, {"weight_version": "run:1"}) and reset == (200, {"success": True})
    assert calls[:4] == [
        ("rloo_init", {"a": 1}), ("rloo_start",), ("rloo_update", {"b": 2}),
        ("rloo_finish", "run:1"),
    ]  # fmt: skip
    bare: Any = Starlette()
    versions.attach_old_routes(bare, NEW)
    assert not bare.router.routes and bare.state.rloo_label is None


# The trainer's half.


class Control:
    """An engine's side that says what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class Source:
    """Three tensors, in order."""

    def __init__(self) -> None:
        self.tensors = {
            "a": torch.arange(6.0).reshape(2, 3),
            "b": torch.ones(5),
            "c": torch.ones(2),
        }

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Any:
        return iter(self.tensors.items())


def test_nccl_sends_each_tensor_on_one_stream_to_vllms_own_receiver(
    old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "vllm.distributed.weight_transfer.nccl_engine"
    group = SimpleNamespace(
        broadcast=call_of(
            "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast"
        )
    )
    made = call_of(f"{module}:NCCLWeightTransferEngine.trainer_init", lambda init_info: group)
    stand_in(monkeypatch, module, NCCLWeightTransferEngine=SimpleNamespace(trainer_init=made))
    assert recorded(f"{module}:NCCLTrainerInitInfo") is None
    waited: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    control, source = Control(), Source()
    sender = transfer_send.connect_weight_sender(
        "nccl", control, source, "127.0.0.1", "127.0.0.1", 2, 5.0
    )  # type: ignore[arg-type]
    where = made.calls[0]["init_info"]  # type: ignore[attr-defined]
    assert where["world_size"] == 3 and where["master_address"] == "127.0.0.1"
    assert control.calls == [("init", where | {"rank_offset": 1})]
    assert {*control.calls[0][1]} == {*recorded(f"{module}:NCCLWeightTransferInitInfo")}  # type: ignore[misc]
    sender.send_weights()
    kind, about = control.calls[2]
    assert [*control.calls[1::2]] == ["start", "finish"] and kind == "update"
    assert about == {
        "names": ["a", "b", "c"], "dtype_names": ["float32"] * 3, "shapes": [[2, 3], [5], [2]],
    }  # fmt: skip
    assert about.keys() <= {*recorded(f"{module}:NCCLWeightTransferUpdateInfo")}  # type: ignore[misc]
    sent = group.broadcast.calls
    assert all(call["stream"] is stream and call["src"] == 0 for call in sent)
    assert all(
        torch.equal(c["tensor"], t) for c, t in zip(sent, source.tensors.values(), strict=True)
    )
    assert waited == [1]
    aborted: list[int] = []
    group.destroy = lambda: aborted.append(1)
    sender.shutdown()
    sender.shutdown()
    assert aborted == [1]


def test_nccl_s_members_cannot_meet_on_ipv6_there(old: None) -> None:
    control = Control()
    with pytest.raises(GenerationError, match=r"(?s)vLLM 0\.22\.1.*::1"):
        transfer_send.connect_weight_sender("nccl", control, Source(), "::1", "::1", 1, 5.0)  # type: ignore[arg-type]
    assert not control.calls


def on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CUDA's calls, as far as handles need them, answered from the CPU; the buffers that were
    shared."""
    shared: list[Any] = []
    uuid = SimpleNamespace(uuid=GPU)
    stream = SimpleNamespace(synchronize=lambda: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: shared.append("collected"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: uuid)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 4)

    def reduce_tensor(buffer: Any) -> tuple[Any, tuple[Any, ...]]:
        shared.append(buffer)
        return None, (len(shared) - 1, 1, 2, 3, 4, 5, 0, "handle")

    def rebuild(number: int, *rest: Any) -> Any:
        assert rest[5] == 4  # the receiver's own number for the GPU
        shared.append("opened")
        return shared[number]

    reductions = importlib.import_module("torch.multiprocessing.reductions")
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    return shared


def test_handles_carry_weights_part_by_part_through_one_buffer(
    old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ray" in RECORD["imports"]["vllm.distributed.weight_transfer.ipc_engine"]
    shared = on_a_pretended_gpu(monkeypatch)
    calls: list[Any] = []
    reload_module(monkeypatch, calls)
    monkeypatch.setattr(transfer_send, "packing_buffer_bytes", lambda source: 48)
    stand_in(monkeypatch, "vllm.distributed.weight_transfer.base", WeightTransferEngine=Old)
    loaded: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=lambda weights: loaded.update(weights))
    worker = Worker(versions.ipc_engine_class()(None, None, model))
    parts: list[Any] = []

    class Direct(Control):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            worker.rloo_init(init_info)

        def start_weight_update(self) -> None:
            worker.rloo_start()

        def update_weights(self, update_info: Any) -> None:
            parts.append(update_info["names"])
            worker.rloo_update(update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            worker.rloo_finish("run:1")

    source = Source()
    sender = transfer_send.connect_weight_sender("ipc", Direct(), source, "", "", 1, 5.0)  # type: ignore[arg-type]
    for _ in range(2):
        sender.send_weights()
        assert all(torch.equal(loaded[n], t) for n, t in source.tensors.items())
    assert parts == [["a"], ["b", "c"]] * 2 and worker.rloo_weights() == "run:1"
    # Opened once for each update, and let go of at its end.
    assert [s for s in shared if isinstance(s, str)] == ["opened", "collected"] * 2
    assert worker.weight_transfer_engine.open_buffer is None


def test_a_buffer_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_pretended_gpu(monkeypatch)
    receiver = versions.HandleReceiver()
    with pytest.raises(ValueError, match=r"GPU-2, .* GPU-1"):
        receiver.receive_weights(versions.HandleUpdateInfo([], [], [], {"GPU-2": ()}))


def test_gloo_and_an_adapter_need_no_sender_of_vllms(old: None) -> None:
    control, source = Control(), Source()
    for kind in ("gloo", lora_slot.ADAPTER_TRANSFER):
        assert isinstance(
            transfer_send.connect_weight_sender(kind, control, source, "", "", 0, 5.0),
            transfer_send.GlooSender,
        )  # type: ignore[arg-type]
    assert isinstance(ModelWeightSource, type) and transfer_gloo.BUFFER_BYTES
