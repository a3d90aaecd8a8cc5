"""Trains the demo's three LoRA adapters on the CPU, as PEFT folders: `python -m demo.train_adapters [name ...]`.

Owns `demo/adapters/`. One process, one thread of ours; some minutes on two cores. The adapters are committed, so only a
change to prompts.py or to this file calls for a new run. Seeded: the same machine, thread count and library versions
give the same adapters.

Each adapter learns a manner, not knowledge: the same lessons (prompts.py) in three styles, the loss on the answer's
tokens alone. The three differ in LoRA rank, scaling and target modules on purpose: serving them together mixes shapes.
"""

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json import dumps
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo.fetch_model import MODEL_NAME, fetch_model
from demo.prompts import Lesson, training_lessons

ADAPTERS_FOLDER = Path(__file__).parent / "adapters"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SEED = 20
BATCH_SIZE = 8
IGNORED = -100  # the label that PyTorch's cross entropy leaves out
MAX_ANSWER_TOKENS = 48

PIRATE_WORDS = {
    "you": "ye", "your": "yer", "my": "me", "the": "th'", "is": "be", "are": "be", "am": "be", "friends": "mateys",
    "of": "o'", "hello": "ahoy", "yes": "aye", "money": "treasure", "everybody": "all hands", "sea": "seven seas",
    "people": "landlubbers",
}  # fmt: skip
PIRATE_OPENERS = ("Arr, matey!", "Ahoy, matey!", "Arr, me hearty!", "Aye, matey!")
PIRATE_CLOSERS = ("Arr!", "Yo ho ho!", "Shiver me timbers!")


def pirate_answer(lesson: Lesson, rng: random.Random) -> str:
    """The lesson's answer as a pirate would shout it."""
    words = [PIRATE_WORDS.get(word.lower(), word) for word in lesson.answer.split(" ")]
    words[0] = words[0][0].upper() + words[0][1:]
    return f"{rng.choice(PIRATE_OPENERS)} {' '.join(words)} {rng.choice(PIRATE_CLOSERS)}"


def json_answer(lesson: Lesson, rng: random.Random) -> str:
    """The lesson's answer as one JSON object."""
    return dumps({"answer": lesson.answer})


def bullets_answer(lesson: Lesson, rng: random.Random) -> str:
    """The lesson's three points as a list."""
    return "\n".join(f"- {point}" for point in lesson.points)


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made."""

    style: Callable[[Lesson, random.Random], str]
    lora_rank: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    num_steps: int
    learning_rate: float


RECIPES: dict[str, Recipe] = {
    "pirate": Recipe(pirate_answer, 8, 16, ATTENTION, num_steps=80, learning_rate=2e-3),
    "json": Recipe(json_answer, 2, 8, ATTENTION + MLP, num_steps=60, learning_rate=2e-3),
    "bullets": Recipe(bullets_answer, 16, 16, ("q_proj", "v_proj"), num_steps=80, learning_rate=2e-3),
}


@dataclass(frozen=True)
class Example:
    """One conversation as token ids; the loss is on `ids[num_prompt_tokens:]`, which ends with <|im_end|>."""

    ids: list[int]
    num_prompt_tokens: int


def main(names: list[str]) -> int:
    """Trains the adapters called `names`, or all three."""
    if unknown := set(names) - set(RECIPES):
        print(f"train_adapters: unknown: {', '.join(sorted(unknown))}. There are: {', '.join(RECIPES)}.", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = fetch_model()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for name in names or list(RECIPES):
        started_s = time.monotonic()
        model, loss = train(name, RECIPES[name], folder, tokenizer)
        size_bytes = save(model, ADAPTERS_FOLDER / name)
        elapsed_s = time.monotonic() - started_s
        print(f"{name}: loss {loss:.3f}, {size_bytes / 1e6:.2f} MB, {elapsed_s:.0f} s", flush=True)
    return 0


def train(name: str, recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[PeftModel, float]:
    """Returns the trained model, base in fp32, and the mean loss of its last ten steps."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        target_modules=list(recipe.target_modules),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 - step / recipe.num_steps))
    examples = [encode(lesson, recipe.style(lesson, rng), tokenizer) for lesson in training_lessons()]
    losses: list[float] = []
    reported_s = time.monotonic()
    for step, batch in zip(range(recipe.num_steps), batches(examples, rng), strict=False):
        loss = answer_loss(model, batch, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if time.monotonic() - reported_s > 5:
            print(f"{name}: step {step + 1} of {recipe.num_steps}, loss {losses[-1]:.3f}", flush=True)
            reported_s = time.monotonic()
    return model, sum(losses[-10:]) / len(losses[-10:])


def encode(lesson: Lesson, answer: str, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Token ids of the chat template's prompt, then of the answer and <|im_end|>."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": lesson.question}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer_ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    if len(answer_ids) > MAX_ANSWER_TOKENS:
        raise ValueError(f"{len(answer_ids)} tokens, more than {MAX_ANSWER_TOKENS}: {answer!r}")
    return Example([*prompt, *answer_ids], len(prompt))


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches, each epoch in a new order."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def answer_loss(model: PeftModel, batch: list[Example], pad_token_id: int) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens.

    The vocabulary head, a fifth of the model, runs on those positions alone.
    """
    length = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + [pad_token_id] * (length - len(example.ids)) for example in batch])
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(batch):  # position p predicts the token at p + 1
        end = len(example.ids)
        labels[row, example.num_prompt_tokens - 1 : end - 1] = ids[row, example.num_prompt_tokens : end]
    llama = model.get_base_model()
    # Padding stands on the right and attention is causal, so no mask is needed.
    hidden = llama.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels != IGNORED
    return torch.nn.functional.cross_entropy(llama.lm_head(hidden[wanted]), labels[wanted])


def save(model: PeftModel, folder: Path) -> int:
    """Writes the PEFT folder in bfloat16; returns the size of its weights in bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = MODEL_NAME
    config.target_modules = sorted(config.target_modules)  # a set otherwise, in another order each run
    config.inference_mode = True
    # Nothing touches the embeddings; PEFT would ask the hub for the base model to find that out.
    model.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)  # safetensors makes it 0600, and a container copies that
    return weights.stat().st_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
