"""POST /rloo/generate: the completions of one prompt in one request, as packed numbers.

vLLM's own route takes one completion per request and answers with an object for every token; with
many GPUs that is more than one process can write. Here the prompt is sent once, every completion
has its own sampling parameters, seed included, and ids and log-probabilities are sent as bytes. It
calls the engine as vLLM's route does, so the tokens are the same.
"""

import asyncio
import base64
import os
import uuid
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rloo_cli.generation.vllm import lora_slot, versions
from rloo_cli.generation.vllm.handshake import GROUP_ROUTE
from rloo_cli.utils.files import JsonObject


def attach_group_route(app: FastAPI) -> None:
    """Add this route to vLLM's application, behind the guard of all routes."""
    app.add_api_route(GROUP_ROUTE, _group_endpoint, methods=["POST"])


async def _group_endpoint(raw_request: Request) -> JSONResponse:
    body = await raw_request.json()
    found: JSONResponse = await _generate_group(body, raw_request)
    return found


@versions.import_vllm_module("api_utils").with_cancellation
async def _generate_group(body: JsonObject, raw_request: Request) -> JSONResponse:
    """Sample all completions at once; they are aborted when the client is gone."""
    state = raw_request.app.state
    adapter = None
    if lora_slot.ADAPTER_FOLDER_VARIABLE in os.environ:
        adapter = state.openai_serving_models.lora_requests[lora_slot.ADAPTER_NAME]
    prompt = TokensPrompt(prompt_token_ids=body["token_ids"])
    number = uuid.uuid4().hex
    outputs = await asyncio.gather(
        *(
            _generate_completion(state, prompt, params, f"rloo-{number}-{i}", adapter)
            for i, params in enumerate(body["sampling_params"])
        )
    )
    return JSONResponse({"completions": outputs})


async def _generate_completion(
    state: Any, prompt: TokensPrompt, sampling_params: JsonObject, request_id: str, adapter: Any
) -> JsonObject:
    params = SamplingParams(**sampling_params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True  # three lists, not an object for each token
    engine, before = state.engine_client, state.rloo_label
    outputs = [o async for o in engine.generate(prompt, params, request_id, lora_request=adapter)]
    output = outputs[-1].outputs[0]
    told, ids = output.logprobs, list(output.token_ids)
    firsts = told.start_indices if told is not None else []
    if [told.token_ids[i] for i in firsts] != ids:
        raise RuntimeError("log-probabilities are of other tokens than those that were sampled")
    return {
        "ids": encode_numbers(ids, np.int32),
        "logp": encode_numbers([told.logprobs[i] for i in firsts], np.float32),
        "finish_reason": str(output.finish_reason),
        "versions": versions.completion_weight_versions(output, before, state.rloo_label),
    }


def encode_numbers(values: list[Any], dtype: Any) -> str:
    """Encode numbers as the base64 of their little-endian bytes."""
    return base64.b64encode(np.asarray(values, dtype).astype(dtype, copy=False).tobytes()).decode()
