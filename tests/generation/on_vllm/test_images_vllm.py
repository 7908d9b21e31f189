"""Prompts with images for vLLM: the ids that it expands them to are the trainer's, or it fails."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import vision_cases as v
from cli_cases import Rloo, strict, surroundings
from episode_runs import image_world_words
from loop_cases import ENDS

from rloo_cli.data.images import decode_png
from rloo_cli.generation.vllm import engine_images
from rloo_cli.generation.vllm.sampling_params import parity_params

SAMPLED_FROM = {
    "a server": ("idefics3", "generation=vllm_server"),
    "an engine of its own, a frozen tower": (
        "idefics3", "generation=vllm_colocate", "model.freeze=[vision]"
    ),
    "Qwen2.5-VL": ("qwen2_5_vl", "generation=vllm_colocate"),
    "Qwen2-VL": ("qwen2_vl", "generation=vllm_colocate"),
    "LLaVA-NeXT": ("llava_next", "generation=vllm_colocate"),
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("family", "words"), [(f, w) for f, *w in SAMPLED_FROM.values()],
                         ids=SAMPLED_FROM)  # fmt: skip
def test_a_run_samples_from_images_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, family: str, words: list[str]
) -> None:
    file = v.rows_file(tmp_path / "rows")
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    given = ("+recipe=smoke", *v.run_words(family, file), *words)
    done = rloo("train", *given, "model.dtype=float32", "eval.at_start=false", timeout=1800)
    assert done.code == 0, done.said
    assert "vLLM on " in done.said
    rows = [r for r in strict(tmp_path / "runs" / "smoke" / "metrics.jsonl") if "step_time" in r]
    assert len(rows) == 2 and all(row["sampling/logp_diff_max"] < 1e-3 for row in rows)
    first, second = (row["vllm/synced_bytes"] for row in rows)
    is_frozen = "model.freeze=[vision]" in words
    assert (second < first) == is_frozen and second > 0


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_whose_tools_show_images_samples_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = v.rows_file(tmp_path / "rows")
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    words = ("+recipe=smoke", *v.run_words("idefics3", file), *image_world_words(tmp_path))
    more = ("generation=vllm_server", "model.dtype=float32", "eval.at_start=false", ENDS)
    done = rloo("train", *words, *more, "agent.max_observation_tokens=200", timeout=1800)
    assert done.code == 0, done.said
    rows = [r for r in strict(tmp_path / "runs" / "smoke" / "metrics.jsonl") if "step_time" in r]
    assert len(rows) == 2 and all(row["sampling/logp_diff_max"] < 1e-3 for row in rows)
    assert sum(row["agent/calls"] for row in rows) > 0


def test_ids_that_an_engine_expands_otherwise_are_refused() -> None:
    engine_images.check_expanded_ids([1, 2, 2, 3], [1, 2, 2, 3])
    with pytest.raises(RuntimeError, match=r"to 3 .* to 4; .* token 2"):
        engine_images.check_expanded_ids([1, 2, 3], [1, 2, 2, 3])
    with pytest.raises(RuntimeError, match="to 0 "):
        engine_images.check_expanded_ids(None, [1])


def test_an_engine_never_samples_a_token_that_stands_for_an_image() -> None:
    config = SimpleNamespace(temperature=1.0, return_sampling_mask=False)
    params = parity_params(config, [2], 1, 4)  # type: ignore[arg-type]
    banned = engine_images.ban_image_tokens(params | {"logit_bias": {"5": 1.0}}, [7, 8])
    assert banned["logit_bias"] == {"7": -100.0, "8": -100.0, "5": 1.0}
    assert engine_images.ban_image_tokens(params, []) is params


def test_images_are_sent_as_files_that_lose_nothing() -> None:
    _, vision = v.fresh("idefics3")
    shown = [v.picture(20, 24), v.picture(16, 16, 1)]
    _, media = v.media(vision, shown)
    sent = engine_images.images_to_send(media, media.prompt_ids)
    assert sent is not None and media is not None
    assert sent["plain_ids"].count(vision.image_token_id) == 2 < len(media.prompt_ids)
    for file, image in zip(sent["files"], shown, strict=True):
        assert decode_png(file).tobytes() == image.tobytes()
    assert engine_images.images_to_send(None, [1]) is None
