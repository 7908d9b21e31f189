"""Requirements of a teacher behind a URL (`algorithm.teacher.base_url`).

A vLLM server returns log-probabilities of given token ids, at temperature 1 and over its whole
vocabulary; it does not return whole distributions.
"""

from collections.abc import Iterator

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.config.rules_sampling import MASK_KEY, keeps_masks
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.utils.errors import Problem, clash_problems, value_problem

URL_KEY = "algorithm.teacher.base_url"


def teacher_server_problems(
    config: Switches, keys: TeacherConfig, ref_path: str | None, generation: GenerationConfig
) -> Iterator[Problem]:
    """Keys that a teacher's server does not support, and an invalid URL."""
    if not str(keys.base_url).startswith(("http://", "https://")):
        what, address = "is not the address of a server", str(keys.base_url).rpartition("://")[2]
        why = "expected http://HOST:PORT"
        yield value_problem(URL_KEY, repr(keys.base_url), what, f"http://{address}", why)
    here = f"model.ref_path=TEACHER {URL_KEY}=null"
    clashes = [
        (
            ref_path is not None,
            URL_KEY,
            f"model.ref_path={ref_path}",
            "only one of them can be the teacher",
            f"model.ref_path=null, or {URL_KEY}=null",
        ),
        (
            config.kl_in == "loss",
            "algorithm.kl_in",
            "algorithm.kl_in=loss",
            "it compares distributions over the whole vocabulary, but a server returns only the"
            " log-probabilities of the sampled tokens",
            f"algorithm=opd (kl_in=reward), or {here}",
        ),
        (
            config.kl_temperature == "sampling" and generation.temperature != 1,
            "algorithm.kl_temperature",
            "algorithm.kl_temperature=sampling",
            "a server returns log-probabilities at temperature 1, but generation.temperature is"
            f" {generation.temperature:g}",
            "algorithm.kl_temperature=one, or generation.temperature=1",
        ),
        (
            keeps_masks(generation),
            MASK_KEY,
            f"{MASK_KEY}=true",
            "a server's log-probabilities are over its whole vocabulary, but the student's only"
            " over the kept ids",
            f"{MASK_KEY}=false, or {here}",
        ),
    ]
    yield from clash_problems(f"{URL_KEY}={keys.base_url}", clashes)
