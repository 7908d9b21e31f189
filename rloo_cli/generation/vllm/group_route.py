"""POST /rloo/generate: the completions of one prompt in one request, as packed numbers.

vLLM's own route takes one completion per request and answers with an object for every token; with
many GPUs that is more than one process can write. Here the prompt is sent once, every completion
has its own sampling parameters, seed included, and ids, log-probabilities and sampling masks are
sent as bytes. It calls the engine as vLLM's route does, so the tokens are the same.
"""

import asyncio
import base64
import os
import uuid
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.sampling_params import RequestOutputKind

from rloo_cli.generation.vllm import auth, lora_slot, versions
from rloo_cli.generation.vllm.engine_images import check_expanded_ids, engine_prompt
from rloo_cli.generation.vllm.handshake import GROUP_ROUTE
from rloo_cli.generation.vllm.sampling_params import engine_params
from rloo_cli.utils.files import JsonObject


class ServerGuard(auth.Guard):
    """The guard of a rollout server. It adds our routes when vLLM's application starts.

    vLLM makes one in each of its API processes, since `--middleware` names this class. If
    another middleware stands before it, the application does not start.
    """

    async def __call__(self, scope: auth.Scope, receive: auth.Receive, send: auth.Send) -> None:
        if scope["type"] == "lifespan":
            app: FastAPI = scope["app"]
            first: object = app.user_middleware[0].cls
            if first is not ServerGuard:
                await receive()
                why = f"{first} stands before the guard, and would see requests without a token"
                await send({"type": "lifespan.startup.failed", "message": why})
                return
            app.add_api_route(GROUP_ROUTE, _group_endpoint, methods=["POST"])
            versions.attach_old_routes(app)
        await super().__call__(scope, receive, send)


async def _group_endpoint(raw_request: Request) -> Response:
    body = await raw_request.json()
    found: Response = await _generate_group(body, raw_request)
    return found


@versions.import_vllm_module("api_utils").with_cancellation
async def _generate_group(body: JsonObject, raw_request: Request) -> Response:
    """Sample all completions at once; they are aborted if the client disconnects."""
    state = raw_request.app.state
    adapter = None
    if lora_slot.ADAPTER_FOLDER_VARIABLE in os.environ:
        adapter = state.openai_serving_models.lora_requests[lora_slot.ADAPTER_NAME]
    shown = body.get("images")
    prompt = engine_prompt(body["token_ids"], shown)
    expanded = None if shown is None else body["token_ids"]
    number = uuid.uuid4().hex
    samplings = [
        _generate_completion(state, prompt, params, adapter, expanded, f"rloo-{number}-{i}")
        for i, params in enumerate(body["sampling_params"])
    ]
    return JSONResponse({"completions": await asyncio.gather(*samplings)})


async def _generate_completion(
    state: Any, prompt: Any, sampling_params: JsonObject, adapter: Any, expanded: list[int] | None,
    request_id: str,
) -> JsonObject:  # fmt: skip
    """`expanded`: the ids that the prompt's images must become; None = no images."""
    params = engine_params(sampling_params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True  # three lists, not an object for each token
    engine, before = state.engine_client, state.rloo_label
    outputs = [o async for o in engine.generate(prompt, params, request_id, lora_request=adapter)]
    if expanded is not None:
        check_expanded_ids(outputs[-1].prompt_token_ids, expanded)
    output = outputs[-1].outputs[0]
    logprobs, ids = output.logprobs, list(output.token_ids)
    firsts = logprobs.start_indices if logprobs is not None else []
    if [logprobs.token_ids[i] for i in firsts] != ids:
        raise RuntimeError("log-probabilities belong to tokens other than the sampled ones")
    mask: JsonObject = {}
    if getattr(output, "sampling_mask", None) is not None:  # versions below 0.28 have no such field
        kept = output.sampling_mask.token_ids
        mask["mask_ids"] = encode_numbers([i for row in kept for i in row], np.int32)
        mask["mask_counts"] = encode_numbers([len(row) for row in kept], np.int32)
    return mask | {
        "ids": encode_numbers(ids, np.int32),
        "logp": encode_numbers([logprobs.logprobs[i] for i in firsts], np.float32),
        "finish_reason": str(output.finish_reason),
        "versions": versions.completion_weight_versions(output, before, state.rloo_label),
    }


def encode_numbers(values: list[Any], dtype: Any) -> str:
    """Encode numbers as the base64 of their little-endian bytes."""
    return base64.b64encode(np.asarray(values, dtype).astype(dtype, copy=False).tobytes()).decode()
