"""The process of a colocated engine: vLLM behind one pipe, without an open port.

`child_engine` starts it with the number of the pipe's descriptor. Messages are tuples: ("call",
name, arguments) is answered by ("ok", value) or ("error", text); ("complete", requests) by a
("done", i, completion) each and an ("end",), or by ("error", text). ("abort",) ends sampling early.
"""

import gc
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from multiprocessing.connection import wait
from typing import Any

from vllm import LLM
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.generation.vllm import lora_slot, versions
from rloo_cli.generation.vllm.engine import EngineCompletion, EngineRequest
from rloo_cli.generation.vllm.engine_images import check_expanded_ids, engine_prompt
from rloo_cli.generation.vllm.sampling_params import engine_params
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.message_socket import MessageSocket, PeerGone

CHILD_ENDED_CODE = 70  # our exit code where vLLM's core has ended


def main() -> None:
    """Serve the pipe until its other end closes."""
    pipe = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    kind, arguments = pipe.receive_pickled()
    assert kind == "start"
    try:
        engine = ChildEngineCalls(LLM(**arguments), pipe)
        exit_with_any_child()
        gc.collect()
        gc.freeze()  # what was loaded stays: never scan it again
        pipe.send_pickled(("ok", engine.num_workers()))
    except Exception:
        traceback.print_exc()  # all of it; the trainer quotes the last line
        pipe.send_pickled(("error", traceback.format_exc()))
        return
    while True:
        try:
            kind, *given = pipe.receive_pickled()
        except PeerGone:
            return
        try:
            if kind == "complete":
                engine.generate(*given)
                pipe.send_pickled(("end",))
            elif kind == "call":
                name, args = given
                pipe.send_pickled(("ok", getattr(engine, name)(*args)))
        except Exception:
            pipe.send_pickled(("error", traceback.format_exc()))


def exit_with_any_child() -> None:
    """From here on this process exits as soon as one of its child processes does.

    vLLM's client waits for ever for the answer of a core process that was
    killed; the trainer notices at once that this process is gone, and starts another engine.
    """
    children = multiprocessing.active_children()
    if not children:
        return

    def watch() -> None:
        wait([child.sentinel for child in children])
        ended = [child.name for child in children if child.exitcode is not None]
        print(f"a process of the engine ended: {', '.join(ended)}", file=sys.stderr, flush=True)
        os._exit(CHILD_ENDED_CODE)

    threading.Thread(target=watch, daemon=True).start()


class ChildEngineCalls:
    """The methods that may be called over the pipe."""

    def __init__(self, llm: Any, pipe: MessageSocket):
        self.llm, self.pipe = llm, pipe
        self.weight_client = versions.with_weight_labels(llm)
        folder = os.environ.get(lora_slot.ADAPTER_FOLDER_VARIABLE)
        self.adapter = (
            LoRARequest(lora_slot.ADAPTER_NAME, lora_slot.ADAPTER_ID, folder) if folder else None
        )
        self.num_requests = 0

    def num_workers(self) -> int:
        """How many processes receive weights."""
        size: int = self.llm.llm_engine.vllm_config.parallel_config.world_size_across_dp
        return size

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        self.weight_client.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.weight_client.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.weight_client.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None) -> None:
        self.weight_client.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> bool:
        done: bool = self.llm.reset_prefix_cache()
        return done

    def version(self) -> str:
        label: str = self.weight_client.get_weight_version()
        return label

    def sleep(self, what: str) -> None:
        """Free the KV cache (`kv`), or everything (`weights`: they will be sent again).

        Level 1 keeps a copy of the weights: only for an adapter, whose base is sent once.
        """
        drain_scheduler(self.llm.llm_engine)
        if what == "weights":
            self.llm.sleep(level=1 if self.adapter else 2)
        else:
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()

    def wake(self, what: str) -> None:
        """Allocate `weights` again, or `kv` and with it the scheduler."""
        self.llm.wake_up(["weights"] if what == "weights" else ["kv_cache"])
        if what == "kv":
            self.llm.wake_up(["scheduling"])

    def generate(self, requests: list[EngineRequest]) -> None:
        """Sample; each completion is sent as soon as it is ready."""
        core, label, first = self.llm.llm_engine, self.version(), self.num_requests
        for i, ask in enumerate(requests):
            params = engine_params(ask.params)
            params.flat_logprobs = True  # three lists, not an object for each token
            params.output_kind = RequestOutputKind.FINAL_ONLY
            prompt = engine_prompt(ask.prompt_ids, ask.images)
            core.add_request(str(first + i), prompt, params, lora_request=self.adapter)
        self.num_requests += len(requests)
        while core.has_unfinished_requests():
            if self.pipe.has_input() and self.pipe.receive_pickled() == ("abort",):
                core.abort_request([str(first + i) for i in range(len(requests))])
                return
            for output in core.step():
                if output.finished:
                    i = int(output.request_id) - first
                    if requests[i].images is not None:
                        check_expanded_ids(output.prompt_token_ids, requests[i].prompt_ids)
                    self.pipe.send_pickled(
                        ("done", i, _to_engine_completion(output.outputs[0], label))
                    )
            self.pipe.send_pickled(("alive",))
        if self.version() != label:
            raise RuntimeError(f"the weights changed from {label} to {self.version()} meanwhile")


def drain_scheduler(engine: Any) -> None:
    """Let the scheduler drop the finished requests, and take in the last batch.

    The scheduler does so in its next step, and with asynchronous scheduling a batch is in flight
    when the last completion is ready; until then vLLM refuses to free the KV cache. A core in its
    own process does this when it pauses.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    while core is not None and (core.scheduler.has_requests() or core.batch_queue):
        engine.step()


def _to_engine_completion(output: Any, label: str) -> EngineCompletion:
    """A finished completion.

    At each position the sampled token comes first; it is the only one if `logprobs` is 0.
    """
    logprobs, ids = output.logprobs, list(output.token_ids)
    firsts = logprobs.start_indices
    if [logprobs.token_ids[i] for i in firsts] != ids:
        raise RuntimeError("log-probabilities belong to tokens other than the sampled ones")
    logp = [logprobs.logprobs[i] for i in firsts]
    kept = getattr(output, "sampling_mask", None)  # versions below 0.28 have no such field
    mask = None if kept is None else SamplingMask.from_lists(kept.token_ids)
    return EngineCompletion(ids, logp, str(output.finish_reason), [label], mask)


if __name__ == "__main__":
    main()
