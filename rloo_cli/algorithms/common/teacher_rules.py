"""What a teacher behind a URL can be asked for (`algorithm.teacher.base_url`).

A vLLM server tells log-probabilities of given token ids, at temperature 1 and over its whole
vocabulary; it does not tell whole distributions.
"""

from collections.abc import Iterator

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.config.rules_sampling import MASK_KEY, keeps_masks
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.utils.errors import Problem

URL_KEY = "algorithm.teacher.base_url"


def teacher_server_problems(
    config: Switches, keys: TeacherConfig, ref_path: str | None, generation: GenerationConfig
) -> Iterator[Problem]:
    """What a teacher's server cannot do beside model.ref_path, and an address that is none."""
    if not str(keys.base_url).startswith(("http://", "https://")):
        yield Problem(
            f"{URL_KEY} = {keys.base_url!r} is not the address of a server",
            URL_KEY,
            "expected http://HOST:PORT",
            f"{URL_KEY}=http://{str(keys.base_url).rpartition('://')[2]}",
        )
    if ref_path is not None:
        yield Problem(
            "there are two teachers",
            URL_KEY,
            f"a server at {keys.base_url}, and model.ref_path={ref_path}",
            f"model.ref_path=null, or {URL_KEY}=null",
        )
    if config.kl_in == "loss":
        yield Problem(
            "a divergence over the whole vocabulary needs the teacher here",
            "algorithm.kl_in",
            "a server tells the log-probabilities of the tokens that were sampled, and kl_in=loss"
            " compares whole distributions",
            f"algorithm=opd (kl_in=reward), or model.ref_path=TEACHER {URL_KEY}=null",
        )
    if config.kl_temperature == "sampling" and generation.temperature != 1:
        yield Problem(
            "a server tells the teacher's log-probabilities at temperature 1",
            "algorithm.kl_temperature",
            f"kl_temperature=sampling asks for them at {generation.temperature:g}"
            " (generation.temperature)",
            "algorithm.kl_temperature=one, or generation.temperature=1",
        )
    if keeps_masks(generation):
        yield Problem(
            "a server tells the teacher's log-probabilities over its whole vocabulary",
            MASK_KEY,
            "with sampling masks the student's are over the ids that were let through",
            f"{MASK_KEY}=false, or model.ref_path=TEACHER {URL_KEY}=null",
        )
