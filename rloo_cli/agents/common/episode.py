"""One episode: its turns so far, the new ids for the next one, and why it ended.

The ids that the sampler gets are always those of all earlier turns, as they were sampled, followed
by the new ones. `retokenised` counts turns for which that failed; it must be 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rloo_cli.agents.common.observations import Content
from rloo_cli.agents.common.tool_processes import ToolCaller
from rloo_cli.agents.common.tool_set import Environment
from rloo_cli.data.batch import Group, Rollout, Turn
from rloo_cli.data.episode_media import extended_media
from rloo_cli.data.media import Media
from rloo_cli.data.vision_processor import VisionProcessor
from rloo_cli.utils.files import JsonObject

# Why an episode ended: an answer without a call; the environment said so; or one of these limits.
LIMITS = ("turns", "tokens", "context", "completion")


@dataclass
class CallCounts:
    """Counts of an episode's calls by outcome."""

    calls: int = 0
    bad_calls: int = 0  # unreadable, of an unknown tool, or with wrong arguments
    errors: int = 0  # the tool raised, timed out or exited
    tool_s: float = 0.0


@dataclass
class Episode:
    """Completion `k` of a group, while it is being played."""

    group: Group
    k: int
    seed: int
    environment: Environment
    base_ids: list[int]  # the prompt, with what the environment's reset added
    turns: list[Turn] = field(default_factory=list)  # as sampled, of all rows
    rows: list[int] = field(default_factory=list)  # the row of each turn
    row: int = 0  # the row of the next turn
    new_ids: list[int] = field(default_factory=list)  # observation before the next turn
    new_messages: list[JsonObject] = field(default_factory=list)
    new_images: list[str] = field(default_factory=list)  # in new_ids: the base64 of PNG files
    media: Media | None = None  # all images so far; None = only the group's
    counts: CallCounts = field(default_factory=CallCounts)
    caller: ToolCaller | None = None  # the process of its environment
    opening: Content | None = None  # what reset returned
    ended_by: str | None = None  # answer, done, bad_call, failed, or one of LIMITS
    failed: str | None = None
    terminated: bool = False
    state: JsonObject | None = None  # the environment's public attributes at the end
    reward: float | None = None
    retokenised: int = 0

    @property
    def sent_ids(self) -> list[int]:
        """The ids that the next turn continues."""
        flat = [
            i
            for turn, row in zip(self.turns, self.rows, strict=True)
            if row == self.row
            for i in (*turn.prompt_ids, *turn.sampled_ids)
        ]
        return [*([] if self.row else self.base_ids), *flat, *self.new_ids]

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt, the new ids included, over all rows."""
        turns = sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in self.turns)
        return turns + len(self.new_ids)

    def add_turn(self, sampled: Rollout, prompt_ids: list[int], calls: list[JsonObject]) -> Turn:
        """Add one sampled turn. `prompt_ids`: the ids that the sampler really got."""
        self.retokenised += prompt_ids != self.sent_ids
        turn = Turn(
            prompt_ids=self.new_ids,
            sampled_ids=sampled.completion_ids,
            logp=sampled.behaviour_logp,
            text=sampled.text,
            finish_reason=sampled.finish_reason,
            weight_version=sampled.weight_version,
            calls=calls,
            observation=self.new_messages,
            begins_row=self.row > 0 and self.row not in self.rows,
            sampling_mask=sampled.sampling_mask,
            images=self.new_images,
        )
        self.turns.append(turn)
        self.rows.append(self.row)
        self.new_ids, self.new_messages, self.new_images = [], [], []
        self.terminated = sampled.terminated
        return turn

    def show_images(
        self, files: list[str], new_plain_ids: list[int], vision: VisionProcessor
    ) -> None:
        """Show these images, whose tokens are in `new_ids`, to the following turns.

        `new_plain_ids`: the same ids with one placeholder for each image.
        """
        shown, ids = self.media or self.group.media, self.sent_ids
        before = ids[: len(ids) - len(self.new_ids)]
        plain = before if shown is None else shown.plain_ids_of(before)
        self.media = extended_media(shown, files, ids, plain + new_plain_ids, vision)
        self.new_images = files

    def fail(self, why: str) -> None:
        """End it without a score."""
        self.failed = self.failed or why
        self.ended_by = "failed"

    def to_rollout(self, prompt_ids: list[int], turn_rewards: str = "sum") -> Rollout:
        """The episode as a rollout of its group, whose prompt is `prompt_ids`.

        `turn_rewards`: how the rewards of turns enter the episode's own (`algorithm.turn_rewards`).
        """
        rest = self.base_ids[len(prompt_ids) :]
        if not self.turns:  # reset failed: the row is one token, not trained on
            rollout = Rollout(
                [self.base_ids[-1]], "", "length", False, self.seed, 0, [float("nan")], turns=[]
            )
        else:
            first, last = self.turns[0], self.turns[-1]
            first.prompt_ids = [*rest, *first.prompt_ids]
            order = sorted(range(len(self.turns)), key=lambda n: self.rows[n])
            in_rows = [self.turns[n] for n in order]
            rollout = Rollout.from_turns(in_rows, self.terminated, self.seed)
            rollout.text, rollout.finish_reason = last.text, last.finish_reason
        rollout.failed, rollout.environment = self.failed, self.state
        earned = [turn.reward for turn in self.turns]
        rollout.environment_reward = episode_reward(self.reward, earned, turn_rewards)
        rollout.episode_facts = {**vars(self.counts), "ended_by": self.ended_by or "answer"}
        rollout.episode_facts |= {"turns": len(self.turns), "retokenised": self.retokenised}
        return rollout


def episode_reward(
    own: float | None, earned: Sequence[float | None], turn_rewards: str
) -> float | None:
    """An episode's reward from its environment: `own` for the whole, plus those of its turns.

    The latter are summed; with `turn_rewards` last, only the last turn with a reward counts.
    None if the environment gives no reward at all.
    """
    said = [reward for reward in earned if reward is not None]
    if turn_rewards == "last":
        said = said[-1:]
    parts = said if own is None else [own, *said]
    return sum(parts) if parts else None


def common_prefix(sequences: list[list[int]]) -> list[int]:
    """The longest common prefix of these lists."""
    first, last = min(sequences), max(sequences)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def finish_group(group: Group, episodes: list[Episode]) -> None:
    """Store a group's episodes whose prompts the agent has written.

    The group's prompt is their common prefix; the rest of each prompt begins its completion and is
    not trained on. An episode that does not begin like the first one has no score.
    """
    asked = [e for e in episodes if e.turns]
    for other in asked[1:]:
        if other.base_ids[0] != asked[0].base_ids[0]:
            other.fail("its prompt begins with another token than its siblings'")
            other.turns, other.rows = [], []
    shared = [e.base_ids for e in asked if e.turns]
    prompt_ids = common_prefix(shared) if shared else group.prompt_ids
    for episode in episodes:
        if not episode.turns:
            episode.base_ids = prompt_ids
    rollouts = [e.to_rollout(prompt_ids) for e in episodes]
    for rollout in rollouts:
        rollout.opening_ids = prompt_ids
    group.take_rollouts(rollouts)
