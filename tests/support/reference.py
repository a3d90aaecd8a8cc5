"""transformers + peft in float32 as the judge: each output goes through it once, teacher-forced, position by position.

`TOLERANCE` is in logits (and natural log-probabilities). An adapter must move the reference's logits by a hundred times as much, else
a test would pass on the base's weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from demo.fetch_model import fetch_model
from demo.train_adapters import ADAPTERS_FOLDER
from demo.traits import TRAITS
from mstar.engine.resources.sampler.reference import draw_interval
from mstar.engine.resources.sampler.sampler import SampleRow
from mstar.engine.resources.sampler.uniform import uniform
from tests.support.adapters import peft_warnings_ignored, tiny_adapters
from tests.support.client import Answer
from tests.support.tiny_models import tiny_model

TOLERANCE = 1e-3
MOVES_AT_LEAST = 100 * TOLERANCE


class Reference:
    """One base model with its adapters. `adapter` is a name, or None for the base."""

    def __init__(self, model_folder: Path, adapters: Mapping[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
        first, *others = adapters
        with peft_warnings_ignored():
            model = PeftModel.from_pretrained(base, str(adapters[first]), adapter_name=first)
            for name in others:
                model.load_adapter(str(adapters[name]), adapter_name=name)
        self.adapters = tuple(adapters)
        self._model = model.eval()
        self._current: str | None = first

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter: str | None, first: int = 0) -> Tensor:
        """Logits at positions `first` to the end, `[positions, vocab]` float32."""
        batch = torch.tensor([list(token_ids)])
        with peft_warnings_ignored():
            if adapter is None:
                with self._model.disable_adapter():
                    logits: Tensor = self._model(batch, use_cache=False, logits_to_keep=len(token_ids) - first).logits
            else:
                if adapter != self._current:
                    self._model.set_adapter(adapter)
                    self._current = adapter
                logits = self._model(batch, use_cache=False, logits_to_keep=len(token_ids) - first).logits
        return logits[0].float()

    def check(self, answer: Answer) -> None:
        """Every token and every log-probability of an answer, against the adapter that its request named."""
        ask = answer.ask
        if ask.seed is None and not ask.fields:
            self.check_greedy(ask.prompt, answer.token_ids, ask.adapter, answer.logprobs)
        else:
            self.check_seeded(answer)
        if answer.prompt_logprobs is not None:
            self.check_prompt(ask.prompt, answer.prompt_logprobs, ask.adapter)

    def check_all(self, answers: Iterable[Answer]) -> None:
        """`check` on each; adapters one after another."""
        for answer in sorted(answers, key=lambda item: item.ask.model):
            self.check(answer)

    def check_greedy(
        self, prompt: Sequence[int], output: Sequence[int], adapter: str | None, logprobs: Sequence[float] | None = None
    ) -> None:
        """Every token's logit is within `TOLERANCE` of the best one there; so is each log-probability, where given."""
        logits = self._of_outputs(prompt, output, adapter)
        gaps = logits.max(dim=-1).values - self._at(logits, output)
        worst = int(gaps.argmax())
        assert gaps[worst] <= TOLERANCE, f"{adapter}: token {worst} is {gaps[worst]:.4f} below the best; prompt {prompt}, output {output}"
        self._check_logprobs(logits, output, logprobs, adapter)

    def check_seeded(self, answer: Answer) -> None:
        """Every draw lies within `TOLERANCE` of its token's interval; each log-probability too."""
        ask, output = answer.ask, answer.token_ids
        logits = self._of_outputs(ask.prompt, output, ask.adapter)
        for position, token_id in enumerate(output):
            row = SampleRow(ask.sampling(), position, ask.prompt, output[:position])
            low, high = draw_interval(logits[position], row, token_id, TOLERANCE)
            drawn = uniform(ask.sampling().seed, position)
            assert low < high and low - TOLERANCE <= drawn <= high + TOLERANCE, (
                f"{ask}: token {position} is {token_id}, drawn with {drawn:.4f}, outside of [{low:.4f}, {high:.4f})"
            )
        self._check_logprobs(logits, output, answer.logprobs, ask.adapter)

    def check_prompt(self, prompt: Sequence[int], logprobs: Sequence[float | None], adapter: str | None) -> None:
        """The log-probability of every prompt token but the first."""
        assert logprobs[0] is None and len(logprobs) == len(prompt)
        if len(prompt) > 1:
            given = [value for value in logprobs[1:] if value is not None]
            self._check_logprobs(self.logits(prompt, adapter)[:-1], prompt[1:], given, adapter)

    def assert_adapter_matters(self, prompt: Sequence[int], adapter: str) -> None:
        """At the prompt's end the adapter's logits are far from the base's and from every other adapter's."""
        self._assert_far_apart(prompt, [(adapter, other) for other in (None, *self.adapters) if other != adapter])

    def assert_adapters_matter(self, prompt: Sequence[int]) -> None:
        """The same of every adapter."""
        self._assert_far_apart(prompt, itertools.combinations((None, *self.adapters), 2))

    def _assert_far_apart(self, prompt: Sequence[int], pairs: Iterable[tuple[str | None, str | None]]) -> None:
        logits = {name: self.logits(prompt, name, len(prompt) - 1) for name in (None, *self.adapters)}
        for one, other in pairs:
            moved = float((logits[one] - logits[other]).abs().max())
            assert moved >= MOVES_AT_LEAST, f"{one} and {other} differ by {moved:.4f} only, after {prompt}"

    def _of_outputs(self, prompt: Sequence[int], output: Sequence[int], adapter: str | None) -> Tensor:
        """The logits from which each output token was chosen, `[outputs, vocab]`."""
        return self.logits([*prompt, *output], adapter, len(prompt) - 1)[:-1]

    @staticmethod
    def _at(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        return logits.gather(1, torch.tensor(list(token_ids))[:, None])[:, 0]

    def _check_logprobs(self, logits: Tensor, token_ids: Sequence[int], given: Sequence[float] | None, adapter: str | None) -> None:
        if given is None:
            return
        expected = self._at(logits.log_softmax(dim=-1), token_ids)[: len(given)]  # a stop token has none
        assert len(given) >= len(token_ids) - 1
        worst = float((torch.tensor(list(given)) - expected).abs().max()) if given else 0.0
        assert worst <= TOLERANCE, f"{adapter}: a log-probability is off by {worst:.5f}"


@functools.cache
def tiny_reference(family: str) -> Reference:
    """The reference of a tiny model with its adapters."""
    return Reference(tiny_model(family), tiny_adapters(family))


@functools.cache
def demo_reference() -> Reference:
    """The reference of the demo's model with its three adapters."""
    return Reference(fetch_model(), {name: ADAPTERS_FOLDER / name for name in TRAITS})
